"""Combine over "fp8" and "logfmt": what is lost, what crosses, what is refused. tests/contract has the bits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.testing import run_ranks

FORMATS = reference.WIRE_FORMATS
MODES = ("ll", "ht")
# Of the elements' magnitudes and of the largest of their block of 128: what a sum may be off.
BOUNDS = {"fp8": (1 / 16, 1 / 28), "logfmt": (1 / 44, 1 / 44)}
MOST_BYTES = {"fp8": 0.53, "logfmt": 0.65}
RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 2, 4, 4, 6, 1024


def ranks_of(hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {
        "max_tokens": TOKENS, "hidden": hidden, "topk": TOPK, "num_experts": EXPERTS, "dtype": dtype, "device": "cpu"
    }  # fmt: skip


def drawn(rank: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose magnitudes differ by many powers of two, and experts of all ranks for every token."""
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, hidden, generator=made) * torch.exp2(6 * torch.randn(TOKENS, hidden, generator=made))
    ids = torch.stack([torch.randperm(EXPERTS, generator=made) for _ in range(TOKENS)])
    return x.clamp(-512, 512).to(dtype), ids


def through_layer(mode: str, layout: str, **options: Any) -> list[tuple[torch.Tensor, int]]:
    """Of each rank: what comes back, of rows that are no multiples of one another, and the bytes of rows that the
    combine sent to others."""

    def body(group: Any) -> tuple[torch.Tensor, int]:
        x, ids = drawn(group.rank())
        weights = torch.full((TOKENS, TOPK), 0.25)
        with nccl_ep.Buffer.for_shapes(group, mode=mode, wire_dtype=torch.float32, **ranks_of()) as buffer:
            room = {"capacity": RANKS * TOKENS} if layout == "expert_major" else {}
            out = nccl_ep.dispatch(
                x, ids, weights, buffer=buffer, num_experts=EXPERTS, layout=layout, mode=mode, zero_padding=True, **room
            )
            before = buffer.wire_bytes()["rows"]
            y = nccl_ep.combine(out.x * (group.rank() + 1), out.handle, **options)
            after = buffer.wire_bytes()["rows"]
            sent = [b - a for r, (a, b) in enumerate(zip(before, after, strict=True)) if r != group.rank()]
            return y, sum(sent)

    return run_ranks(RANKS, body)


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("layout", ["expert_major", "packed", "flat", "rank_major"])
@pytest.mark.parametrize("mode", MODES)
def test_fewer_bytes_cross_and_the_sum_is_near(mode: str, layout: str, wire: str) -> None:
    plain, narrow = through_layer(mode, layout), through_layer(mode, layout, wire_dtype=wire)
    wide = through_layer(mode, layout, wire_dtype=torch.float32)
    of_element, of_block = BOUNDS[wire]
    for rank in range(RANKS):
        assert 0 < narrow[rank][1] <= MOST_BYTES[wire] * plain[rank][1], (narrow[rank][1], plain[rank][1])
        exact, got = wide[rank][0].float(), narrow[rank][0].float()
        # Both ranks' sums are multiples of the row: off by their bounds together, and by the last rounding to bf16.
        largest = exact.abs().view(TOKENS, -1, 128).amax(-1).repeat_interleave(128, 1)
        most = torch.minimum(of_block * largest, torch.maximum(of_element * exact.abs(), 1e-3 * largest))
        assert ((got - exact).abs() <= most + exact.abs() / 100).all()
        assert not got.equal(plain[rank][0].float())


@pytest.mark.parametrize("hidden", [16, 48, 128, 144, 2048, 7168])
@pytest.mark.parametrize("wire", FORMATS)
def test_each_element_is_within_the_bound_of_its_format(wire: str, hidden: int) -> None:
    """One expert of one rank: what comes back is the row, rounded once to the format and once to bf16."""
    x, _ = drawn(5, hidden)
    x[0] = 0
    x[1, ::2] = 0
    x[2] = 1.25
    sizes = {**ranks_of(hidden), "topk": 1, "num_experts": 1}
    with nccl_ep.Buffer.for_shapes(None, **sizes) as buffer:
        out = nccl_ep.dispatch(x, torch.zeros(TOKENS, 1, dtype=torch.int64), buffer=buffer, num_experts=1)
        got = nccl_ep.combine(out.x, out.handle, wire_dtype=wire).float()
    of_element, of_block = BOUNDS[wire]
    for first in range(0, hidden, 128):
        want, mine = x[:, first : first + 128].float(), got[:, first : first + 128]
        largest = want.abs().amax(-1, keepdim=True)
        assert ((mine - want).abs() <= of_block * largest + want.abs() / 256).all()
        if wire == "logfmt":
            of_x = torch.maximum(of_element * want.abs(), 2.0**-32 * largest)
            assert ((mine - want).abs() <= of_x + want.abs() / 256).all()
    assert not got[0].any() and not got[1, ::2].any() and (got[2] == 1.25).all()


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_home_and_number_of_ranks_of_a_token_change_nothing(mode: str, wire: str) -> None:
    """Each rank gives the same tokens to the same experts, and gets the same bits: an own sum is rounded as others."""

    def body(group: Any) -> torch.Tensor:
        x, ids = drawn(0)
        with nccl_ep.Buffer.for_shapes(group, mode=mode, **ranks_of()) as buffer:
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, layout="packed", mode=mode)
            return nccl_ep.combine(out.x * (group.rank() + 1), out.handle, wire_dtype=wire)

    first, second = run_ranks(RANKS, body)
    assert first.equal(second) and first.any()


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_pass_the_rounding_as_if_it_were_not_there(mode: str, wire: str) -> None:
    def body(group: Any) -> list[torch.Tensor]:
        x, ids = drawn(group.rank())
        grads = []
        with nccl_ep.Buffer.for_shapes(group, mode=mode, **ranks_of()) as buffer:
            for wire_dtype in (None, wire):
                given, weights = x.clone().requires_grad_(), torch.rand(TOKENS, TOPK).requires_grad_()
                torch.nn.init.constant_(weights, 0.5)
                out = nccl_ep.dispatch(
                    given, ids, weights, buffer=buffer, num_experts=EXPERTS, layout="packed", mode=mode
                )
                y = nccl_ep.combine(out.x * 3, out.handle, wire_dtype=wire_dtype)
                y.backward(torch.ones_like(y))
                assert given.grad is not None and weights.grad is not None
                grads += [given.grad, weights.grad]
        return grads

    for x_plain, weights_plain, x_narrow, weights_narrow in run_ranks(RANKS, body):
        assert x_plain.any() and x_plain.equal(x_narrow) and weights_plain.equal(weights_narrow)


