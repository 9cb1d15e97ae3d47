"""What single figures that are far off come from: torchrun --nproc-per-node 2 -m bench.measure_outliers FILE.json

Figures of ``python -m bench`` again and again, until the time is up: low latency's dispatch of 32 tokens and
high throughput's packed dispatch and combine, in graphs and as kernels; low latency's pairs of 1 token in FP8, called
from Python one after the other (queued). Every other time ("pause last") GPUs are aligned as they were until 26
November 2026: by a collective, and then a short pause. FILE has every sample of every rank. A line for each figure and
repeat, in us:

- value: what the benchmark makes of the samples, the median of the slowest rank.
- last: the median of the samples of the rank that began last. Operations end on all ranks at the same time, so what
  another rank has more is its wait for that one.
- apart: by how much the ranks differ in a sample, the median and the most. Of graphs, over all calls of the chain.
- queue: of the slowest host from one sample to the next, the median and the most. The pause has to outlast it.
- alloc: allocations that CUDA made meanwhile, of all ranks. MHz: the GPUs' clocks behind it.

``value`` off and ``last`` not: the ranks began apart. With a long ``queue`` a host was late; else the GPUs' clocks
differ ("pause last"), or the collective lets them go apart. Both off: it is the library or the GPUs; see MHz and alloc.

Of queued pairs, ``queue`` is from one call to the next, and ranks go in step. ``value`` about the median of ``queue``:
that host is slow. Far above it: it is the library or the GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench import measure, world
from bench.operations import Operations, native_operations
from bench.records import Record, make, revision, save, slowest, today
from bench.workload import Checked, Shape, arena_bytes_for, fitted, make_buffer, make_inputs
from nccl_ep import Buffer
from nccl_ep.choices import Mode

EAGER = "eager"
SHAPES: dict[str, tuple[Mode, int, str, str, int, int]] = {  # mode, tokens, dtype, layout, alignment, calls in a graph
    "ll": ("ll", 32, "bf16", "expert_major", 1, 40),
    "ht": ("ht", 4096, "bf16", "packed", 128, 10),
    EAGER: ("ll", 1, "fp8", "expert_major", 1, 0),
}
_COUNTER = "num_device_alloc"  # of torch.cuda.memory_stats()


class Rank(world.World):
    """Notes when its host queues the samples."""

    is_pause_last = False

    def __init__(self) -> None:
        super().__init__("cuda")
        self.times: list[float] = []

    def align(self) -> None:
        self.times.append(time.perf_counter())
        if not self.is_pause_last:
            super().align()
            return
        dist.all_reduce(self._token)
        world._sleep(400_000)

    def queue_times(self) -> list[float]:
        times, self.times = self.times, []
        return [(later - earlier) * 1e6 for earlier, later in itertools.pairwise(times)]


def clock() -> int | None:
    try:
        return int(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):  # without pynvml
        return None


class Subject:
    """A shape's buffer and calls."""

    def __init__(self, rank: Rank, name: str, hidden: int, experts: int) -> None:
        mode, tokens, dtype, layout, alignment, chain = SHAPES[name]
        shape = Shape(rank.num_ranks, tokens, hidden, 8, experts, dtype, layout, "uniform", 1, mode, alignment)
        inputs = make_inputs(shape)
        if mode == "ht":
            shape = fitted(shape, inputs)
        self.name, self.mode, self.rank, self.shape = name, mode, rank, shape
        arena_bytes = arena_bytes_for(shape, rank.device) if mode == "ht" else None
        self.buffer: Buffer = make_buffer(shape, rank.device, 20.0, arena_bytes)
        checked = Checked(shape, rank.rank, inputs, self.buffer)
        given = inputs[rank.rank].to(rank.device)
        self.calls: Operations = native_operations(shape, self.buffer, given, checked, 0)
        self.effort = measure.Effort(warm_up=10, iterations=50, chain=chain, host_calls=0)

    def graph(self, op: str) -> dict[str, list[float]]:
        call = self.calls.in_graph(op)
        if self.mode == "ll":
            return {op: measure.plain_graph_times(self.rank, self.buffer, call, self.effort)}
        return {op: measure.graph_times(self.rank, call, self.effort)}

    def kernels(self) -> dict[str, list[float]]:
        names = {op: measure.KERNELS[op] for op in ("dispatch", "combine")}
        if self.mode == "ht":
            return measure.kernel_times(self.rank, self.calls.get("pair"), self.effort, names)
        with measure.without_pdl(self.buffer):
            return measure.kernel_times(self.rank, self.calls.get("pair"), self.effort, names)

    def queued(self) -> dict[str, list[float]]:
        call = self.calls.get("pair")

        def noted() -> None:
            self.rank.times.append(time.perf_counter())
            call()

        times = measure.queued_times(self.rank, noted, self.effort)
        del self.rank.times[: -len(times)]  # of calls that are no samples
        return {"pair": times}

    def figures(self) -> list[tuple[str, Callable[[], dict[str, list[float]]]]]:
        if self.name == EAGER:
            return [("queued", self.queued)]
        ops = ("dispatch",) if self.mode == "ll" else ("dispatch", "combine")
        return [("graph", lambda op=op: self.graph(op)) for op in ops] + [("kernel", self.kernels)]


