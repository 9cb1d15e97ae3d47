"""Where Hybrid-EP's callers look for its buffer."""

from nccl_ep.deep_ep.hybrid import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
