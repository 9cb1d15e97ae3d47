"""Memory of a GPU that goes while something is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def used(device: torch.device) -> int:
    """Bytes that are not free, of whichever process, when this one's queued work is done. 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def taken_by(
    make: Callable[[], T], device: torch.device, barrier: Callable[[], object] = lambda: None, *, tensors: bool = True
) -> tuple[T, int]:
    """What ``make`` returns, and the bytes that it took.

    Args:
        barrier: the ranks call it before each reading. tensors: with what torch has reserved for tensors meanwhile.
    """

    def now() -> int:
        barrier()
        return used(device) - (0 if tensors or device.type != "cuda" else torch.cuda.memory_reserved(device))

    before = now()
    made = make()
    return made, now() - before
