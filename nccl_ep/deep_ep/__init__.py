"""DeepEP's names: ``from nccl_ep.deep_ep import Buffer`` is all that its callers change. See docs/deepep.md.

``nccl_ep.install_as_deep_ep()`` makes ``import deep_ep`` find them. See docs/migrating_from_deepep.md.
"""

import torch

from .._version import __version__ as _version
from ..events import EventHandle, EventOverlap
from .hybrid import HybridEPBuffer
from .utils.envs import get_logical_domain_size, get_physical_domain_size
from .v1.buffer import Buffer
from .v1.config import Config
from .v2.elastic import ElasticBuffer
from .v2.ep_buffer import EPBuffer
from .v2.handle import EPHandle

topk_idx_t = torch.int64  # the dtype of topk_idx; int32 is accepted as well
__version__ = f"2.1.0+nccl_ep.{_version}"  # of DeepEP, whose names these are

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
