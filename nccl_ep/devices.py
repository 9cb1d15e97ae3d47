"""Devices: which one is meant by a name or by none, and what lies there."""

from __future__ import annotations

import functools

import torch

from . import _C


def choose_device(device: str | torch.device | None) -> torch.device:
    """Of a buffer that is made with ``device``."""
    if device is None:
        device = "cuda" if _C.has_cuda() and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f'device is {device!r}, must be "cuda", "cpu" or a torch.device') from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}, must be cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device is {device}, but torch finds no GPU; device="cpu" always works')
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU; 0 of the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


@functools.lru_cache(maxsize=64)
def empty_on(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What stands for an output that a layout has not got."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)
