"""Backward passes that come to an operation give the right gradients or raise: none is left out without a word."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep

IDS = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 0]])
SIZES: dict[str, Any] = {"max_tokens": 4, "num_experts": 4}
Torch = Callable[[torch.Tensor], torch.Tensor]
WAYS: dict[str, tuple[Callable[[nccl_ep.Buffer, torch.Tensor], torch.Tensor], Torch | None]] = {}


def way(name: str, in_torch: Torch | None) -> Callable[[Callable[..., torch.Tensor]], None]:
    """in_torch: the same by torch's own operations, of which the gradient is right; None: there is none."""
    return lambda run: WAYS.update({name: (run, in_torch)})


def _places() -> list[tuple[int, int, int, int]]:
    """Token, choice, expert, and row of the expert."""
    rows = [0] * 4
    found = []
    for token, chosen in enumerate(IDS.tolist()):
        for k, expert in enumerate(chosen):
            found.append((token, k, expert, rows[expert]))
            rows[expert] += 1
    return found


PLACES = _places()


def _by_expert(values: torch.Tensor) -> torch.Tensor:
    """[T, K, ..] to rows [L, C, ..]."""
    out = torch.zeros(4, 4, *values.shape[2:])
    for token, k, expert, row in PLACES:
        out[expert, row] = values[token, k]
    return out


def _home(rows: torch.Tensor) -> torch.Tensor:
    """The other way, rows that do not exist left out."""
    token, k, expert, row = torch.tensor(PLACES).T
    return torch.zeros(4, 2, *rows.shape[2:]).index_put((token, k), rows[expert, row])


def _dispatched(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "flat" else _by_expert(x.unsqueeze(1).expand(4, 2, 16))


def _combined(rows: torch.Tensor, layout: str) -> torch.Tensor:
    return rows if layout == "flat" else _home(rows).sum(1)


def _of_mean(layout: str) -> Torch:
    """Rows of a dispatch, times the mean of x, combined."""
    return lambda x: _combined(_dispatched(x.detach(), layout) * x.mean(), layout)


def _rows(buffer: nccl_ep.Buffer, **how: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(torch.ones(4, 16), IDS, buffer=buffer, zero_padding=True, **SIZES, **how)


for mode, layout in (("ll", "expert_major"), ("ht", "flat")):
    how: dict[str, Any] = {"mode": mode, "layout": layout, "zero_padding": True, **SIZES}
    dispatched: Torch = partial(_dispatched, layout=layout)

    @way(f"{mode}: dispatch", dispatched)
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        return nccl_ep.dispatch(x, IDS, buffer=buffer, **how).x

    @way(f"{mode}: dispatch, extra", dispatched)
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        given = [torch.ones(4, 4), x]
        return nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, extra=given, **how).extra[1]

    @way(f"{mode}: dispatch_send, async_finish", dispatched)
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        return nccl_ep.dispatch_send(x, IDS, buffer=buffer, async_finish=True, **how).receive().x

    @way(f"{mode}: combine", _of_mean(layout))
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine(out.x * x.mean(), out.handle)

    @way(f"{mode}: combine, out", _of_mean(layout))
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine(out.x * x.mean(), out.handle, out=torch.empty(4, 16))

    @way(f"{mode}: combine_weights", lambda x: x.mean().expand(4, 2))
    def _(buffer: nccl_ep.Buffer, x: torch.Tensor, how: Any = how) -> torch.Tensor:
        out = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **how)
        return nccl_ep.combine_weights(out.weights * x.mean(), out.handle)


@way("ll: dispatch_send", lambda x: _dispatched(x, "expert_major"))
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_send(x, IDS, buffer=buffer, **SIZES).receive().x


@way("ll: dispatch_send, weights", lambda x: _by_expert(x[:, :2]))
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_send(x.detach(), IDS, x[:, :2].contiguous(), buffer=buffer, **SIZES).receive().weights


@way("ll: combine_send", lambda x: 2 * x.mean().expand(4, 16))
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer)
    return nccl_ep.combine_send(out.x * x.mean(), out.handle).receive()


