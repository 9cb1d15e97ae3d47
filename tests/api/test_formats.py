"""Number formats beside those of torch, ml_dtypes and torchao on corner values: where all agree, and where we do not.

docs/semantics.md has the differences in a table ("Beside other libraries"). When a test of another library's side fails
with a newer version of it, that table wants a new line. ml_dtypes and torchao are there in `make frameworks` and `make
newest`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nccl_ep
from nccl_ep import reference
from nccl_ep.block_scales import plain_scales
from nccl_ep.deep_ep.v1 import nvfp4

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCK = 128
LARGEST, NAN = 0x7E, 0x7F  # codes of e4m3
TORCH_SATURATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # at 448, in its cast to e4m3


def ml_dtypes() -> Any:
    return pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: make frameworks")


def torchao(module: str) -> Any:
    return pytest.importorskip(f"torchao.prototype.{module}", reason="torchao is not installed: make frameworks")


def numpy_codes(x: Tensor, name: str) -> Tensor:
    """Codes of fp32 numbers in a format of ml_dtypes."""
    return torch.from_numpy(x.float().numpy().astype(getattr(ml_dtypes(), name)).view("uint8"))


def torch_e4m3(x: Tensor) -> Tensor:
    return x.float().to(E4M3).view(torch.uint8)


def ml_e4m3(x: Tensor) -> Tensor:
    return numpy_codes(x, "float8_e4m3fn")


def numbers_up_to(most: float, dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype whose magnitude is at most that: both zeros, subnormals, all ties."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return numbers[numbers.float().abs() <= most]


def rows_with(last: float, numbers: Tensor, size: int) -> Tensor:
    """Rows of one block of `size`, whose last number is the block's largest."""
    filled = numbers.new_zeros(-(-len(numbers) // (size - 1)) * (size - 1))
    filled[: len(numbers)] = numbers
    rows = filled.view(-1, size - 1)
    return torch.cat([rows, rows.new_full((len(rows), 1), last)], 1)


def layer(x: Tensor, quant: str | None = None, wire: str | None = None) -> tuple[nccl_ep.DispatchOutput, Tensor]:
    """A dispatch of one rank and one expert. With `wire` also what a combine of the same rows gives, else x."""
    tokens, hidden = x.shape
    sizes: dict[str, Any] = {"max_tokens": tokens, "hidden": hidden, "topk": 1, "num_experts": 1, "dtype": x.dtype}
    with nccl_ep.Buffer.for_shapes(None, **sizes, device="cpu") as buffer:
        ids = torch.zeros(tokens, 1, dtype=torch.int64)
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=1, quant=quant)
        return out, x if wire is None else nccl_ep.combine(out.x, out.handle, wire_dtype=wire)


def quantised(x: Tensor, quant: str) -> tuple[Tensor, Tensor]:
    """Codes [T, H] and scales as dispatch gives them; the oracle's are the same."""
    out, _ = layer(x, quant)
    assert out.scales is not None
    codes, scales = out.x[0], out.scales[0].contiguous()
    wanted_codes, wanted_scales = reference.quantize_fp8(x, quant)
    assert reference.bits_equal(codes, wanted_codes) and reference.bits_equal(scales, wanted_scales)
    return codes.view(torch.uint8), scales


def same_codes(got: Tensor, want: Tensor) -> bool:
    """NaN has two codes of e4m3."""
    return bool(((got == want) | ((got & 0x7F == NAN) & (want & 0x7F == NAN))).all())


# ---- e4m3: one number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch_e4m3, ml_e4m3], ids=["torch", "ml_dtypes"])
def test_e4m3_of_every_number_up_to_the_largest(other: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The block's largest is 448, its factor 1: an element's code is that of the number itself."""
    x = rows_with(448.0, numbers_up_to(448.0, dtype), BLOCK)
    codes, _ = quantised(x, "fp8")
    assert len(x) > 250 and same_codes(codes, other(x))
    assert (codes[x == 0] & 0x80).ne(0).equal(x[x == 0].signbit())
    assert codes[:, -1].eq(LARGEST).all() and codes.unique().numel() == 2 * NAN


def test_e4m3_codes_stand_for_the_same_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    ours = codes.view(E4M3).float()
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes().float8_e4m3fn).astype("float32"))
    assert reference.bits_equal(ours, theirs) and ours.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


PAST_THE_LARGEST = torch.tensor([448.0, 449.0, 456.0, 464.0, 464.5, 465.0, 480.0, 1e9, math.inf])


def test_past_the_largest_others_give_nan() -> None:
    """464 lies between 448 and the 480 that e4m3 has not got. The even neighbour is 448."""
    is_nan = PAST_THE_LARGEST > 464
    assert (torch_e4m3(PAST_THE_LARGEST) == NAN).equal(is_nan & (not TORCH_SATURATES))
    assert (torch_e4m3(-PAST_THE_LARGEST) == NAN | 0x80).equal(is_nan & (not TORCH_SATURATES))
    assert (ml_e4m3(PAST_THE_LARGEST) == NAN).equal(is_nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_past_the_largest_we_saturate(dtype: torch.dtype) -> None:
    """Infinity, and elements that the block's own factor takes a little past 448."""
    x = torch.zeros(1, BLOCK, dtype=dtype)
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    codes, _ = quantised(x, "fp8_rounded")
    assert codes[0, :2].tolist() == [LARGEST, LARGEST | 0x80] and codes[0, 2] & 0x7F == NAN
    largest = numbers_up_to(2.0, dtype)
    largest = largest[largest >= 1]
    factor = 448 / largest.float()
    assert (largest.float() * factor > 448).any()
    codes, _ = quantised(largest.unsqueeze(1).expand(-1, 16).contiguous(), "fp8")
    assert codes.eq(LARGEST).all()


# ---- e4m3: a block and its scale


def corner_blocks(least_exponent: int = -13) -> Tensor:
    """bf16 [n, 128]: blocks whose largest is a power of two, 448 times one, and what lies beside them, with ties,
    zeros of both signs and subnormals among the others."""
    mantissas = torch.tensor([0x00, 0x01, 0x40, 0x5F, 0x60, 0x61, 0x7F])  # 0x60: 1.75, as 448 has it
    bits = (torch.arange(least_exponent, 128).unsqueeze(1) + 127 << 7) + mantissas
    largest = bits.flatten().to(torch.int16).view(torch.bfloat16).unsqueeze(1)
    made = torch.Generator().manual_seed(3)
    parts = torch.rand(len(largest), BLOCK, generator=made).mul(2).sub(1)
    parts[:, ::3] *= torch.exp2(-20 * torch.rand(len(largest), BLOCK, generator=made))[:, ::3]
    sixteenths = torch.arange(-16, 17) / 16
    parts[:, :33] = sixteenths
    parts[:, 33], parts[:, 34], parts[:, 35] = 0.0, -0.0, 1.0
    x = (parts * largest.float()).to(torch.bfloat16)
    x[:, 36], x[:, 37] = 2.0**-133, -(2.0**-133)
    return x


def to_mx(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Codes and bytes of scales of torchao's MX formats in blocks of 128."""
    module, modes = torchao("mx_formats.mx_tensor"), torchao("mx_formats.config").ScaleCalculationMode
    scales, codes = module.to_mx(x.float(), E4M3, BLOCK, modes[mode])
    return codes.view(torch.uint8), scales.view(torch.uint8)


def exponents_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and bytes of scales of rows of one block."""
    codes, words = quantised(x, "fp8_ue8m0")
    return codes, words.view(torch.uint8)[:, :1]


def test_ue8m0_is_torchaos_rceil() -> None:
    x = corner_blocks()
    codes, exponents = exponents_of(x)
    their_codes, their_exponents = to_mx(x, "RCEIL")
    assert exponents.equal(their_exponents) and codes.equal(their_codes) and exponents.unique().numel() > 130


def test_ue8m0_bytes_are_the_rounded_scales() -> None:
    x = corner_blocks()
    codes, exponents = exponents_of(x)
    same, scales = quantised(x, "fp8_rounded")
    assert codes.equal(same) and exponents.view(E8M0).float().equal(scales)
    assert scales.log2().frac().eq(0).all()
    theirs = exponents.numpy().view(ml_dtypes().float8_e8m0fnu).astype("float32")
    assert torch.from_numpy(theirs).equal(scales)


def block_of(*numbers: float) -> Tensor:
    x = torch.zeros(1, BLOCK, dtype=torch.bfloat16)
    x[0, : len(numbers)] = torch.tensor(numbers)
    return x


@pytest.mark.parametrize(
    ("largest", "ours", "floor", "ceil", "even"),
    [
        (256.0, 127, 127, 127, 127),
        (448.0, 127, 127, 128, 127),
        (450.0, 128, 127, 128, 127),
        (494.0, 128, 127, 128, 127),
        (496.0, 128, 127, 128, 128),
        (512.0, 128, 128, 128, 128),
    ],
)
def test_torchaos_other_modes(largest: float, ours: int, floor: int, ceil: int, even: int) -> None:
    """The least power of two that keeps the largest within 448, as RCEIL; FLOOR saturates up to 512, EVEN up to 496."""
    x = block_of(largest)
    assert int(exponents_of(x)[1]) == int(to_mx(x, "RCEIL")[1]) == ours
    assert [int(to_mx(x, mode)[1]) for mode in ("FLOOR", "CEIL", "EVEN")] == [floor, ceil, even]


def test_a_scale_goes_up_where_a_cast_goes_to_the_nearest() -> None:
    """amax / 448 of these blocks is 2.5 and 3: torch and ml_dtypes round the first to 2, the tie to 4."""
    x = torch.cat([block_of(2.5 * 448), block_of(3 * 448.0)])
    assert exponents_of(x)[1].flatten().tolist() == [129, 129]
    ratios = torch.tensor([2.5, 3.0])
    assert ratios.to(E8M0).view(torch.uint8).tolist() == [128, 129]
    assert numpy_codes(ratios, "float8_e8m0fnu").tolist() == [128, 129]


# name: (block, our exponent, torchao's; elements that are NaN, ours and torchao's)
DIFFERENT_BLOCKS: dict[str, tuple[Tensor, int, int, int, int]] = {
    "zeros": (block_of(0.0, -0.0), 105, 0, 0, 0),
    "smaller than 1e-4": (block_of(2.0**-20), 105, 99, 0, 0),
    "a NaN": (block_of(1.0, math.nan), 119, 255, 1, BLOCK),
    "an infinity": (block_of(1.0, math.inf), 254, 254, 0, 0),
}


@pytest.mark.parametrize("name", DIFFERENT_BLOCKS)
def test_ue8m0_blocks_that_torchao_scales_otherwise(name: str) -> None:
    x, exponent, their_exponent, nans, their_nans = DIFFERENT_BLOCKS[name]
    codes, exponents = exponents_of(x)
    their_codes, their_exponents = to_mx(x, "RCEIL")
    assert int(exponents) == exponent and int(their_exponents) == their_exponent
    assert int((codes & 0x7F == NAN).sum()) == nans and int((their_codes & 0x7F == NAN).sum()) == their_nans


def blockwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """torchao's e4m3 codes in blocks of 128, and fp32 scales."""
    codes, scales = torchao("blockwise_fp8_training.kernels").torch_blockwise_scale_act_quant_lhs(x)
    return codes.view(torch.uint8), scales


def test_fp8_codes_are_those_of_torchaos_blocks() -> None:
    """Scales are the same number, 448 from the other side: within two roundings."""
    x = corner_blocks()
    codes, scales = quantised(x, "fp8")
    their_codes, their_scales = blockwise(x)
    assert codes.equal(their_codes)
    torch.testing.assert_close(scales, their_scales, rtol=2.0**-22, atol=0)
    assert not scales.equal(their_scales)


def test_fp8_blocks_that_torchao_scales_otherwise() -> None:
    x = torch.cat([block_of(0.0, -0.0), block_of(2.0**-20), block_of(1.0, math.nan), block_of(1.0, math.inf)])
    codes, scales = quantised(x, "fp8")
    their_codes, their_scales = blockwise(x)
    assert scales[:2].flatten().tolist() == [float(torch.tensor(1e-4) * torch.tensor(1 / 448))] * 2
    assert codes[0, :2].tolist() == their_codes[0, :2].tolist() == [0, 0x80]
    assert int(codes[1, 0]) == int(torch_e4m3(torch.tensor(2.0**-20 * 448e4))) and int(their_codes[1, 0]) == LARGEST
    assert int((codes[2] & 0x7F == NAN).sum()) == 1 and int((their_codes[2] & 0x7F == NAN).sum()) == BLOCK
    assert (codes[3, :2] & 0x7F).tolist() == [0, NAN] and same_codes(codes[3], their_codes[3])
    assert scales[3].isinf().all() and their_scales[3].isinf().all()


# ---- MXFP8


MX_BLOCK = 32


def small_blocks(x: Tensor, quant: str, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of rows and of scales as dispatch gives them in both modes; the oracle's are the same."""
    ids = torch.zeros(len(x), 1, dtype=torch.int64)
    sizes: dict[str, Any] = {"max_tokens": len(x), "hidden": x.shape[1], "topk": 1, "num_experts": 1, "dtype": x.dtype}
    want = reference.quantize(x, quant, tensor_scale)
    with nccl_ep.Buffer.for_shapes(None, **sizes, device="cpu", mode="auto") as buffer:
        for mode in ("ll", "ht"):
            out = nccl_ep.dispatch(
                x, ids, buffer=buffer, num_experts=1, quant=quant, scales=tensor_scale, mode=mode, layout="flat"
            )
            assert out.scales is not None
            for mine, theirs in zip((out.x, out.scales), want, strict=True):
                assert reference.bits_equal(mine, theirs)
    return out.x.view(torch.uint8), out.scales.view(torch.uint8)


def mx_corner_blocks() -> Tensor:
    """bf16 [n, 128]: every largest, subnormal ones and zero too. Its four blocks have it and parts of it."""
    x = corner_blocks(-126)
    tiny = torch.zeros(4, BLOCK, dtype=torch.bfloat16)
    tiny[1, 0], tiny[2, 0], tiny[3, 0] = 2.0**-133, -(2.0**-127), 1.75 * 2.0**-118
    return torch.cat([x, tiny])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp8_is_torchaos_rceil(dtype: torch.dtype) -> None:
    module, modes = torchao("mx_formats.mx_tensor"), torchao("mx_formats.config").ScaleCalculationMode
    x = mx_corner_blocks()
    x = x[x.abs().amax(1) < 6e4].to(dtype) if dtype == torch.float16 else x
    codes, scales = small_blocks(x, "mxfp8")
    their_scales, their_codes = module.to_mx(x.float(), E4M3, MX_BLOCK, modes.RCEIL)
    assert scales.equal(their_scales.view(torch.uint8)) and codes.equal(their_codes.view(torch.uint8))
    assert scales.unique().numel() > (30 if dtype == torch.float16 else 200)


def test_mxfp8_blocks_that_are_not_finite() -> None:
    """NaN is passed over and stays alone; torchao's block becomes NaN. Of infinity both have 2^127."""
    x = torch.zeros(2, BLOCK, dtype=torch.bfloat16)
    x[0, :2], x[1, :3] = torch.tensor([448.0, math.nan]), torch.tensor([math.inf, -math.inf, 1.0])
    codes, scales = small_blocks(x, "mxfp8")
    assert scales[:, 0].tolist() == [127, 254] and not scales[:, 1:].any()
    assert (
        codes[0, 0] == LARGEST and codes[0, 1] & 0x7F == NAN and codes[1, :3].tolist() == [LARGEST, LARGEST | 0x80, 0]
    )
    module, modes = torchao("mx_formats.mx_tensor"), torchao("mx_formats.config").ScaleCalculationMode
    their_scales, their_codes = module.to_mx(x.float(), E4M3, MX_BLOCK, modes.RCEIL)
    assert their_scales.view(torch.uint8)[:, 0].tolist() == [255, 254]
    assert (their_codes.view(torch.uint8)[0, :MX_BLOCK] & 0x7F == NAN).all()


def test_swizzled_scales_are_torchaos() -> None:
    to_blocked = torchao("mx_formats.utils").to_blocked
    scales = torch.randint(0, 250, (200, 10), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    ours = reference.swizzled(scales)
    assert ours.shape == (2, 3, 512) and ours.flatten().equal(to_blocked(scales).flatten())
    assert plain_scales(ours, 200, 10).equal(scales)


# ---- NVFP4


NVFP4_BLOCK = 16


def ours_of(x: Tensor, tensor_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of rows of whole blocks, as dispatch has them and as DeepEP's method makes them."""
    scale = torch.tensor(tensor_scale)
    width = x.shape[1]
    packed, scales = small_blocks(torch.nn.functional.pad(x, (0, -width % 32)), "nvfp4", scale)
    packed, scales = packed[:, : width // 2], scales[:, : width // NVFP4_BLOCK].contiguous().view(E4M3)
    there = nvfp4.quantize(x, scale)
    assert reference.bits_equal(scales, there[1]) and (packed.equal(there[0]) or bool(x.isnan().any()))
    return packed, scales


def e2m1_codes(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def test_e2m1_of_every_number() -> None:
    """The block's largest is 6, its scale 1. Ties go to the even code, zeros keep their sign."""
    x = rows_with(6.0, numbers_up_to(6.0, torch.bfloat16), NVFP4_BLOCK)
    packed, scales = ours_of(x)
    assert scales.float().eq(1).all() and e2m1_codes(packed).equal(numpy_codes(x, "float4_e2m1fn"))


def test_nan_of_e2m1() -> None:
    """e2m1 has none: ml_dtypes makes it a zero; here it is in the scale."""
    x = block_of(math.nan, 1.0)[:, :NVFP4_BLOCK]
    assert int(numpy_codes(x[0, :1], "float4_e2m1fn")) & 7 == 0
    assert ours_of(x)[1].isnan().all()


def nvfp4_quantize(x: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    module = torchao("mx_formats.nvfp4_tensor")
    scales, packed = module.nvfp4_quantize(x, NVFP4_BLOCK, torch.tensor(1 / global_scale))
    return packed, scales


@pytest.mark.parametrize("global_scale", [1.0, 64.0])
def test_nvfp4_is_torchaos(global_scale: float) -> None:
    """Blocks whose scale is a normal number of e4m3. Element 2i is in the low bits of byte i in both."""
    x = corner_blocks(-4)[:80, : 4 * NVFP4_BLOCK].contiguous()
    x = torch.where(x.abs() > 400, 0, x)
    is_normal = x.float().view(len(x), -1, NVFP4_BLOCK).abs().amax(-1) * global_scale / 6 >= 2.0**-6
    packed, scales = ours_of(x, global_scale)
    their_packed, their_scales = nvfp4_quantize(x, global_scale)
    assert scales[is_normal].view(torch.uint8).equal(their_scales[is_normal].view(torch.uint8))
    in_bytes = is_normal.repeat_interleave(NVFP4_BLOCK // 2, 1)
    assert packed[in_bytes].equal(their_packed[in_bytes]) and is_normal.sum() > 100


def test_nvfp4_blocks_that_torchao_scales_otherwise() -> None:
    """Its scales are at least 2^-6; ours have e4m3's subnormal numbers, and 0, whose elements are all 0."""
    x = torch.cat([block_of(0.0, -0.0), block_of(3 * 2.0**-9), block_of(6 * 2.0**-9)])[:, :NVFP4_BLOCK].contiguous()
    packed, scales = ours_of(x)
    their_packed, their_scales = nvfp4_quantize(x, 1.0)
    assert scales.float().flatten().tolist() == [0, 0, 2.0**-9]  # half of 2^-9 is a tie, and 0 is even
    assert their_scales.float().flatten().tolist() == [2.0**-6] * 3
    assert packed[:, 0].tolist() == [0x80, 0x00, 0x07] and their_packed[:, 0].tolist() == [0x80, 0x01, 0x02]


# ---- LogFMT, which no other library has: beside logarithms in double precision


UNIT = 2.0**-16


def wanted_logfmt(block: Tensor) -> tuple[Tensor, float]:
    """Of a block of finite numbers: those that become zero, and how far the logarithms of the others may be off."""
    log = block.double().abs().log2()
    log = torch.where(block.abs() < 2.0**-126, -math.inf, log)
    if not log.isfinite().any():
        return torch.ones_like(block, dtype=torch.bool), 0.0
    most = float(log.max())
    least = max(float(log[log.isfinite()].min()), most - 32)
    first = math.floor(least * 256) / 256
    return log < first - 1, math.ceil((most - first) / 508 / UNIT) * UNIT / 2 + 8 * UNIT


def test_logfmt_of_corner_blocks() -> None:
    """Every largest of a block between the smallest and the largest normal number, beside zeros and subnormals."""
    x = corner_blocks(-126)
    _, y = layer(x, wire="logfmt")
    assert reference.bits_equal(y, reference.rounded_to_wire(x.float(), "logfmt").bfloat16())
    wide = reference.rounded_to_wire(x.float(), "logfmt")
    assert wide.signbit().equal(x.signbit())
    for row, got in zip(x.float(), wide, strict=True):
        to_zero, most_off = wanted_logfmt(row)
        off = (got.double().abs().log2() - row.double().abs().log2()).abs()
        small = row.double().abs().log2() < row.double().abs().log2().max() - 32
        assert (got == 0).equal(to_zero) and (off <= most_off)[~to_zero & ~small].all()


@pytest.mark.parametrize("number", [1.0, 1.25, 2.0**-126, 3.3895313892515355e38, 2.0**127, 448.0])
def test_logfmt_of_one_magnitude(number: float) -> None:
    """A block whose numbers differ in sign alone comes back, and its zeros."""
    x = block_of(number, -number, 0.0, -0.0, 2.0**-133, -(2.0**-133))
    _, y = layer(x, wire="logfmt")
    want = x.clone()
    want[0, 4:6] = torch.tensor([0.0, -0.0])
    assert reference.bits_equal(y, want)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("wire", ["logfmt", "fp8"])
def test_what_is_not_finite_stays_in_its_block(wire: str, number: float) -> None:
    x = torch.cat([block_of(1.0, number), block_of(2.0, -0.0)], 1)
    _, y = layer(x, wire=wire)
    alone = wire == "fp8" and math.isnan(number)
    assert int(y[0, :BLOCK].isnan().sum()) == (1 if alone else BLOCK)
    assert y[0, BLOCK:].equal(x[0, BLOCK:]) and y[0, BLOCK + 1].signbit()
