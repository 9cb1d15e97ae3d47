"""Times, as programs written for DeepEP ask for them: ``deep_ep.utils.testing``.

Source: DeepEP V2's functions of these names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

__all__ = [
    "bench",
    "bench_kineto",
    "flush_l2_cache",
]

_L2_BYTES = 256_000_000
_BUSY_CYCLES = 20_000_000  # about 10 ms


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes 256 MB on the current GPU, so that its L2 cache has nothing else. Nothing if not ``enabled``."""
    if enabled and torch.cuda.is_available():
        torch.empty(_L2_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds of ``fn``: their mean, the least and the largest of ``num_tests`` calls, without the first.

    On a GPU by events of the current stream; without one by the host's clock. ``post_fn`` is called after each.
    """
    if num_tests < 2:
        raise ValueError(f"num_tests is {num_tests}, must be at least 2: the first is left out")
    for _ in range(num_warmups):
        fn()
    measure = _by_events if torch.cuda.is_available() else _by_the_clock
    seconds = measure(fn, num_tests, post_fn, flush_l2)[1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def _by_the_clock(fn: Callable[[], Any], count: int, post_fn: Callable[[], Any] | None, flush_l2: bool) -> list[float]:
    seconds = []
    for _ in range(count):
        flush_l2_cache(flush_l2)
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return seconds


def _by_events(fn: Callable[[], Any], count: int, post_fn: Callable[[], Any] | None, flush_l2: bool) -> list[float]:
    torch.cuda.synchronize()
    pairs = [(_timed_event(), _timed_event()) for _ in range(count)]
    for start, end in pairs:
        flush_l2_cache(flush_l2)
        start.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Seconds of the kernels whose names contain ``kernel_names``, by torch's profiler: means over ``num_tests`` calls.

    Args:
        trace_path: a file for the trace. flush_l2: before each call, ``flush_l2_cache``.
        barrier_comm_profiling: before each call the ranks meet on the GPU, by ``barrier`` or an all-reduce.
        num_kernels_per_period: launches of such a kernel in a call, in turn.
        suppress_kineto_output: accepted; nothing is printed.

    Returns: for one name a number, for a tuple a list of them; 0 for a kernel that did not run. With several launches
    in a call, a list of these in place of each number.

    Raises: RuntimeError without a GPU; ValueError if the launches do not divide by ``num_kernels_per_period``.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench_kineto measures kernels, and there is no GPU")
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    torch.cuda.synchronize()
    met = torch.ones(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if barrier_comm_profiling:
                torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]  # so that the host runs ahead
                dist.all_reduce(met) if barrier is None else barrier()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        Path(trace_path).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(trace_path)
    events = [each for each in profiler.events() or () if each.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    made = [_durations(name, events, num_kernels_per_period) for name in names]
    return made[0] if isinstance(kernel_names, str) else made


def _durations(name: str, events: list[Any], period: int) -> Any:
    """Of the kernels of that name, in seconds."""
    seconds = [each.time_range.elapsed_us() / 1e6 for each in events if name in each.name]
    if len(seconds) % period:
        raise ValueError(f"{len(seconds)} launches of {name!r} do not divide by {period} of a call")
    means = [sum(seconds[i::period]) * period / len(seconds) if seconds else 0.0 for i in range(period)]
    return means if period > 1 else means[0]
