"""DeepEP's names, as nccl_ep has them."""

from nccl_ep.deep_ep import *  # noqa: F403
from nccl_ep.deep_ep import __all__, __version__  # noqa: F401
