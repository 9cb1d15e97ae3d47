"""What once crashed, hung or went wrong in silence, and what it does now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.bootstrap import SoloRendezvous
from nccl_ep.room import LlSizes, Room
from nccl_ep.testing import ThreadGroup
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes

SIZES: dict[str, Any] = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cpu", "mode": "auto"}
X, IDS = torch.ones(8, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 8)


@pytest.fixture
def buffer() -> Any:
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as made:
        yield made


def _flat(buffer: nccl_ep.Buffer, **options: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(X, IDS, buffer=buffer, num_experts=4, layout="flat", **options)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_buffer_is_destroyed_beside_an_operation(mode: str) -> None:
    groups = ThreadGroup.make(2)
    buffers: list[Any] = [None, None]
    errors: list[Exception] = []

    def make(rank: int) -> None:
        buffers[rank] = nccl_ep.Buffer.for_shapes(groups[rank], **SIZES, timeout=PATIENCE)

    def wait() -> None:
        try:
            _flat(buffers[0], mode=mode)
        except Exception as error:
            errors.append(error)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    buffers[0].destroy()
    with pytest.raises(nccl_ep.UsageError, match="destroyed"):
        _flat(buffers[0], mode=mode)
    waiting.join(30)
    assert not waiting.is_alive() and isinstance(errors[0], nccl_ep.EpError), errors
    buffers[1].destroy()


def _refused_then_made(rank: int) -> int:
    """A refusal on one rank, of either kind, and then a good buffer."""
    for bad in ({"hidden": 7}, {"on_overflow": "x"}, {"mode": "fast"}):
        options = {**SIZES, **(bad if rank == 1 else {}), "timeout": 1.0}
        with pytest.raises((ValueError, nccl_ep.TimeoutError)):
            nccl_ep.Buffer.for_shapes(dist.group.WORLD, **options)
        dist.barrier()
    with nccl_ep.Buffer.for_shapes(dist.group.WORLD, **SIZES) as buffer:
        return int(_flat(buffer).total)


def test_a_refused_buffer_does_not_part_the_ranks(tmp_path: Path) -> None:
    assert run_processes(2, _refused_then_made, tmp_path) == [16, 0]


def _outside_the_world(rank: int, store: str) -> int:
    """A process group that torch's world does not know of, as vLLM makes them."""
    group = dist.ProcessGroup(dist.PrefixStore("beside", dist.FileStore(store, 2)), rank, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", dist.FileStore(store, 2)), rank, 2)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    with nccl_ep.Buffer.for_shapes(group, **SIZES) as buffer:
        return int(_flat(buffer).total)


def test_a_group_that_torch_does_not_know_of(tmp_path: Path) -> None:
    assert run_processes(2, _outside_the_world, tmp_path, str(tmp_path / "beside")) == [16, 0]


class _Claims(SoloRendezvous):
    def __init__(self, rank: Any, size: Any) -> None:
        self._claims = rank, size

    def rank(self) -> Any:
        return self._claims[0]

    def size(self) -> Any:
        return self._claims[1]


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (0, -1), (2, 2), (-1, 2)])
def test_a_rank_that_its_world_does_not_have(rank: int, size: int) -> None:
    group = _Claims(rank, size)
    for make in (
        lambda: nccl_ep.Buffer(group, device="cpu"),
        lambda: deep_ep.Buffer(group, 1 << 20, device="cpu"),
        lambda: nccl_ep.Buffer.for_shapes(group, **SIZES),
    ):
        with pytest.raises(ValueError, match=rf"rank\(\) is {rank} and its size\(\) {size}, must be 0 <= rank"):
            make()


@pytest.mark.parametrize(("rank", "size", "text"), [(0, 2.0, r"size\(\) is 2.0"), (None, 2, r"rank\(\) is None")])
def test_a_rank_that_is_no_number(rank: Any, size: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"{text}, must be an integer"):
        nccl_ep.Buffer(_Claims(rank, size), device="cpu")


HUGE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda b: _flat(b, scales=torch.zeros(1, 1).expand(8, 2**30)), "scales of 4294967296 bytes a row"),
    (lambda b: b.empty([2**62 + 4], torch.float32), "beyond 64 bits"),
    (lambda b: b.empty([2**40, 2**40]), "beyond 64 bits"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **{**SIZES, "arena_bytes": 2**64 - 1}), "arena_bytes is 1844"),
    (lambda b: nccl_ep.Buffer(None, device="cpu", _room=Room(LlSizes(*[2**62] * 4))), "a window of more than"),
    (lambda b: nccl_ep.Buffer.for_shapes(None, **SIZES, scale_bytes=-256), "scale_bytes is -256"),
]


@pytest.mark.parametrize(("call", "text"), HUGE, ids=["scales", "empty", "product", "arena", "window", "negative"])
def test_sizes_beyond_reason_are_refused(buffer: nccl_ep.Buffer, call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises((ValueError, nccl_ep.SystemError), match=text):
        call(buffer)
    assert int(_flat(buffer).total) == 8


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_tensors_on_another_device_are_refused(buffer: nccl_ep.Buffer, mode: str) -> None:
    out = _flat(buffer, mode=mode)
    with pytest.raises(ValueError, match="out is on meta, the buffer on cpu"):
        nccl_ep.combine(out.x, out.handle, out=torch.empty(8, 64, device="meta"))
    if mode == "ht":
        out.handle.slots = out.handle.slots.to("meta")
        for call in (
            lambda: nccl_ep.combine(out.x, out.handle),
            lambda: nccl_ep.combine_weights(out.weights, out.handle),
            lambda: nccl_ep.dispatch_cached(X, out.handle),
        ):
            with pytest.raises(ValueError, match="handle is on meta"):
                call()


def test_too_many_tensors_are_refused_under_compile(buffer: nccl_ep.Buffer) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return _flat(buffer, mode="ht", extra=[x] * 4).x

    with pytest.raises(Exception, match="5 tensors, must be 1 to 4"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(X)


def test_a_receive_that_failed_says_so_again(buffer: nccl_ep.Buffer) -> None:
    pending = nccl_ep.dispatch_send(X, IDS, buffer=buffer, num_experts=4)
    buffer.destroy()
    with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
        pending.receive()
    with pytest.raises(
        nccl_ep.UsageError, match=r"this operation has failed with UsageError: the buffer .* was destroyed"
    ):
        pending.receive()


def test_deepeps_events_are_ours_and_its_biases_may_be_none() -> None:
    from nccl_ep import deep_ep
    from nccl_ep.utils import EventHandle, EventOverlap

    assert (EventHandle, EventOverlap) == (nccl_ep.EventHandle, nccl_ep.EventOverlap)
    with deep_ep.Buffer(None, num_nvl_bytes=1 << 20, device="cpu") as buffer:
        counts = buffer.get_dispatch_layout(IDS, 4)
        weights = torch.ones(8, 2)
        handle = buffer.dispatch(X, None, counts[0], counts[1], counts[3], counts[2], IDS, weights)[4]
        for bias, added in (((X, None), 1), ((None, X), 1), ((X, X), 2), (None, 0), ((None, None), 0)):
            assert buffer.combine(X, handle, bias=bias)[0].eq(1 + added).all()
