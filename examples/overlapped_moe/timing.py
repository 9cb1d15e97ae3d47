"""How long calls of all ranks take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed(call: Callable[[], object], repetitions: int, device: str = "cuda") -> float:
    """Milliseconds: the median over repetitions of the slowest rank's. On CPU ranks those of the clock on the wall."""
    for _ in range(3):
        call()
    once = _on_gpu if device == "cuda" else _on_host
    times = []
    for _ in range(repetitions):
        dist.barrier()
        slowest = torch.tensor([once(call)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times)


def captured(call: Callable[[], torch.Tensor | None]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor | None]:
    """A call that has run before as a CUDA graph, whose replays wait for no launches of the host; what they write."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = call()
    return graph, made


def _on_gpu(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _on_host(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
