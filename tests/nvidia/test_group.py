"""Groups of ``nccl.ep``: their configs, communicators, masks, and what is a tensor."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor, library, nccl_comm
from nccl_ep.nvidia.communicator import Communicator, UniqueId, get_nccl_comm_from_group, get_unique_id
from nccl_ep.nvidia.datatypes import NcclDataType
from nccl_ep.nvidia.streams import stream_pointer
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.nvidia.tokens import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    MOST,
    RANKS,
    alone,
    made_group,
    tokens_of,
)
from tests.support.patience import PATIENCE
from tests.support.ranks import DEVICE, same_for_all

HT = ep.Algorithm.HIGH_THROUGHPUT


def test_values_are_those_of_the_header() -> None:
    values = {
        ep.Algorithm: "LOW_LATENCY HIGH_THROUGHPUT", ep.Layout: "UNSET EXPERT_MAJOR RANK_MAJOR FLAT",
        ep.PassDir: "FWD BWD", ep.OverflowPolicy: "AUTO TRAP DROP", ep.ZeroCopyMode: "AUTO OFF ON",
        ep.ExpertIdKind: "AUTO LOCAL GLOBAL", ep.DispatchQuantizationRecipe: "NONE FWD DS_FP8E3M4",
        ep.CombineQuantizationRecipe: "NONE NVFP4",
    }  # fmt: skip
    for enum, names in values.items():
        assert {each.name: each.value for each in enum} == {name: at for at, name in enumerate(names.split())}
    assert str(ep.get_lib_version()) == "0.2.0"


def test_the_c_library_is_found_where_it_lies_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "nvidia/library.py"))
    assert ep.get_lib_path() is None
    (tmp_path / "libnccl_ep.so.0").touch()
    assert ep.get_lib_path() == tmp_path / "libnccl_ep.so.0"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts is 0"),
    ({"max_dispatch_tokens_per_rank": 0}, "max_dispatch_tokens_per_rank is 0"),
    ({"max_token_bytes": 0}, "max_token_bytes is 0"),
    ({"timeout_ns": -1}, "timeout_ns is -1"),
    ({"algorithm": HT, "max_token_bytes": 40}, "max_token_bytes is 40, must be a multiple of 16"),
    ({"algorithm": HT, "max_recv_tokens_per_rank": 3}, "max_recv_tokens_per_rank is 3, must be at least"),
    ({"algorithm": HT, "overflow_policy": ep.OverflowPolicy.DROP}, "overflow_policy is DROP with"),
    ({"alloc": ep.AllocConfig(alloc_fn=1)}, "has one of alloc_fn and free_fn"),
    ({"algorithm": 2}, "algorithm is 2, must be one of Algorithm: LOW_LATENCY, HIGH_THROUGHPUT"),
    ({"algorithm": "ll"}, "algorithm is 'll', must be one of Algorithm"),
    ({"zero_copy": torch.ones(2)}, "zero_copy is a Tensor, must be one of ZeroCopyMode"),
    ({"overflow_policy": None}, "overflow_policy is None, must be one of OverflowPolicy"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=[text for _, text in WRONG])
def test_configs_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text), alone(**options):
        pass


def test_what_has_no_meaning_here_changes_nothing() -> None:
    @ep.AllocFn
    def never(*_: object) -> int:
        raise AssertionError("no allocator is called")

    address = ctypes.cast(never, ctypes.c_void_p).value or 0
    options = {
        "rdma_buffer_size": 1, "num_qp_per_rank": 24, "num_channels": 10, "num_topk": 3,
        "alloc": ep.AllocConfig(alloc_fn=address, free_fn=address), "max_recv_tokens_per_rank": 1,
    }  # fmt: skip
    with alone(**options) as owner:
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(tokens_of(0).ids), stream=0)
        assert repr(handle) == "<Handle EXPERT_MAJOR>" and owner.ptr and handle.ptr
    with pytest.raises(nccl_ep.UsageError, match="the group was destroyed"):
        _ = owner.ptr


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone(timeout_ns=2_500_000_000) as owner:
        assert owner.buffer._timeout == 2.5
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "1500")
    with alone(timeout_ns=2_500_000_000) as owner:
        assert owner.buffer._timeout == 1.5
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "soon")
    with pytest.raises(nccl_ep.UsageError, match="NCCL_EP_TIMEOUT_MS is 'soon'"), alone():
        pass


def test_ranks_meet_by_a_unique_id() -> None:
    """As of MPI programs: one makes the id, the others get its 128 bytes."""
    data = same_for_all(bytes(get_unique_id()))
    assert len(data) == 128

    def body(group: Any) -> int:
        comm = Communicator.init(RANKS, group.rank(), UniqueId.from_bytes(bytearray(data)))
        assert (comm.rank, comm.nranks, comm.is_valid) == (group.rank(), RANKS, True)
        again = Communicator(ptr=comm.ptr)  # as of those who have the number alone
        config = ep.GroupConfig(
            num_experts=EXPERTS, max_dispatch_tokens_per_rank=MOST, max_token_bytes=2 * HIDDEN
        )  # fmt: skip
        owner = ep.Group.create(again, config, device=DEVICE)
        owner.destroy()
        comm.finalize()
        comm.destroy()
        with pytest.raises(nccl_ep.UsageError, match="the communicator was destroyed"):
            ep.Group.create(comm, config, device=DEVICE)
        return owner.buffer.num_ranks

    assert run_ranks(RANKS, body) == [RANKS] * RANKS


def test_what_is_no_communicator() -> None:
    with pytest.raises(TypeError, match="comm is a int, must be a Communicator"):
        ep.Group.create(7, ep.GroupConfig(num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=16))
    with pytest.raises(ValueError, match="must be what nccl_ep's get_unique_id"):
        Communicator.init(2, 0, get_unique_id(empty=True))
    with pytest.raises(ValueError, match="rank is 2, must be 0 to 1"):
        Communicator.init(2, 2, get_unique_id(empty=True))
    with pytest.raises(nccl_ep.UsageError, match=r"torch\.distributed is not initialized"):
        get_nccl_comm_from_group()
    comm = get_nccl_comm_from_group(ThreadGroup.make(1)[0])
    with pytest.raises(AttributeError, match="has no allreduce: install nccl4py"):
        comm.allreduce()


class FakeNccl:
    """A communicator of two ranks, whose other rank sends what this one does, reversed."""

    result = 0

    def ncclCommUserRank(self, _comm: Any, number: Any) -> int:
        number._obj.value = 1
        return self.result

    def ncclCommCount(self, _comm: Any, number: Any) -> int:
        number._obj.value = 2
        return 0


def test_ranks_of_a_communicator_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of unequal lengths travel in messages of one length."""
    monkeypatch.setattr(nccl_comm, "_nccl", FakeNccl)
    met = nccl_comm.NcclCommRendezvous(0x1234)
    assert (met.rank(), met.size()) == (1, 2)
    sent = []

    def gather(mine: bytes, *_: float) -> list[bytes]:
        sent.append(mine)
        other = (2).to_bytes(8, "little") if len(sent) == 1 else b"ab".ljust(len(mine), b"\0")
        return [other, mine]

    monkeypatch.setattr(met, "_gather", gather)
    assert met.allgather(b"hello", 1.0) == [b"ab", b"hello"]
    monkeypatch.setattr(FakeNccl, "result", 4)
    with pytest.raises(nccl_ep.SystemError, match="ncclCommUserRank of the given communicator returned 4"):
        nccl_comm.NcclCommRendezvous(0x1234)


