"""Where callers look for tensors."""

from nccl_ep.nvidia import Tensor

__all__ = ["Tensor"]
