"""What is counted, and what is said of ids that name no expert."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from tests.contract.bits import MODES
from tests.contract.world import Rank, World
from tests.support.expected import Expected, run_case
from tests.support.harness import on_host, synchronize

COUNTERS = {"ll": ("dispatches", "combines"), "ht": ("ht_dispatches", "ht_combines")}


class Counts:
    world: World

    @pytest.mark.parametrize("mode", MODES)
    def test_an_output_has_the_documented_rows(self, mode: str) -> None:
        """In numbers, as documented: the oracle has no say here."""
        self.world.run(numbers_of_all_layouts, mode)

    @pytest.mark.parametrize("layout", ["packed", "rank_major", "flat"])
    def test_exact_outputs_have_as_many_rows_as_come(self, layout: str) -> None:
        self.world.run(sizes_are_exact, layout)

    @pytest.mark.parametrize("mode", MODES)
    def test_stats_count_operations(self, mode: str) -> None:
        self.world.run(counts_operations, mode)

    @pytest.mark.parametrize("mode", [*MODES, "exact"])
    def test_ids_out_of_range_are_reported_once(self, mode: str) -> None:
        self.world.run(reports_ids_once, mode)

    @pytest.mark.parametrize("mode", [*MODES, "exact"])
    def test_ids_out_of_range_raise_by_default(self, mode: str) -> None:
        self.world.run(raises_ids_once, mode)

    @pytest.mark.parametrize("mode", [*MODES, "exact"])
    def test_a_combine_that_raises_ids_can_be_called_again(self, mode: str) -> None:
        self.world.run(combines_after_wrong_ids, mode)

    @pytest.mark.parametrize("mode", MODES)
    def test_overflow_raises_where_asked(self, mode: str) -> None:
        self.world.run(raises_on_overflow, mode)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_row_crosses_once_to_each_rank(self, mode: str) -> None:
        """A row crosses once to each rank that has an expert of its token, and one comes back."""
        if not self.world.backend.counts_bytes:
            pytest.skip("this backend does not count what crosses")
        self.world.run(sends_no_row_twice, mode)


def _two_tokens_to_rank_0(rank: Rank, buffer: nccl_ep.Buffer, **how: Any) -> nccl_ep.DispatchOutput:
    """Of every rank: expert 0 twice, expert 1 once."""
    x = torch.full((2, 144), float(rank.number), dtype=torch.bfloat16, device=buffer.device)
    ids = torch.tensor([[0, 1], [0, -1]], device=buffer.device)
    return nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2 * rank.size, **how)


def _numbers(out: nccl_ep.DispatchOutput) -> tuple[Any, ...]:
    given = (out.counts, out.demand, out.overflow, out.offsets, out.total)
    return tuple(None if each is None else each.tolist() for each in given)


def numbers_of_all_layouts(rank: Rank, mode: str) -> None:
    ranks, is_first = rank.size, rank.number == 0
    twice, once = 2 * ranks * is_first, ranks * is_first  # rows of the two experts of this rank
    few, every = min(twice, 3), 2 * is_first
    ends = [0, -(-twice // 4) * 4, -(-twice // 4) * 4 + -(-once // 4) * 4]
    from_ranks = [every] * ranks
    first_three = [2, 1, *[0] * (ranks - 2)] if is_first else [0] * ranks
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"layout": "expert_major", "capacity": 3},
         ([few, min(once, 3)], [twice, once], [twice - few + once - min(once, 3)], None, None)),
        ({"layout": "packed", "expert_alignment": 4, "capacity": 6 * ranks + 8},
         ([twice, once], [twice, once], [0], ends, None)),
        ({"layout": "rank_major"}, (from_ranks, from_ranks, [0], None, None)),
        ({"layout": "flat"}, (from_ranks, from_ranks, [0], None, [twice])),
        ({"layout": "flat", "capacity": 3}, (first_three, from_ranks, [twice - few], None, [few])),
    ]  # fmt: skip
    with rank.buffer(rank.case().case) as buffer:
        for how, want in cases:
            out = _two_tokens_to_rank_0(rank, buffer, mode=mode, **how)
            assert _numbers(out) == want, f"{how} rank {rank.number}: {_numbers(out)}, must be {want}"
        buffer.check()


def sizes_are_exact(rank: Rank, layout: str) -> None:
    with rank.buffer(rank.case().case) as buffer:
        out = _two_tokens_to_rank_0(rank, buffer, mode="ht", layout=layout, capacity="exact")
        is_first, ranks = rank.number == 0, rank.size
        rows = {"packed": 3 * ranks, "flat": 2 * ranks, "rank_major": 0}[layout] * is_first
        shape = (ranks, 8, 144) if layout == "rank_major" else (rows, 144)
        assert out.x.shape == shape and int(out.overflow) == 0
        buffer.check()


def counts_operations(rank: Rank, mode: str) -> None:
    case = rank.case(layout="flat", capacity=5, routing="skewed")
    dispatches, combines = COUNTERS[mode]
    with rank.buffer(case.case) as buffer:
        fresh = buffer.stats()
        assert (fresh[dispatches], fresh[combines], fresh["dropped_rows"], fresh["invalid_ids"]) == (0, 0, 0, 0)
        for _ in range(3):
            out = case.send(buffer, mode=mode)
            nccl_ep.combine(out.x, out.handle)
            nccl_ep.combine_weights(out.weights, out.handle)
        synchronize(buffer.device)
        stats = buffer.stats()
        assert (stats[dispatches], stats[combines]) == (3, 6)
        if mode == "ll":  # the host's counts leave high throughput out
            assert [stats["calls"][kind] for kind in ("dispatch", "combine", "combine_weights")] == [3, 3, 3]
        assert stats["dropped_rows"] == 3 * int(case.results[rank.number].overflow)
        buffer.check()


def _good_and_bad(case: Expected, bad: dict[tuple[int, int], int], buffer: nccl_ep.Buffer) -> reference.RankInput:
    """Inputs of a case, some of whose ids are others."""
    given = case.given_on(buffer)
    ids = given.topk_idx.clone()
    for (token, k), value in bad.items():
        ids[token, k] = value
    return reference.RankInput(given.x, ids, given.topk_weights)


def reports_ids_once(rank: Rank, mode: str) -> None:
    case, size = rank.case(), 2 * rank.size
    how: dict[str, Any] = {"mode": "ht", "capacity": "exact"} if mode == "exact" else {"mode": mode}
    is_bad = rank.number == rank.size - 1
    with rank.buffer(case.case) as buffer:
        case.send(buffer, _good_and_bad(case, {(3, 1): size + 4} if is_bad else {}, buffer), **how)
        synchronize(buffer.device)
        assert buffer.stats()["invalid_ids"] == is_bad
        if is_bad:
            with pytest.raises(ValueError, match=rf"^1 expert ids .* the first is {size + 4} at token 3, k 1;"):
                buffer.check()
        assert buffer.stats()["invalid_ids"] == 0
        buffer.check()
        case.send(buffer, _good_and_bad(case, {(1, 0): -2, (2, 2): size} if is_bad else {}, buffer), **how)
        synchronize(buffer.device)
        if is_bad:
            with pytest.raises(ValueError, match=r"^2 expert ids .* the first is "):
                buffer.check()
        buffer.check()


def raises_ids_once(rank: Rank, mode: str) -> None:
    """On the rank that has them: before anything is sent where the host can read ids, else by the next call."""
    case, wrong = rank.case(), 2 * rank.size + 4
    how: dict[str, Any] = {"mode": "ht", "capacity": "exact"} if mode == "exact" else {"mode": mode}
    is_bad = rank.number == rank.size - 1
    with rank.buffer(case.case, on_invalid_ids="raise") as buffer:
        given = _good_and_bad(case, {(3, 1): wrong} if is_bad else {}, buffer)
        if buffer.stats()["backend"] == "cpu":
            text, call = rf"^topk_idx\[3, 1\] is {wrong}, must be 0 to ", partial(case.send, buffer, given, **how)
        else:
            out = case.send(buffer, given, **how)
            synchronize(buffer.device)
            text, call = rf"^1 expert ids .* the first is {wrong} at token 3, k 1;", partial(case.send, buffer, **how)
            assert out.handle.mode == how["mode"]
        if is_bad:
            with pytest.raises(ValueError, match=text):
                call()
        case.check_dispatch(case.send(buffer, mode=how["mode"]), rank.number)
        run_case(case, buffer, mode=how["mode"])
        assert buffer.stats()["invalid_ids"] == 0
        buffer.check()


def combines_after_wrong_ids(rank: Rank, mode: str) -> None:
    """The sums are those without the choices that were none. Ranks on CPUs refuse the dispatch."""
    case = rank.case()
    how: dict[str, Any] = {"mode": "ht", "capacity": "exact"} if mode == "exact" else {"mode": mode}
    is_bad = rank.number == rank.size - 1
    with rank.buffer(case.case, on_invalid_ids="raise") as buffer:
        if buffer.stats()["backend"] == "cpu":
            return
        none, wrong = (
            _good_and_bad(case, {(3, 1): no_expert, (1, 0): -1} if is_bad else {}, buffer)
            for no_expert in (-1, 2 * rank.size)
        )
        out = case.send(buffer, none, **how)
        expected = on_host(nccl_ep.combine(out.x, out.handle))
        for _ in range(2):
            out = case.send(buffer, wrong, **how)
            synchronize(buffer.device)
            if is_bad:
                with pytest.raises(ValueError, match=r"^1 expert ids .* at token 3, k 1;"):
                    nccl_ep.combine(out.x, out.handle)
            combined = on_host(nccl_ep.combine(out.x, out.handle))
            assert not reference.first_difference(combined, expected)
        run_case(case, buffer, mode=how["mode"])
        buffer.check()


def raises_on_overflow(rank: Rank, mode: str) -> None:
    """On the rank that overflows; the buffer works on."""
    with rank.buffer(rank.case().case, on_overflow="raise") as buffer:
        for _ in range(2):
            if rank.number == 0:
                with pytest.raises(nccl_ep.OverflowError, match="did not fit into capacity 3 of layout flat"):
                    _two_tokens_to_rank_0(rank, buffer, mode=mode, layout="flat", capacity=3)
            else:
                _two_tokens_to_rank_0(rank, buffer, mode=mode, layout="flat", capacity=3)
            case = rank.case()
            case.check_dispatch(case.send(buffer, mode=mode), rank.number)


def sends_no_row_twice(rank: Rank, mode: str) -> None:
    case = rank.case(routing="duplicates", topk=4)
    there = reference.wire_rows(case.inputs, num_experts=case.case.num_experts)
    with rank.buffer(case.case) as buffer:
        out = case.send(buffer, mode=mode)
        assert buffer.wire_bytes()["rows_count"] == there[rank.number].tolist()
        nccl_ep.combine(out.x, out.handle)
        back = there.T if mode == "ll" else there  # in high throughput the home rank reads them, and counts
        assert buffer.wire_bytes()["rows_count"] == (there + back)[rank.number].tolist()
