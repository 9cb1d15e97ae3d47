"""Outputs of the caller whose scales begin at any element, as a view of a larger tensor may."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.config import pack_dispatch
from nccl_ep.handle import LAYOUTS, QUANTS

TOKENS, HIDDEN, TOPK, EXPERTS = 5, 1024, 2, 4
QUANT_NAMES = ("fp8", "fp8_rounded", "fp8_ue8m0", "mxfp8", "nvfp4")
SWIZZLED = ("mxfp8_swizzled", "nvfp4_swizzled")
CAPACITY = {"expert_major": TOKENS, "packed": EXPERTS * TOKENS, "flat": EXPERTS * TOKENS, "rank_major": TOKENS}
SCALES = 1  # place among the tensors of a dispatch
_ops = torch.ops.nccl_ep


def make_buffer(group: Any, device: str, mode: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, device=device, timeout=60.0, mode=mode
    )


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros; torch has none of four bits."""
    return torch.zeros(tensor.nbytes, dtype=torch.uint8, device=tensor.device).view(tensor.dtype).view(tensor.shape)


def _at_next_element(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same shape, an element behind the beginning of its memory."""
    size = tensor.element_size()
    made = torch.zeros((tensor.numel() + 1) * size, dtype=torch.uint8, device=tensor.device)
    return made[size:].view(tensor.dtype).view(tensor.shape)


def _arguments(buffer: nccl_ep.Buffer, quant: str, layout: str) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(buffer.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=made).bfloat16().to(buffer.device)
    ids = torch.rand(TOKENS, EXPERTS, generator=made).topk(TOPK).indices.to(buffer.device)
    weights = torch.rand(TOKENS, TOPK, generator=made).to(buffer.device)
    numbers = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "zero_padding": True}
    config = pack_dispatch(numbers | {"layout": int(LAYOUTS[layout]), "quant": QUANTS[quant]})
    return x, ids, weights, CAPACITY[layout] * (buffer.num_ranks if layout != "rank_major" else 1), config


def _require_same_bytes(tensors: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str) -> None:
    for place, (mine, wanted) in enumerate(zip(tensors, expected, strict=True)):
        same = torch.equal(mine.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
        assert same, f"{what}: tensor {place} of shape {list(wanted.shape)}"


def check_low_latency(buffer: nccl_ep.Buffer) -> None:
    for quant in QUANT_NAMES:
        for layout in LAYOUTS:
            x, ids, weights, capacity, config = _arguments(buffer, quant, layout)
            given = (buffer._seq, x, None, ids, weights, capacity, config)
            expected = _ops.ll_dispatch.default(*given)
            outs = [_like(each) for each in expected]
            outs[SCALES] = _at_next_element(expected[SCALES])
            _ops.ll_dispatch_out.default(*given, *outs)
            _require_same_bytes(tuple(outs[:-1]), tuple(expected[:-1]), f"{quant}, {layout}")  # the last is the handle


def check_high_throughput(buffer: nccl_ep.Buffer) -> None:
    for quant in QUANT_NAMES:
        for layout in ("expert_major", "packed", "flat"):
            x, ids, weights, capacity, config = _arguments(buffer, quant, layout)
            given = (buffer._seq, [x], None, ids, weights, capacity, config)
            expected = _ops.ht_dispatch.default(*given)[:8]
            outs = [_like(each) for each in expected]
            outs[SCALES] = _at_next_element(expected[SCALES])
            _ops.ht_dispatch_out.default(*given, outs[:1], *outs[1:])
            _require_same_bytes(tuple(outs[:2]), tuple(expected[:2]), f"{quant}, {layout}")


def check_tiles_are_refused(buffer: nccl_ep.Buffer) -> None:
    """GEMMs read swizzled scales in tiles, and a tile has an aligned address."""
    for quant in SWIZZLED:
        x, ids, weights, capacity, config = _arguments(buffer, quant, "expert_major")
        given = (buffer._seq, x, None, ids, weights, capacity, config)
        outs = [_like(each) for each in _ops.ll_dispatch.default(*given)]
        outs[SCALES] = _at_next_element(outs[SCALES])
        with pytest.raises(ValueError, match=f"output scales at address 0x[0-9a-f]+ are not aligned to 16 .*{quant}"):
            _ops.ll_dispatch_out.default(*given, *outs)


def check_all(group: Any, device: str) -> None:
    with make_buffer(group, device, "ll") as buffer:
        check_low_latency(buffer)
        check_tiles_are_refused(buffer)
    with make_buffer(group, device, "ht") as buffer:
        check_high_throughput(buffer)
