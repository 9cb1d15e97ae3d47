"""How ranks find one another: over what earlier buffers and tries have left, late, and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import nccl_ep
import nccl_ep.deep_ep
from nccl_ep import meeting
from nccl_ep.bootstrap import ProcessGroupRendezvous
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.patience import DEADLINES, PATIENCE, Clock, Late, with_more_time
from tests.support.processes import run_processes

SIZES: dict[str, Any] = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cpu"}


def _works(buffer: nccl_ep.Buffer, hidden: int = 64) -> bool:
    x, ids = torch.ones(5, hidden).bfloat16(), torch.tensor([[0, 3]] * 5)
    out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, max_tokens=8)
    return bool(nccl_ep.combine(out.x, out.handle, weights=None).eq(2).all())


class _PlainStore(dist.Store):
    """A user's own store: it has what torch's documentation asks of one, neither compare_set nor delete_key."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def _tcp_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(params=["hash", "file", "tcp", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    made: dict[str, Callable[[], dist.Store]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 3),  # type: ignore[attr-defined]
        "tcp": _tcp_store,
        "plain": _PlainStore,
    }
    yield made[request.param]()


def _nameless(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group without a name, as two of them have one and the same place in the store."""
    return dist.ProcessGroup(store, rank, size)


def _num_keys(store: dist.Store) -> int:
    return sum(key.startswith("nccl_ep/") for key in store.list_keys())  # type: ignore[attr-defined]


# ---- What is in the store already


def test_groups_of_one_name_work_one_after_the_other(store: dist.Store) -> None:
    """Every buffer is of other sizes than the one before, so that a record of that one would be found out."""

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        for number in range(4):
            hidden, tokens = ((64, 8), (512, 64))[number % 2]
            sizes = {**SIZES, "hidden": hidden, "max_tokens": tokens, "timeout": PATIENCE}
            with nccl_ep.Buffer.for_shapes(_nameless(store, rank, 2), **sizes) as buffer:
                assert _works(buffer, hidden), (rank, number)
            if rank == number % 2:
                time.sleep(0.05)  # the other is ahead

    run_ranks(2, body)


def test_no_key_stays_in_the_store() -> None:
    store = dist.HashStore()

    def body(group: ThreadGroup) -> None:
        for _ in range(3):
            with nccl_ep.Buffer.for_shapes(_nameless(store, group.rank(), 3), **{**SIZES, "num_experts": 6}):
                group.allgather(b"", PATIENCE)

    run_ranks(3, body)
    assert _num_keys(store) == 0, store.list_keys()  # type: ignore[attr-defined]


def test_every_round_is_of_now(store: dist.Store) -> None:
    """Ranks run ahead of one another by a round, and never read the round before."""

    def body(group: ThreadGroup) -> None:
        rank, meeting = group.rank(), ProcessGroupRendezvous(_nameless(store, group.rank(), 3))
        for number in range(30):
            if number % 3 == rank:
                time.sleep(0.002)
            want = [f"{each} {number}".encode() for each in range(3)]
            assert meeting.allgather(want[rank], PATIENCE) == want

    run_ranks(3, body)


class _Paced(meeting.KeyStore):
    """Rank 1 writes its first word when rank 0 has not found it, and has begun its next collective before rank 0 looks
    for who has come anew."""

    def __init__(self, store: dist.Store, rank: int, is_missed: threading.Event, is_ahead: threading.Event) -> None:
        super().__init__(store, "paced", rank)
        self.is_missed, self.is_ahead = is_missed, is_ahead

    def peek(self, key: str) -> bytes | None:
        if self._rank == 0 and key.endswith("/again") and not self.is_missed.is_set():
            self.is_missed.set()
            assert self.is_ahead.wait(PATIENCE)
        return super().peek(key)

    def set(self, key: str, value: bytes) -> None:
        if self._rank == 1 and key.endswith("/0/1"):
            assert self.is_missed.wait(PATIENCE)
        super().set(key, value)
        if self._rank == 1 and key.endswith("/again"):
            self.is_ahead.set()


def test_a_rank_that_is_ahead_waits_for_the_next_call() -> None:
    """Rank 0 takes it for one that gave up and came anew as long as it has not heard from all."""
    store, events = dist.HashStore(), (threading.Event(), threading.Event())

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        words = _Paced(store, rank, *events)
        for number in range(2):
            collective = meeting.StoreMeeting(words, "", rank, 2)
            with collective.until_left():
                got = collective.allgather(f"{rank} {number}".encode(), PATIENCE)
            assert got == [f"0 {number}".encode(), f"1 {number}".encode()]

    run_ranks(2, body)


def test_a_collective_may_meet_in_several_rounds(store: dist.Store) -> None:
    def body(group: ThreadGroup) -> None:
        rank, rendezvous = group.rank(), ProcessGroupRendezvous(_nameless(store, group.rank(), 3))
        for _ in range(3):
            with rendezvous.meet() as allgather:
                for number in range(5):
                    want = [bytes([each, number]) * (1 + 100 * each) for each in range(3)]
                    assert allgather(want[rank], PATIENCE) == want

    run_ranks(3, body)


def test_buffers_of_one_group_grow_apart() -> None:
    """What the ranks of one buffer do together is no part of another's, in whatever order threads do it."""
    store = dist.HashStore()

    def body(group: ThreadGroup) -> None:
        rank, ends = group.rank(), []
        for _ in range(2):
            ends.append(ProcessGroupRendezvous(_nameless(store, rank, 2)))
            ends[-1].allgather(b"made", PATIENCE)
        got: dict[int, list[bytes]] = {}

        def grow(number: int) -> None:
            got[number] = ends[number].allgather(f"{rank} of {number}".encode(), PATIENCE)

        threads = [threading.Thread(target=grow, args=(number,)) for number in ((0, 1) if rank else (1, 0))]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert got == {number: [f"{each} of {number}".encode() for each in range(2)] for number in range(2)}

    run_ranks(2, body)


# ---- Late ranks, and tries that are not counted


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_meet_after_unequal_numbers_of_tries(late: int, store: dist.Store) -> None:
    tried = threading.Event()

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        members = _nameless(store, rank, 2)
        if rank == late:
            assert tried.wait(PATIENCE)
        else:
            for _ in range(3):
                with pytest.raises(nccl_ep.TimeoutError, match=f"nothing was heard from rank {late}"):
                    nccl_ep.Buffer.for_shapes(members, **SIZES, timeout=0.05)
            tried.set()
        with nccl_ep.Buffer.for_shapes(members, **SIZES, timeout=PATIENCE) as buffer:
            assert _works(buffer)

    run_ranks(2, body)


@pytest.mark.parametrize("pause", [0.0, 0.3])  # in which the others go on with what is left
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_gave_up_does_not_count_as_there(gone: int, pause: float, store: dist.Store) -> None:
    """It left an answer (rank 1) or a call (rank 0), and another process takes its place."""
    tried = threading.Event()

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        if rank == gone:
            dead = ProcessGroupRendezvous(_nameless(store, rank, 3))
            with pytest.raises(nccl_ep.TimeoutError):
                dead.allgather(b"of the dead", 0.3)
            tried.set()
            time.sleep(pause)
        elif rank == 2:
            assert tried.wait(PATIENCE)
        want = [f"rank {each}".encode() for each in range(3)]
        assert ProcessGroupRendezvous(_nameless(store, rank, 3)).allgather(want[rank], PATIENCE) == want

    run_ranks(3, body)


def test_a_caller_that_is_lost_behind_its_roster_is_followed(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have joined its meeting, in which it has said nothing yet."""
    lost, usual = threading.Event(), meeting.KeyStore.set

    def lose_first(self: Any, key: str, value: bytes) -> None:
        if key.endswith("/0/0") and not lost.is_set():
            lost.set()
            raise _LostError
        usual(self, key, value)

    monkeypatch.setattr(meeting.KeyStore, "set", lose_first)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        want = [f"rank {each}".encode() for each in range(3)]
        members = ProcessGroupRendezvous(_nameless(store, rank, 3))
        if rank == 0:
            with pytest.raises(_LostError):
                members.allgather(b"of the dead", PATIENCE)
            time.sleep(0.3)
        assert members.allgather(want[rank], PATIENCE) == want

    run_ranks(3, body)


class _LostError(Exception):
    pass


@pytest.mark.parametrize("missing", range(3))
def test_the_missing_rank_is_named(missing: int, store: dist.Store) -> None:
    def body(group: ThreadGroup, deadline: float) -> str:
        group.allgather(b"", PATIENCE)
        if group.rank() == missing:
            return ""
        with pytest.raises(nccl_ep.TimeoutError) as caught:
            ProcessGroupRendezvous(_nameless(store, group.rank(), 3)).allgather(b"", deadline)
        return str(caught.value)

    def run(deadline: float) -> None:
        for rank, text in enumerate(run_ranks(3, lambda group: body(group, deadline))):
            if rank != missing:
                named = text.split("nothing was heard from rank ")[1].split(", ")
                assert str(missing) in named, text
                if len(named) > 1:
                    raise Late(text)

    with_more_time(run, (0.3, *DEADLINES[1:]))


@pytest.mark.parametrize("tries", [1, 3])
def test_threads_meet_after_unequal_numbers_of_tries(tries: int) -> None:
    tried = threading.Event()

    def body(group: ThreadGroup) -> None:
        if group.rank() == 0:
            for _ in range(tries):
                with pytest.raises(nccl_ep.TimeoutError, match="nothing was heard from rank 1"):
                    nccl_ep.Buffer.for_shapes(group, **SIZES, timeout=0.05)
            tried.set()
        else:
            assert tried.wait(PATIENCE)
        with nccl_ep.Buffer.for_shapes(group, **SIZES, timeout=PATIENCE) as buffer:
            assert _works(buffer)

    run_ranks(2, body)


def test_a_refused_buffer_does_not_count() -> None:
    store = dist.HashStore()

    def body(group: ThreadGroup) -> None:
        members = _nameless(store, group.rank(), 2)
        if group.rank() == 0:
            with pytest.raises(ValueError, match="on_overflow"):
                nccl_ep.Buffer.for_shapes(members, **SIZES, on_overflow="what")
        with nccl_ep.Buffer.for_shapes(members, **SIZES, timeout=PATIENCE) as buffer:
            assert _works(buffer)

    run_ranks(2, body)


class _Counted:
    """A user's rendezvous, whose rounds are numbered by calls: a rank that gives up is a round ahead of the others."""

    def __init__(self, world: dict[tuple[int, int], bytes], rank: int) -> None:
        self._world, self._rank, self._calls = world, rank, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        call, self._calls = self._calls, self._calls + 1
        self._world[call, self._rank] = mine
        deadline = time.monotonic() + timeout
        while not all((call, rank) in self._world for rank in range(2)):
            if time.monotonic() > deadline:
                raise nccl_ep.TimeoutError("nobody came")
            time.sleep(0.001)
        return [self._world[call, rank] for rank in range(2)]


def test_ranks_out_of_step_are_refused_at_once_and_then_meet() -> None:
    world: dict[tuple[int, int], bytes] = {}
    tried = threading.Event()

    def body(group: ThreadGroup) -> None:
        end = _Counted(world, group.rank())
        if group.rank() == 0:
            with pytest.raises(nccl_ep.TimeoutError, match="nobody came"):
                nccl_ep.Buffer.for_shapes(end, **SIZES, timeout=0.05)
            tried.set()
        else:
            assert tried.wait(PATIENCE)
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=r"step . of making a buffer.*try again"):
            nccl_ep.Buffer.for_shapes(end, **SIZES, timeout=PATIENCE)
        with nccl_ep.Buffer.for_shapes(end, **SIZES, timeout=PATIENCE) as buffer:
            assert _works(buffer)

    run_ranks(2, body)


# ---- What is no group


def test_a_lost_store_is_named() -> None:
    server = _tcp_store()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)  # type: ignore[attr-defined]
    group = _nameless(client, 1, 2)
    del server
    with pytest.raises(nccl_ep.SystemError, match="rank 1 cannot reach the store of its process group, through which"):
        nccl_ep.Buffer.for_shapes(group, **SIZES, timeout=PATIENCE)


