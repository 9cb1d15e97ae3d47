"""Ranks as threads of one process: a world for tests, notebooks and debuggers."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .checks import MAX_RANKS, described, require_timeout, require_within
from .errors import TimeoutError
from .meeting import late

T = TypeVar("T")


class _Meeting:
    """One round of an allgather: an entry for each rank."""

    def __init__(self, size: int) -> None:
        self.texts: list[bytes | None] = [None] * size
        self.heard: set[int] = set()
        self.is_full = threading.Event()


class _World:
    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.meetings: dict[int, _Meeting] = {}


class ThreadGroup:
    """One rank's end of a world of threads; give it to ``Buffer`` where a process group would go.

    ``ThreadGroup.make(n)`` returns the ends of ``n`` ranks.
    """

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank, self._round = world, rank, 0

    @staticmethod
    def make(num_ranks: int) -> list[ThreadGroup]:
        world = _World(num_ranks)
        return [ThreadGroup(world, rank) for rank in range(num_ranks)]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        world = self._world
        with world.lock:
            meeting = world.meetings.setdefault(self._round, _Meeting(world.size))
            meeting.texts[self._rank] = mine
            meeting.heard.add(self._rank)
            if all(text is not None for text in meeting.texts):
                meeting.is_full.set()
                del world.meetings[self._round]  # the others hold a reference
        try:
            meeting.is_full.wait(timeout)
        finally:  # all ranks go on to the next round, or none: whoever gives up can try again
            with world.lock:
                is_full = meeting.is_full.is_set()
                if is_full:
                    self._round += 1
                else:
                    meeting.texts[self._rank] = None
        if not is_full:
            raise late(self._rank, timeout, [rank for rank in range(world.size) if rank not in meeting.heard])
        return [text for text in meeting.texts if text is not None]


@functools.cache
def _prepare_torch() -> None:
    """For threads that make fake tensors, as a compiler does: where no GPU is, the first of these changes what all
    threads use, and torch 2.11 crashes if several are the first at once. (To make one here would bring a compiler.)"""
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def run_ranks(num_ranks: int, body: Callable[[ThreadGroup], T], timeout: float = 300.0) -> list[T]:
    """Runs ``body(group)`` once a rank, each in a thread of its own, and returns the results in rank order.

    ``timeout``: seconds for all of them; ``TimeoutError`` names a rank that runs longer (its thread is left alone).
    Raises the error of the lowest rank that failed, with the others' texts added.
    """
    require_within(1, MAX_RANKS, num_ranks=num_ranks)
    require_timeout(timeout=timeout)
    if not callable(body):
        raise TypeError(f"body is {described(body)}, must be a function of a rank's group")
    _prepare_torch()
    results: list[Any] = [None] * num_ranks
    errors: dict[int, BaseException] = {}

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank()] = body(group)
        except BaseException as error:
            errors[group.rank()] = error

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in ThreadGroup.make(num_ranks)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            errors.setdefault(rank, TimeoutError(f"rank {rank} is still running after {timeout} s"))
    if errors:
        first = errors[min(errors)]
        for rank, error in sorted(errors.items()):
            if error is not first and hasattr(first, "add_note"):  # Python 3.11 and newer
                first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
        raise first
    return results
