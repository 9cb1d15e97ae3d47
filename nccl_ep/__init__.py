"""Expert-parallel dispatch and combine for PyTorch: tokens to their experts' ranks and back, bit for bit the same."""

import torch  # noqa: F401  (its libraries must be loaded before the extension)

from . import log
from ._version import __version__
from .buffer import Buffer
from .deepep_config import Config
from .deepep_normal import topk_idx_t
from .errors import EpError, MismatchError, OverflowError, SystemError, TimeoutError, UsageError
from .events import EventHandle, EventOverlap
from .functional import Pending, combine, combine_send, combine_weights, dispatch, dispatch_send
from .handle import DispatchOutput, Handle, Layout, Quant
from .high_throughput import Payload, dispatch_cached

log.set_up()

__all__ = [
    "Buffer",
    "Config",
    "DispatchOutput",
    "EpError",
    "EventHandle",
    "EventOverlap",
    "Handle",
    "Layout",
    "MismatchError",
    "OverflowError",
    "Payload",
    "Pending",
    "Quant",
    "SystemError",
    "TimeoutError",
    "UsageError",
    "__version__",
    "combine",
    "combine_send",
    "combine_weights",
    "dispatch",
    "dispatch_cached",
    "dispatch_send",
    "topk_idx_t",
]
