"""NVFP4 rows of DeepEP's hybrid-ep branch: quantised where they are sent, with scales in the order that GEMMs read.

An element is an e2m1 number (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign). 16 elements of a row share an e4m3 scale, and the
whole dispatch shares a float32 factor, the global scale. All of it is torch operations on the tensors' own device. None
waits for the device, so a CUDA graph may hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...checks import require_bools, require_on, require_tensors
from ...gradients import refuse_backward, wants_gradient

BLOCK = 16  # elements that share a scale
_HIDDEN = 32  # elements in 16 bytes, of which rows are a multiple
_LARGEST_E2M1, _LARGEST_E4M3 = 6.0, 448.0
# Between an e2m1 number and the next, and whether the middle itself rounds up: to the even code.
_MIDDLES = (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)
_TILE_ROWS, _TILE_LANES, _WORD_SCALES = 128, 32, 4  # of the order of scales
_DTYPES = (torch.bfloat16, torch.float16)


def global_scale_of(
    seq: torch.Tensor, x: torch.Tensor, x_global_scale: object, use_fp8: bool, use_ue8m0_for_sf: object
) -> torch.Tensor:
    """The factor of a dispatch with ``use_nvfp4``, float32 of no dimension: a view of what was given, or 1.

    Args:
        seq: the buffer's. x: [T, H] bf16 or fp16, H a multiple of 32. x_global_scale: float32 of any shape, of which
            the first element counts, or None. Its value is looked at on the CPU alone.

    Raises: ValueError, TypeError with what is wrong.
    """
    if use_fp8:
        raise ValueError(f"use_fp8 is {use_fp8} (its default is True) and use_nvfp4 is set: they exclude each other")
    require_bools(use_ue8m0_for_sf=use_ue8m0_for_sf)
    if use_ue8m0_for_sf:
        raise TypeError(f"low_latency_dispatch(use_ue8m0_for_sf={use_ue8m0_for_sf!r}) is not served: scales are e4m3")
    require_tensors(x=x)
    if x_global_scale is None:
        x_global_scale = torch.ones((), dtype=torch.float32, device=seq.device)
    require_tensors(x_global_scale=x_global_scale)
    assert isinstance(x_global_scale, torch.Tensor)
    require_on(seq, ("x", "x_global_scale"), (x, x_global_scale))
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}, with use_nvfp4 it must be torch.bfloat16 or torch.float16")
    if x.shape[1] == 0 or x.shape[1] % _HIDDEN:
        raise ValueError(f"x has shape {list(x.shape)}, with use_nvfp4 hidden must be a multiple of {_HIDDEN}")
    if x_global_scale.dtype != torch.float32 or x_global_scale.numel() == 0:
        raise ValueError(
            f"x_global_scale is {x_global_scale.dtype} {list(x_global_scale.shape)}, must be torch.float32 with an "
            "element"
        )
    scale = x_global_scale.detach()[(0,) * x_global_scale.dim()]
    if scale.device.type == "cpu" and not 0 < float(scale) < math.inf:
        raise ValueError(f"x_global_scale is {float(scale)}, must be positive and finite")
    return scale


@torch.no_grad()
def quantize(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers as NVFP4, in float32 arithmetic that rounds to nearest, ties to even.

    The scale of a block is ``s = e4m3(global_scale * (amax * (1 / 6)))``, at most 448. An element becomes ``e2m1(x * (1
    / (s * (1 / global_scale))))``, at most 6; all of a block become 0 where s is 0. So x is about ``e2m1 * s /
    global_scale``. A NaN makes the scale of its block NaN.

    Args:
        x: [T, H] bf16, fp16 or fp32, H a multiple of 16. global_scale: float32 of no dimension, commonly ``448 * 6``
            over the largest |x| of all ranks.

    Returns: uint8 [T, H / 2], element 2i in the low bits of byte i and 2i + 1 in the high bits; float8_e4m3fn
        [T, H / 16].
    """
    num_tokens, hidden = x.shape
    blocks = x.float().reshape(num_tokens, hidden // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=2)
    scales = (global_scale * (amax * (1 / _LARGEST_E2M1))).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    rounded = scales.float()
    factors = (rounded * global_scale.reciprocal()).reciprocal().where(rounded > 0, 0.0)
    values = blocks * factors.unsqueeze(2)
    sizes = values.abs()
    codes = values.signbit().to(torch.uint8) * 8
    for middle, goes_up in _MIDDLES:
        codes += sizes >= middle if goes_up else sizes > middle
    pairs = codes.view(num_tokens, hidden // 2, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4, scales


def send(
    op: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor, global_scale: torch.Tensor, receives: bool
) -> tuple[Any, ...]:
    """Quantises x and calls ``op`` with rows and scales.

    Scales travel as int32, four in each; in place of scales that a row has not got, zeros.

    Args:
        op: returns the pair of received rows and scales, and more. receives: whether they are filled by then.

    Returns: rows and scales, [L, rm, rk, 32, 4, 4] float8_e4m3fn for the latter in their order, and what more ``op``
        returned.
    """
    rows, scales = quantize(x, global_scale)
    given = scales.view(torch.uint8)
    missing = -given.shape[1] % _WORD_SCALES
    if missing:
        given = torch.nn.functional.pad(given, (0, missing))
    (received_rows, words), *more = op(rows, given.view(torch.int32))
    local, capacity, count = words.shape
    tiles = -(-capacity // _TILE_ROWS)
    sizes = (local, tiles, count, _TILE_LANES, _TILE_ROWS // _TILE_LANES, _WORD_SCALES)
    swizzled = torch.empty(sizes, dtype=torch.float8_e4m3fn, device=x.device)
    if receives:
        _swizzle(words, swizzled)
    if wants_gradient(x):
        refuse_backward("low_latency_dispatch with use_nvfp4", swizzled)
    return received_rows, words, swizzled, *more


def receive(op: Callable[[], None], scales: torch.Tensor, swizzled: torch.Tensor) -> None:
    """Calls ``op``, which fills the scales, and puts them in their order."""
    op()
    _swizzle(scales, swizzled)


def received(rows: torch.Tensor, swizzled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the branch returns them, without a copy: rows [R * M, H / 2, L], scales [32, 4, rm, 4, rk, L]."""
    return rows.permute(1, 2, 0), swizzled.permute(3, 4, 1, 5, 2, 0)


@torch.inference_mode()
def _swizzle(scales: torch.Tensor, swizzled: torch.Tensor) -> None:
    """Row r, scale s of an expert comes to [r // 128, s // 4, r % 32, r % 128 // 32, s % 4].

    In inference mode, where tensors of any mode may be written.

    Args:
        scales: int32 [L, R * M, rk], four scales in each. swizzled: float8_e4m3fn [L, rm, rk, 32, 4, 4].
    """
    tiles = swizzled.view(torch.int32).squeeze(5).permute(0, 1, 4, 3, 2)
    missing = -scales.shape[1] % _TILE_ROWS
    if missing:
        scales = torch.nn.functional.pad(scales, (0, 0, 0, missing))
    tiles.copy_(scales.view(tiles.shape))
