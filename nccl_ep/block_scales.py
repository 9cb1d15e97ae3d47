"""Rows that dispatch has quantised, as numbers again; and the order in which GEMMs read the scales of small blocks."""

from __future__ import annotations

import torch

_FP8_GROUP = 128  # elements that share a scale of FP8
_TILE_ROWS, _TILE_SCALES = 128, 4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_numbers(x: torch.Tensor) -> torch.Tensor:
    """float32 [.., H] of packed e2m1 [.., H/2]; element 2i is in the low bits of byte i."""
    packed = x.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    return torch.tensor(_E2M1 + tuple(-each for each in _E2M1), device=x.device)[codes]


def plain_scales(scales: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """Swizzled scales [.., ceil(rows/128), ceil(count/4), 512] row by row, [.., rows, count]: a copy."""
    *outer, tiles, words, _ = scales.shape
    inner = scales.view(torch.uint8).view(*outer, tiles, words, 32, _TILE_ROWS // 32, _TILE_SCALES)
    ordered = inner.movedim((-2, -3), (-4, -3))  # tile, row // 32, row % 32, word, scale
    plain = ordered.reshape(*outer, tiles * _TILE_ROWS, words * _TILE_SCALES)
    return plain[..., :rows, :count].contiguous().view(scales.dtype)


def dequantized_rows(x: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
    """float32 [.., H] of rows and scales of any ``quant``."""
    numbers = e2m1_numbers(x) if x.dtype == torch.float4_e2m1fn_x2 else x.float()
    hidden = numbers.shape[-1]
    if scales.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        block = 32 if scales.dtype == torch.float8_e8m0fnu else 16
        if scales.dim() > x.dim():
            scales = plain_scales(scales, x.shape[-2], hidden // block)
        factors = scales.float()
        if tensor_scale is not None:
            factors = factors * tensor_scale.reshape(()).reciprocal()
        return numbers * factors.repeat_interleave(block, -1)
    if scales.dtype == torch.int32:  # four exponents in a word
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponents = scales.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(0xFF).flatten(-2)
        groups = (hidden + _FP8_GROUP - 1) // _FP8_GROUP
        scales = torch.exp2(exponents[..., :groups].float() - 127)
    return numbers * scales.repeat_interleave(_FP8_GROUP, -1)[..., :hidden]