def sampled(subject: Subject, figure: str, body: Callable[[], dict[str, list[float]]], repeat: int) -> list[Record]:
    rank, shape = subject.rank, subject.shape
    rank.times.clear()
    before = torch.cuda.memory_stats()[_COUNTER]
    told = rank.agree(
        lambda: (body(), rank.queue_times(), torch.cuda.memory_stats()[_COUNTER] - before, clock())
    )  # fmt: skip
    samples, queues, allocations, clocks = zip(*told, strict=True)
    made = []
    for op in samples[0]:
        each = [mine[op] for mine in samples]
        value, p99 = slowest(each)
        known: Record = {
            "bench": "outliers", "system": "nccl_ep", "api": "native", "op": op, "figure": figure, "value": value,
            "p99": p99, "ranks": shape.num_ranks, "tokens": shape.tokens, "hidden": shape.hidden, "topk": shape.topk,
            "experts": shape.num_experts, "dtype": shape.dtype, "layout": shape.layout, "routing": shape.routing,
            "num_sms": 0, "seed": shape.seed, "device": rank.device_name(), "revision": revision(), "date": today(),
            "mode": shape.mode,
        }  # fmt: skip
        chain = subject.effort.chain if figure == "graph" else 1
        apart = [(max(times) - min(times)) * chain for times in zip(*each, strict=True)]
        queue = max(queues, key=median)
        more: dict[str, Any] = {
            "repeat": repeat, "pause": "last" if rank.is_pause_last else "first",
            "last": round(median(map(min, zip(*each, strict=True))), 3), "samples": each, "queues": queues,
            "allocations": allocations, "clocks": clocks,
        }  # fmt: skip
        made.append(make(known) | more)
        if rank.rank == 0:
            print(
                f"{shape.mode} {op:8} {figure:6} pause {more['pause']:5} value {value:7.2f} last {more['last']:7.2f} "
                f"apart {median(apart):6.1f} {max(apart):6.1f} queue {median(queue):6.0f} {max(map(max, queues)):6.0f} "
                f"alloc {sum(allocations)} MHz {clocks}",
                flush=True,
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--seconds", type=float, default=55.0, help="after which no repeat begins")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    rank = Rank()
    subjects = [rank.together(partial(Subject, rank, name, options.hidden, options.experts)) for name in SHAPES]
    records: list[Record] = []
    repeat = 0
    while all(rank.agree(lambda: time.monotonic() < until)):
        rank.is_pause_last = repeat % 2 == 1
        for subject in subjects:
            for figure, body in subject.figures():
                records += sampled(subject, figure, body, repeat)
        repeat += 1
    for subject in subjects:
        rank.together(subject.buffer.destroy)
    if rank.rank == 0:
        save(options.records, records)
    rank.close()


if __name__ == "__main__":
    main()
