"""combine(scale=): the factor with which models multiply the sum of a token's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from tests.support.ranks import DEVICE

T, H, K, E = 5, 16, 3, 4
IDS = torch.tensor([[0, 1, 2], [3, -1, 0], [1, 1, 2], [-1, -1, -1], [2, 3, 0]])
WEIGHTS = torch.tensor([[0.3, 0.5, 0.7]] * T)
MODES = ("ll", "ht")
LAYOUTS = ("expert_major", "packed", "rank_major", "flat")


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=H, topk=K, num_experts=E, dtype=torch.float32, mode="auto", device=DEVICE
    ) as made:
        yield made


def _dispatched(buffer: nccl_ep.Buffer, mode: str, layout: str, dtype: torch.dtype) -> nccl_ep.DispatchOutput:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(3)).to(dtype)
    capacity = 2 * T if layout == "expert_major" else None
    how: dict[str, Any] = {"mode": mode, "layout": layout, "capacity": capacity, "zero_padding": True}
    return nccl_ep.dispatch(x, IDS, WEIGHTS, buffer=buffer, num_experts=E, **how)


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_the_sum_is_multiplied_in_float32_and_rounded_once(
    buffer: nccl_ep.Buffer, mode: str, layout: str, dtype: torch.dtype
) -> None:
    out = _dispatched(buffer, mode, layout, dtype)
    bias = torch.randn(2, T, H, generator=torch.Generator().manual_seed(4)).to(dtype)
    biases = list(bias) if layout == "flat" else []
    how: dict[str, Any] = {"wire_dtype": torch.float32}
    plain = nccl_ep.combine(out.x.float(), out.handle, **how)  # the sum before it is rounded: one rank
    assert plain.abs().sum() > 0
    for scale in (2.5, 0.1, -3.0, 0.0):
        expected = plain * torch.tensor(scale)
        for each in biases:
            expected = expected + each.float()
        got = nccl_ep.combine(out.x, out.handle, bias=biases, scale=scale, **how)
        assert _bits(got) == _bits(expected.to(dtype)), scale
        given = torch.empty_like(got)
        assert nccl_ep.combine(out.x, out.handle, bias=biases, scale=scale, out=given, **how) is given
        assert _bits(given) == _bits(got), scale


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_of_one_keeps_the_bits(buffer: nccl_ep.Buffer, mode: str) -> None:
    out = _dispatched(buffer, mode, "flat", torch.bfloat16)
    bias = [torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()]
    for scale in (1, 1.0, True):
        got = nccl_ep.combine(out.x, out.handle, bias=bias, scale=scale)
        assert _bits(got) == _bits(nccl_ep.combine(out.x, out.handle, bias=bias))


@pytest.mark.parametrize("weights", ["dispatch", "given", None])
def test_a_split_combine_has_the_bits_of_a_whole_one(buffer: nccl_ep.Buffer, weights: str | None) -> None:
    out = _dispatched(buffer, "ll", "expert_major", torch.bfloat16)
    how: dict[str, Any] = {"weights": WEIGHTS if weights == "given" else weights, "scale": 2.5}
    whole = nccl_ep.combine(out.x, out.handle, **how)
    assert _bits(nccl_ep.combine_send(out.x.clone(), out.handle, **how).receive()) == _bits(whole)
    pending = nccl_ep.combine_send(out.x, out.handle, **how, async_finish=True)
    assert _bits(pending.receive()) == _bits(whole)
    assert _bits(whole) != _bits(nccl_ep.combine(out.x, out.handle, weights=how["weights"]))


@pytest.mark.parametrize(
    "scale, kind, text",
    [
        (math.nan, ValueError, "scale is nan, must be a finite number"),
        (math.inf, ValueError, "scale is inf, must be a finite number"),
        (-math.inf, ValueError, "scale is -inf, must be a finite number"),
        (1e39, ValueError, "scale is inf, must be a finite number"),
        ("2.5", TypeError, "scale is '2.5', must be a number"),
        (None, TypeError, "scale is None, must be a number"),
        (torch.tensor(2.5), TypeError, "scale is a Tensor, must be a number"),
    ],
)
def test_what_is_no_finite_number_is_refused(
    buffer: nccl_ep.Buffer, scale: Any, kind: type[Exception], text: str
) -> None:
    out = _dispatched(buffer, "ll", "expert_major", torch.bfloat16)
    for call in (nccl_ep.combine, nccl_ep.combine_send):
        with pytest.raises(kind) as refused:
            call(out.x, out.handle, scale=scale)
        assert str(refused.value) == text
    assert nccl_ep.combine(out.x, out.handle, scale=2.5).shape == (T, H)  # nothing was begun


# ---- Gradients


def _in_torch(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """A token's rows are tanh(x) of each of its experts, weighted."""
    factors = torch.where(IDS >= 0, weights, 0.0).sum(1, keepdim=True)
    out = scale * (factors * x.tanh())
    return out if bias is None else out + bias


def _layer(
    buffer: nccl_ep.Buffer, mode: str, kind: str, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    layout = "flat" if kind == "flat" else "expert_major"
    out = nccl_ep.dispatch(
        x, IDS, weights, buffer=buffer, num_experts=E, mode=mode, layout=layout, zero_padding=True,
        capacity=2 * T if layout == "expert_major" else None,
    )  # fmt: skip
    rows = out.x.tanh()
    if kind == "flat":
        rows = rows * torch.where(out.topk_idx >= 0, out.weights, 0.0).sum(1, keepdim=True)
    how: dict[str, Any] = {"scale": scale, "bias": bias}
    if kind == "split":
        return nccl_ep.combine_send(rows, out.handle, **how).receive()
    if kind == "given":
        return nccl_ep.combine(rows, out.handle, weights=weights, **how)
    return nccl_ep.combine(rows, out.handle, **how)


WAYS = [(mode, kind) for mode in MODES for kind in ("dispatch", "given", "flat")] + [("ll", "split")]


@pytest.mark.parametrize("mode, kind", WAYS)
def test_gradients_have_the_scale_as_a_factor_and_biases_have_not(buffer: nccl_ep.Buffer, mode: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weights, of_out, of_grad = (torch.randn(*size, generator=generator) for size in ((T, H), (T, K), (T, H), (T, H)))
    bias = torch.randn(T, H, generator=generator) if kind == "flat" else None
    found = []
    for run in (_in_torch, lambda *given: _layer(buffer, mode, kind, *given)):
        leaves = [each.clone().requires_grad_() for each in (x, weights, bias) if each is not None]
        out = run(leaves[0], leaves[1], leaves[2] if bias is not None else None, 2.5)
        first = torch.autograd.grad(out, leaves, of_out, create_graph=True)
        second = torch.autograd.grad((first[0] * of_grad).sum(), leaves[:2])
        found.append([out, *first, *second])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
    if bias is not None:
        assert torch.equal(found[1][3], of_out)


@pytest.mark.parametrize("mode", MODES)
def test_a_compiler_takes_it_as_a_constant(buffer: nccl_ep.Buffer, mode: str) -> None:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(6))

    def layer(x: torch.Tensor, scale: float) -> torch.Tensor:
        return _layer(buffer, mode, "dispatch", x, WEIGHTS, None, scale)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for scale in (2.5, 0.5):
        found = []
        for run in (layer, compiled):
            leaf = x.clone().requires_grad_()
            out = run(leaf, scale)
            out.sum().backward()
            assert leaf.grad is not None
            found.append((_bits(out), leaf.grad))
        assert found[1][0] == found[0][0]
        torch.testing.assert_close(found[1][1], found[0][1])
