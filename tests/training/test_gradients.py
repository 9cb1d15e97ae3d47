"""loss.backward() through dispatch and combine: the gradients are those of the same layer on one rank."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import run_ranks
from tests.training.moe import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MAX_TOKENS,
    Case,
    apply_experts,
    check_gradients,
    dispatch_args,
    make_buffer,
    on_one_rank,
    run_layer,
)

MODES = ("ll", "ht")


@pytest.mark.parametrize("weighting", ["dispatch", "home", "caller"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_of_one_rank_bit_for_bit(mode: str, layout: str, weighting: str) -> None:
    case = Case(2, (5, 3))
    check_gradients(on_one_rank(case), run_layer(case, mode, layout, weighting))


@pytest.mark.parametrize("way", ["split", "async", "out"])
@pytest.mark.parametrize("weighting", ["dispatch", "home", "caller"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_the_same_by_every_way_of_calling(mode: str, weighting: str, way: str) -> None:
    if mode == "ht" and way == "split":
        pytest.skip("high throughput has no split calls")
    case = Case(2, (5, 3))
    for layout in ("expert_major", "flat"):
        check_gradients(on_one_rank(case), run_layer(case, mode, layout, weighting, way))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_four_ranks_in_domains_are_plain_torchs(mode: str) -> None:
    case = Case(4, (5, 0, 8, 1))
    check_gradients(on_one_rank(case), run_layer(case, mode, "packed", "dispatch"))
    check_gradients(on_one_rank(case), run_layer(case, mode, "packed", "home", domain_size=2, network_seed=3))


@pytest.mark.parametrize("weighting", ["dispatch", "home", "caller"])
@pytest.mark.parametrize("mode", MODES)
def test_dropped_rows_have_no_gradient(mode: str, weighting: str) -> None:
    case = Case(2, (8, 7), capacity=3)
    assert not all(each[ids >= 0].all() for each, ids in zip(case.kept(), case.idx, strict=True))
    check_gradients(on_one_rank(case), run_layer(case, mode, "expert_major", weighting))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_random_numbers_are_plain_torchs(mode: str, layout: str) -> None:
    case = Case(2, (6, 8), integers=False)
    check_gradients(on_one_rank(case), run_layer(case, mode, layout, "dispatch"), tolerance=1e-5)


@pytest.mark.parametrize("layout", ["packed", "flat", "rank_major"])
def test_gradients_of_exact_sizes_are_plain_torchs(layout: str) -> None:
    case = Case(2, (5, 3))

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank, local = group.rank(), EXPERTS // 2
        with make_buffer(group) as buffer:
            x, weights = case.x[rank].clone().requires_grad_(), case.weights[rank].clone().requires_grad_()
            experts = case.experts[rank * local : (rank + 1) * local].clone().requires_grad_()
            args = dispatch_args(case, buffer, "ht", layout) | {"capacity": "exact"}
            out = nccl_ep.dispatch(x, case.idx[rank], weights, **args)
            combined = nccl_ep.combine(apply_experts(out, experts), out.handle)
            combined.backward(case.out_grads[rank])
            assert x.grad is not None and weights.grad is not None and experts.grad is not None
            return combined.detach(), x.grad, weights.grad, experts.grad

    check_gradients(on_one_rank(case), run_ranks(2, body))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_aligned_packed_rows_are_plain_torchs(mode: str) -> None:
    """The home rank's weights are routed once more, to the same places."""
    case = Case(2, (5, 3))

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank, local = group.rank(), EXPERTS // 2
        with make_buffer(group) as buffer:
            x, weights = case.x[rank].clone().requires_grad_(), case.weights[rank].clone().requires_grad_()
            experts = case.experts[rank * local : (rank + 1) * local].clone().requires_grad_()
            args = dispatch_args(case, buffer, mode, "packed") | {"expert_alignment": 8}
            out = nccl_ep.dispatch(x, case.idx[rank], None, **args)
            combined = nccl_ep.combine(apply_experts(out, experts), out.handle, weights=weights)
            combined.backward(case.out_grads[rank])
            assert x.grad is not None and weights.grad is not None and experts.grad is not None
            return combined.detach(), x.grad, weights.grad, experts.grad

    check_gradients(on_one_rank(case), run_ranks(2, body))


