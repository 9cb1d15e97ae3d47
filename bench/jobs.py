"""Runs the jobs of a benchmark: on ranks that it starts, or as one of the ranks of torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_ep.choices import Mode
from nccl_ep.doctor.ranks import Launcher

from . import records, table
from .configuration import Configuration, Plan
from .ht_configuration import HtConfiguration
from .measure import Effort
from .records import Record
from .rivals.torch_all_to_all import TorchSymmMem
from .workload import Shape
from .world import GRACE_SECONDS, BenchError, World, is_rank

_BROKEN = 3  # exit code of a rank whose GPU no longer works: the next job needs new processes

# From the process that starts the ranks to its ranks: first and last + 1 of the jobs to do, and where rank 0 tells how
# far it is.
_ENV_JOBS, _ENV_STATE = "NCCL_EP_BENCH_JOBS", "NCCL_EP_BENCH_STATE"


@dataclass(frozen=True)
class Job:
    system: str
    shape: Shape

    @property
    def is_ours(self) -> bool:
        return self.system == "nccl_ep"

    def __str__(self) -> str:
        how = f", {self.shape.layout}, {self.shape.mode}" if self.is_ours else ""
        return f"{self.system}, {self.shape.tokens} tokens, {self.shape.dtype}{how}"


@dataclass(frozen=True)
class Bench:
    """A command that measures. report: prints the records when all is done, and returns them with what it adds."""

    command: str
    parse: Callable[[list[str]], argparse.Namespace]
    make_jobs: Callable[[argparse.Namespace], list[Job]]
    report: Callable[[list[Record]], list[Record]] = table.show


def library_jobs(options: argparse.Namespace, modes: Sequence[Mode]) -> list[Job]:
    """Modes, layouts and dtypes of a size follow one another: they have the same inputs."""
    return [
        Job(
            "nccl_ep",
            Shape(
                options.ranks, tokens, options.hidden, options.topk, options.experts, dtype, layout, options.routing,
                options.seed, mode, options.alignment if layout == "packed" else 1, enable_shrink=options.enable_shrink,
            ),
        )
        for tokens in options.tokens
        for layout in options.layout
        for dtype in options.dtype
        for mode in modes
    ]  # fmt: skip


def with_rivals(jobs: list[Job], names: Sequence[str]) -> list[Job]:
    """The library's first: rivals cannot break what was not yet measured. They have one layout."""
    first = [job.shape for job in jobs if job.shape.layout == jobs[0].shape.layout]
    return jobs + [Job(name, shape) for name in names for shape in first]


def main(bench: Bench, argv: list[str]) -> int:
    options = bench.parse(argv)
    if not is_rank():
        return start_ranks(bench, argv, options)
    world = World(options.device)
    try:
        return _Rank(bench, world, options).run()
    finally:
        world.close()


def effort_of(options: argparse.Namespace, shape: Shape) -> Effort:
    """Thousands of tokens take so long that a short chain is all operation and no launch. A CPU rank has no queue that
    calls could fill."""
    warm_up, chain, host_calls = (3, 10, 50) if options.quick else (10, 40, 200)
    if options.device == "cpu":
        warm_up, host_calls = 3, 5
    return Effort(warm_up, options.iterations, min(chain, 10) if shape.tokens > 512 else chain, host_calls)


# ---- A rank


