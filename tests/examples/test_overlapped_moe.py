"""The layer whose experts begin while rows come, on CPU ranks: its bits are those of one step behind the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nccl_ep
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.examples.moe_reference import distance, layer

RANKS, HIDDEN, INNER, TOPK, LOCAL, ROWS = 2, 64, 32, 3, 4, 8
WAYS: dict[str, tuple[nccl_ep.choices.Mode, dict[str, Any]]] = {
    "ll": ("ll", {}),
    "ht": ("ht", {}),
    "ht, sorts": ("ht", {"sorts": True}),
    "ht, signals": ("ht", {"signals": True}),
}
TOKENS = {"many tokens": (40, 40), "few tokens and none": (5, 0)}


@dataclass
class World:
    """What all ranks are given, and what float32 and torch's autograd make of it."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]  # of the outputs
    experts: Experts
    wanted: list[tuple[torch.Tensor, ...]]  # of each rank: the output, then gradients of x, weights, w13 and w2

    @staticmethod
    def of(tokens: tuple[int, ...], dtype: torch.dtype) -> World:
        """The last expert gets nothing, and some choices are none."""
        draw = torch.Generator().manual_seed(7)
        count, num_experts = sum(tokens), RANKS * LOCAL
        weights, ids = torch.rand(count, num_experts - 1, generator=draw).softmax(-1).topk(TOPK)
        ids[torch.rand(count, TOPK, generator=draw) < 0.1] = -1
        x, gradient = (torch.randn(count, HIDDEN, generator=draw).to(dtype) for _ in range(2))
        experts = Experts.random(num_experts, HIDDEN, INNER, "cpu")
        experts = Experts(experts.w13.to(dtype), experts.w2.to(dtype))
        given = [each.float().requires_grad_() for each in (x, weights, experts.w13, experts.w2)]
        y = layer(given[0], ids, *given[1:])
        of_x, of_weights, of_w13, of_w2 = torch.autograd.grad(y, given, gradient.float())
        split = [each.split(tokens) for each in (x, ids, weights, gradient, y.detach(), of_x, of_weights)]
        wanted = [
            (split[4][r], split[5][r], split[6][r], of_w13.split(LOCAL)[r], of_w2.split(LOCAL)[r]) for r in range(RANKS)
        ]
        return World(*[list(each) for each in split[:4]], experts, wanted)


def results(moe: MoeLayer, world: World, rank: int, overlaps: bool) -> list[torch.Tensor]:
    """In the order of ``World.wanted``."""
    experts, here = world.experts, slice(rank * LOCAL, (rank + 1) * LOCAL)
    x, weights, w13, w2 = (
        each.detach().requires_grad_()
        for each in (world.x[rank], world.weights[rank], experts.w13[here], experts.w2[here])
    )
    moe.experts = Experts(w13, w2)
    y = moe(x, world.ids[rank], weights, overlaps=overlaps)
    y.backward(world.gradients[rank])
    made = [y.detach()]
    for each in (x, weights, w13, w2):
        assert each.grad is not None
        made.append(each.grad)
    return made


def buffer_of(group: ThreadGroup, tokens: int, mode: Any, dtype: torch.dtype) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=tokens, hidden=HIDDEN, topk=TOPK, num_experts=group.size() * LOCAL, mode=mode, device="cpu",
        dtype=dtype, late_weights=mode == "ll",
    )  # fmt: skip


def layer_of(buffer: nccl_ep.Buffer, experts: Experts, tokens: int, mode: Any, how: dict[str, Any]) -> MoeLayer:
    return MoeLayer(
        buffer, experts, num_experts=buffer.num_ranks * LOCAL, max_tokens=tokens, topk=TOPK, mode=mode,
        rows_per_block=ROWS, **how,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("way", WAYS)
def test_experts_begin_while_rows_and_gradients_come(
    way: str, dtype: torch.dtype, most: float, tokens: tuple[int, ...]
) -> None:
    mode, how = WAYS[way]
    world = World.of(tokens, dtype)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with buffer_of(group, max(tokens), mode, dtype) as buffer:
            moe = layer_of(buffer, world.experts, max(tokens), mode, how)
            moe.experts = Experts(world.experts.w13[:LOCAL], world.experts.w2[:LOCAL])
            one_behind = results(moe, world, rank, False)
            for _ in range(2):
                for got, want in zip(results(moe, world, rank, True), one_behind, strict=True):
                    assert torch.equal(got, want)
        for got, want in zip(one_behind, world.wanted[rank], strict=True):
            assert distance(got, want) < most

    run_ranks(RANKS, body)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_rows_that_do_not_exist_reach_no_gradient(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made NaN in all that a backward pass reads."""
    world = World.of(TOKENS["many tokens"], torch.float32)

    def poison(rows: torch.Tensor, there: torch.Tensor) -> None:
        rows.view(there.numel(), -1)[~there] = torch.nan

    def body(group: ThreadGroup) -> None:
        tokens = TOKENS["many tokens"][group.rank()]
        with buffer_of(group, tokens, mode, torch.float32) as buffer:
            own = slice(group.rank() * LOCAL, (group.rank() + 1) * LOCAL)
            experts = Experts(world.experts.w13[own], world.experts.w2[own])
            moe = layer_of(buffer, experts, tokens, mode, {})
            given = world.x[group.rank()], world.ids[group.rank()], world.weights[group.rank()]
            _, kept, handle = moe.forward(*given, overlaps=False, keeps=True)
            assert kept is not None
            there = torch.zeros(kept.weights.numel(), dtype=torch.bool)
            for first, count in zip(kept.firsts.tolist(), kept.counts.tolist(), strict=True):
                there[first : first + count] = True
            assert not there.all()
            for each in (kept.x, kept.gates, kept.weights):
                poison(each, there)
            make = moe.backward_gemms

            def made(gradient: torch.Tensor, *rest: Any) -> Any:
                poison(gradient, there)
                gemms = make(gradient, *rest)
                for each in (gemms.rows, gemms.of_gates, gemms.weighted, gemms.dots):
                    poison(each, there)
                return gemms

            monkeypatch.setattr(moe, "backward_gemms", made)
            gradients = moe.backward(world.gradients[group.rank()], *given[1:], kept, handle, experts, overlaps=False)
            for got, want in zip(gradients, world.wanted[group.rank()][1:], strict=True):
                assert distance(got, want) < 1e-5

    run_ranks(RANKS, body)


def test_experts_in_fp8_have_no_gradient() -> None:
    with buffer_of(ThreadGroup.make(1)[0], 4, "ht", torch.bfloat16) as buffer:
        experts = Experts.random(LOCAL, 128, 128, "cpu").in_fp8()
        moe = layer_of(buffer, experts, 4, "ht", {})
        x = torch.zeros(4, 128, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(ValueError, match=r"experts are torch\.float8_e4m3fn, which have no gradient"):
            moe(x, torch.zeros(4, TOPK, dtype=torch.int64), torch.ones(4, TOPK))
