"""Small functions that programs written for DeepEP import of ``deep_ep.utils.math``. All are plain torch.

Source: DeepEP V2's functions of these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]

_BLOCK = 128  # elements that share a scale
_LARGEST_E4M3, _LEAST_AMAX = 448.0, 1e-4
_MANTISSA_BITS = 23


def ceil_div(x: int, y: int) -> int:
    """The least integer that is not below x / y."""
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b, where 0 / 0 is 0. ZeroDivisionError for any other a over 0."""
    return 0 if a == 0 and b == 0 else a / b


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How much x and y differ, in float64: 1 - 2 <a, b> / (|a|^2 + |b|^2) for a = x + 1, b = y + 1. 0: equal."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] in e4m3 with a float32 scale for 128 elements: float8_e4m3fn [T, H], float32 [T, ceil(H / 128)].

    A block's scale is its largest |x| (at least 1e-4) over 448.
    """
    blocks = _blocks_of(x)
    amax = blocks.abs().float().amax(2).clamp(min=_LEAST_AMAX)
    cast = (blocks * (_LARGEST_E4M3 / amax.unsqueeze(2))).to(torch.float8_e4m3fn)
    return cast.flatten(1)[:, : x.shape[1]].contiguous(), amax / _LARGEST_E4M3


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H] of what ``per_token_cast_to_fp8`` made. Scales may be exponents, four in an int32 (UE8M0)."""
    blocks = _blocks_of(x_fp8.float())
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8).to(torch.int32)
        x_scales = (exponents << _MANTISSA_BITS).view(torch.float32)
    scales = x_scales[:, : blocks.shape[1]]
    return (blocks * scales.unsqueeze(2)).flatten(1).to(torch.bfloat16)[:, : x_fp8.shape[1]].contiguous()


def _blocks_of(x: torch.Tensor) -> torch.Tensor:
    """x [T, H] as [T, ceil(H / 128), 128], zeros added."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
    rows, hidden = x.shape
    padded = torch.nn.functional.pad(x, (0, -hidden % _BLOCK))
    return padded.view(rows, ceil_div(hidden, _BLOCK), _BLOCK)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Of each row of x [N, K], integers below num_slots: the different ones, the largest first, then -1. In place."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, must be two-dimensional")
    falling = x.sort(dim=1, descending=True).values
    falling[:, 1:] = falling[:, 1:].masked_fill(falling[:, 1:] == falling[:, :-1], -1)
    unique = falling.clamp(min=-1).sort(dim=1, descending=True).values
    x.copy_(unique)
    x[:, num_slots:] = -1


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """scores [T, E] of which experts in other groups than those of group_idx [T, G] have 0."""
    tokens, experts = scores.shape
    chosen = torch.zeros(tokens, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(experts // num_groups, 1)


def hash_tensor(t: torch.Tensor) -> int:
    """The sum of the tensor's 32-bit words, as int32. Equal for equal bits."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of the hashes of tensors, and of those in tuples and lists. Others, as None, are left out."""
    value = 0
    for tensor in _flat(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of the elements of tensors, and of those in tuples and lists."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        elif isinstance(value, torch.Tensor):
            yield value
