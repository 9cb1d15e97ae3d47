"""What dispatch and combine give, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.block_scales import plain_scales
from tests.contract.world import Rank, World
from tests.support.cases import Case
from tests.support.expected import Expected, run_case
from tests.support.harness import check_dispatch, check_padding, combine_case, dispatch_case, synchronize, to_device

LAYOUTS = reference.LAYOUTS
MODES = ("ll", "ht")
# Capacities that drop rows.
FEW: dict[str, int | None] = {"expert_major": 2, "packed": 5, "flat": 5, "rank_major": None}

PAYLOADS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "special": {
        "seed": 3, "dtype": torch.float32, "rows_dtype": torch.float32, "content": "special", "keep_nan": True,
        "routing": "some_none",
    },
    "words": {"dtype": torch.uint8, "content": "words", "weights_content": "words", "routing": "duplicates", "topk": 4},
    "float_words": {"dtype": torch.float16, "content": "words", "idx_dtype": torch.int32},
    "scales": {
        "dtype": torch.int8, "content": "words", "scales_dtype": torch.int32, "scales_width": 5,
        "scales_strides": "column", "routing": "out_of_range",
    },
    "fp8": {"quant": "fp8", "routing": "out_of_range", "idx_dtype": torch.int32},
    "fp8_rounded": {"quant": "fp8_rounded", "routing": "skewed", "with_weights": False},
    "fp8_ue8m0": {"quant": "fp8_ue8m0", "dtype": torch.float16, "routing": "duplicates", "zero_padding": True},
    "mxfp8": {"quant": "mxfp8", "hidden": 1184, "routing": "duplicates", "zero_padding": True},
    "no_expert": {"routing": "none", "zero_padding": True},
}  # fmt: skip

SUMS: dict[str, dict[str, Any]] = {
    "no_weights": {"layout": "expert_major", "combine_weights": "none"},
    "home_weights": {"layout": "packed", "combine_weights": "tensor", "routing": "duplicates"},
    "home_weights_of_few": {"layout": "expert_major", "combine_weights": "masked"},
    "one_bias": {"layout": "flat", "biases": 1},
    "two_biases": {"layout": "flat", "biases": 2, "out_dtype": torch.float32},
    "wide_wire": {"layout": "packed", "wire_dtype": torch.float32},
    "wide_output": {"layout": "rank_major", "rows_dtype": torch.float16, "out_dtype": torch.float32},
    "scaled": {"layout": "expert_major", "scale": 2.5},
    "scaled_with_home_weights": {
        "layout": "packed",
        "combine_weights": "tensor",
        "routing": "duplicates",
        "scale": 0.1,
    },
    "scaled_with_biases": {"layout": "flat", "biases": 2, "rows_content": "few", "scale": -3.0},
}
# In each block format. Rows of 144 elements: the last block is short.
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "sums": {"layout": "packed", "routing": "duplicates", "topk": 4},
    "few": {"layout": "expert_major", "rows_content": "few", "combine_weights": "masked"},
    "home_weights": {"layout": "expert_major", "combine_weights": "tensor"},
    "special": {"layout": "flat", "rows_content": "special", "biases": 2},
    "words": {"layout": "rank_major", "rows_content": "words", "rows_dtype": torch.float16},
    "long": {"layout": "flat", "hidden": 2064, "biases": 1},
    "scaled": {"layout": "flat", "biases": 1, "scale": 2.5},
}
SUMS |= {
    f"{wire}_{name}": {**how, "wire_dtype": wire} for wire in reference.WIRE_FORMATS for name, how in IN_BLOCKS.items()
}


class Bits:
    world: World

    @pytest.mark.parametrize("payload", PAYLOADS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_every_payload_arrives_as_the_oracle_says(self, mode: str, layout: str, payload: str) -> None:
        self.world.run(equal_to_the_oracle, mode, {"layout": layout, **PAYLOADS[payload]})

    def test_what_is_special_about_them(self) -> None:
        """Of the generator: the payloads have what they are named after."""
        x = torch.cat([given.x for given in self.world.case(**PAYLOADS["special"]).inputs])
        assert x.isnan().any() and x.isinf().any()
        assert ((x == 0) & x.signbit()).any() and ((x == 0) & ~x.signbit()).any()
        words = torch.cat([given.x for given in self.world.case(**PAYLOADS["words"]).inputs]).view(torch.int32)
        assert {-1, -2, 0} <= set(words.flatten().tolist())
        ids = torch.cat([given.topk_idx for given in self.world.case(**PAYLOADS["words"]).inputs]).sort(1).values
        assert ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any()

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_rows_past_a_capacity_are_the_oracles(self, mode: str, layout: str) -> None:
        changes = {"layout": layout, "routing": "skewed", "capacity": FEW[layout], "zero_padding": True}
        dropped = sum(int(result.overflow) for result in self.world.case(**changes).results)
        assert (dropped > 0) == (layout != "rank_major")
        self.world.run(equal_to_the_oracle, mode, changes)

    @pytest.mark.parametrize("sums", SUMS)
    @pytest.mark.parametrize("mode", MODES)
    def test_sums_are_the_oracles(self, mode: str, sums: str) -> None:
        self.world.run(equal_to_the_oracle, mode, SUMS[sums])

    @pytest.mark.parametrize("mode", MODES)
    def test_ranks_without_tokens_get_empty_results(self, mode: str) -> None:
        self.world.run(equal_to_the_oracle, mode, {"layout": "packed", "tokens": (0,) * self.world.num_ranks})

    @pytest.mark.parametrize("layout", ["expert_major", "flat"])
    @pytest.mark.parametrize("mode", MODES)
    def test_bits_do_not_depend_on_num_sms(self, mode: str, layout: str) -> None:
        self.world.run(equal_for_all_num_sms, mode, {"layout": layout, "topk": 4, "routing": "duplicates"})

    @pytest.mark.parametrize("quant", ["mxfp8", "nvfp4"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_rows_in_small_blocks_are_the_oracles(self, mode: str, layout: str, quant: str) -> None:
        """Of bf16 and of fp16; of rows whose scales are no multiple of 16 bytes, and of more than one piece."""
        for dtype, hidden in ((torch.bfloat16, 32 * 37), (torch.float16, 2048)):
            changes = {"layout": layout, "dtype": dtype, "hidden": hidden, "routing": "duplicates"}
            self.world.run(moves_small_blocks, mode, quant, changes)

    @pytest.mark.parametrize("quant", ["mxfp8", "nvfp4"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_swizzled_scales_are_the_same(self, layout: str, quant: str) -> None:
        changes = {"layout": layout, "hidden": 32 * 37, "zero_padding": layout != "flat"}
        self.world.run(moves_small_blocks, "ll", f"{quant}_swizzled", changes)

    def test_split_calls_have_the_oracles_bits(self) -> None:
        for layout in LAYOUTS:
            self.world.run(equal_in_open_sends, {"layout": layout, **PAYLOADS["fp8_ue8m0"]})

    @pytest.mark.parametrize("mode", MODES)
    def test_extra_tensors_arrive_bit_for_bit(self, mode: str) -> None:
        self.world.run(moves_extra_tensors, mode)

    def test_words_that_are_nan_travel_unchanged(self) -> None:
        """No NaN becomes another one."""
        self.world.run(moves_nan, {"layout": "rank_major", **PAYLOADS["float_words"], "zero_padding": True})

    @pytest.mark.parametrize("mode", MODES)
    def test_outputs_given_by_the_caller_have_the_same_bits(self, mode: str) -> None:
        self.world.run(writes_given_outputs, mode)


def equal_to_the_oracle(rank: Rank, mode: str, changes: dict[str, Any]) -> None:
    case = rank.case(**changes)
    with rank.buffer(case.case) as buffer:
        run_case(case, buffer, mode=mode)


def blocks_of_all_kinds(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in the shape and dtype of x: of many magnitudes, blocks that are all alike, zero, NaN or infinite."""
    made = torch.Generator().manual_seed(seed)
    numbers = torch.randn(x.shape, generator=made)
    numbers *= (
        torch.exp2(torch.randint(-18, 6, (x.shape[0], x.shape[1] // 16, 1), generator=made))
        .expand(-1, -1, 16)
        .flatten(1)
    )
    for row in range(min(len(x), 3)):
        numbers[row, :64] = -3.0  # of NVFP4 code 15: words of ones
        numbers[row, 64:80] = 0.0
        numbers[row, 80:88], numbers[row, 88:96] = -3.0, 3.0
        numbers[row, 96 + row] = (float("nan"), float("inf"), -float("inf"))[row]
        numbers[row, -32:] = -0.0
        numbers[row, -8:] = -3.0
    return numbers.to(x.dtype)


def moves_small_blocks(rank: Rank, mode: str, quant: str, changes: dict[str, Any]) -> None:
    case = rank.case(**changes)
    scale = torch.tensor(2.5) if quant.startswith("nvfp4") else None
    inputs = [
        reference.RankInput(blocks_of_all_kinds(given.x, number), given.topk_idx, given.topk_weights, scale)
        for number, given in enumerate(case.inputs)
    ]
    want = reference.dispatch(inputs, **{**case.case.dispatch_kwargs(), "quant": quant})[rank.number]
    own = inputs[rank.number]
    with rank.buffer(case.case) as buffer:
        tensors = (own.x, own.topk_idx, own.topk_weights, scale)
        given, ids, weights, scales = (to_device(each, buffer.device) for each in tensors)
        kwargs = {**case.case.dispatch_kwargs(), "quant": quant}
        out = nccl_ep.dispatch(given, ids, weights, scales=scales, buffer=buffer, mode=mode, **kwargs)
        rows = out.dequantized(torch.float32, scales)
        if quant.endswith("swizzled"):
            assert out.scales is not None and want.scales is not None and out.scales.dim() == want.scales.dim() + 1
            out.scales = plain_scales(out.scales, *want.scales.shape[-2:])
        check_dispatch(out, want, quant)
        if case.case.zero_padding:
            check_padding(out, want, quant)
        assert rows.shape == (*want.scales.shape[:-1], own.x.shape[1])
        buffer.check()


def equal_for_all_num_sms(rank: Rank, mode: str, changes: dict[str, Any]) -> None:
    case = rank.case(**changes)
    with rank.buffer(case.case) as buffer:
        for num_sms in (0, 1, 2, 3, 0):
            run_case(case, buffer, mode=mode, num_sms=num_sms)


def equal_in_open_sends(rank: Rank, changes: dict[str, Any]) -> None:
    case = rank.case(**changes)
    own = Expected(case.case)  # whose inputs are overwritten between send and receive
    with rank.buffer(case.case) as buffer:
        out = dispatch_case(case.case, own.inputs[rank.number], buffer, staged=True)
        case.check_dispatch(out, rank.number)
        rows = case.rows[rank.number].to(buffer.device, copy=True)
        y = combine_case(case.case, rows, out.handle, rank.number, staged=True)
        case.check_combine(y.cpu(), rank.number)
        buffer.check()


def expect_rows(case: Case, moved: torch.Tensor, given: list[torch.Tensor], number: int) -> None:
    """What was moved beside a case's rows, or after them, along the same routes, bit for bit."""
    inputs = [reference.RankInput(x, i.topk_idx, i.topk_weights) for x, i in zip(given, case.inputs(), strict=True)]
    want = reference.dispatch(inputs, **{**case.dispatch_kwargs(), "quant": None})[number]
    width = moved.shape[-1]
    mine, theirs = (each.reshape(-1, width)[want.valid.flatten()].view(torch.uint8) for each in (moved.cpu(), want.x))
    assert torch.equal(mine, theirs), f"rank {number}"


def other_rows(case: Case, width: int, seed: int) -> list[torch.Tensor]:
    """Of every rank's tokens, any bytes."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (tokens, width), dtype=torch.uint8, generator=made) for tokens in case.tokens]


def moves_extra_tensors(rank: Rank, mode: str) -> None:
    case = rank.case(layout="packed")
    extra = [other_rows(case.case, width, width) for width in (16, 48)]
    mine = [each[rank.number].to(rank.backend.device) for each in extra]
    with rank.buffer(case.case, scale_bytes=64) as buffer:
        out = case.send(buffer, mode=mode, extra=mine)
        case.check_dispatch(out, rank.number)
        for moved, given in zip(out.extra, extra, strict=True):
            expect_rows(case.case, moved, given, rank.number)
        buffer.check()


def moves_nan(rank: Rank, changes: dict[str, Any]) -> None:
    case = rank.case(**changes)
    with rank.buffer(case.case) as buffer:
        out = case.send(buffer)
        expect_rows(case.case, out.x, [given.x for given in case.inputs], rank.number)


def writes_given_outputs(rank: Rank, mode: str) -> None:
    """Outputs that are written again, and biases that are the output itself."""
    case = rank.case(layout="flat", biases=1)
    given = case.inputs[rank.number]
    with rank.buffer(case.case) as buffer:
        out = case.send(buffer, mode=mode)
        if mode == "ht":
            for tensor in (out.x, out.weights, out.handle.tensor):
                tensor.zero_()
            assert case.send(buffer, out=out).x is out.x
        case.check_dispatch(out, rank.number)
        bias = case.case.rank_combine_kwargs(rank.number)["bias"][0]
        into = to_device(bias, buffer.device).clone()
        rows = case.rows[rank.number].to(buffer.device)
        assert nccl_ep.combine(rows, out.handle, bias=into, out=into) is into
        synchronize(buffer.device)
        case.check_combine(into.cpu(), rank.number)
        assert len(into) == len(given.x)
