"""Elastic buffers on CPU ranks: a new process takes the place of a rank that has gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.room import Room, ll_sizes_for_bytes
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ll.mask_ranks import CaseOf, run_parted
from tests.ll.replace_ranks import World, lose
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.patience import PATIENCE, with_more_time
from tests.support.processes import run_processes

SHORT = 0.3  # seconds, to wait for a rank that does not come


# ---- Processes that are killed


def _lose_with_more_time(num_ranks: int, victims: Sequence[int]) -> World:
    worlds = []
    with_more_time(lambda deadline: worlds.append(lose(num_ranks, victims, deadline)))
    assert worlds[0].store.num_keys() <= 4, "keys are left in the store"
    return worlds[0]


def test_ranks_that_are_killed_are_replaced() -> None:
    """Rank 0, by which the others meet, too."""
    _lose_with_more_time(3, (1, 0, 2))


@pytest.mark.slow
def test_fifty_replaced_ranks_leave_nothing_behind() -> None:
    world = _lose_with_more_time(3, [1 + number % 2 for number in range(50)])
    survivor = world.told[0]
    assert [each["phase"] for each in survivor] == list(range(51))
    for kind in ("descriptors", "threads", "windows"):
        assert len({each[kind] for each in survivor[2:]}) == 1, (kind, survivor)
    assert world.store.num_keys() <= 4, "keys are left in the store"


def _take_the_place_of_one_that_lives(process: int, path: str) -> None:
    """Processes 0 and 1 are the ranks; process 2 comes for rank 1."""
    store = dist.FileStore(path, 3)
    group = nccl_ep.StoreGroup(store, rank=min(process, 1), size=2)
    told = r"rank 1 is to be replaced, but its process \d+ still runs: end it first"
    whole = Expected(plain_case(2))
    if process == 2:
        dist.barrier()
        with pytest.raises(nccl_ep.UsageError, match=told):
            shared_buffer(group, [whole], elastic=True, join=True, timeout=PATIENCE)
        dist.barrier()
        return
    with shared_buffer(group, [whole], elastic=True, timeout=PATIENCE) as buffer:
        dist.barrier()
        if process == 0:
            with pytest.raises(nccl_ep.UsageError, match=told):
                buffer.replace(1, timeout=10.0)  # half of it waits for the end of the process
        dist.barrier()
        assert buffer.masked == []
        run_parted(whole, whole, buffer)


def test_a_rank_whose_process_lives_is_not_replaced(tmp_path: Path) -> None:
    run_processes(3, _take_the_place_of_one_that_lives, tmp_path, str(tmp_path / "world"))


# ---- Threads, whose ranks go as they are told


class _Threads:
    """A world of threads, of which some go and others come."""

    def __init__(self, num_ranks: int) -> None:
        self.store, self.num_ranks = dist.HashStore(), num_ranks
        self.whole = Expected(plain_case(num_ranks))

    def without(self, *gone: int) -> Expected:
        return Expected(CaseOf.make(self.whole.case, frozenset(range(self.num_ranks)) - set(gone)))

    def buffer(self, rank: int, **options: Any) -> nccl_ep.Buffer:
        group = nccl_ep.StoreGroup(self.store, rank=rank, size=self.num_ranks)
        return shared_buffer(group, [self.whole], **{"elastic": True, **options})

    def run(self, buffer: nccl_ep.Buffer, *gone: int) -> None:
        assert buffer.masked == sorted(gone)
        run_parted(self.whole, self.without(*gone) if gone else self.whole, buffer)

    def lose(self, buffer: nccl_ep.Buffer, rank: int) -> None:
        buffer.runtime.mask(rank, 0)

    def replace(self, rank: int, buffer: nccl_ep.Buffer) -> nccl_ep.Buffer:
        """By every rank that is there; the newcomer's ``buffer`` is its old one."""
        if buffer.rank == rank:
            return self.buffer(rank, join=True)
        buffer.replace(rank, timeout=PATIENCE)
        return buffer


def _threads(num_ranks: int, body: Callable[[_Threads, ThreadGroup, nccl_ep.Buffer], None]) -> None:
    world = _Threads(num_ranks)

    def run_body(group: ThreadGroup) -> None:
        buffer = world.buffer(group.rank())
        world.run(buffer)
        group.allgather(b"", PATIENCE)  # a rank that is masked may leave out what it still waits for
        body(world, group, buffer)

    run_ranks(num_ranks, run_body)


def test_ranks_that_are_still_away_stay_masked() -> None:
    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        gone = [1, 3]
        if buffer.rank in gone:
            buffer.destroy()
        group.allgather(b"", PATIENCE)
        if buffer.rank not in gone:
            for rank in gone:
                world.lose(buffer, rank)
            world.run(buffer, *gone)
            world.run(buffer, *gone)
        if buffer.rank != 3:
            buffer = world.replace(1, buffer)
            world.run(buffer, 3)
            world.run(buffer, 3)
        buffer = world.replace(3, buffer)
        world.run(buffer)
        deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()  # the new ranks meet the old ones in other ways, too
        world.run(buffer)

    _threads(4, body)


def test_a_rank_that_was_far_ahead_is_replaced() -> None:
    """What it has left in the others' windows lies in the future of those."""

    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        if buffer.rank == 0:
            world.lose(buffer, 1)
            for _ in range(20):
                world.run(buffer, 1)
            buffer.destroy()
        group.allgather(b"", PATIENCE)
        for _ in range(3):
            buffer = world.replace(0, buffer)
            world.run(buffer)
            group.allgather(b"", PATIENCE)

    _threads(2, body)


