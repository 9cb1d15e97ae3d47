"""NVIDIA's names, as nccl_ep has them."""

from nccl_ep.nvidia import *  # noqa: F403
from nccl_ep.nvidia import __all__  # noqa: F401
from nccl_ep.nvidia import bindings as _ep_bindings  # noqa: F401
