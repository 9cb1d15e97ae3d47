"""Backward passes that come to an operation raise: gradients are never left out without a word."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep

IDS = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 0]])
SIZES: dict[str, Any] = {"max_tokens": 4, "num_experts": 4}
WAYS: dict[str, Callable[[nccl_ep.Buffer, torch.Tensor], torch.Tensor]] = {}


def way(name: str) -> Callable[[Callable[..., torch.Tensor]], None]:
    return lambda run: WAYS.update({name: run})


def _rows(buffer: nccl_ep.Buffer, **how: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(torch.ones(4, 16), IDS, buffer=buffer, zero_padding=True, **SIZES, **how)


for mode, layout in (("ll", "expert_major"), ("ht", "flat")):
    how: dict[str, Any] = {"mode": mode, "layout": layout, "zero_padding": True, **SIZES}

    @way(f"{mode}: dispatch")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        return nccl_ep.dispatch(x, IDS, buffer=buffer, **how).x

    @way(f"{mode}: dispatch, extra")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        given = [torch.ones(4, 4), x]
        return nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, extra=given, **how).extra[1]

    @way(f"{mode}: dispatch_send, async_finish")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        return nccl_ep.dispatch_send(x, IDS, buffer=buffer, async_finish=True, **how).receive().x

    @way(f"{mode}: combine")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine(out.x * x.mean(), out.handle)

    @way(f"{mode}: combine, out")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine(out.x * x.mean(), out.handle, out=torch.empty(4, 16))

    @way(f"{mode}: combine_weights")
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine_weights(out.weights * x.mean(), out.handle)


@way("ll: dispatch_send")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_send(x, IDS, buffer=buffer, **SIZES).receive().x


@way("ll: dispatch_send, weights")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_send(x.detach(), IDS, x[:, :2].contiguous(), buffer=buffer, **SIZES).receive().weights


@way("ll: combine_send")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer)
    return nccl_ep.combine_send(out.x * x.mean(), out.handle).receive()


@way("ll: combine, weights with out")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer)
    return nccl_ep.combine(out.x, out.handle, weights=x[:, :2].contiguous(), topk_idx=IDS, out=torch.empty(4, 16))


@way("ht: dispatch, out")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer, mode="ht", layout="flat")
    return nccl_ep.dispatch(x, IDS, buffer=buffer, mode="ht", layout="flat", zero_padding=True, out=out, **SIZES).x


@way("ht: dispatch_cached")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_cached(x, _rows(buffer, mode="ht", layout="flat").handle, zero_padding=True).x


@way("ht: dispatch_cached, out")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    handle = _rows(buffer, mode="ht", layout="flat").handle
    out = nccl_ep.dispatch_cached(x.detach(), handle, zero_padding=True)
    return nccl_ep.dispatch_cached(x, handle, zero_padding=True, out=out).x


@way("deepep: dispatch")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return deep_ep.Buffer.of(buffer).low_latency_dispatch(x, IDS, 4, 4, use_fp8=False)[0]


@way("deepep: dispatch, hook")
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    received, *_, hook = deep_ep.Buffer.of(buffer).low_latency_dispatch(
        x, IDS, 4, 4, use_fp8=False, return_recv_hook=True
    )
    hook()
    return received


for name, given in (("", None), (", out", "out"), (", zero_copy", "scratch")):
    for hooked in (False, True):

        @way(f"deepep: combine{name}{', hook' if hooked else ''}")
        def _(buffer: nccl_ep.Buffer, x: torch.Tensor, given: Any = given, hooked: bool = hooked) -> torch.Tensor:
            rows, _, handle, *_ = deep_ep.Buffer.of(buffer).low_latency_dispatch(x.detach(), IDS, 4, 4, use_fp8=False)
            out = torch.empty(4, 16) if given == "out" else None
            if given == "scratch":
                rows = deep_ep.Buffer.of(buffer).get_next_low_latency_combine_buffer(handle).copy_(rows)
                rows.mul_(x.mean())
            else:
                rows = rows * x.mean()
            combined, _, hook = deep_ep.Buffer.of(buffer).low_latency_combine(
                rows, IDS, torch.ones(4, 2), handle, zero_copy=given == "scratch", out=out, return_recv_hook=hooked
            )
            if hooked:
                hook()
            return combined


@pytest.mark.parametrize("name", WAYS)
def test_a_backward_pass_raises(name: str) -> None:
    with nccl_ep.Buffer.for_shapes(
        None,
        max_tokens=4,
        hidden=16,
        topk=2,
        num_experts=4,
        dtype=torch.float32,
        device="cpu",
        mode="auto",
        scale_bytes=128,
    ) as buffer:
        x, beside = torch.ones(4, 16, requires_grad=True), torch.ones(1, requires_grad=True)
        result = WAYS[name](buffer, x)
        with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
            (torch.nan_to_num(result) * beside).sum().backward()
        with torch.no_grad():
            assert not WAYS[name](buffer, x).requires_grad


def test_an_output_that_is_written_again_keeps_nothing_of_earlier_calls() -> None:
    out = torch.empty(4, 16)
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=4, hidden=16, topk=2, num_experts=4, dtype=torch.float32, device="cpu"
    ) as buffer:
        received = _rows(buffer)
        for _ in range(3):
            factor = torch.ones(1, requires_grad=True)
            is_kept = weakref.ref(factor)
            assert nccl_ep.combine(received.x * factor, received.handle, out=out) is out
            del factor
            gc.collect()
            assert is_kept() is None
        assert out.grad_fn is not None
        assert [str(node) for node, _ in out.grad_fn.next_functions if "Refusing" in str(node)] == []
