"""What a buffer refuses whatever is given: at the wrong time, made wrongly, copied, in a fork; rows that do not fit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import _C
from nccl_ep.config import combine_args
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import make_buffer
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes

EXPERTS, TOPK, HIDDEN, MOST = 4, 2, 64, 8  # plain_case of two ranks


def _alone(**options: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        max_tokens=MOST, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, device="cpu", **options
    )


SOLO = Expected(plain_case(1, num_experts=EXPERTS))
SOLO_ARGS = (SOLO.inputs[0].x, SOLO.inputs[0].topk_idx, SOLO.inputs[0].topk_weights)


def _dispatch(buffer: nccl_ep.Buffer, run: Any = nccl_ep.dispatch, **changes: Any) -> Any:
    return run(*SOLO_ARGS, buffer=buffer, num_experts=EXPERTS, **changes)


# ---- At the wrong time


def test_an_unreceived_send_is_named() -> None:
    with _alone() as buffer:
        out = _dispatch(buffer)
        pending = _dispatch(buffer, nccl_ep.dispatch_send)
        for run in (nccl_ep.dispatch, nccl_ep.dispatch_send):
            with pytest.raises(nccl_ep.UsageError, match="dispatch 2 was sent and has not been received"):
                _dispatch(buffer, run)
        SOLO.combine(buffer, out.handle)  # of the other kind: unaffected
        SOLO.check_dispatch(pending.receive(), 0)
        back = nccl_ep.combine_send(SOLO.rows[0], out.handle)
        for again in (nccl_ep.combine, nccl_ep.combine_send):
            with pytest.raises(nccl_ep.UsageError, match="combine 2 was sent and has not been received"):
                again(SOLO.rows[0], out.handle)
        with pytest.raises(nccl_ep.UsageError, match="combine 2 was sent and has not been received"):
            nccl_ep.combine_weights(SOLO.values[0], out.handle)
        SOLO.check_combine(back.receive(), 0)
        SOLO.run(buffer)


def test_a_second_receive_is_refused() -> None:
    with _alone() as buffer:
        pending = _dispatch(buffer, nccl_ep.dispatch_send)
        out = pending.receive()
        with pytest.raises(nccl_ep.UsageError, match="received already"):
            pending.receive()
        back = nccl_ep.combine_send(SOLO.rows[0], out.handle)
        back.receive()
        with pytest.raises(nccl_ep.UsageError, match="received already"):
            back.receive()
        SOLO.run(buffer)
        # The ops themselves have no such object to ask.
        args = (SOLO.rows[0].dtype, HIDDEN, *combine_args(out.handle, 1, torch.bfloat16))
        with pytest.raises(nccl_ep.UsageError, match="combine: nothing was sent that could be received"):
            torch.ops.nccl_ep.ll_combine_recv(buffer._seq, out.handle.tensor, [], *args, None, None, None, None)
        SOLO.run(buffer)


def _uses(buffer: nccl_ep.Buffer, handle: nccl_ep.Handle) -> list[Callable[[], Any]]:
    return [
        lambda: _dispatch(buffer),
        lambda: _dispatch(buffer, nccl_ep.dispatch_send),
        lambda: nccl_ep.combine(SOLO.rows[0], handle),
        lambda: nccl_ep.combine_send(SOLO.rows[0], handle),
        lambda: nccl_ep.combine_weights(SOLO.values[0], handle),
        lambda: buffer.check(),
        lambda: buffer.set_timeout(1.0),
        lambda: buffer.require_usable(),
    ]


def test_a_destroyed_buffer_is_refused() -> None:
    buffer, other = _alone(), _alone()
    out = _dispatch(buffer)
    pending = _dispatch(buffer, nccl_ep.dispatch_send)
    buffer.destroy()
    buffer.destroy()
    calls = [*_uses(buffer, out.handle), pending.receive]
    for call in calls:
        with pytest.raises(nccl_ep.UsageError, match="destroyed"):
            call()
    assert buffer.rank == 0 and buffer.domain_size == 1 and "buffer" in repr(buffer)
    assert isinstance(buffer.stats(), dict) and buffer.wire_bytes() == {}
    name = buffer.name
    del buffer, calls
    gc.collect()  # else an exception may keep it
    with pytest.raises(nccl_ep.UsageError, match=f"the handle's buffer {name} is gone"):
        nccl_ep.combine(SOLO.rows[0], out.handle)
    SOLO.run(other)
    other.destroy()


def test_a_handle_of_another_buffer_is_refused() -> None:
    """By the buffer that its maker claims it is of; one of the same shape cannot be told apart, and is not mixed up."""
    with _alone() as mine, _alone() as other:
        handle = _dispatch(other).handle
        assert handle.buffer == other.name != mine.name
        small = nccl_ep.dispatch(*(t[:3] for t in SOLO_ARGS if t is not None), buffer=mine, num_experts=EXPERTS).handle
        with pytest.raises(ValueError, match=r"handle has shape \[\d+\], must be \[\d+\]"):
            nccl_ep.combine(SOLO.rows[0], dataclasses.replace(handle, tensor=small.tensor))
        SOLO.combine(other, handle)
        assert (mine.stats()["combines"], other.stats()["combines"]) == (0, 1)


# ---- Buffers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_experts": 5, "group": ThreadGroup.make(2)[0]}, "5 experts do not divide over 2 ranks"),
        ({"topk": 33}, "topk is 33, must be 1 to 32"),
        ({"topk": 0}, "topk is 0"),
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"timeout": 0.0}, "timeout is 0 s, must be positive"),
        ({"timeout": float("nan")}, "timeout is nan s"),
        ({"timeout": float("inf")}, "timeout is inf s"),
        ({"domain_size": 3}, "1 ranks do not divide into domains of 3"),
        ({"domain_size": -1}, "1 ranks do not divide into domains of -1"),
        ({"on_overflow": "ignore"}, "on_overflow is 'ignore', must be"),
        ({"window": "cuda"}, 'window is \'cuda\', must be "nccl" or "cumem"'),
        ({"ll_network": "star"}, 'll_network is \'star\', must be "auto", "rail" or "mesh"'),
        ({"device": "meta"}, "device is meta, must be cpu or cuda"),
        ({"max_tokens": 1 << 31}, "max_tokens is 2147483648, beyond 32 bits"),
        ({"network_seed": -1}, "network_seed is -1, must be 0 to"),
        ({"arena_bytes": -1, "mode": "ht"}, "arena_bytes is -1, must be 0 to"),
        ({"device": 2**70}, f"device is {2**70}, must be"),
    ],
)
def test_bad_sizes_and_options_of_a_buffer_are_refused_with_the_values(options: dict[str, Any], text: str) -> None:
    shapes = {"max_tokens": MOST, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS, "device": "cpu"}
    with pytest.raises(ValueError, match=text):
        nccl_ep.Buffer.for_shapes(**{**shapes, **options})
    with _alone() as buffer:
        SOLO.run(buffer)


def test_a_window_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"a window of \d+ bytes is too small for 100000 ranks: at least \d+"):
        _C.sizes_for_window(100000, 1 << 20)
    with (
        nccl_ep.Buffer(None, device="cpu") as buffer,
        pytest.raises(ValueError, match=r"a bank needs \d+ bytes of") as caught,
    ):
        nccl_ep.dispatch(
            torch.zeros(4, 8192), torch.zeros(4, 1, dtype=torch.int64), buffer=buffer, num_experts=4, max_tokens=64
        )
    assert str(64 * 8192 * 4) in str(caught.value)
    with (
        nccl_ep.Buffer(None, device="cpu") as buffer,
        pytest.raises(ValueError, match="max_tokens is not given"),
    ):
        nccl_ep.dispatch(torch.zeros(4, 64), torch.zeros(4, 1, dtype=torch.int64), buffer=buffer, num_experts=4)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_window_made_for_bf16_names_what_makes_room_for_fp32(mode: str) -> None:
    x, ids = torch.ones(8, 512, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.int64)
    sizes = {"max_tokens": 8, "hidden": 512, "topk": 1, "num_experts": 1, "scale_bytes": 0, "device": "cpu"}
    text = "the window is too small .*; the buffer was made with .*, dtype=torch.bfloat16, wire_dtype=torch.bfloat16, "
    with nccl_ep.Buffer.for_shapes(None, **sizes, mode=mode) as buffer:
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=1, mode=mode, layout="flat")
        with pytest.raises(ValueError, match=text):
            nccl_ep.combine(out.x, out.handle, wire_dtype=torch.float32)
    with nccl_ep.Buffer.for_shapes(None, **sizes, mode=mode, wire_dtype=torch.float32) as buffer:
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=1, mode=mode, layout="flat")
        assert nccl_ep.combine(out.x, out.handle, wire_dtype=torch.float32).equal(x)


def test_what_is_not_a_group() -> None:
    with pytest.raises(
        TypeError, match="group is a int: must be a torch process group, a DeviceMesh of one dimension, None"
    ):
        nccl_ep.Buffer(3, device="cpu")
    with pytest.raises(TypeError, match="group is the class ProcessGroup, must be one of its objects"):
        nccl_ep.Buffer(torch.distributed.ProcessGroup, device="cpu")


class _OwnProcessGroup(dist.ProcessGroup):
    """As a library makes that replaces ranks: it has no store."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own = rank, size

    def rank(self) -> int:
        return self._own[0]

    def size(self) -> int:
        return self._own[1]


