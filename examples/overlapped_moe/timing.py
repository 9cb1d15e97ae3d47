"""How long calls of all ranks take on GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed(call: Callable[[], object], repetitions: int) -> float:
    """Milliseconds: the median over repetitions of the slowest rank's."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times)