# ---- One rank: what else has a gradient


def one_rank() -> nccl_ep.Buffer:
    return make_buffer(None)


IDS = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 0]])


def given(mode: str, layout: str = "packed") -> dict[str, Any]:
    return {"num_experts": EXPERTS, "mode": mode, "layout": layout, "zero_padding": True}


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_biases_are_the_outputs(mode: str) -> None:
    with one_rank() as buffer:
        x = torch.ones(4, HIDDEN)
        out = nccl_ep.dispatch(x, IDS, buffer=buffer, **given(mode, "flat"))
        biases = [torch.ones(4, HIDDEN, requires_grad=True) for _ in range(2)]
        grad = torch.arange(4.0 * HIDDEN).view(4, HIDDEN)
        nccl_ep.combine(out.x, out.handle, bias=biases).backward(grad)
        for bias in biases:
            assert bias.grad is not None and torch.equal(bias.grad, grad)


@pytest.mark.parametrize("mode", MODES)
def test_choices_that_combine_skips_have_no_gradient(mode: str) -> None:
    """Its ids that are no expert, on either side: nothing of their weights, and of their rows."""
    ids = IDS.clone()
    ids[0, 1], ids[1, 0], ids[2, 1], ids[3, 0] = -1, EXPERTS, 1 << 40, -7
    with one_rank() as buffer:
        x, weights = torch.ones(4, HIDDEN, requires_grad=True), torch.rand(4, 2, requires_grad=True)
        out = nccl_ep.dispatch(x, IDS, buffer=buffer, **given(mode))
        nccl_ep.combine(out.x, out.handle, weights=weights, topk_idx=ids).sum().backward()
    assert weights.grad is not None and torch.equal(weights.grad, HIDDEN * (ids == IDS).float())
    stays = torch.where(ids == IDS, weights.detach(), 0.0).sum(1, keepdim=True)
    assert x.grad is not None and torch.equal(x.grad, stays.expand(4, HIDDEN))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_extra_tensors_and_scales_are_summed(mode: str) -> None:
    """A token's rows: two choices, so that each number is counted twice."""
    with one_rank() as buffer:
        extras = [torch.randn(4, 4, requires_grad=True), torch.randn(4, 8, requires_grad=True)]
        out = nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, extra=extras, **given(mode))
        assert torch.equal(out.extra[0][:8].sum(), 2 * extras[0].sum()) or torch.allclose(
            out.extra[0].sum(), 2 * extras[0].sum()
        )
        (out.extra[0] * 3).sum().backward()
        assert extras[0].grad is not None and torch.equal(extras[0].grad, torch.full((4, 4), 6.0))
        out = nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, extra=extras, **given(mode))
        (out.extra[1] * 5).sum().backward()
        assert extras[1].grad is not None and torch.equal(extras[1].grad, torch.full((4, 8), 10.0))

        scales = torch.randn(4, 3, requires_grad=True)  # rows of 12 bytes
        out = nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, scales=scales, **given(mode))
        assert out.scales is not None
        (out.scales * 7).sum().backward()
        assert scales.grad is not None and torch.equal(scales.grad, torch.full((4, 3), 14.0))


def test_gradients_of_a_cached_dispatch_and_of_scalars_are_plain_torchs() -> None:
    with one_rank() as buffer:
        out = nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, **given("ht"))
        x = torch.randn(4, HIDDEN, requires_grad=True)
        rows = nccl_ep.dispatch_cached(x, out.handle, zero_padding=True).x
        (rows * 3).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, HIDDEN), 6.0))
        again = torch.randn(4, HIDDEN, requires_grad=True)
        written = nccl_ep.dispatch_cached(x.detach(), out.handle, zero_padding=True)
        (nccl_ep.dispatch_cached(again, out.handle, zero_padding=True, out=written).x * 2).sum().backward()
        assert again.grad is not None and torch.equal(again.grad, torch.full((4, HIDDEN), 4.0))
        for mode in MODES:
            out = nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, **given(mode))
            values = out.weights.detach().clone().requires_grad_()
            grad = torch.arange(8.0).view(4, 2)
            nccl_ep.combine_weights(values, out.handle).backward(grad)
            assert values.grad is not None and values.grad.sum() == grad.sum()
            assert torch.equal(nccl_ep.combine_weights(values.grad, out.handle), grad)


