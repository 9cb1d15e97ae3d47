"""Experts as ``torch.nn.functional.grouped_mm`` over a packed output: its spare rows are uninitialised memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nccl_ep
from nccl_ep.testing import run_ranks

RANKS, EXPERTS, HIDDEN, INNER, TOPK, TOKENS = 2, 4, 64, 32, 2, 6
LOCAL = EXPERTS // RANKS
grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Grouped(torch.autograd.Function):
    """The real one, with NaN where it leaves memory as it was: past the last end, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, ends)
        out: torch.Tensor = grouped_mm(rows, weights, offs=ends)
        out[int(ends[-1]) :] = float("nan")
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights, ends = ctx.saved_tensors
        with torch.enable_grad():
            given = rows.detach().requires_grad_(), weights.detach().requires_grad_()
            out = grouped_mm(*given, offs=ends)
        of_rows, of_weights = torch.autograd.grad(out, given, grad.contiguous())
        of_rows = of_rows.clone()
        of_rows[int(ends[-1]) :] = float("nan")
        return of_rows, of_weights, None


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4).bfloat16()


class Case:
    def __init__(self) -> None:
        self.x = [numbers(rank, TOKENS + rank, HIDDEN) for rank in range(RANKS)]
        draws = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
        self.ids = [torch.rand(TOKENS + rank, EXPERTS, generator=draws[rank]).topk(TOPK)[1] for rank in range(RANKS)]
        self.weights = [numbers(10 + rank, TOKENS + rank, TOPK).float().abs() for rank in range(RANKS)]
        self.out_grads = [numbers(20 + rank, TOKENS + rank, HIDDEN) for rank in range(RANKS)]
        self.up, self.down = numbers(30, EXPERTS, HIDDEN, INNER), numbers(31, EXPERTS, INNER, HIDDEN)


def on_one_rank(case: Case) -> list[torch.Tensor]:
    """Results and gradients of all ranks: outputs, of x, of weights; then of up and of down."""
    up, down = case.up.float().requires_grad_(), case.down.float().requires_grad_()
    outs, leaves = [], []
    for x, ids, weights in zip(case.x, case.ids, case.weights, strict=True):
        x, weights = x.float().requires_grad_(), weights.clone().requires_grad_()
        rows = torch.einsum("th,tkhi->tki", x, up[ids])
        outs.append((torch.einsum("tki,tkih->tkh", F.silu(rows), down[ids]) * weights.unsqueeze(-1)).sum(1))
        leaves += [x, weights]
    grads = torch.autograd.grad(outs, [*leaves, up, down], [each.float() for each in case.out_grads])
    return [*(each.detach() for each in outs), *grads[0:-2:2], *grads[1:-2:2], *grads[-2:]]


@pytest.mark.parametrize("is_poisoned", [True, False])
@pytest.mark.parametrize("how", ["zeroed", "exact"])
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_spare_rows_change_nothing(mode: str, how: str, is_poisoned: bool) -> None:
    """The recipe of the docs: packed, aligned, padding zeroed, ``offsets[1:]`` for the ends."""
    if how == "exact" and mode == "ll":
        pytest.skip("exact sizes are of high throughput")
    case = Case()
    product = Grouped.apply if is_poisoned else lambda rows, weights, ends: grouped_mm(rows, weights, offs=ends)

    def body(group: Any) -> list[torch.Tensor]:
        rank = group.rank()
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=16, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode="auto", device="cpu", timeout=60.0
        ) as buffer:
            x, weights = case.x[rank].clone().requires_grad_(), case.weights[rank].clone().requires_grad_()
            own = slice(rank * LOCAL, (rank + 1) * LOCAL)
            up, down = case.up[own].clone().requires_grad_(), case.down[own].clone().requires_grad_()
            size: dict[str, Any] = {"capacity": "exact"} if how == "exact" else {"capacity": 96}
            out = nccl_ep.dispatch(
                x, case.ids[rank], weights, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="packed",
                expert_alignment=8, zero_padding=True, **size,
            )  # fmt: skip
            assert out.offsets is not None
            ends = out.offsets[1:]
            assert how == "exact" or int(ends[-1]) < out.x.shape[0]
            rows = product(F.silu(product(out.x, up, ends)), down, ends)
            home = nccl_ep.combine(rows, out.handle)
            grads = torch.autograd.grad(home, (x, weights, up, down), case.out_grads[rank])
            return [home.detach(), *grads]

    found, wanted = run_ranks(RANKS, body), on_one_rank(case)
    home, of_x, of_weights, of_up, of_down = zip(*found, strict=True)
    for each, want in zip([*home, *of_x, *of_weights, torch.cat(of_up), torch.cat(of_down)], wanted, strict=True):
        assert each.isfinite().all()
        torch.testing.assert_close(each.float(), want, rtol=3e-2, atol=1e-2)
