"""Expert-parallel dispatch and combine for PyTorch: tokens to their experts' ranks and back, bit for bit the same."""

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (its libraries must be loaded before the extension)

from . import extension, log, recording  # noqa: F401  (extension first: it says if there is none)
from ._version import __version__
from .arrivals import Arrivals
from .bootstrap import StoreGroup
from .buffer import Buffer
from .errors import EpError, MismatchError, OverflowError, SystemError, TimeoutError, UsageError
from .events import EventHandle, EventOverlap
from .functional import KEEP_PROGRAM_ORDER, combine, combine_send, combine_weights, dispatch, dispatch_send
from .handle import DispatchOutput, Handle, Layout, Quant
from .high_throughput import Payload, dispatch_cached, dispatch_cached_send
from .marks import mark_tokens
from .pending import Pending
from .prometheus import metrics
from .recording import record

if TYPE_CHECKING:
    from .deep_ep import Config, topk_idx_t
    from .deep_ep.install import install_as_deep_ep
    from .nvidia.install import install_as_nccl_ep

log.set_up()
recording.set_up()

__all__ = [
    "KEEP_PROGRAM_ORDER",
    "Arrivals",
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
    "StoreGroup",
    "SystemError",
    "TimeoutError",
    "UsageError",
    "__version__",
    "combine",
    "combine_send",
    "combine_weights",
    "dispatch",
    "dispatch_cached",
    "dispatch_cached_send",
    "dispatch_send",
    "install_as_deep_ep",
    "install_as_nccl_ep",
    "mark_tokens",
    "metrics",
    "record",
    "topk_idx_t",
]

_DEEP_EP = ("Config", "topk_idx_t")

if not TYPE_CHECKING:  # or every name would be there for mypy

    def __getattr__(name: str) -> Any:
        """DeepEP's names, and ``nccl_ep.deep_ep``: loaded when asked for."""
        if name == "deep_ep" or name in _DEEP_EP:
            import importlib

            module = importlib.import_module(".deep_ep", __name__)
            return module if name == "deep_ep" else getattr(module, name)
        if name == "install_as_deep_ep":
            from .deep_ep.install import install_as_deep_ep

            return install_as_deep_ep
        if name == "install_as_nccl_ep":
            from .nvidia.install import install_as_nccl_ep

            return install_as_nccl_ep
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
