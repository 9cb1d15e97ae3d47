"""A Mixture-of-Experts layer over dispatch and combine, and the same on one rank without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import nccl_ep
from nccl_ep.testing import run_ranks
from tests.support.harness import synchronize

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 8, 4, 2, 8
EXPERT_LAYOUTS = ("expert_major", "packed")
LAYOUTS = (*EXPERT_LAYOUTS, "rank_major", "flat")


@dataclass
class Case:
    """Tokens of all ranks. ``integers``: sums are exact in any order, so that bits can be compared."""

    num_ranks: int
    tokens: Sequence[int]
    integers: bool = True
    topk: int = TOPK
    capacity: int | None = None  # of an expert: rows past it are dropped
    x: list[torch.Tensor] = field(init=False)
    idx: list[torch.Tensor] = field(init=False)
    weights: list[torch.Tensor] = field(init=False)
    out_grads: list[torch.Tensor] = field(init=False)
    experts: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
            if self.integers:
                return torch.randint(low, high + 1, shape, generator=generator).float()
            return torch.rand(shape, generator=generator) * (high - low) + low

        self.x = [numbers(-3, 3, count, HIDDEN) for count in self.tokens]
        self.out_grads = [numbers(-3, 3, count, HIDDEN) for count in self.tokens]
        self.weights = [numbers(1, 3, count, self.topk) for count in self.tokens]
        self.idx = [torch.rand(count, EXPERTS, generator=generator).topk(self.topk)[1] for count in self.tokens]
        for each in self.idx:  # a choice that is none
            if len(each) > 1:
                each[1, 0] = -1
        self.experts = numbers(-2, 2, EXPERTS, HIDDEN, HIDDEN)

    def kept(self) -> list[torch.Tensor]:
        """bool [T, K] of each rank: the choices whose rows fit, in the order (source rank, token, k)."""
        used = [0] * EXPERTS
        kept = [torch.zeros_like(each, dtype=torch.bool) for each in self.idx]
        for rank, ids in enumerate(self.idx):
            for token, row in enumerate(ids.tolist()):
                for k, expert in enumerate(row):
                    if expert < 0:
                        continue
                    kept[rank][token, k] = self.capacity is None or used[expert] < self.capacity
                    used[expert] += 1
        return kept


@dataclass
class Gradients:
    out: list[torch.Tensor]
    x: list[torch.Tensor]
    weights: list[torch.Tensor]
    experts: torch.Tensor


def on_one_rank(case: Case) -> Gradients:
    x = [each.clone().requires_grad_() for each in case.x]
    weights = [each.clone().requires_grad_() for each in case.weights]
    experts = case.experts.clone().requires_grad_()
    out = []
    for own_x, own_weights, ids, kept in zip(x, weights, case.idx, case.kept(), strict=True):
        total = torch.zeros_like(own_x)
        for k in range(case.topk):
            rows = torch.einsum("th,thj->tj", own_x, experts[ids[:, k].clamp(min=0)])
            total = total + torch.where(kept[:, k : k + 1], own_weights[:, k : k + 1] * rows, 0.0)
        out.append(total)
    torch.autograd.backward(out, case.out_grads)
    return Gradients(
        [each.detach() for each in out],
        [_grad_of(each) for each in x],
        [_grad_of(each) for each in weights],
        _grad_of(experts),
    )


def _grad_of(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def apply_experts(out: nccl_ep.DispatchOutput, experts: torch.Tensor) -> torch.Tensor:
    """This rank's experts [L, H, H] on what it received; in rank layouts their weighted sum for each token."""
    if out.row_expert is not None:
        chosen = experts[out.row_expert.clamp(min=0).long()]
        return torch.einsum("nh,nhj->nj", out.x, chosen) * (out.row_expert >= 0).unsqueeze(-1)
    if out.topk_idx is None:
        return torch.einsum("lch,lhj->lcj", out.x, experts)
    total = torch.zeros_like(out.x)
    for k in range(out.topk_idx.shape[-1]):
        ids, weights = out.topk_idx[..., k], out.weights[..., k : k + 1]
        rows = torch.einsum("...h,...hj->...j", out.x, experts[ids.clamp(min=0).long()])
        total = total + torch.where((ids >= 0).unsqueeze(-1), weights * rows, 0.0)
    return total


def make_buffer(group: Any, **how: Any) -> nccl_ep.Buffer:
    sizes: dict[str, Any] = {
        "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS, "dtype": torch.float32,
        "mode": "auto", "device": "cpu", "timeout": 60.0, "scale_bytes": 128,
    }  # fmt: skip
    return nccl_ep.Buffer.for_shapes(group, **sizes | how)


