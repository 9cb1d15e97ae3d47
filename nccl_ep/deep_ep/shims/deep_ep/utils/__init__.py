"""Where DeepEP's callers look for events."""

from nccl_ep.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