def _second_try_succeeds(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
    """After one that failed: the others go on without rank 1, and then it is replaced."""
    if buffer.rank != 1:
        world.lose(buffer, 1)
        world.run(buffer, 1)
    group.allgather(b"", PATIENCE)
    world.run(world.replace(1, buffer))


def test_whoever_does_not_come_can_come_later() -> None:
    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        if buffer.rank == 1:
            buffer.destroy()
            with pytest.raises(nccl_ep.TimeoutError, match=r"rank 1 waited .* and no rank has called replace\(1\)"):
                world.buffer(1, join=True, timeout=SHORT)
        group.allgather(b"", PATIENCE)
        if buffer.rank != 1:
            with pytest.raises(nccl_ep.TimeoutError, match=f"rank {buffer.rank} waited .* for rank 1 to be replaced; "):
                buffer.replace(1, timeout=SHORT)
        _second_try_succeeds(world, group, buffer)

    _threads(3, body)


def test_a_new_rank_of_other_sizes_is_refused() -> None:
    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        told = "the ranks disagree about "
        if buffer.rank == 1:
            buffer.destroy()
            with pytest.raises(nccl_ep.MismatchError, match=told):
                world.buffer(1, join=True, _room=Room(ll_sizes_for_bytes(3)))
        else:
            with pytest.raises(nccl_ep.MismatchError, match=told):
                buffer.replace(1, timeout=PATIENCE)
        _second_try_succeeds(world, group, buffer)

    _threads(3, body)


def test_ranks_that_have_masked_others_do_not_meet() -> None:
    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        if buffer.rank == 0:  # it calls, and nobody comes in time
            with pytest.raises(nccl_ep.TimeoutError, match="nothing was heard from rank 2, 3, 1"):
                buffer.replace(1, timeout=SHORT)
        group.allgather(b"", PATIENCE)
        if buffer.rank == 3:
            world.lose(buffer, 2)
            told = r"rank 0 leaves out ranks \[\], rank 3 has masked \[2\]"
            with pytest.raises(nccl_ep.MismatchError, match=told):
                buffer.replace(1, timeout=SHORT)
        group.allgather(b"", PATIENCE)

    _threads(4, body)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"elastic": "yes"}, TypeError, "elastic is "),
        ({"elastic": False, "join": True}, ValueError, "join is True, and elastic False"),
        ({"domain_size": 1}, ValueError, "must be in one domain, these are 2 in 2"),
        ({"mode": "ht"}, ValueError, "an elastic buffer serves low latency"),
        ({"mode": "auto"}, ValueError, "an elastic buffer serves low latency"),
    ],
)
def test_what_an_elastic_buffer_cannot_be(options: dict[str, Any], error: type[Exception], text: str) -> None:
    store = dist.HashStore()

    def body(group: ThreadGroup) -> None:
        with pytest.raises(error, match=text):
            _small(nccl_ep.StoreGroup(store, rank=group.rank(), size=2), **{"elastic": True, **options})

    run_ranks(2, body)


def test_groups_without_a_store_of_their_own_are_refused() -> None:
    for group in (None, ThreadGroup.make(1)[0]):
        with pytest.raises(TypeError, match=r"must be a nccl_ep\.StoreGroup"):
            _small(group, elastic=True)
    for wrong in ({"rank": 2, "size": 2}, {"rank": -1, "size": 2}, {"rank": 0, "size": 0}):
        with pytest.raises(ValueError, match="must be 0 <= rank < size"):
            nccl_ep.StoreGroup(dist.HashStore(), **wrong)
    with pytest.raises(TypeError, match="store is a str"):
        nccl_ep.StoreGroup("store", rank=0, size=1)


def test_what_replace_refuses() -> None:
    store = dist.HashStore()

    def body(group: ThreadGroup) -> None:
        given = nccl_ep.StoreGroup(store, rank=group.rank(), size=2)
        told = "was made without elastic=True"
        with _small(given, enable_shrink=True) as rigid, pytest.raises(nccl_ep.UsageError, match=told):
            rigid.replace(1 - rigid.rank)
        with _small(given, elastic=True) as buffer:
            for rank in (-1, 2):
                with pytest.raises(ValueError, match=f"rank is {rank}"):
                    buffer.replace(rank)
            with pytest.raises(ValueError, match="is this rank itself"):
                buffer.replace(buffer.rank)
            with pytest.raises(ValueError, match="timeout is -1"):
                buffer.replace(1 - buffer.rank, timeout=-1)
        with pytest.raises(nccl_ep.UsageError, match="destroyed"):
            buffer.replace(1 - buffer.rank)

    run_ranks(2, body)


def test_a_split_call_is_received_before() -> None:
    def body(world: _Threads, group: ThreadGroup, buffer: nccl_ep.Buffer) -> None:
        if buffer.rank == 1:
            buffer.destroy()
            with pytest.raises(nccl_ep.UsageError, match="on rank 0: a dispatch was sent and has not been received"):
                world.buffer(1, join=True)
            return
        world.lose(buffer, 1)
        pending = nccl_ep.dispatch_send(
            world.whole.inputs[0].x, world.whole.inputs[0].topk_idx, buffer=buffer, num_experts=4, max_tokens=8
        )
        with pytest.raises(nccl_ep.UsageError, match="receive it before a rank is replaced"):
            buffer.replace(1, timeout=PATIENCE)
        pending.receive()

    _threads(2, body)


def _small(group: Any, **options: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=2, hidden=16, topk=1, num_experts=2, device="cpu", **{"timeout": PATIENCE, **options}
    )
