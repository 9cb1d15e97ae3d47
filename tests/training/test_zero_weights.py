"""Weights that are 0, rows that are no numbers or do not exist: derivatives of the first and second order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import run_ranks
from tests.training.moe import EXPERTS, HIDDEN, make_buffer

MODES, LAYOUTS, WEIGHTINGS = ("ll", "ht"), ("packed", "expert_major"), ("dispatch", "home")
TOKENS, TOPK = 5, 2
NAN = float("nan")


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11 * rank + sum(shape)))


class Tokens:
    """Of a rank: small experts are one factor each, so that a row's gradient depends on its weight and on the loss."""

    def __init__(self, rank: int) -> None:
        self.ids = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(rank)).topk(TOPK)[1]
        self.ids[1, 0] = -1
        self.x = numbers(rank, TOKENS, HIDDEN).requires_grad_()
        weights = numbers(rank, TOKENS, TOPK).abs()
        weights[0, 0], weights[2, 1], weights[3] = 0.0, -0.0, torch.tensor([0.0, 2.0])
        self.weights = weights.requires_grad_()
        self.out_grads = numbers(rank + 1, TOKENS, HIDDEN).requires_grad_()
        self.probe = numbers(rank + 2, TOKENS, HIDDEN), numbers(rank + 2, TOKENS, TOPK)

    def derivatives(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Those of x and weights, then those of a sum of both by x, weights and what came to ``out``."""
        first = torch.autograd.grad(out, (self.x, self.weights), self.out_grads, create_graph=True)
        total = sum((each * probe).sum() for each, probe in zip(first, self.probe, strict=True))
        second = torch.autograd.grad(total, (self.x, self.weights, self.out_grads))
        return [each.detach() for each in (*first, *second)]


def reference(tokens: Tokens, kept: torch.Tensor) -> torch.Tensor:
    """sum over k of weight * (x * (id + 1)), of the choices that were kept."""
    factors = torch.where(kept, (tokens.ids + 1).float(), 0.0)
    return tokens.x * (tokens.weights * factors).sum(1, keepdim=True)


def layer(tokens: Tokens, buffer: nccl_ep.Buffer, mode: str, layout: str, weighting: str, **how: Any) -> torch.Tensor:
    given = {"buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": layout, "zero_padding": True} | how
    out = nccl_ep.dispatch(tokens.x, tokens.ids, tokens.weights, **given)
    rows = out.x * own_factors(out, buffer)
    return nccl_ep.combine(rows, out.handle, weights="dispatch" if weighting == "dispatch" else tokens.weights)


def own_factors(out: nccl_ep.DispatchOutput, buffer: nccl_ep.Buffer) -> torch.Tensor:
    """Global id + 1 of each row's expert, or of each expert's block."""
    local = EXPERTS // buffer.num_ranks
    if out.row_expert is not None:
        return (out.row_expert + 1 + buffer.rank * local).float().unsqueeze(1)
    return torch.arange(1.0, local + 1).add(buffer.rank * local).view(local, 1, 1)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_derivatives_are_plain_torchs(ranks: int, mode: str, layout: str, weighting: str) -> None:
    def body(group: Any) -> list[torch.Tensor]:
        with make_buffer(group) as buffer:
            how = {"capacity": 8 * ranks} if layout == "expert_major" else {}
            tokens = Tokens(group.rank())
            return tokens.derivatives(layer(tokens, buffer, mode, layout, weighting, **how))

    for rank, found in enumerate(run_ranks(ranks, body)):
        tokens = Tokens(rank)
        for each, want in zip(found, tokens.derivatives(reference(tokens, tokens.ids >= 0)), strict=True):
            torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_of_dropped_rows_are_plain_torchs(mode: str, weighting: str) -> None:
    """Past an expert's capacity: nothing of them, in no order."""
    with make_buffer(None) as buffer:
        tokens = Tokens(0)
        used, kept = [0] * EXPERTS, torch.zeros_like(tokens.ids, dtype=torch.bool)
        for at, expert in enumerate(tokens.ids.flatten().tolist()):
            kept.view(-1)[at] = expert >= 0 and used[expert] < 2
            used[expert] += expert >= 0
        assert not torch.equal(kept, tokens.ids >= 0)
        found = tokens.derivatives(layer(tokens, buffer, mode, "expert_major", weighting, capacity=2))
        for each, want in zip(found, tokens.derivatives(reference(tokens, kept)), strict=True):
            torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_do_not_exist_change_nothing(mode: str, layout: str, weighting: str) -> None:
    """Whatever stands in them: in what experts return, in the gradients that experts return, and for their weights."""

    def run(spare: float) -> list[torch.Tensor]:
        with make_buffer(None) as buffer:
            tokens = Tokens(0)
            given = {"buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": layout, "capacity": 16}
            out = nccl_ep.dispatch(tokens.x, tokens.ids, tokens.weights, zero_padding=True, **given)
            exists = existing(out).unsqueeze(-1)
            assert not exists.all()
            rows = torch.where(exists, out.x * own_factors(out, buffer), spare)
            # What comes back for these rows is that number, too: as of a GEMM that leaves them unwritten.
            rows = Poisoned.apply(rows, exists, spare)
            weights = "dispatch" if weighting == "dispatch" else tokens.weights
            return tokens.derivatives(nccl_ep.combine(rows, out.handle, weights=weights))

    for each, want in zip(run(NAN), run(0.0), strict=True):
        assert each.isfinite().all() and torch.equal(each, want)


def existing(out: nccl_ep.DispatchOutput) -> torch.Tensor:
    if out.row_expert is not None:
        return out.row_expert >= 0
    return torch.arange(out.x.shape[1]) < out.counts.unsqueeze(1)


class Poisoned(torch.autograd.Function):
    """Rows as they are; where they do not exist, their gradients become ``spare``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exists: torch.Tensor, spare: float) -> torch.Tensor:
        ctx.save_for_backward(exists)
        ctx.spare = spare
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (exists,) = ctx.saved_tensors
        return torch.where(exists, grad, ctx.spare), None, None


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_weights_of_rows_that_do_not_exist_is_zero(mode: str) -> None:
    """It is zero, although the rows are no numbers: a sum over all weights is the sum over those that exist."""
    with make_buffer(None) as buffer:
        tokens = Tokens(0)
        given = {"buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": "packed", "capacity": 16}
        out = nccl_ep.dispatch(tokens.x, tokens.ids, tokens.weights, **given)
        exists = existing(out)
        rows = torch.where(exists.unsqueeze(1), out.x.detach(), NAN).requires_grad_()
        home = nccl_ep.combine(rows, out.handle)
        (of_weights,) = torch.autograd.grad(home, out.weights, tokens.out_grads, create_graph=True)
        assert torch.equal(of_weights[~exists], torch.zeros(int((~exists).sum())))
        assert of_weights[exists].isfinite().all()
        (of_rows,) = torch.autograd.grad(of_weights.sum(), rows)
        assert torch.equal(of_rows[~exists], torch.zeros_like(of_rows[~exists])) and of_rows.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_skipped_at_home_adds_nothing(mode: str) -> None:
    """Its ids are given at the combine, and one is -1: the row is NaN, and adds nothing to anything."""
    with make_buffer(None) as buffer:
        tokens = Tokens(0)
        at_home = tokens.ids.clone()
        at_home[4, 1] = -1

        def run(skipped: float) -> list[torch.Tensor]:
            out = nccl_ep.dispatch(
                tokens.x, tokens.ids, tokens.weights, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="packed",
                capacity=16, zero_padding=True,
            )  # fmt: skip
            # The row of token 4's second choice, by what it is worth there.
            is_skipped = (out.weights.detach() == tokens.weights.detach()[4, 1]).unsqueeze(1)
            assert is_skipped.sum() == 1
            rows = torch.where(is_skipped, skipped, out.x * own_factors(out, buffer))
            return tokens.derivatives(nccl_ep.combine(rows, out.handle, weights=tokens.weights, topk_idx=at_home))

        want = tokens.derivatives(reference(tokens, at_home >= 0))
        for each, other, plain in zip(run(NAN), run(1.0), want, strict=True):
            assert torch.equal(each, other)
            torch.testing.assert_close(each, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_no_number_spoils_only_its_weights_gradient(mode: str, weighting: str) -> None:
    """Its weight is 0: the gradient of the weight is NaN as in plain torch, and that of all others is as without it."""
    with make_buffer(None) as buffer:
        tokens = Tokens(0)
        x = tokens.x.detach().clone()
        x[3] = NAN
        tokens.x = x.requires_grad_()
        found = tokens.derivatives(layer(tokens, buffer, mode, "packed", weighting))[:2]
        want = tokens.derivatives(reference(tokens, tokens.ids >= 0))[:2]
        for each, plain in zip(found, want, strict=True):
            torch.testing.assert_close(each, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_third_derivative_is_plain_torchs() -> None:
    """d/dw of d/dg of d/dx: a product of weights, at weights of 0."""
    with make_buffer(None) as buffer:
        for mode in MODES:
            for weighting in WEIGHTINGS:
                thirds = []
                for plain in (False, True):
                    t = Tokens(0)
                    out = reference(t, t.ids >= 0) if plain else layer(t, buffer, mode, "packed", weighting)
                    (of_x,) = torch.autograd.grad(out, t.x, t.out_grads, create_graph=True)
                    (of_w,) = torch.autograd.grad((of_x * t.probe[0]).sum(), t.weights, create_graph=True)
                    thirds += torch.autograd.grad((of_w * t.probe[1]).sum(), t.out_grads)
                torch.testing.assert_close(thirds[0], thirds[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_weight_0_whose_gradient_is_0_has_a_second_derivative(mode: str, weighting: str) -> None:
    """Of a loss (w x)^2 by w, at w = 0 and at -0: 2 x^2. With x = 0, too, all orders are those of plain torch."""
    ids = torch.tensor([[0, -1], [1, 0], [0, 1]])
    with make_buffer(None) as buffer:
        found = []
        for plain in (False, True):
            x = numbers(0, 3, HIDDEN)
            x[2] = 0.0
            x, weights = x.requires_grad_(), torch.tensor([[0.0, 0.0], [-0.0, 0.0], [0.0, -0.0]], requires_grad=True)
            if plain:
                out = x * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
            else:
                given = {"mode": mode, "layout": "packed", "zero_padding": True}
                sent = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=EXPERTS, **given)
                at_home = weights if weighting == "home" else "dispatch"
                out = nccl_ep.combine(sent.x, sent.handle, weights=at_home)
            first = torch.autograd.grad(out.square().sum(), (x, weights), create_graph=True)
            second = torch.autograd.grad((first[1] * numbers(1, 3, 2)).sum(), (x, weights), create_graph=True)
            third = torch.autograd.grad((second[1] * numbers(2, 3, 2)).sum() + second[0].sum(), (x, weights))
            found.append([*first, *second, *third])
        assert found[1][3].count_nonzero() == 3  # what would be lost
        for each, want in zip(*found, strict=True):
            torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5)
