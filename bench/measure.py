"""The figures. Every function returns this rank's samples in microseconds; all ranks call it together."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nccl_ep import Buffer

from .operations import Call
from .world import Skipped, World

_HOST_RUNS = 5
_PROFILERS_FIRST = 3  # calls of which none is counted: the profiler takes its memory meanwhile, and the host is late
# A part of their names by operation. A dispatch of high throughput is two kernels, the first of them routing alone.
KERNELS = {"routing": "dispatch_route", "dispatch": "dispatch", "combine": "combine"}


@dataclass(frozen=True)
class Effort:
    """warm_up and iterations of a timed call; chain: operations in a graph; host_calls: enqueued in a row."""

    warm_up: int
    iterations: int
    chain: int
    host_calls: int


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _warm_up(world: World, call: Call, count: int) -> None:
    world.gate.wait()
    for _ in range(count):
        call()
    world.synchronize()


def event_times(world: World, call: Call, effort: Effort) -> list[float]:
    """The call as its caller sees it: GPUs idle, ranks at a barrier, then events around it. CPU: wall-clock time."""
    _warm_up(world, call, effort.warm_up)
    times = []
    start, end = (_timing_event() for _ in range(2)) if world.is_cuda else (None, None)
    for _ in range(effort.iterations):
        world.synchronize()
        if start is not None:
            start.record()  # the first one behind a wait takes 8-20 us, on each host another time: ranks would part
        world.gate.wait()
        if start is None or end is None:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        else:
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return times


def queued_times(world: World, call: Call, effort: Effort) -> list[float]:
    """Calls that follow one another, between the events of each: of the second half, when the queue has settled."""
    if not world.is_cuda:
        return event_times(world, call, effort)
    _warm_up(world, call, effort.warm_up)
    events = [[_timing_event() for _ in range(2)] for _ in range(2 * effort.iterations)]
    world.gate.wait()
    for start, end in events:
        start.record()
        call()
        end.record()
    world.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events[effort.iterations :]]


def host_times(world: World, call: Call, effort: Effort) -> list[float]:
    """Mean time that a call keeps the host, of so many that the GPU's queue does not fill up; a few such means."""
    _warm_up(world, call, effort.warm_up)
    means = []
    for _ in range(_HOST_RUNS):
        world.synchronize()
        world.gate.wait()
        begin = time.perf_counter()
        for _ in range(effort.host_calls):
            call()
        means.append((time.perf_counter() - begin) / effort.host_calls * 1e6)
    world.synchronize()
    return means


def graph_times(world: World, call: Call, effort: Effort) -> list[float]:
    """Time on the device of one call inside a captured chain: of a replay, over the calls in it."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _warm_up(world, call, 3)
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL's process group ask for events meanwhile, which a global capture forbids.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(effort.chain):
            call()
    _warm_up(world, graph.replay, max(1, effort.warm_up // 4))
    events = [[_timing_event() for _ in range(2)] for _ in range(effort.iterations)]
    for start, end in events:
        world.align()
        start.record()
        graph.replay()
        end.record()
    world.synchronize()
    return [start.elapsed_time(end) * 1e3 / effort.chain for start, end in events]


def enable_pdl(buffer: Buffer, enabled: bool) -> bool:
    """Programmatic dependent launch of the buffer's kernels. False: this build has no switch for it."""
    switch = getattr(buffer.runtime, "set_pdl", None)
    if switch is not None:
        switch(enabled)
    return switch is not None


@contextmanager
def without_pdl(buffer: Buffer) -> Iterator[None]:
    enable_pdl(buffer, False)
    try:
        yield
    finally:
        enable_pdl(buffer, True)


def plain_graph_times(world: World, buffer: Buffer, call: Call, effort: Effort) -> list[float]:
    """As graph_times, without any programmatic dependent launch."""
    with without_pdl(buffer):
        return graph_times(world, call, effort)


def graph_pdl_times(world: World, buffer: Buffer, call: Call, effort: Effort) -> list[float]:
    """As graph_times, with programmatic dependent launch between the operations: the library's default."""
    if not enable_pdl(buffer, True):
        raise Skipped("this build has no programmatic dependent launch")
    return graph_times(world, call, effort)


def kernel_times(world: World, call: Call, effort: Effort, names: Mapping[str, str]) -> dict[str, list[float]]:
    """Profiler's time of kernels in calls that all GPUs start together, a sample a call. names: as in KERNELS."""
    calls = min(effort.iterations, 30)
    _warm_up(world, call, effort.warm_up)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILERS_FIRST + calls):
            world.align()
            call()
        world.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = find_kernels(events, _PROFILERS_FIRST + calls, names)
    return {op: times[_PROFILERS_FIRST:] for op, times in found.items()}


def find_kernels(events: list[dict[str, Any]], calls: int, names: Mapping[str, str]) -> dict[str, list[float]]:
    """Kernels of a Chrome trace by operation. An operation of several takes from the first one's start to the last end:
    the next may begin before the one before it ends. Raises Skipped, also where calls have not the same kernels: the
    profiler has lost some then."""
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    found = {}
    for op, name in names.items():
        mine = [event for event in kernels if name in event["name"]]
        if not mine or len(mine) % calls:
            raise Skipped(f"the profiler saw {len(mine)} kernels named *{name}* in {calls} calls")
        each = len(mine) // calls
        groups = [mine[i : i + each] for i in range(0, len(mine), each)]
        kinds = {tuple(event["name"] for event in group) for group in groups}
        if len(kinds) > 1:
            shown = " and ".join(sorted("+".join(kind) for kind in kinds))
            raise Skipped(
                f"the profiler saw {len(mine)} kernels named *{name}* in {calls} calls, not the same: {shown}"
            )
        found[op] = [_span(group) for group in groups]
    return found


def _span(kernels: list[dict[str, Any]]) -> float:
    start = kernels[0]["ts"]
    return float(max(event["ts"] - start + event["dur"] for event in kernels))
