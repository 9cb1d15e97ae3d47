"""Number formats of the oracle: FP8, and what counts as the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..marks import uncompiled

QUANT_MODES = ("fp8", "fp8_rounded", "fp8_ue8m0")
BLOCK_MODES = ("mxfp8", "mxfp8_swizzled", "nvfp4", "nvfp4_swizzled")

FP8_MAX = 448.0
FP8_GROUP = 128
FP8_MIN_AMAX = 1e-4

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(tensor: Tensor) -> Tensor:
    """A row-major copy. Tensor.contiguous keeps odd strides of dimensions of size 0 and 1, on which a view
    of another dtype fails."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


# --- FP8


@uncompiled
def quantize_fp8(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Rows [T, H] of a float dtype as E4M3, in groups of 128 elements of which the last may be shorter.

    Returns (float8_e4m3fn [T, H], scales): fp32 [T, ceil(H / 128)], or in mode "fp8_ue8m0" int32
    [T, ceil(H / 512)] with the biased exponent of group g in byte g % 4 of word g // 4.
    NaN elements stay NaN and do not take part in the maximum. Raises ValueError.
    """
    if mode not in QUANT_MODES:
        raise ValueError(f"unknown quantisation {mode!r}")
    tokens, hidden = x.shape
    if hidden == 0 or hidden % 16:
        raise ValueError(f"rows of {hidden} elements cannot be quantised: not a multiple of 16")
    groups = -(-hidden // FP8_GROUP)
    padded = torch.zeros(tokens, groups * FP8_GROUP, dtype=torch.float32)
    padded[:, :hidden] = x.to(torch.float32)
    grouped = padded.view(tokens, groups, FP8_GROUP)
    magnitude = torch.where(torch.isnan(grouped), 0.0, grouped.abs())
    amax = magnitude.amax(-1).clamp(min=FP8_MIN_AMAX)
    plain_scale = amax * torch.tensor(1.0 / FP8_MAX, dtype=torch.float32)

    exponent = torch.zeros_like(amax, dtype=torch.int32)
    if mode == "fp8":
        factor, scale = torch.tensor(FP8_MAX, dtype=torch.float32) / amax, plain_scale
    else:
        # From its bits the power is exact, and so is its reciprocal, denormal for the largest.
        exponent = _ceil_log2(plain_scale)
        scale = ((exponent + 127) << 23).view(torch.float32)
        factor = torch.tensor(1.0, dtype=torch.float32) / scale

    # Out of range, the cast alone would give NaN; clamp saturates and lets NaN through.
    scaled = (grouped * factor.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    quantized = compact(scaled.view_as(padded)[:, :hidden].to(torch.float8_e4m3fn))
    if mode != "fp8_ue8m0":
        return quantized, scale
    biased = torch.zeros(tokens, align_up(groups, 4), dtype=torch.uint8)
    biased[:, :groups] = (exponent + 127).to(torch.uint8)
    return quantized, biased.view(torch.int32)


def _ceil_log2(value: Tensor) -> Tensor:
    """ceil(log2(value)) of positive values, int32, exact, kept within [-126, 127]; 127 for infinity."""
    mantissa, exponent = torch.frexp(value)
    exact = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(torch.isinf(value), 127, exact).clamp(-126, 127).to(torch.int32)


def _rounded_fp8(values: Tensor) -> Tensor:
    quantized, scale = quantize_fp8(values, "fp8")
    widened = scale.repeat_interleave(FP8_GROUP, 1)[:, : values.shape[1]]
    return quantized.to(torch.float32) * widened


# --- MXFP8 and NVFP4

MX_BLOCK, NVFP4_BLOCK = 32, 16
_LARGEST_E2M1 = 6.0
# Between an e2m1 number and the next, and whether the middle itself rounds up: to the even code.
_MIDDLES = (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)


def _blocks_of(x: Tensor, size: int) -> Tensor:
    tokens, hidden = x.shape
    if hidden == 0 or hidden % MX_BLOCK:
        raise ValueError(f"rows of {hidden} elements cannot be quantised: not a multiple of {MX_BLOCK}")
    return x.to(torch.float32).reshape(tokens, hidden // size, size)


@uncompiled
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, H] of a float dtype as E4M3, in blocks of 32 elements with a power of two as scale.

    Returns (float8_e4m3fn [T, H], float8_e8m0fnu [T, H / 32]). The scale is the least power of two that takes the
    block's largest magnitude to 448 at most, as cuBLAS has it; 2^-127 for zeros, 2^127 for infinity. NaN elements stay
    NaN and do not take part. Raises ValueError.
    """
    blocks = _blocks_of(x, MX_BLOCK)
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1)
    mantissa, exponent = torch.frexp(amax)  # mantissa within [1/2, 1); 448 is 7/8 * 2^9
    biased = (exponent - 9 + (mantissa > 7 / 8).int() + 127).clamp(0, 254)
    biased = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, biased))
    factor = torch.where(biased == 0, 1.0, torch.exp2(127.0 - biased.to(torch.float64)).to(torch.float32))
    scaled = (blocks * factor.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return compact(scaled.view(x.shape).to(torch.float8_e4m3fn)), biased.to(torch.uint8).view(torch.float8_e8m0fnu)


@uncompiled
def quantize_nvfp4(x: Tensor, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows [T, H] of a float dtype as E2M1, in blocks of 16 elements, in float32 that rounds to nearest, ties to even.

    The scale of a block is ``s = e4m3(tensor_scale * (amax * (1 / 6)))``, at most 448. An element becomes ``e2m1(x * (1
    / (s * (1 / tensor_scale))))``, at most 6; all of a block become 0 where s is 0. So x is about ``e2m1 * s /
    tensor_scale``. A NaN makes the scale of its block NaN, and all elements 0.

    Args:
        tensor_scale: float32 of one element, commonly ``448 * 6`` over the largest |x| of all ranks; None: 1.

    Returns (float4_e2m1fn_x2 [T, H / 2], element 2i in the low bits of byte i and 2i + 1 in the high bits;
    float8_e4m3fn [T, H / 16]). Raises ValueError.
    """
    blocks = _blocks_of(x, NVFP4_BLOCK)
    scale = torch.ones(()) if tensor_scale is None else tensor_scale.reshape(())
    amax = blocks.abs().amax(dim=2)
    scales = (scale * (amax * (1 / _LARGEST_E2M1))).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    rounded = scales.float()
    factors = (rounded * scale.reciprocal()).reciprocal().where(rounded > 0, 0.0)
    values = blocks * factors.unsqueeze(2)
    sizes, is_negative = values.abs(), values.signbit() & ~values.isnan()
    codes = is_negative.to(torch.uint8) * 8
    for middle, goes_up in _MIDDLES:
        codes += sizes >= middle if goes_up else sizes > middle
    pairs = codes.view(x.shape[0], x.shape[1] // 2, 2)
    return compact(pairs[:, :, 0] | pairs[:, :, 1] << 4).view(torch.float4_e2m1fn_x2), scales


def quantize(x: Tensor, mode: str, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows and their scales as a ``quant`` has them, the scales row by row. Raises ValueError."""
    if mode not in QUANT_MODES + BLOCK_MODES:
        raise ValueError(f"unknown quantisation {mode!r}")
    if mode.startswith("nvfp4"):
        return quantize_nvfp4(x, tensor_scale)
    return quantize_mxfp8(x) if mode.startswith("mxfp8") else quantize_fp8(x, mode)


def swizzled(scales: Tensor) -> Tensor:
    """Scales [.., rows, S] of one byte in tiles as GEMMs read them: [.., ceil(rows/128), ceil(S/4), 512], padded with
    zeros. Scale s of row r is byte r % 32 * 16 + r % 128 // 32 * 4 + s % 4 of tile [r // 128, s // 4]."""
    *outer, rows, count = scales.shape
    out = torch.zeros(*outer, -(-rows // 128), -(-count // 4), 512, dtype=torch.uint8)
    given = scales.view(torch.uint8)
    for r in range(rows):
        for s in range(count):
            out[..., r // 128, s // 4, r % 32 * 16 + r % 128 // 32 * 4 + s % 4] = given[..., r, s]
    return out.view(scales.dtype)


# --- LogFMT: a sign and 9 bits, in blocks of 128; logarithms are integers in units of 2^-16

LOG_CODES = 509  # of magnitudes; code 0 is zero
LOG_OCTAVE = 1 << 16
LOG_RANGE = 32 * LOG_OCTAVE
_LOG_END = 255 << 16


def _above_line(fraction: Tensor) -> Tensor:
    """log2(1 + x) - x, x and the result in units of 2^-16."""
    factor = 28961 - (fraction * (17510 - (fraction * (9727 - (fraction * 2959 >> 16)) >> 16)) >> 16)
    return ((fraction * (LOG_OCTAVE - fraction) >> 16) * factor + 32768) >> 16


def _below_line(fraction: Tensor) -> Tensor:
    """1 + x - 2^x."""
    factor = 20119 + (fraction * (4289 + (fraction * 898 >> 16)) >> 16)
    return ((fraction * (LOG_OCTAVE - fraction) >> 16) * factor + 32768) >> 16


def _logarithm(values: Tensor) -> Tensor:
    """127 + log2 of magnitudes, int64; 0 of zeros and of what is below the normal numbers."""
    magnitude = values.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    line = (magnitude + 64) >> 7
    log = torch.where(line < _LOG_END, line + _above_line(line & 0xFFFF), _LOG_END - 1)
    return torch.where(magnitude < 0x00800000, 0, log)


def _rounded_logfmt(values: Tensor) -> Tensor:
    tokens, hidden = values.shape
    blocks = -(-hidden // FP8_GROUP)
    padded = torch.zeros(tokens, blocks * FP8_GROUP, dtype=torch.float32)
    padded[:, :hidden] = values
    block = padded.view(tokens, blocks, FP8_GROUP)
    is_finite = block.isfinite().all(-1, keepdim=True)
    log = _logarithm(torch.where(is_finite, block, 0.0))
    most = log.amax(-1, keepdim=True)
    least = torch.where(log == 0, _LOG_END, log).amin(-1, keepdim=True)
    first = torch.where(most == 0, 0, torch.maximum(least, most - LOG_RANGE)) & ~0xFF
    step = (-(-(most - first) // (LOG_CODES - 1))).clamp(min=1)
    nearest = (log - first + step // 2) // step
    code = torch.where(log <= first, 1, 1 + nearest.clamp(max=LOG_CODES - 1))
    code = torch.where((log == 0) | (log + LOG_OCTAVE < first), 0, code)
    decoded = (first + (code - 1) * step).clamp(max=_LOG_END - 1)
    magnitude = torch.where(code == 0, 0, (decoded - _below_line(decoded & 0xFFFF)) << 7)
    number = magnitude.to(torch.int32).view(torch.float32).copysign(block)
    return compact(torch.where(is_finite, number, torch.nan).view_as(padded)[:, :hidden])


WIRE_FORMATS = ("fp8", "logfmt")


@uncompiled
def rounded_to_wire(values: Tensor, wire: torch.dtype | str) -> Tensor:
    """fp32 sums [T, H] as they arrive: rounded to a dtype, or to "fp8" or "logfmt" (docs/semantics.md)."""
    if isinstance(wire, torch.dtype):
        return values.to(wire).to(torch.float32)
    return _rounded_fp8(values) if wire == "fp8" else _rounded_logfmt(values)


# --- Comparison


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """bool mask of the elements that differ, for tensors of one dtype and shape."""
    kind = _INTEGER_OF_SIZE[a.element_size()]
    differ = compact(a).view(kind) != compact(b).view(kind)
    if a.dtype.is_floating_point:
        wide_a, wide_b = a.to(torch.float32), b.to(torch.float32)
        differ &= ~(torch.isnan(wide_a) & torch.isnan(wide_b))
    return differ


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype and shape, and the same bits, except that of floats (E4M3 included) NaN equals NaN."""
    return first_difference(a, b) == ""


def first_difference(a: Tensor, b: Tensor) -> str:
    """Where `a` and `b` first differ in the sense of bits_equal, with values and bits; "" if nowhere.

    Packed FP4, whose numbers torch cannot convert and of which none is NaN, counts as bytes.
    """
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} against {b.dtype}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} against {tuple(b.shape)}"
    if a.dtype == torch.float4_e2m1fn_x2:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    differ = _differences(a, b)
    if not bool(differ.any()):
        return ""
    index = tuple(int(i) for i in torch.nonzero(differ)[0])
    shown = []
    for tensor in (a, b):
        element = compact(tensor[index].reshape(1))
        value = element.to(torch.float32) if tensor.dtype.is_floating_point else element
        size = element.element_size()
        bits = int(element.view(_INTEGER_OF_SIZE[size])) & ((1 << (8 * size)) - 1)
        shown.append(f"{value.item()!r} (0x{bits:0{2 * size}X})")
    count = int(differ.sum())
    return f"{count} of {a.numel()} elements differ, first at {list(index)}: {shown[0]} against {shown[1]}"
