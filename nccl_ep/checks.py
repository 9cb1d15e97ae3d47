"""Checks and errors that the calls of both modes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffer import Buffer, find_buffer
from .errors import UsageError
from .handle import Handle

_Tensor, _strided = torch.Tensor, torch.strided  # the hot path is spared the look-ups


def buffer_of(handle: Handle) -> Buffer:
    """The buffer that a handle belongs to."""
    buffer = find_buffer(handle.buffer)
    if handle.num_ranks != buffer.num_ranks:
        raise UsageError(f"the handle is of {handle.num_ranks} ranks, its buffer {buffer.name} of {buffer.num_ranks}")
    return buffer


def require_on(buffer: Buffer, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """An op would follow a tensor on another device to that device's kernel, or to the fake one."""
    device = buffer.device
    for tensor in tensors:
        if tensor is None or (isinstance(tensor, _Tensor) and tensor.device == device and tensor.layout is _strided):
            continue
        name = next(name for name, each in zip(names, tensors, strict=True) if each is tensor)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the buffer on {device}")
        raise ValueError(f"{name} is {tensor.layout}, must be strided")


def error_of(buffer: Buffer, error: RuntimeError) -> Exception:
    """Ops know only ValueError and RuntimeError: the second becomes the buffer's own error where it has one."""
    try:
        buffer.require_usable()
    except Exception as reason:
        return reason
    return UsageError(str(error).split("\n", 1)[0])