def test_what_is_written_again_is_lost_to_a_graph_that_has_saved_it() -> None:
    """The backward pass raises, as of a tensor that torch has written."""
    factor = torch.ones(1, requires_grad=True)
    with one_rank() as buffer, one_rank() as other:
        x = torch.ones(4, HIDDEN)
        first = nccl_ep.dispatch(x, IDS, buffer=buffer, **given("ht"))
        home = nccl_ep.combine(first.x, first.handle)
        payload = nccl_ep.dispatch_cached(x, first.handle)
        view = nccl_ep.deep_ep.Buffer.of(other)
        rows, _, handle, _, _ = view.low_latency_dispatch(x, IDS, MAX_TOKENS, EXPERTS, use_fp8=False)
        weights, of_deepep = torch.ones(IDS.shape), torch.empty(4, HIDDEN)
        writes: list[tuple[torch.Tensor, Any]] = [
            (home, lambda: nccl_ep.combine(first.x, first.handle, out=home)),
            (payload.x, lambda: nccl_ep.dispatch_cached(x * 2, first.handle, out=payload)),
            (first.x, lambda: nccl_ep.dispatch(x * 2, IDS, buffer=buffer, out=first, **given("ht"))),
            (of_deepep, lambda: view.low_latency_combine(rows, IDS, weights, handle, out=of_deepep)),
        ]
        for tensor, write in writes:
            product = (tensor * factor).sum()
            write()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


@pytest.mark.parametrize("quant", ["fp8", "fp8_rounded", "fp8_ue8m0"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_in_fp8_have_gradients_in_bf16(mode: str, quant: str) -> None:
    with make_buffer(None, hidden=256, dtype=torch.bfloat16, scale_bytes=64) as buffer:
        x = torch.randn(4, 256).bfloat16().requires_grad_()
        out = nccl_ep.dispatch(x, IDS, buffer=buffer, quant=quant, **given(mode))
        rows = out.dequantized()
        assert rows.dtype == torch.bfloat16 and out.x.dtype == torch.float8_e4m3fn
        exact = nccl_ep.dispatch(x.detach(), IDS, buffer=buffer, **given(mode)).x
        assert torch.allclose(rows.float(), exact.float(), rtol=0.08, atol=0.02)
        (rows * 3).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, 256), 6.0).bfloat16())
        with torch.no_grad():
            assert not nccl_ep.dispatch(x, IDS, buffer=buffer, quant=quant, **given(mode)).dequantized().requires_grad
        with pytest.raises(ValueError, match="only rows that dispatch has quantised"):
            nccl_ep.dispatch(x, IDS, buffer=buffer, **given(mode)).dequantized()


# ---- The graph of gradients


@pytest.mark.parametrize("mode", MODES)
def test_a_handle_twice_a_graph_twice_and_outputs_that_are_not_used(mode: str) -> None:
    with one_rank() as buffer:
        x, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, 2, requires_grad=True)
        out = nccl_ep.dispatch(x, IDS, weights, buffer=buffer, **given(mode))
        total = nccl_ep.combine(out.x, out.handle) + nccl_ep.combine(out.x * 2, out.handle)
        total.sum().backward(retain_graph=True)
        assert x.grad is not None and weights.grad is not None
        first = x.grad.clone(), weights.grad.clone()
        total.sum().backward()
        assert torch.equal(x.grad, 2 * first[0]) and torch.equal(weights.grad, 2 * first[1])
        torch.testing.assert_close(first[0], 3 * weights.detach().sum(1, keepdim=True).expand_as(x))

        x.grad = weights.grad = None
        out = nccl_ep.dispatch(x, IDS, weights, buffer=buffer, **given(mode))
        out.weights.sum().backward()  # not of x
        assert torch.equal(weights.grad, torch.ones(4, 2)) and torch.equal(x.grad, torch.zeros(4, HIDDEN))


