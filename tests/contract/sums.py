"""What combine adds up, bit for bit: zeros of both signs, NaN, infinities, and rows that were dropped or skipped."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from tests.contract.bits import FEW, LAYOUTS, MODES
from tests.contract.world import Rank, World
from tests.ht.harness import LARGE_ARENA
from tests.support.cases import COMBINE_WEIGHTS
from tests.support.expected import Expected
from tests.support.harness import combine_case, synchronize

CONTENTS = ("few", "special", "words")
ROUTINGS = ("skewed", "some_none", "duplicates", "out_of_range")
TYPES: tuple[dict[str, Any], ...] = (
    {},
    {"rows_dtype": torch.float32},
    {"rows_dtype": torch.float16, "wire_dtype": torch.float32},
    {"out_dtype": torch.float32},
)


class Sums:
    world: World

    @pytest.mark.parametrize("content", CONTENTS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_sums_of_special_numbers_are_the_oracles(self, mode: str, layout: str, content: str) -> None:
        self.world.run(adds_up, mode, layout, content)

    @pytest.mark.parametrize("layout", ["expert_major", "packed", "flat"])
    def test_what_is_special_about_those_sums(self, layout: str) -> None:
        """Of the cases: somewhere a rank has dropped all rows of a token, and its +0 turns the others' -0 into +0."""
        cases = [self.world.case(**changes) for changes in kinds_of_sums(layout, "few")]
        assert any(reference.first_difference(mine, theirs) for case in cases for mine, theirs in without_dropped(case))
        combined = torch.cat([each.flatten() for case in cases for each in map(torch.Tensor.float, case.combined)])
        assert ((combined == 0) & combined.signbit()).any() and ((combined == 0) & ~combined.signbit()).any()

    @pytest.mark.parametrize("layout", ["expert_major", "packed", "flat"])
    @pytest.mark.parametrize("mode", MODES)
    def test_without_any_room_all_rows_are_dropped_and_counted(self, mode: str, layout: str) -> None:
        """All rows are dropped, and counted."""
        self.world.run(drops_everything, mode, layout)


def kinds_of_sums(layout: str, content: str) -> list[dict[str, Any]]:
    """Changes of a case: all weightings, numbers of biases and capacities; types and routings by turns."""
    weightings = COMBINE_WEIGHTS if layout in reference.EXPERT_LAYOUTS else ("dispatch",)
    biases = (0, 1, 2) * 3 if layout == "flat" else (0,)
    capacities: list[dict[str, Any]] = [{}, {"capacity": FEW[layout]}] if FEW[layout] else [{}]
    kinds = list(itertools.product(capacities, weightings, biases))
    if len(kinds) == 1:
        kinds *= len(TYPES)
    return [
        {
            "layout": layout, "seed": 40 + number, "rows_content": content, "combine_weights": weighting,
            "biases": bias, "weights_content": "plain" if content == "special" else content,
            "routing": ROUTINGS[(number + number // 4) % 4], **TYPES[number % 3], **capacity,
        }
        for number, (capacity, weighting, bias) in enumerate(kinds)
    ]  # fmt: skip


def without_dropped(case: Expected) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What combine gives, and what it would give if a rank that drops all rows of a token added nothing."""
    inputs = []
    for source, given in enumerate(case.inputs):
        local = case.case.num_experts // case.case.num_ranks
        is_gone = torch.zeros_like(given.topk_idx, dtype=torch.bool)
        for rank, result in enumerate(case.results):
            drops = (result.row_of[source, : len(given.x)] < 0).all(1, keepdim=True)
            is_gone |= drops & (given.topk_idx // local == rank)
        inputs.append(replace(given, topk_idx=torch.where(is_gone, -1, given.topk_idx)))
    other = reference.combine(case.rows, case.results, inputs, **case.case.combine_kwargs())
    return list(zip(case.combined, other, strict=True))


def adds_up(rank: Rank, mode: str, layout: str, content: str) -> None:
    cases = [rank.case(**changes) for changes in kinds_of_sums(layout, content)]
    arena = {"arena_bytes": LARGE_ARENA} if mode == "ht" else {}
    with rank.buffer(cases[0].case, **arena) as buffer:
        got = [results_of(case, buffer, mode) for case in cases]
        synchronize(buffer.device)
        buffer.require_usable()
        for case, (out, sums, scalars) in zip(cases, got, strict=True):
            case.check_dispatch(out, rank.number)
            for each in sums:
                case.check_combine(each.cpu(), rank.number)
            case.check_scalars(scalars.cpu(), rank.number)


def results_of(case: Expected, buffer: nccl_ep.Buffer, mode: str) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    """Of a dispatch, of combines and of one of weights, to be looked at when no rank waits for this one."""
    rows, values = (each[buffer.rank].to(buffer.device, copy=True) for each in (case.rows, case.values))
    out = case.send(buffer, mode=mode)
    sums = [combine_case(case.case, rows, out.handle, buffer.rank)]
    if mode == "ht":  # read in place, if layout and types allow it
        rows = buffer.empty(rows.shape, rows.dtype).copy_(rows)
        sums.append(combine_case(case.case, rows, out.handle, buffer.rank))
    return out, sums, nccl_ep.combine_weights(values, out.handle)


def drops_everything(rank: Rank, mode: str, layout: str) -> None:
    case = rank.case(layout=layout, capacity=0, routing="some_none", rows_content="few", zero_padding=True)
    with rank.buffer(case.case) as buffer:
        out, sums, scalars = results_of(case, buffer, mode)
        synchronize(buffer.device)
        case.check_dispatch(out, rank.number)
        case.check_scalars(scalars.cpu(), rank.number)
        for y in sums:
            case.check_combine(y.cpu(), rank.number)
            assert not y.any() and not y.signbit().any()
        assert int(out.overflow) == int(out.demand.sum()) and not out.counts.any()
        assert buffer.stats()["dropped_rows"] == int(out.overflow)
        buffer.check()