@way("ll: combine, weights with out", lambda x: x[:, :2].sum(1, keepdim=True).expand(4, 16))
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer)
    return nccl_ep.combine(out.x, out.handle, weights=x[:, :2].contiguous(), topk_idx=IDS, out=torch.empty(4, 16))


@way("ht: dispatch, out", lambda x: x)
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    out = _rows(buffer, mode="ht", layout="flat")
    return nccl_ep.dispatch(x, IDS, buffer=buffer, mode="ht", layout="flat", zero_padding=True, out=out, **SIZES).x


@way("ht: dispatch_cached", lambda x: x)
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return nccl_ep.dispatch_cached(x, _rows(buffer, mode="ht", layout="flat").handle, zero_padding=True).x


@way("ht: dispatch_cached, out", lambda x: x)
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    handle = _rows(buffer, mode="ht", layout="flat").handle
    out = nccl_ep.dispatch_cached(x.detach(), handle, zero_padding=True)
    return nccl_ep.dispatch_cached(x, handle, zero_padding=True, out=out).x


@way("deepep: dispatch", partial(_dispatched, layout="expert_major"))
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    return deep_ep.Buffer.of(buffer).low_latency_dispatch(x, IDS, 4, 4, use_fp8=False)[0]


@way("deepep: dispatch, hook", None)
def _(buffer: nccl_ep.Buffer, x: torch.Tensor) -> torch.Tensor:
    received, *_, hook = deep_ep.Buffer.of(buffer).low_latency_dispatch(
        x, IDS, 4, 4, use_fp8=False, return_recv_hook=True
    )
    hook()
    return received


for name, given in (("", None), (", out", "out"), (", zero_copy", "scratch")):
    for hooked in (False, True):
        has_gradient = not hooked and given != "scratch"

        @way(
            f"deepep: combine{name}{', hook' if hooked else ''}",
            _of_mean("expert_major") if has_gradient else None,
        )
        def _(buffer: nccl_ep.Buffer, x: torch.Tensor, given: Any = given, hooked: bool = hooked) -> torch.Tensor:
            rows, _, handle, *_ = deep_ep.Buffer.of(buffer).low_latency_dispatch(x.detach(), IDS, 4, 4, use_fp8=False)
            rows = rows.nan_to_num(0, 0, 0)  # rows that do not exist may be anything, and 0 * NaN is NaN
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
def test_a_backward_pass_is_right_or_raises(name: str) -> None:
    run, in_torch = WAYS[name]
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
        x, beside = torch.rand(4, 16, requires_grad=True), torch.ones(1, requires_grad=True)
        result = torch.nan_to_num(run(buffer, x))
        factors = torch.rand(result.shape)
        if in_torch is None:
            with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
                (result * factors * beside).sum().backward()
        else:
            same = x.detach().clone().requires_grad_()
            want = in_torch(same)
            exists = in_torch(torch.ones(4, 16)) != 0  # other rows may be anything
            torch.testing.assert_close(torch.where(exists, result, 0), want)
            (result * factors * beside).sum().backward()
            (want * factors).sum().backward()
            assert x.grad is not None and same.grad is not None and same.grad.ne(0).any()
            torch.testing.assert_close(x.grad, same.grad)
        with torch.no_grad():
            assert not run(buffer, x).requires_grad


def test_an_output_that_is_written_again_keeps_nothing_of_earlier_calls() -> None:
    out, calls = torch.empty(4, 16), []
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=4, hidden=16, topk=2, num_experts=4, dtype=torch.float32, device="cpu"
    ) as buffer:
        received = _rows(buffer)
        for _ in range(3):
            factor = torch.ones(1, requires_grad=True)
            calls.append(weakref.ref(factor))
            assert nccl_ep.combine(received.x * factor, received.handle, out=out) is out
            del factor
            gc.collect()
            assert all(factor() is None for factor in calls[:-1])
        assert out.grad_fn is not None
        assert len([node for node, _ in out.grad_fn.next_functions if node is not None]) == 1
        last = calls[-1]()
        assert last is not None
        out.sum().backward()
        assert last.grad is not None and last.grad.item() == 4 * 2 * 16  # tokens, choices, elements
        del last
        out.detach_()
        gc.collect()
        assert calls[-1]() is None