class _Rank:
    def __init__(self, bench: Bench, world: World, options: argparse.Namespace) -> None:
        self.bench, self.world, self.options = bench, world, options
        self.plan = Plan(
            options.figures, options.api, options.num_sms, options.cached, options.staged,
            options.fits_capacity,
        )  # fmt: skip
        self.jobs = bench.make_jobs(options)
        self.is_started_by_us = _ENV_JOBS in os.environ
        bounds = os.environ.get(_ENV_JOBS, f"0:{len(self.jobs)}").split(":")
        self.first, self.end = int(bounds[0]), int(bounds[1])
        self.begin = time.monotonic()
        self.failures: list[str] = []
        # Those of earlier processes stay in the file.
        self.records = records.load([options.json]) if self.is_started_by_us else []

    def run(self) -> int:
        for number in range(self.first, self.end):
            job = self.jobs[number]
            if self.world.agree(lambda: time.monotonic() - self.begin > self.options.time_limit)[0]:
                self._fail(job, "the time limit left no time for it")
                continue
            self._tell(number)
            self._run_job(job)
            self._save()
        self._tell(self.end)
        if self.world.rank == 0 and not self.is_started_by_us:
            self.records = self.bench.report(self.records)
            self._save()
        return 0 if self.is_started_by_us or not self.failures else 1

    def _run_job(self, job: Job) -> None:
        mine: list[Record] = []

        def note(record: Record) -> None:
            mine.append(record)
            self.records.append(record)

        try:
            kind = HtConfiguration if job.shape.mode == "ht" else Configuration
            configuration = kind(
                self.world, job.shape, effort_of(self.options, job.shape), note, self.plan,
                progress=lambda text: self._say(f"{job}: {text}"),
            )  # fmt: skip
            if job.is_ours:
                configuration.measure_library()
            else:
                configuration.measure_rival(job.system)
            for failure in configuration.failures:
                self._fail(job, failure)
        except BenchError as error:
            self._fail(job, str(error))
        self._say(f"{job}: {table.in_short(mine)}")
        try:
            self.world.together(self.world.synchronize)
        except BenchError as error:  # an error of CUDA stays with its process
            self._fail(job, str(error))
            self._save()
            self._tell(self.jobs.index(job))
            os._exit(_BROKEN)

    def _fail(self, job: Job, text: str) -> None:
        """What keeps a rival from running stands in its records; only the library's failures are the benchmark's."""
        if self.world.rank == 0:
            print(f"{job}: {text}", file=sys.stderr)
        if job.is_ours:
            self.failures.append(f"{job}: {text}")

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            print(f"[{time.monotonic() - self.begin:5.1f} s] {text}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        if self.world.rank == 0 and self.options.json is not None:
            records.save(self.options.json, self.records)

    def _tell(self, number: int) -> None:
        if self.world.rank == 0 and self.is_started_by_us:
            state = {"job": number, "failures": self.failures}
            Path(os.environ[_ENV_STATE]).write_text(json.dumps(state))


# ---- The process that starts them


def start_ranks(bench: Bench, argv: list[str], options: argparse.Namespace) -> int:
    """Runs all jobs. Ranks that die take one job with them; the others are done by new ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "records.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        records.save(path, [])
        parent = _Parent(bench, argv, options, path, Path(folder) / "state.json")
        failures = parent.run()
        records.save(path, bench.report(records.load([path])))
        for failure in failures:
            print(f"FAILED {failure}", file=sys.stderr)
        return 1 if failures else 0


class _Parent:
    def __init__(self, bench: Bench, argv: list[str], options: argparse.Namespace, path: Path, state: Path) -> None:
        self.bench, self.argv, self.options, self.path, self.state = bench, argv, options, path, state
        self.jobs = bench.make_jobs(options)
        self.deadline = time.monotonic() + options.time_limit
        self.failures: list[str] = []

    def run(self) -> list[str]:
        """What failed of the library's jobs."""
        end = len(self.jobs)
        # NVSHMEM ends its process where it does not like the machine: its rival comes last, in processes of its own.
        apart = end
        if self.options.device == "cuda":
            apart = next((i for i, job in enumerate(self.jobs) if job.system == TorchSymmMem.name), end)
        first = 0
        while first < end:
            first = self._run_ranks(first, apart if first < apart else end)
        return self.failures

    def _run_ranks(self, first: int, end: int) -> int:
        """Does jobs of the range in new processes. Returns the one to go on with, or ``end``."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.failures += [f"the time limit left no time for {job}" for job in self.jobs[first:end] if job.is_ours]
            return end
        self.state.write_text(json.dumps({"job": first, "failures": []}))
        settings = {_ENV_JOBS: f"{first}:{end}", _ENV_STATE: str(self.state)}
        argv = [self.bench.command, *self.argv, "--json", str(self.path), "--time-limit", str(left)]
        reason = Launcher(self.options.ranks).run("bench", argv, settings, self.deadline + GRACE_SECONDS)
        state: dict[str, Any] = json.loads(self.state.read_text())
        self.failures += state["failures"]
        if not reason:
            return end
        number = int(state["job"])
        if number >= end:  # all was done: they died on leaving
            print(f"after the last configuration: {reason}", file=sys.stderr)
            return end
        job = self.jobs[number]
        print(f"{job}: {reason}", file=sys.stderr)
        if job.is_ours:
            self.failures.append(f"{job}: {reason}")
        else:
            self._skip(job, reason)
        return number + 1

    def _skip(self, job: Job, reason: str) -> None:
        """A record for a rival that left none, made from the library's of the same shape."""
        written = records.load([self.path])
        for like in written:
            shape = tuple(like[name] for name in ("system", "tokens", "dtype"))
            if shape == ("nccl_ep", job.shape.tokens, job.shape.dtype):
                fields = {"system": job.system, "api": "torch", "op": "pair", "figure": "event", "layout": "packed"}
                changed = {"value": None, "unit": "us", "p99": None, "num_sms": 0, "num_sms_used": None}
                more = {"placement": None} if "placement" in like else {}
                common = {name: value for name, value in like.items() if name != "skipped"}
                written.append(records.make(common, skipped=reason, **fields, **changed, **more))
                records.save(self.path, written)
                return
