"""Split calls of which the receive was lost, or is not wanted any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks

IDS = torch.tensor([[0, 1], [3, 2]])
SIZES: dict[str, Any] = {"max_tokens": 2, "hidden": 8, "topk": 2, "num_experts": 4, "dtype": torch.float32}


def _on_ranks(body: Callable[[nccl_ep.Buffer, torch.Tensor], None]) -> None:
    def run(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(group, **SIZES, device="cpu", timeout=60.0) as buffer:
            body(buffer, torch.full((2, 8), group.rank() + 1.0))

    run_ranks(2, run)


def _send(buffer: nccl_ep.Buffer, x: torch.Tensor) -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
    return nccl_ep.dispatch_send(x, IDS, buffer=buffer, num_experts=4)


def _check(buffer: nccl_ep.Buffer, x: torch.Tensor) -> nccl_ep.DispatchOutput:
    """A whole dispatch and combine give what they should."""
    out = nccl_ep.dispatch(x, IDS, buffer=buffer, num_experts=4)
    assert out.counts.tolist() == [2, 2] and sorted(out.x[0, :2, 0].tolist()) == [x[0, 0] // x[0, 0], 2]
    assert nccl_ep.combine(out.x, out.handle).equal(2 * x)
    return out


def _raise_between(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
    pending = _send(buffer, x)
    assert pending is not None
    raise ZeroDivisionError("of the caller's work")


def test_a_lost_dispatch_does_not_wedge_the_buffer() -> None:
    def body(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                _raise_between(buffer, 7 * x)
            gc.collect()
            _check(buffer, x)
        assert buffer.stats()["dispatches"] == 6

    _on_ranks(body)


def test_a_lost_combine_does_not_wedge_the_buffer() -> None:
    def body(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
        out = _check(buffer, x)
        nccl_ep.combine_send(out.x, out.handle)
        assert nccl_ep.combine_weights(out.weights, out.handle).equal(torch.ones(2, 2))
        nccl_ep.combine_send(7 * out.x, out.handle)
        pending = nccl_ep.combine_send(out.x, out.handle)
        assert pending.receive().equal(2 * x)

    _on_ranks(body)


def test_one_rank_may_lose_what_another_receives() -> None:
    def body(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
        pending = _send(buffer, x)
        if buffer.rank == 0:
            del pending
        else:
            assert pending.receive().counts.tolist() == [2, 2]
        _check(buffer, x)

    _on_ranks(body)


def test_what_is_not_wanted_is_dropped() -> None:
    def body(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
        pending = _send(buffer, 7 * x)
        with pytest.raises(nccl_ep.UsageError, match="has not been received"):  # its Pending lives
            _send(buffer, x)
        pending.drop()
        pending.drop()
        with pytest.raises(nccl_ep.UsageError, match="this operation was dropped"):
            pending.receive()
        out = _check(buffer, x)
        sent, home = _send(buffer, 7 * x), nccl_ep.combine_send(out.x, out.handle)
        buffer.drop_pending()
        buffer.drop_pending()
        for each in (sent, home):
            for _ in range(2):
                with pytest.raises(nccl_ep.UsageError, match="this operation was dropped"):
                    each.receive()
        _check(buffer, x)

    _on_ranks(body)


def test_a_receive_that_failed_may_be_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, for one, comes before the send is received."""

    def body(buffer: nccl_ep.Buffer, x: torch.Tensor) -> None:
        pending = _send(buffer, 7 * x)
        open_send = buffer._open_sends["dispatch"]
        op, open_send._op = open_send._op, _no_memory
        with pytest.raises(torch.OutOfMemoryError):
            pending.receive()
        open_send._op = op
        _check(buffer, x)

    _on_ranks(body)


def _no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def test_a_lost_send_waits_no_longer_than_the_deadline() -> None:
    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(group, **SIZES, device="cpu", timeout=60.0) as buffer:
            if group.rank() == 1:
                return
            _send(buffer, torch.ones(2, 8))
            buffer.set_timeout(0.2)
            with pytest.raises(nccl_ep.TimeoutError, match="nothing of this call was heard from rank 1"):
                buffer.drop_pending()

    run_ranks(2, body)


def test_an_open_send_does_not_keep_the_buffer() -> None:
    import weakref

    with nccl_ep.Buffer.for_shapes(None, **SIZES, device="cpu") as buffer:
        pending = _send(buffer, torch.ones(2, 8))
        gone = weakref.ref(buffer)
    del buffer, pending
    assert gone() is None