@pytest.mark.parametrize("mode", MODES)
def test_a_second_derivative_is_plain_torchs(mode: str) -> None:
    with one_rank() as buffer:
        x, weights = torch.randn(4, HIDDEN, requires_grad=True), torch.rand(4, 2, requires_grad=True)

        def loss() -> torch.Tensor:
            out = nccl_ep.dispatch(x, IDS, weights, buffer=buffer, **given(mode))
            return nccl_ep.combine(out.x.pow(2), out.handle).pow(2).sum()

        def plain() -> torch.Tensor:
            return (x.pow(2) * weights.sum(1, keepdim=True)).pow(2).sum()

        results = []
        for each in (loss, plain):
            first = torch.autograd.grad(each(), (x, weights), create_graph=True)
            results.append((*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, weights))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_backward_pass_that_is_skipped_leaves_nothing_behind() -> None:
    with one_rank() as buffer:
        x = torch.randn(4, HIDDEN, requires_grad=True)
        out = nccl_ep.dispatch(x, IDS, buffer=buffer, **given("ht"))
        kept = weakref.ref(out.x)
        del out
        gc.collect()
        assert kept() is None
        nccl_ep.combine(nccl_ep.dispatch(x, IDS, buffer=buffer, **given("ht")).x, _handle(buffer)).sum().backward()
        assert x.grad is not None


def _handle(buffer: nccl_ep.Buffer) -> nccl_ep.Handle:
    return nccl_ep.dispatch(torch.ones(4, HIDDEN), IDS, buffer=buffer, **given("ht")).handle


def test_dtypes_without_a_gradient_say_so() -> None:
    with one_rank() as buffer:
        x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
        out = nccl_ep.dispatch(x, IDS, buffer=buffer, **given("ll"))
        with pytest.raises(ValueError, match=r"a gradient of torch\.float64 rows: only those of bf16, fp16 and fp32"):
            out.x.sum().backward()


def test_rows_may_be_overwritten_between_the_two_calls() -> None:
    with one_rank() as buffer:
        leaf = torch.ones(4, HIDDEN, requires_grad=True)
        x = leaf * 2
        pending = nccl_ep.dispatch_send(x, IDS, buffer=buffer, **given("ll"))
        x.zero_()
        pending.receive().x.sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.full((4, HIDDEN), 4.0))


def test_errors_in_a_backward_pass_keep_their_class() -> None:
    buffer = one_rank()
    x = torch.ones(4, HIDDEN, requires_grad=True)
    out = nccl_ep.dispatch(x, IDS, buffer=buffer, **given("ll"))
    buffer.destroy()
    with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
        out.x.sum().backward()


def test_max_tokens_are_those_of_the_forward() -> None:
    """All tokens that a buffer takes."""
    case = Case(1, (MAX_TOKENS,))
    check_gradients(on_one_rank(case), run_layer(case, "ll", "packed", "home"))


def test_deepeps_normal_mode_has_gradients_by_itself() -> None:
    """dispatch, experts with the received weights, combine; the plain layer on one rank has the same gradients."""
    case = Case(2, (5, 3))

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank, local = group.rank(), EXPERTS // 2
        buffer = nccl_ep.deep_ep.Buffer(group, num_nvl_bytes=1 << 20, device="cpu", timeout=60.0)
        x, weights = case.x[rank].clone().requires_grad_(), case.weights[rank].clone().requires_grad_()
        experts = case.experts[rank * local : (rank + 1) * local].clone().requires_grad_()
        counts = buffer.get_dispatch_layout(case.idx[rank], EXPERTS)
        received, ids, row_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=case.idx[rank], topk_weights=weights, num_tokens_per_rank=counts[0],
            is_token_in_rank=counts[3], num_tokens_per_expert=counts[2],
        )  # fmt: skip
        total = torch.zeros_like(received)
        for k in range(ids.shape[1]):
            rows = torch.einsum("nh,nhj->nj", received, experts[ids[:, k].clamp(min=0)])
            total = total + torch.where(ids[:, k : k + 1] >= 0, row_weights[:, k : k + 1] * rows, 0.0)
        combined = buffer.combine(total, handle)[0]
        combined.backward(case.out_grads[rank])
        buffer.destroy()
        assert x.grad is not None and weights.grad is not None and experts.grad is not None
        return combined.detach(), x.grad, weights.grad, experts.grad

    check_gradients(on_one_rank(case), run_ranks(2, body))
