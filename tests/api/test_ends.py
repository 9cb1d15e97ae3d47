"""Other ends than the interpreter's: of a process by fork beside busy threads, of a buffer by the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.patience import PATIENCE

X, IDS = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 0]])
SIZES: dict[str, Any] = {
    "max_tokens": 2, "hidden": 64, "topk": 2, "num_experts": 2, "mode": "auto", "device": "cpu", "timeout": PATIENCE,
}  # fmt: skip
FORKS = 20


def _make(group: ThreadGroup | None = None, **how: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(group, **(SIZES | how))


def _dispatch(buffer: nccl_ep.Buffer, mode: str = "ht") -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(X, IDS, buffer=buffer, num_experts=2, mode=mode, layout="flat")


# ---- Forks


@contextlib.contextmanager
def _busy(*bodies: Callable[[], Any]) -> Iterator[None]:
    """Threads that do this again and again."""
    over, faults = threading.Event(), []

    def run(body: Callable[[], Any]) -> None:
        try:
            while not over.is_set():
                body()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not faults, faults


def _live_in_fork(parents: nccl_ep.Buffer, kept: list[Any]) -> None:
    torch.set_num_threads(1)
    with pytest.raises(nccl_ep.UsageError, match="make a buffer here"):
        _dispatch(parents)
    kept.clear()  # tensors in the arena of the parent
    with _make() as own:
        assert _dispatch(own).counts.tolist() == [2]
    parents.destroy()  # nothing to do here
    del parents


def test_a_fork_beside_busy_threads_makes_its_own_buffer() -> None:
    """Whatever the threads, which it has not got, held when it was made."""

    def make_one() -> None:
        with _make() as buffer:
            _dispatch(buffer)

    parents = _make()
    kept = [_dispatch(parents) for _ in range(2)]
    with _busy(make_one, lambda: _dispatch(parents)):
        for _ in range(FORKS):
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE))
                try:
                    _live_in_fork(parents, kept)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [out.counts.tolist() for out in kept] == [[2], [2]]
    parents.destroy()


# ---- The garbage collector


@pytest.fixture
def collected_when_asked() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _drop_in_circles(made: list[Any]) -> list[weakref.ref[Any]]:
    """References to the buffers of a list, which is cleared: only the collector finds them."""
    dead = []
    while made:
        circle = {"buffer": made.pop()}
        circle["circle"] = circle
        dead.append(weakref.ref(circle["buffer"]))
    return dead


def _garbage() -> list[weakref.ref[Any]]:
    """Buffers with all that a buffer may have: outputs in the arena, an open send, a network, a failure."""
    solo = _make()
    kept: Any = solo
    kept.out, kept.pending = _dispatch(solo), nccl_ep.dispatch_send(X, IDS, buffer=solo, num_experts=2, max_tokens=2)
    networked = run_ranks(2, lambda group: _make(group, domain_size=1))
    failed, other = run_ranks(2, _make)
    failed.set_timeout(0.01)
    with pytest.raises(nccl_ep.TimeoutError):
        _dispatch(failed)
    return _drop_in_circles([solo, *networked, failed, other])


LOCKS: dict[str, Callable[[ThreadGroup], Any]] = {
    "of the ranks' meetings": lambda group: group._world.lock,
    "of a log": lambda group: logging.Handler().lock,
    "of the caller": lambda group: threading.Lock(),
}


@pytest.mark.usefixtures("collected_when_asked")
@pytest.mark.parametrize("lock", LOCKS)
def test_a_thread_that_has_a_lock_collects_buffers(lock: str) -> None:
    """One rank waits in an operation for the other, which waits for the lock."""
    groups = ThreadGroup.make(2)
    ranks = run_ranks(2, lambda group: _make(groups[group.rank()]))
    held, has_lock, waits = LOCKS[lock](groups[0]), threading.Event(), threading.Event()
    dead = _garbage()

    def body(group: ThreadGroup) -> None:
        if group.rank() == 1:
            assert has_lock.wait(PATIENCE)
            waits.set()
            with held:
                pass
        for mode in ("ll", "ht"):
            assert _dispatch(ranks[group.rank()], mode).counts.tolist() == [2, 2]
        _make(groups[group.rank()]).destroy()

    def collect() -> None:
        with held:
            has_lock.set()
            assert waits.wait(PATIENCE)
            gc.collect()

    collecting = threading.Thread(target=collect)
    collecting.start()
    run_ranks(2, body, timeout=PATIENCE)
    collecting.join(PATIENCE)
    assert not collecting.is_alive()
    assert [each for each in dead if each() is not None] == []
    for buffer in ranks:
        buffer.destroy()


class _Collecting(ThreadGroup):
    """Collects whenever ranks meet, in the midst of the making of a buffer."""

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        gc.collect()
        return super().allgather(mine, timeout)


@pytest.mark.usefixtures("collected_when_asked")
def test_buffers_are_collected_while_a_buffer_is_made() -> None:
    dead, ends = _garbage(), ThreadGroup.make(2)
    groups = [_Collecting(end._world, end.rank()) for end in ends]

    def body(group: ThreadGroup) -> None:
        with _make(groups[group.rank()]) as buffer:
            assert [each for each in dead if each() is not None] == []
            assert _dispatch(buffer).counts.tolist() == [2, 2]

    run_ranks(2, body, timeout=PATIENCE)
