"""The ranks of a measurement: processes that this module starts, or those of torchrun."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nccl_ep.doctor.ranks import COLLECTIVE_SECONDS, Launcher, join

from . import records
from .records import Record

T = TypeVar("T")

GRACE_SECONDS = 30.0  # for what is in hand when the time is over
_GATE_SECONDS = 20.0
_POLLS_BEFORE_YIELD = 200
_CPU_SECONDS = 120.0  # of whatever CPU ranks wait for: they share cores with all else that runs there
_PAUSE_CYCLES = 2_000_000  # 1 ms
_sleep: Callable[[int], None] = torch.cuda._sleep


class BenchError(RuntimeError):
    """A rank failed; the text has what every failed rank said. All ranks raise it at the same place."""


class Skipped(Exception):
    """This figure cannot be had here; the text says why."""


class Gate:
    """A barrier of host threads by shared memory: ranks leave it within about a microsecond of one another.

    (One over sockets lets them out tens of microseconds apart, which would be measured.)
    """

    def __init__(self, rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], seconds: float) -> None:
        name = None
        if rank == 0:
            where = "/dev/shm" if os.path.isdir("/dev/shm") else None
            handle, name = tempfile.mkstemp(prefix="nccl_ep_bench_", dir=where)
            os.write(handle, bytes(64 * num_ranks))
            os.close(handle)
        with open(gather(name)[0], "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 64 * num_ranks)).cast("q")
        gather(None)
        if name is not None:
            os.unlink(name)
        self._own = 8 * rank  # a cache line a rank
        self._others = [8 * other for other in range(num_ranks) if other != rank]
        self.rounds = 0
        self._seconds = seconds

    def wait(self) -> None:
        self.rounds += 1
        words, rounds = self._words, self.rounds
        words[self._own] = rounds
        deadline = time.monotonic() + self._seconds
        for other in self._others:
            polls = 0
            while words[other] < rounds:
                polls += 1
                if polls < _POLLS_BEFORE_YIELD:  # a call of the kernel may take microseconds
                    continue
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise BenchError(f"rank {other // 8} did not come to the barrier within {self._seconds:g} s")


class World:
    """This rank's end. ``device`` is current; torch's default group serves it (NCCL or gloo)."""

    def __init__(self, device: str) -> None:
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_cuda = device == "cuda"
        self.device = join(device)
        # The oracle runs on all ranks of a GPU's machine; CPU ranks share the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.num_ranks) if self.is_cuda else 1)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        host = dist.new_group(backend="gloo", timeout=timeout)
        assert host is not None
        self._host = host
        self.gate = Gate(self.rank, self.num_ranks, self._gather, self.patience(_GATE_SECONDS))
        self._token = torch.zeros(1, device=self.device)
        if self.is_cuda:
            dist.all_reduce(self._token)  # makes NCCL's communicator before memory is measured
            torch.cuda.synchronize()

    def together(self, body: Callable[[], T]) -> T:
        """Runs ``body`` on every rank; returns this rank's result. Where one raises, all raise: none is left behind."""
        kept: list[T] = []
        self.agree(lambda: kept.append(body()))
        return kept[0]

    def agree(self, body: Callable[[], T]) -> list[T]:
        """The same with the results of all ranks, which are what JSON holds. Calls of these two are not nested."""
        outcome: tuple[str, Any]
        try:
            outcome = ("done", body())
        except Skipped as reason:
            outcome = ("skipped", str(reason))
        except Exception as error:
            first_line = (str(error).strip() or repr(error)).splitlines()[0]
            outcome = ("failed", f"rank {self.rank}: {type(error).__name__}: {first_line}")
        gathered = self._gather((outcome, self.gate.rounds))
        # A rank that failed half way has passed the gate less often.
        self.gate.rounds = max(rounds for _, rounds in gathered)
        outcomes = [outcome for outcome, _ in gathered]
        if failed := [text for state, text in outcomes if state == "failed"]:
            raise BenchError("; ".join(failed))
        if skipped := [text for state, text in outcomes if state == "skipped"]:
            raise Skipped(skipped[0])
        return [result for _, result in outcomes]

    def _gather(self, mine: Any) -> list[Any]:
        """Of all ranks, as JSON: nothing that comes over a socket is unpickled."""
        text = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(lengths, torch.tensor([text.numel()]), group=self._host)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())), group=self._host)
        return [json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(texts, lengths, strict=True)]

    def patience(self, seconds: float) -> float:
        """The deadline of a wait that is given up on GPUs after so many seconds."""
        return seconds if self.is_cuda else max(seconds, _CPU_SECONDS)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def align(self) -> None:
        """Queues what makes all GPUs go on at the same time: a pause in which every host gets ahead, and a collective.

        The pause outlasts the time that the slowest host needs to queue what is measured, a profiler's part included.
        It comes first, as it is a number of cycles, and each GPU has a clock of its own.
        """
        _sleep(_PAUSE_CYCLES)
        dist.all_reduce(self._token)

    def device_name(self) -> str:
        if self.is_cuda:
            return torch.cuda.get_device_name(self.device)
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"

    def close(self) -> None:
        dist.destroy_process_group()


class Started(NamedTuple):
    """This process among those that torchrun has started, or by itself. ``group`` is gloo's, or None."""

    group: Any
    rank: int
    ranks: int
    barrier: Callable[[], Any]


def join_torchrun(is_cuda: bool) -> Started:
    """On GPUs each rank's own one is current then."""
    if not is_rank():
        return Started(None, 0, 1, lambda: None)
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    return Started(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), dist.barrier)


# ---- Starting ranks


def is_rank() -> bool:
    """Whether this process is one of the ranks, started by torchrun or by ``run_ranks``."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(argv: list[str], options: argparse.Namespace, render: Callable[[list[Record]], str]) -> int:
    """Runs a command on ranks, the first of which saves records, and prints these. Returns an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "records.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        records.save(path, [])
        deadline = time.monotonic() + options.time_limit + GRACE_SECONDS
        reason = Launcher(options.ranks).run("bench", [*argv, "--json", str(path)], {}, deadline)
        print(render(records.load([path])), flush=True)
    if reason:
        print(f"FAILED {reason}", file=sys.stderr)
    return 1 if reason else 0