@pytest.mark.parametrize("wire", FORMATS)
def test_a_split_combine_and_a_given_output_have_the_bits_of_a_plain_one(wire: str) -> None:
    def body(group: Any) -> None:
        x, ids = drawn(group.rank())
        with nccl_ep.Buffer.for_shapes(group, **ranks_of()) as buffer:
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS)
            want = nccl_ep.combine(out.x, out.handle, wire_dtype=wire)
            assert nccl_ep.combine_send(out.x, out.handle, wire_dtype=wire).receive().equal(want)
            given = torch.empty_like(want)
            assert nccl_ep.combine(out.x, out.handle, wire_dtype=wire, out=given) is given and given.equal(want)

    run_ranks(RANKS, body)


REFUSED: list[tuple[str, torch.dtype, dict[str, Any], str]] = [
    ("name", torch.bfloat16, {"wire_dtype": "fp9"},
     "wire_dtype is 'fp9', must be torch.bfloat16, torch.float32, \"fp8\" or \"logfmt\""),
    ("rows", torch.float32, {"wire_dtype": "fp8", "out_dtype": torch.bfloat16},
     "combine adds up fp32 rows to bf16 over fp8: rows and output must both be bf16, or both fp16"),
    ("output", torch.bfloat16, {"wire_dtype": "logfmt", "out_dtype": torch.float32},
     "combine adds up bf16 rows to fp32 over logfmt: rows and output must both be bf16, or both fp16"),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("what", "dtype", "options", "text"), REFUSED, ids=[each[0] for each in REFUSED])
def test_what_a_format_cannot_carry_is_refused_with_the_values(
    mode: str, what: str, dtype: torch.dtype, options: dict[str, Any], text: str
) -> None:
    x, ids = drawn(0, dtype=dtype)
    if options.get("out_dtype") == torch.float32:
        text = re.escape(text) + "|wire_dtype is 'logfmt', must be torch.float32$"
    else:
        text = re.escape(text)
    with nccl_ep.Buffer.for_shapes(None, mode=mode, **ranks_of(dtype=dtype)) as buffer:
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, layout="packed", mode=mode)
        with pytest.raises(ValueError, match=text):
            nccl_ep.combine(out.x, out.handle, **options)
        assert nccl_ep.combine(out.x, out.handle).any()


@pytest.mark.parametrize("wire", FORMATS)
def test_rows_that_are_no_multiple_of_16_elements(wire: str) -> None:
    x = torch.ones(TOKENS, 24, dtype=torch.bfloat16)
    with nccl_ep.Buffer.for_shapes(None, **ranks_of(24)) as buffer:
        out = nccl_ep.dispatch(x, torch.zeros(TOKENS, TOPK, dtype=torch.int64), buffer=buffer, num_experts=EXPERTS)
        with pytest.raises(ValueError, match=f"rows of 24 elements over {wire}: must be a multiple of 16 elements"):
            nccl_ep.combine(out.x, out.handle, wire_dtype=wire)


def test_ranks_with_other_formats_are_told_both() -> None:
    def body(group: Any) -> str:
        x, ids = drawn(group.rank())
        with nccl_ep.Buffer.for_shapes(group, **ranks_of(), timeout=60.0) as buffer:
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS)
            try:
                nccl_ep.combine(out.x, out.handle, wire_dtype=FORMATS[group.rank()])
                buffer.check()  # of kernels, which say it later
            except nccl_ep.MismatchError as error:
                return str(error)
        return ""

    for text in run_ranks(RANKS, body):
        assert "wire fp8" in text and "wire logfmt" in text, text
