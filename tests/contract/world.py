"""What the contract needs of a backend: ranks that do what they are told, and a word on what that backend has not got.

Tests tell ranks ``body(rank, *args)``: a function of a module and what pickle takes, since ranks may be processes.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.delays import meet
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case
from tests.support.gpus import on_gpu
from tests.support.harness import make_buffer
from tests.support.processes import Processes

MOST_SECONDS = 300.0  # of a test on all ranks


@dataclass(frozen=True)
class Backend:
    """How buffers of a backend are made, and what is not to be expected of it.

    Attributes:
        device, domain_size, options: of ``Buffer``.
        counts_bytes: ``wire_bytes()`` tells what has crossed.
        has_rail: between domains, what ranks of one place send to each other's domains goes by way of them.
        is_one_launch: an operation is one launch of all ranks, which meet on the host for it: it does not begin while
            one is missing, and takes one kind of call and one stream.
    """

    device: str = "cpu"
    domain_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    counts_bytes: bool = False
    has_rail: bool = False
    is_one_launch: bool = False


@dataclass(frozen=True)
class Rank:
    """What a body gets: its place in the world, and how to make buffers there. Making one is collective."""

    backend: Backend
    group: Any

    @property
    def number(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    def case(self, **changes: Any) -> Expected:
        return _expected(self.size, self.backend, changes)

    def buffer(self, case: Case, **options: Any) -> nccl_ep.Buffer:
        """In which all operations of the case fit, of both modes."""
        how = {"mode": "auto", **self.backend.options, **options}
        return make_buffer(case, self.group, device=self.backend.device, **how)

    def meet(self, text: str = "") -> list[str]:
        """All ranks come here, whatever their buffers are doing."""
        return meet(self.group, text)


def small_case(num_ranks: int, backend: Backend, **changes: Any) -> Case:
    """Rows of 18 times 16 bytes; the last rank but one has no token. No row is dropped unless a change says so."""
    most = 8
    tokens = (most,) * (num_ranks - 2) + (0, most - 1)
    topk, layout = changes.get("topk", 3), changes.get("layout", "flat")
    plain: dict[str, Any] = {
        "layout": layout, "topk": topk, "hidden": 144, "max_tokens": most, "tokens": tokens,
        "capacity": num_ranks * most * topk if layout == "expert_major" else None,
        "expert_alignment": 4 if layout == "packed" else 1, "domain_size": backend.domain_size,
    }  # fmt: skip
    return plain_case(num_ranks, **{**plain, **changes})


_oracle, _made = threading.Lock(), functools.lru_cache(maxsize=128)(Expected)


def _expected(num_ranks: int, backend: Backend, changes: Mapping[str, Any]) -> Expected:
    """Made by one of the ranks that are threads, for all of them. Nobody may write to it."""
    with _oracle:
        return _made(small_case(num_ranks, backend, **changes))


class World:
    """Ranks of a backend."""

    def __init__(self, num_ranks: int, backend: Backend) -> None:
        self.num_ranks, self.backend = num_ranks, backend

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """``body(rank, *args)`` on every rank; what they return, in rank order. Fails where one fails."""
        raise NotImplementedError

    def case(self, **changes: Any) -> Expected:
        return _expected(self.num_ranks, self.backend, changes)

    def close(self) -> None:
        """After the last test."""


class Threads(World):
    """Of this process."""

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        def on_rank(group: ThreadGroup) -> Any:
            return body(Rank(self.backend, group), *args)

        return run_ranks(self.num_ranks, on_rank, MOST_SECONDS)


class LivingProcesses(World):
    """Started for the first test and used by all; others take their places where a test has failed."""

    _ranks: Processes | None = None

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        if self._ranks is None:
            self._start()
        try:
            for end in self._ends:
                end.send((body, args))
            said = [self._answer(number) for number in range(self.num_ranks)]
        except BaseException:
            self.close()
            raise
        return said

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        ours, theirs = zip(*(Pipe() for _ in range(self.num_ranks)), strict=True)
        self._ends: tuple[Connection, ...] = ours
        self._ranks = Processes(self.num_ranks, _serve, Path(self._folder.name), theirs, self.backend)
        for end in theirs:
            end.close()

    def _answer(self, number: int) -> Any:
        assert self._ends[number].poll(MOST_SECONDS), f"rank {number} still runs after {MOST_SECONDS} s"
        try:
            value, error = self._ends[number].recv()
        except EOFError:
            raise AssertionError(f"rank {number} has died") from None
        assert not error, f"rank {number}: {error}"
        return value

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._folder.cleanup()
            self._ranks = None


def _serve(number: int, ends: tuple[Connection, ...], backend: Backend) -> None:
    for each, end in enumerate(ends):
        if each != number:
            end.close()  # or nobody would hear of the other's death
    if backend.device == "cuda":
        on_gpu(number)
    rank = Rank(backend, rendezvous_of(dist.group.WORLD))
    while True:
        body, args = ends[number].recv()
        try:
            said = body(rank, *args), ""
        except BaseException:
            said = None, traceback.format_exc()
        ends[number].send(said)