def _use_meshes(rank: int) -> list[str]:
    texts = []
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for make in (
        lambda: nccl_ep.Buffer.for_shapes(mesh, **SIZES),
        lambda: nccl_ep.Buffer(mesh, device="cpu"),
        lambda: nccl_ep.deep_ep.Buffer(mesh, device="cpu").core,
    ):
        with make() as buffer:
            assert (buffer.rank, buffer.num_ranks, buffer.group) == (rank, 2, mesh.get_group())
            assert _works(buffer)
    named = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for group in (named, dist.init_device_mesh("cpu", (2, 1)), DeviceMesh("cpu", [1 - rank])):
        try:
            nccl_ep.Buffer.for_shapes(group, **SIZES)
        except ValueError as error:
            texts.append(str(error))
    with nccl_ep.Buffer.for_shapes(named["ep"], **SIZES) as buffer:
        assert _works(buffer)
    return texts


def test_a_device_mesh_of_two_dimensions_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for rank, texts in enumerate(run_processes(2, _use_meshes, tmp_path)):
        named, nameless, foreign = texts
        assert named == (
            'group is a DeviceMesh of 2 dimensions, dp, ep: pass the one whose ranks share experts, as mesh["ep"]'
        )
        assert "2 dimensions, without names" in nameless and "as mesh.get_group(1)" in nameless
        assert f"this process, rank {rank}, is no member of the group" in foreign
