"""MXFP8 and NVFP4 as callers meet them: shapes, numbers again, gradients, split calls, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.block_scales import plain_scales

TOKENS, HIDDEN, EXPERTS = 5, 96, 2
IDS = torch.tensor([[0], [1], [1], [0], [1]])
SIZES: dict[str, Any] = {"max_tokens": TOKENS, "hidden": HIDDEN, "topk": 1, "num_experts": EXPERTS, "device": "cpu"}
BLOCKS = {"mxfp8": (32, torch.float8_e8m0fnu, HIDDEN), "nvfp4": (16, torch.float8_e4m3fn, HIDDEN // 2)}


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(None, **SIZES, mode="auto") as made:
        yield made


def tokens(dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(5)).to(dtype)


def dispatched(buffer: nccl_ep.Buffer, x: torch.Tensor, quant: Any, **more: Any) -> nccl_ep.DispatchOutput:
    return nccl_ep.dispatch(x, IDS, **{"buffer": buffer, "num_experts": EXPERTS, "quant": quant, "mode": "ll", **more})


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("quant", BLOCKS)
def test_rows_are_numbers_again(buffer: nccl_ep.Buffer, quant: str, mode: str) -> None:
    x = tokens()
    block, dtype, width = BLOCKS[quant]
    scale = 2688 / x.float().abs().max() if quant == "nvfp4" else None
    out = dispatched(buffer, x, quant, mode=mode, layout="flat", scales=scale)
    assert out.scales is not None
    assert out.x.shape == (TOKENS, width) and out.scales.dtype == dtype
    assert out.scales.shape == (TOKENS, HIDDEN // block)
    rows = out.dequantized(torch.float32, scale)
    amax = x.float().view(TOKENS, -1, block).abs().amax(-1).repeat_interleave(block, 1)
    assert rows.shape == x.shape and ((rows - x.float()).abs() <= amax / (5 if quant == "nvfp4" else 14)).all()
    assert out.dequantized(tensor_scale=scale).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["expert_major", "packed", "rank_major", "flat"])
@pytest.mark.parametrize("quant", BLOCKS)
def test_swizzled_scales_are_tiles_of_the_plain_ones(buffer: nccl_ep.Buffer, quant: str, layout: str) -> None:
    x = tokens()
    plain = dispatched(buffer, x, quant, layout=layout, zero_padding=True)
    tiled = dispatched(buffer, x, f"{quant}_swizzled", layout=layout, zero_padding=True)
    assert plain.scales is not None and tiled.scales is not None
    *outer, rows, count = plain.scales.shape
    assert tiled.scales.shape == (*outer, 1, -(-count // 4), 512) and tiled.scales.dtype == plain.scales.dtype
    assert plain_scales(tiled.scales, rows, count).view(torch.uint8).equal(plain.scales.view(torch.uint8))
    assert tiled.x.view(torch.uint8).equal(plain.x.view(torch.uint8))
    assert tiled.dequantized().equal(plain.dequantized())


@pytest.mark.parametrize("quant", [*BLOCKS, "nvfp4_swizzled"])
def test_a_split_dispatch_has_the_same_rows(buffer: nccl_ep.Buffer, quant: str) -> None:
    x, scale = tokens(), torch.tensor(3.0) if quant.startswith("nvfp4") else None
    kwargs: dict[str, Any] = {"buffer": buffer, "num_experts": EXPERTS, "quant": quant, "scales": scale}
    whole = nccl_ep.dispatch(x, IDS, zero_padding=True, mode="ll", **kwargs)
    split = nccl_ep.dispatch_send(x, IDS, zero_padding=True, **kwargs).receive()
    for mine, theirs in ((split.x, whole.x), (split.scales, whole.scales)):
        assert mine is not None and theirs is not None and mine.shape == theirs.shape
    assert split.dequantized(torch.float32, scale).equal(whole.dequantized(torch.float32, scale))


@pytest.mark.parametrize("quant", [*BLOCKS, "mxfp8_swizzled"])
def test_gradients_pass_as_if_nothing_were_quantised(buffer: nccl_ep.Buffer, quant: str) -> None:
    x = tokens().requires_grad_()
    out = dispatched(buffer, x, quant, layout="flat")
    assert out.carrier is not None and out.carrier.shape == (TOKENS, HIDDEN)
    factors = torch.arange(1.0, HIDDEN + 1).bfloat16()
    (out.dequantized() * factors).sum().backward()
    assert x.grad is not None and x.grad.equal(factors.expand(TOKENS, -1))


def test_a_row_of_the_smallest_code_arrives(buffer: nccl_ep.Buffer) -> None:
    """All of its words are ones, which is what a slot has before anything came."""
    x = torch.full((TOKENS, HIDDEN), -6.0).bfloat16()
    out = dispatched(buffer, x, "nvfp4", layout="flat")
    assert out.x.view(torch.uint8).eq(0xFF).all() and out.dequantized().equal(x)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"x": tokens(torch.float32)}, "quant nvfp4 of fp32: only bf16 and fp16 are quantised"),
    "odd rows": ({"x": tokens(hidden=80)}, "quant nvfp4 of rows of 80 elements: must be a multiple of 32"),
    "scales of MXFP8": (
        {"quant": "mxfp8", "scales": torch.ones(TOKENS, 3)},
        "scales given together with quant mxfp8, which makes its own",
    ),
    "scales of rows": ({"scales": torch.ones(TOKENS, 6)}, r"scales are torch.float32 \[5, 6\], with quant nvfp4 they"),
    "a scale of another dtype": ({"scales": torch.ones(1).double()}, "scales are torch.float64"),
    "a scale of 0": ({"scales": torch.zeros(())}, "scales are 0, with quant nvfp4 they must be positive and finite"),
    "tiles in high throughput": (
        {"quant": "mxfp8_swizzled", "mode": "ht", "layout": "flat"},
        "quant is mxfp8_swizzled, which low latency alone has",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(buffer: nccl_ep.Buffer, what: str) -> None:
    changes, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        dispatched(buffer, **{"x": tokens(), "quant": "nvfp4", **changes})
    assert dispatched(buffer, tokens(), "mxfp8").counts.tolist() == [2, 3]


@pytest.mark.parametrize("quant", [*BLOCKS, "mxfp8_swizzled", "nvfp4_swizzled"])
def test_sizes_that_a_compiler_sees_are_those_there_are(buffer: nccl_ep.Buffer, quant: str) -> None:
    def sizes(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, quant=quant, mode="ll", layout="packed")  # type: ignore[arg-type]
        assert out.scales is not None
        return out.x, out.scales

    whole = sizes(tokens(), IDS)
    compiled = torch.compile(sizes, backend="eager", fullgraph=True)(tokens(), IDS)
    for mine, theirs in zip(compiled, whole, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype


def test_the_oracle_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown quantisation 'mxfp4'"):
        reference.quantize(tokens(), "mxfp4")
    with pytest.raises(ValueError, match="not a multiple of 32"):
        reference.quantize(tokens(hidden=48), "mxfp8")