def dispatch_args(case: Case, buffer: nccl_ep.Buffer, mode: str, layout: str) -> dict[str, Any]:
    capacity = case.capacity
    if capacity is None and mode == "ht" and layout == "expert_major":
        capacity = buffer.num_ranks * MAX_TOKENS
    return {
        "buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": layout, "zero_padding": True,
        "capacity": capacity,
    }  # fmt: skip


def check_gradients(want: Gradients, got: Sequence[tuple[torch.Tensor, ...]], tolerance: float = 0.0) -> None:
    """``got``: of each rank out, and the gradients of x, weights and its experts."""

    def check(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")

    for rank, (out, x, weights, _) in enumerate(got):
        check(f"out of rank {rank}", out, want.out[rank])
        check(f"x of rank {rank}", x, want.x[rank])
        check(f"weights of rank {rank}", weights, want.weights[rank])
    check("experts", torch.cat([each[3] for each in got]), want.experts)


# ---- Ways of calling

Call = Callable[..., Any]


def whole_dispatch(x: torch.Tensor, *args: Any, **how: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(x, *args, **how)


def split_dispatch(x: torch.Tensor, *args: Any, **how: Any) -> nccl_ep.DispatchOutput:
    pending = nccl_ep.dispatch_send(x, *args, **how)
    return pending.receive()


def split_combine(rows: torch.Tensor, handle: nccl_ep.Handle, **how: Any) -> torch.Tensor:
    return nccl_ep.combine_send(rows, handle, **how).receive()


def async_dispatch(x: torch.Tensor, *args: Any, **how: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch_send(x, *args, async_finish=True, **how).receive()


def async_combine(rows: torch.Tensor, handle: nccl_ep.Handle, **how: Any) -> torch.Tensor:
    return nccl_ep.combine_send(rows, handle, async_finish=True, **how).receive()


def into_dispatch(x: torch.Tensor, *args: Any, **how: Any) -> nccl_ep.DispatchOutput:
    with torch.no_grad():
        out = nccl_ep.dispatch(x, *args, **how)
    return nccl_ep.dispatch(x, *args, out=out, **how)


def into_combine(rows: torch.Tensor, handle: nccl_ep.Handle, **how: Any) -> torch.Tensor:
    return nccl_ep.combine(rows, handle, out=rows.new_empty(handle.num_tokens, rows.shape[-1]), **how)


WAYS: dict[str, tuple[Call, Call]] = {
    "whole": (whole_dispatch, nccl_ep.combine),
    "split": (split_dispatch, split_combine),
    "async": (async_dispatch, async_combine),
    "out": (into_dispatch, into_combine),
}


def run_rank(case: Case, group: Any, mode: str, layout: str, weighting: str, way: str = "whole", device: Any = "cpu",
             **how: Any) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """One rank's step: the result, and the gradients of x, weights and its experts, on the CPU."""
    rank, local = (0 if group is None else group.rank()), EXPERTS // case.num_ranks
    send, receive = WAYS[way]
    if mode == "ll" and way == "out":
        send = whole_dispatch  # low latency has it for combine alone
    with make_buffer(group, device=device, **how) as buffer:

        def leaf(each: torch.Tensor) -> torch.Tensor:
            return each.clone().to(buffer.device).requires_grad_()

        x, weights = leaf(case.x[rank]), leaf(case.weights[rank])
        experts = leaf(case.experts[rank * local : (rank + 1) * local])
        args = dispatch_args(case, buffer, mode, layout)
        out = send(x, case.idx[rank].to(buffer.device), weights, **args)
        rows, given = apply_experts(out, experts), {}
        if layout in EXPERT_LAYOUTS and weighting == "home":
            given = {"weights": weights}
        elif layout in EXPERT_LAYOUTS and weighting == "caller":
            given, rows = {"weights": None}, rows * out.weights.unsqueeze(-1)
        combined = receive(rows, out.handle, **given)
        combined.backward(case.out_grads[rank].to(buffer.device))
        synchronize(buffer.device)
        buffer.require_usable()  # its error says more than a difference does
        return combined.detach().cpu(), *(_grad_of(each).cpu() for each in (x, weights, experts))


def run_layer(case: Case, mode: str, layout: str, weighting: str, way: str = "whole", **how: Any) -> list[Any]:
    """Ranks as threads."""
    return run_ranks(case.num_ranks, lambda group: run_rank(case, group, mode, layout, weighting, way, **how))