def test_tensors() -> None:
    """Of torch, by DLPack, and at addresses; those have no device until they are used."""
    cpu, memory = torch.device("cpu"), torch.arange(12, dtype=torch.float32).reshape(3, 4)
    of_torch = Tensor(memory)
    assert (of_torch.ndim, of_torch.sizes, of_torch.datatype) == (2, (3, 4), NcclDataType.FLOAT32)
    assert of_torch.data == memory.data_ptr() and of_torch.buffer is memory
    assert Tensor(memory.numpy()).on(cpu).data_ptr() == memory.data_ptr()
    for code, dtype in ((9, torch.bfloat16), (10, torch.float8_e4m3fn), (NcclDataType.INT32, torch.int32)):
        at = Tensor(memory.data_ptr(), dtype=code, shape=(2, 3))
        assert at.buffer is None and at.on(cpu).equal(memory.view(dtype).flatten()[:6].view(2, 3))
    Tensor(memory.data_ptr(), dtype=7, shape=[4]).on(cpu).fill_(5)
    assert memory[0].tolist() == [5.0] * 4
    assert Tensor(0, dtype=7, shape=(0, 4)).on(cpu).shape == (0, 4)
    window = type("Window", (), {"handle": 7})()
    assert Tensor(memory, window=window, window_offset=0).sizes == (3, 4)
    for error, arguments, text in (
        (ValueError, {"buffer": 16}, "dtype and shape belong to an address"),
        (ValueError, {"buffer": memory, "dtype": 7}, "dtype and shape belong to an address"),
        (ValueError, {"buffer": 16, "dtype": 99, "shape": (1,)}, "dtype is 99, must be one of NcclDataType"),
        (ValueError, {"buffer": memory, "window": window}, "window_offset is None, must be given with a window"),
        (ValueError, {"buffer": memory, "window_offset": 0}, "window_offset is 0, must be given with a window"),
        (ValueError, {"buffer": torch.tensor(1.0)}, "at least one dimension"),
        (ValueError, {"buffer": torch.zeros(1, dtype=torch.complex64)}, "which NCCL has no data type for"),
        (TypeError, {"buffer": "x"}, "buffer is a str, must be a torch tensor"),
    ):
        with pytest.raises(error, match=text):
            Tensor(**arguments)
    with pytest.raises(ValueError, match="a Tensor is on meta, its group on cpu"):
        Tensor(torch.zeros(1, device="meta")).on(cpu)