class _AsMpi:
    """A communicator of one rank, as mpi4py has them: ``rank`` and ``size`` are numbers."""

    rank, size = 0, 1

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, mine: bytes) -> list[bytes]:
        return [mine]


def test_groups_that_only_look_like_one_are_refused() -> None:
    """They have rank(), size() and allgather(), but of another kind."""
    store = dist.HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    with pytest.raises(TypeError, match=r"group is a ProcessGroupGloo, the backend of a process group, .*: pass"):
        nccl_ep.Buffer(backend, device="cpu")
    with pytest.raises(TypeError, match=r"group is a _OwnProcessGroup, a process group without a store .*: pass"):
        nccl_ep.Buffer(_OwnProcessGroup(0, 2), device="cpu")
    for served in (_OwnProcessGroup(0, 1), _AsMpi()):
        with nccl_ep.Buffer(served, device="cpu") as buffer:
            assert buffer.num_ranks == 1
    odd = SimpleNamespace(rank=lambda: 0, size=lambda: 1, allgather=lambda mine, timeout: [mine, b""])
    with pytest.raises(TypeError, match=r"group.allgather\(\) returned 2 of bytes, must return bytes of 1 ranks"):
        nccl_ep.Buffer(odd, device="cpu")
    with pytest.raises(TypeError, match="group is a SimpleNamespace: must be a torch process group"):
        nccl_ep.Buffer(SimpleNamespace(rank=0, size=1, allgather=None), device="cpu")


