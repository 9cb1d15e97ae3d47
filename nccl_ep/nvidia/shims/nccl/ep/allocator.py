"""Where callers look for allocators."""

from nccl_ep.nvidia import AllocConfig, AllocFn, FreeFn

__all__ = ["AllocConfig", "AllocFn", "FreeFn"]