def test_streams() -> None:
    of_core = type("Stream", (), {"__cuda_stream__": lambda self: (0, 5)})()
    of_torch = type("Stream", (), {"cuda_stream": 6})()
    assert [stream_pointer(each) for each in (None, 3, of_core, of_torch)] == [0, 3, 5, 6]
    for wrong in (True, "0", 1.0):
        with pytest.raises(TypeError, match="stream is a"):
            stream_pointer(wrong)


# ---- Masks


def masks_of(owner: ep.Group) -> list[int]:
    status = torch.full((RANKS,), 7, dtype=torch.int32)
    owner.mask_query(status.data_ptr(), stream=0)
    return status.tolist()


def exchange(owner: ep.Group, rank: int) -> int:
    """Rows that came, with every token for expert 0 of rank 0."""
    mine = tokens_of(rank)
    handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(torch.zeros_like(mine.ids[:, :1])), stream=0)
    rows, counts = torch.zeros(LOCAL, RANKS * MOST, HIDDEN, dtype=torch.bfloat16), torch.zeros(LOCAL, dtype=torch.int32)
    handle.dispatch(
        ep.DispatchInputs(tokens=Tensor(mine.x)), ep.DispatchOutputs(tokens=Tensor(rows)),
        layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)), stream=0,
    )  # fmt: skip
    return int(counts[0])


def test_masks_are_1_for_active_ranks() -> None:
    def body(group: Any) -> list[Any]:
        rank = group.rank()
        owner = made_group(group, enable_mask=True, timeout_ns=int(PATIENCE * 1e9))
        seen: list[Any] = [masks_of(owner)]
        mask = torch.ones(RANKS, dtype=torch.int32, device="cpu")  # on the host
        mask[1 - rank] = 0
        group.allgather(b"asked", PATIENCE)
        owner.mask_update(mask.data_ptr(), stream=0)
        seen += [masks_of(owner), exchange(owner, rank), owner.get_async_error()]
        owner.mask_update(torch.ones(RANKS, dtype=torch.int32, device="cpu"), stream=0)
        seen += [masks_of(owner), owner.get_async_error(), exchange(owner, rank), masks_of(owner)]
        seen += [owner.get_async_error()]  # it has not come back
        group.allgather(b"left", PATIENCE)
        owner.mask_clean(stream=0)
        seen += [masks_of(owner), exchange(owner, rank)]
        owner.destroy()
        return seen

    assert run_ranks(RANKS, body) == [
        [[1, 1], [1, 0], 5, False, [1, 1], False, 5, [1, 0], True, [1, 1], 9],
        [[1, 1], [0, 1], 0, False, [1, 1], False, 0, [0, 1], True, [1, 1], 0],
    ]


def test_a_rank_that_is_late_is_an_error_until_it_is_cleared() -> None:
    def body(group: Any) -> list[Any]:
        owner = made_group(group, enable_mask=True, timeout_ns=int(PATIENCE * 1e9))
        if group.rank() == 1:  # does not come
            return []
        owner.buffer.set_timeout(0.3)
        seen = [exchange(owner, 0), masks_of(owner), owner.get_async_error(), owner.get_async_error()]
        owner.error_clear()
        return [*seen, owner.get_async_error(), masks_of(owner)]

    assert run_ranks(RANKS, body)[0] == [5, [1, 0], True, True, False, [1, 0]]


def test_masks_that_are_refused() -> None:
    for options in ({}, {"algorithm": HT, "enable_mask": True}):
        with alone(**options) as owner, pytest.raises(nccl_ep.UsageError, match="the group has no masks"):
            owner.get_async_error()
    with alone(enable_mask=True) as owner:
        with pytest.raises(ValueError, match=r"mask\[0\] is 0: a rank cannot mask itself"):
            owner.mask_update(torch.zeros(1, dtype=torch.int32, device="cpu"))
        with pytest.raises(ValueError, match=r"mask\[0\] is 2, must be 0 or 1"):
            owner.mask_update(torch.full((1,), 2, dtype=torch.int32, device="cpu"))
        with pytest.raises(ValueError, match=r"the mask is torch\.int64 \[1\], must be contiguous int32 \[1\]"):
            owner.mask_query(torch.zeros(1, dtype=torch.int64))