class _HandsOn:
    """Has all that another object has, as libraries make groups that can be replaced."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _HasStore(_OwnProcessGroup):
    """Keeps a store of its own, and a name."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def group_name(self) -> str:
        return "mine"


class _GathersTensors:
    """As torch's groups and backends do."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> None:
        raise TypeError("of tensors alone")


def test_objects_that_hand_calls_on_are_served_or_named() -> None:
    store = dist.HashStore()

    def body(group: Any) -> list[int]:
        given = _HasStore(store, group.rank(), 2)
        found = []
        for each in (given, _HandsOn(given)):
            with nccl_ep.Buffer.for_shapes(
                each, max_tokens=2, hidden=8, topk=1, num_experts=2, device="cpu", timeout=20.0
            ) as buffer:
                ids = torch.full((2, 1), 1 - group.rank())
                x = torch.full((2, 8), 1.0 + group.rank()).bfloat16()
                out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2, layout="packed", mode="ll")
                found.append(int(out.x[0, 0]))
        return found

    assert run_ranks(2, body) == [[2, 2], [1, 1]]
    with pytest.raises(TypeError, match="group is a _HandsOn, a process group without a store"):
        nccl_ep.Buffer(_HandsOn(_OwnProcessGroup(0, 2)), device="cpu")
    with pytest.raises(TypeError, match="group is a _HandsOn"):  # what it hands on differs between torch's versions
        nccl_ep.Buffer(_HandsOn(dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))), device="cpu")
    text = r"group is a _GathersTensors, whose allgather\(bytes, seconds\) must return .* raises TypeError: of tensors"
    with pytest.raises(TypeError, match=text):
        nccl_ep.Buffer(_GathersTensors(), device="cpu")


def _on_the_fake_backend() -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    said = []
    for size in (4, 1):
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            nccl_ep.Buffer(dist.group.WORLD, device="cpu").destroy()
            said.append("served")
        except ValueError as error:
            said.append(str(error))
        dist.destroy_process_group()
    return said


def test_the_fake_backend_is_refused_beyond_one_rank() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.apply(_on_the_fake_backend)
    assert said[0].startswith("group is of the fake backend: of its 4 ranks only this one exists"), said
    assert said[1] == "served"


def test_two_buffers_of_one_name_are_refused() -> None:
    with _alone(name="twin") as first:
        with pytest.raises(ValueError, match="a buffer named twin exists already"):
            _alone(name="twin")
        SOLO.run(first)
    with _alone(name="twin") as second:
        SOLO.run(second)


def test_cuda_without_a_gpu_is_refused_and_names_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match='device="cpu" always works'):
        nccl_ep.Buffer(device="cuda")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_buffer_is_not_copied(duplicate: Callable[[nccl_ep.Buffer], Any]) -> None:
    with _alone() as buffer:
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            duplicate(buffer)
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            duplicate([buffer]) if duplicate is not copy.copy else duplicate(buffer)
        SOLO.run(buffer)


def _use_in_fork(buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, pipe: Any) -> None:
    torch.set_num_threads(1)
    texts = []
    for call in _uses(buffer, handle):
        try:
            call()
            texts.append("served")
        except nccl_ep.UsageError as error:
            texts.append(str(error))
    buffer.destroy()
    with _alone() as own:  # and what the text advises works
        SOLO.run(own)
    buffer.runtime = None  # what the end of its last reference does; its network's thread is not here to be joined
    pipe.send(texts)


@pytest.mark.parametrize("with_network", [False, True])
def test_a_fork_of_a_buffer_refuses_every_call(with_network: bool) -> None:
    fork = multiprocessing.get_context("fork")

    def body(group: ThreadGroup) -> None:
        case = Expected(plain_case(group.size(), domain_size=1 if with_network else None))
        buffer = make_buffer(case.case, group)
        out = case.dispatch(buffer)
        if group.rank() == 0:
            receiver, sender = fork.Pipe(duplex=False)
            child = fork.Process(target=_use_in_fork, args=(buffer, out.handle, sender))
            child.start()
            assert receiver.poll(PATIENCE), "the fork hangs"
            texts = receiver.recv()
            child.join(PATIENCE)
            assert child.exitcode == 0
            assert len(texts) == 8
            for text in texts:
                assert "belongs to process" in text and "make a buffer here" in text
        case.combine(buffer, out.handle)
        case.run(buffer)
        buffer.destroy()

    run_ranks(2 if with_network else 1, body)


def _use_foreign_handle(rank: int) -> str:
    case = Expected(plain_case(2))
    with make_buffer(case.case, dist.group.WORLD) as buffer:
        out = case.dispatch(buffer)
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, pickle.dumps(out.handle))
        mine, theirs = pickle.loads(texts[rank]), pickle.loads(texts[1 - rank])
        case.combine(buffer, mine)  # a handle is plain data
        with pytest.raises(nccl_ep.UsageError, match="is gone, or lives in another process") as caught:
            nccl_ep.combine(case.rows[rank], theirs)
        case.run(buffer)
        return str(caught.value)


def test_a_handle_of_another_process_is_refused(tmp_path: Path) -> None:
    run_processes(2, _use_foreign_handle, tmp_path)


# ---- Rows that do not fit


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("layout", "demand"), [("expert_major", "8, 8, 0, 0"), ("packed", "8, 8, 0, 0"), ("flat", "8")]
)
def test_overflow_raises_where_asked_and_is_counted_otherwise(layout: str, demand: str, staged: bool) -> None:
    ids = torch.tensor([[0, 1]] * MOST)
    run: Any = nccl_ep.dispatch_send if staged else nccl_ep.dispatch
    dropped = {"expert_major": 10, "packed": 13, "flat": 5}[layout]

    def overflow(buffer: nccl_ep.Buffer, capacity: int | None) -> nccl_ep.DispatchOutput:
        out = run(SOLO_ARGS[0], ids, buffer=buffer, num_experts=EXPERTS, layout=layout, capacity=capacity)
        return out.receive() if staged else out

    with _alone(on_overflow="raise") as strict, _alone() as lenient:
        text = f"{dropped} rows did not fit into capacity 3 of layout {layout}: demand was \\[{demand}\\]"
        with pytest.raises(nccl_ep.OverflowError, match=text):
            overflow(strict, 3)
        assert overflow(strict, None).overflow.item() == 0
        SOLO.run(strict)
        assert overflow(lenient, 3).overflow.item() == dropped == lenient.stats()["dropped_rows"]
        SOLO.run(lenient)
