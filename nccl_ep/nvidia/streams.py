"""CUDA streams as callers of ``nccl.ep`` name them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch


def stream_pointer(stream: Any) -> int:
    """A ``cudaStream_t``: of a number, a stream of torch or of cuda.core, what has ``__cuda_stream__``, or None (0).

    TypeError for anything else, bools included.
    """
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    try:
        if not isinstance(stream, bool):
            return operator.index(stream)
    except TypeError:
        pass
    raise TypeError(f"stream is a {type(stream).__name__}, must be a CUDA stream or its number")


@contextlib.contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """Puts work on a stream. On the CPU it is done when a call returns, whatever the stream."""
    pointer = stream_pointer(stream)
    if device.type == "cpu" or pointer == torch.cuda.current_stream(device).cuda_stream:
        yield
        return
    named = torch.cuda.ExternalStream(pointer, device) if pointer else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(named or torch.cuda.default_stream(device)):
        yield
