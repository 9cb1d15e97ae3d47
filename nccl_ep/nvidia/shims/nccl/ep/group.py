"""Where callers look for groups."""

from nccl_ep.nvidia import Group, GroupConfig

__all__ = ["Group", "GroupConfig"]
