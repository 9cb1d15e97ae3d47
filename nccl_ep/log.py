"""What the library logs: through Python's ``logging``, under the name ``nccl_ep``.

The environment variable ``NCCL_EP_LOG`` (error, warning, info or debug) writes it to stderr, from that level on.
Without it, what is done with the messages is the program's affair, as with any library.

error: a buffer has failed, and why. warning: something is not as it was asked for. info: buffers that are made and
destroyed, with their sizes and what they served. debug: shapes that a buffer serves for the first time, and what was
chosen for them.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

logger = logging.getLogger("nccl_ep")
_served: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()  # shapes, by buffers
_LEVELS = {name: getattr(logging, name.upper()) for name in ("error", "warning", "info", "debug")}


def set_up() -> None:
    """Reads ``NCCL_EP_LOG``. Called when the package is imported."""
    asked = os.environ.get("NCCL_EP_LOG", "").lower()
    if not asked:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(_LEVELS.get(asked, logging.WARNING))
    if asked not in _LEVELS:
        logger.warning("NCCL_EP_LOG is %r, must be one of %s; warning is taken", asked, ", ".join(_LEVELS))


def note_served(buffer: Any, mode: str, capacity: int, config: tuple[int, ...]) -> None:
    """A shape of a dispatch, of which the log tells when the buffer serves it for the first time."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    served = _served.setdefault(buffer, set())
    if (mode, capacity, config) not in served:
        served.add((mode, capacity, config))
        num_experts, topk, max_tokens, layout, alignment, *_ = config
        logger.debug(
            "%s serves mode=%s, num_experts=%d, topk=%d, max_tokens=%d, layout=%d, alignment=%d, capacity=%d (%s) for "
            "the first time",
            buffer.name, mode, num_experts, topk, max_tokens, layout, alignment, capacity, config,
        )  # fmt: skip
