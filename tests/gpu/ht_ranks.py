"""What a rank does in tests/gpu/test_ht.py: high throughput against the oracle.

Run as a program: a few cases on one GPU, for sanitizers and for settings of the allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import reference
from nccl_ep.bootstrap import rendezvous_of
from tests.gpu.ht_chains import ht_chain_buffer, replay_ht_graphs
from tests.gpu.layers import LAYOUTS, capacity_of, layer, layer_buffer
from tests.gpu.ranks import cover, cuda_case, cuda_cases, wide_case
from tests.gpu.sanitizers import run_arguments
from tests.ht.harness import (
    LARGE_ARENA,
    SMALL_ARENA,
    HtPlan,
    HtRankResult,
    check_extra,
    check_ht_case,
    crowd,
    oracle,
    oracle_kwargs,
    run_on_rank,
)  # fmt: skip
from tests.support.cases import Case
from tests.support.expected import Expected
from tests.support.gpus import on_gpu
from tests.support.harness import check_dispatch, garble, synchronize
from tests.support.patience import of_living_ranks

# ---- Generated cases


class ExpectedHt:
    """A generated case of high throughput, with what its seed leaves open and all that the oracle says about it."""

    def __init__(self, case: Case) -> None:
        self.case, self.plan, self.inputs = case, HtPlan.of(case), case.inputs()
        self.kwargs = oracle_kwargs(case, self.plan, self.inputs)
        self.results = oracle(self.inputs, self.kwargs)
        rows = [case.expert(result.x, result, rank) for rank, result in enumerate(self.results)]
        self.combined = reference.combine(rows, self.results, self.inputs, **case.combine_kwargs())
        self.scalars = reference.combine_weights(
            [case.scalars(result, rank) for rank, result in enumerate(self.results)], self.results, self.inputs,
            num_experts=case.num_experts, layout=case.layout,
        )  # fmt: skip

    def run(self, buffer: nccl_ep.Buffer, **options: Any) -> None:
        rank = buffer.rank
        got = run_on_rank(self.case, self.plan, buffer, self.inputs[rank], self.results[rank], **options)
        self.check(got, rank, f"{self.case.describe()} {self.plan} {options} rank {rank}")

    def check(self, got: HtRankResult, rank: int, where: str) -> None:
        check_dispatch(got.dispatched, self.results[rank], where)
        for name, mine, theirs in (
            ("combined", got.combined, self.combined[rank]),
            ("scalars", got.scalars, self.scalars[rank]),
        ):
            difference = reference.first_difference(mine, theirs)
            assert not difference, f"{where}: {name}: {difference}"
        check_extra(self.case, self.plan, self.inputs, self.kwargs, {rank: got})


def shared_ht_buffer(group: Any, cases: Sequence[Case], **options: Any) -> nccl_ep.Buffer:
    """A buffer in which all operations of all the cases fit; not all outputs find a place in its arena. Ids out of
    range are no choice."""
    beside = row = 0
    for case in cases:
        plan = HtPlan.of(case)
        extra = sum(hidden * dtype.itemsize for hidden, dtype in plan.extra)
        cached = max([hidden * dtype.itemsize + 400 for hidden, dtype, _ in plan.cached], default=0)
        beside = max(beside, case.scales_width * 8 + 16 + extra, cached)
        row = max(row, case.hidden)
    arena = LARGE_ARENA if torch.device(options["device"]).type == "cuda" else 1 << 19
    by_default = {"timeout": of_living_ranks(30.0), "arena_bytes": arena, "on_invalid_ids": "count"}
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=max(case.max_tokens for case in cases), hidden=-(-row // 8) * 8,
        topk=max(case.topk for case in cases), num_experts=max(case.num_experts for case in cases), dtype=torch.float32,
        scale_bytes=beside, mode="ht", **{**by_default, **options},
    )  # fmt: skip


def run_in_one_buffer(group: Any, cases: Sequence[ExpectedHt], device: Any) -> None:
    """Counters, signals and slots of one operation are those of the next, of any other shape."""
    with shared_ht_buffer(group, [each.case for each in cases], device=device) as buffer:
        for number, case in enumerate([*cases, *reversed(cases)]):
            case.run(buffer, num_sms=number % 4)


def wide_cases(num_ranks: int) -> list[Case]:
    """Work for many blocks, in every layout."""
    cases = [wide_case(num_ranks, layout=layout, capacity=capacity_of(layout, num_ranks, 96)) for layout in LAYOUTS]
    return [*cases, wide_case(num_ranks, layout="packed", quant="fp8_ue8m0", expert_alignment=16)]


def run_ht_cases(rank: int, num_ranks: int, count: int, num_sms: tuple[int, ...]) -> int:
    """Generated cases, wide ones with every number of SMs, and the bodies below. Returns the number of dispatches."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    cases = [ExpectedHt(case) for case in cuda_cases(count, num_ranks)]
    wide = [ExpectedHt(case) for case in wide_cases(num_ranks)]
    with shared_ht_buffer(group, [each.case for each in cases + wide], device=device) as buffer:
        for case in cases:
            case.run(buffer)
        for case, sms in itertools.product(wide, num_sms):
            case.run(buffer, num_sms=sms)
        dispatches = int(buffer.stats()["ht_dispatches"])
    for body in BODIES + SLOW_BODIES:
        body(group, device)
    return dispatches


# ---- Bodies on any device


def live_outputs(group: Any, device: Any) -> None:
    """Forward through all layers, then backward: outputs, inputs and handles of all live at once, in arenas of all
    sizes."""
    rank, layers = group.rank(), [layer(group.size(), LAYOUTS[i % 4], 40 + i) for i in range(8)]
    is_cpu, room = torch.device(device).type == "cpu", 1 << 17
    small = room if is_cpu else SMALL_ARENA
    for arena_bytes in (0, small, LARGE_ARENA):
        with layer_buffer(layers[0].case, group, device, arena_bytes=arena_bytes) as buffer:
            kept = crowd(buffer, room)
            outs = [case.send(buffer) for case in layers]
            rows = [buffer.empty(case.rows[rank].shape, case.rows[rank].dtype) for case in layers]
            for mine, case in zip(rows, layers, strict=True):
                mine.copy_(case.rows[rank])
            combined = [nccl_ep.combine(each, out.handle) for each, out in zip(rows, outs, strict=True)]
            for case, out in reversed(list(zip(layers, outs, strict=True))):
                again = nccl_ep.dispatch_cached(case.inputs[rank].x.to(buffer.device), out.handle)
                valid, hidden = case.results[rank].valid.to(buffer.device), case.case.hidden
                assert torch.equal(again.x.reshape(-1, hidden)[valid], out.x.reshape(-1, hidden)[valid])
                case.check_scalars(nccl_ep.combine_weights(case.values[rank].to(buffer.device), out.handle).cpu(), rank)
            for case, out, each, y in zip(layers, outs, rows, combined, strict=True):
                case.check_dispatch(out, rank)
                case.check_combine(y.cpu(), rank)
                assert not reference.first_difference(each.cpu(), case.rows[rank]), "combine's input was written to"
            stats = buffer.stats()
            staged, total = stats["staged_dispatches"], 2 * len(layers)
            if arena_bytes == 0:
                assert staged == total
            elif arena_bytes == small:
                assert 0 < staged < total, staged
            else:
                assert staged == 0 and stats["staged_combines"] == 0
            del kept, outs, rows, combined, mine, again, out, each
            if is_cpu:  # torch's allocator keeps what it has
                assert buffer.stats()["arena_free_bytes"] == buffer.stats()["arena_bytes"] == arena_bytes


def overwrite_inputs(group: Any, device: Any, wide: bool = False) -> None:
    """Every input is overwritten by the next kernel of the stream, while other ranks may still be busy with it.

    wide: with work for many blocks."""
    rank, layers = group.rank(), [layer(group.size(), layout, 60 + i) for i, layout in enumerate(LAYOUTS)]
    if wide:
        layers = [Expected(case) for case in wide_cases(group.size())[: len(LAYOUTS)]]
    for in_arena in (False, True):
        with layer_buffer(layers[0].case, group, device, arena_bytes=1 << 27 if wide else 1 << 25) as buffer:

            def place(tensor: torch.Tensor, buffer: nccl_ep.Buffer = buffer, in_arena: bool = in_arena) -> Any:
                return (buffer.empty if in_arena else torch.empty)(
                    tensor.shape, dtype=tensor.dtype, **({} if in_arena else {"device": buffer.device})
                ).copy_(tensor)

            for case in layers * 3:
                given = case.inputs[rank]
                x, ids, weights = (place(each) for each in (given.x, given.topk_idx, given.topk_weights))
                kwargs = {**case.case.dispatch_kwargs(), "mode": "ht"}
                out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **kwargs)
                garble(x, ids, weights)
                x = place(given.x)
                cached = nccl_ep.dispatch_cached(x, out.handle)
                rows = place(case.rows[rank])
                garble(x)
                y = nccl_ep.combine(rows, out.handle)
                garble(rows)
                values = place(case.values[rank])
                scalars = nccl_ep.combine_weights(values, out.handle)
                garble(values, out.handle.tensor, out.handle.slots)
                synchronize(buffer.device)
                buffer.require_usable()
                case.check_dispatch(out, rank)
                valid, hidden = case.results[rank].valid.to(buffer.device), case.case.hidden
                assert torch.equal(cached.x.reshape(-1, hidden)[valid], out.x.reshape(-1, hidden)[valid])
                case.check_combine(y.cpu(), rank)
                case.check_scalars(scalars.cpu(), rank)


def both_modes(group: Any, device: Any) -> None:
    """One buffer does both modes, in any order, and what comes out is equal to the last bit."""
    rank = group.rank()
    for layout, quant in itertools.product(LAYOUTS, (None, "fp8", "fp8_ue8m0")):
        case = layer(group.size(), layout, 80, quant=quant, zero_padding=True)
        first: list[torch.Tensor] = []
        with layer_buffer(case.case, group, device, mode="auto", scale_bytes=64) as buffer:
            for mode in ("ll", "ht", "ht", "ll", "ll", "ht"):
                out = case.send(buffer, mode=mode)
                assert out.handle.mode == mode
                y = nccl_ep.combine(case.rows[rank].to(buffer.device), out.handle)
                scalars = nccl_ep.combine_weights(case.values[rank].to(buffer.device), out.handle)
                kept = (out.x, out.scales, out.weights, out.topk_idx, out.counts, out.offsets, out.row_expert)
                tensors = [each.cpu() for each in (*kept, y, scalars) if each is not None]
                case.check_dispatch(out, rank)
                first = first or tensors
                for tensor, same in zip(tensors, first, strict=True):
                    assert not reference.first_difference(tensor, same), f"{mode}, {layout}, {quant}"


def own_layouts(group: Any, device: Any) -> None:
    """Every rank takes what comes in a layout of its own, which the others learn from its call; outputs and combine's
    rows lie in the arena on some ranks alone."""
    rank, ranks = group.rank(), group.size()
    for turn in range(len(LAYOUTS)):
        layouts = [LAYOUTS[(r + turn) % len(LAYOUTS)] for r in range(ranks)]
        case = layer(ranks, layouts[rank], 90)
        arena_bytes, uses_arena = (turn % 2) << 25, turn % 2 == 1 and (rank + turn // 2) % 2 == 1
        with layer_buffer(case.case, group, device, arena_bytes=arena_bytes) as buffer:
            taken = None if uses_arena else buffer.empty((arena_bytes,), torch.uint8)
            out = case.send(buffer)
            case.check_dispatch(out, rank)
            rows = buffer.empty(out.x.shape, out.x.dtype) if uses_arena else torch.empty_like(out.x)
            y = nccl_ep.combine(rows.fill_(rank + 1), out.handle, weights=None)
            want = torch.zeros(len(case.inputs[rank].topk_idx))
            owner = torch.where(case.inputs[rank].topk_idx >= 0, case.inputs[rank].topk_idx // 4, -1)
            for r, layout in enumerate(layouts):
                there = (owner == r).sum(1)
                want += (r + 1) * (there if layout in ("packed", "expert_major") else there.clamp(max=1))
            assert torch.equal(y.cpu(), want.bfloat16()[:, None].expand(y.shape)), f"{layouts} rank {rank}"
            del taken


# One chunk, less than a group, whole groups, partial steps and blocks of two steps: the last of one, two and more.
HIDDEN_OF_CONVERSION = (16, 112, 128, 528, 1008, 1040, 2064, 3072)


def _groups_to_convert(count: int, dtype: torch.dtype, made: torch.Generator) -> torch.Tensor:
    """[count, 128] of `dtype`, each group of a kind: what decides its scale stands anywhere, of either sign."""
    size = reference.FP8_GROUP
    x = torch.randn(count, size, generator=made).to(dtype)
    lone = torch.rand(count, size, generator=made).argmax(1)
    nan, info = torch.tensor([0x7FFF, -1], dtype=torch.int16).view(dtype), torch.finfo(dtype)
    for group, place in enumerate(lone.tolist()):
        sign, row = (1, -1)[place % 2], x[group]
        match group % 10:
            case 0:
                row.mul_(0.01)[place] = 3 * sign
            case 1:
                row[:] = nan.repeat(size // 2)
            case 2:
                row.copy_(torch.randint(-(2**15), 2**15, (size,), generator=made).to(torch.int16).view(dtype))
            case 3:
                row[place] = float("inf") * sign
            case 4:
                row[place], row[place - 1] = nan[place % 2], 5 * sign
            case 5:
                row.zero_()[:place] = -0.0
            case 6:
                row.mul_(info.smallest_normal / 4)
            case 7:
                row.mul_(1e-6)[place] = 1e-4 * (1 + 0.1 * sign)
            case 8:
                row[place] = info.max * sign
    return x


def conversion(group: Any, device: Any) -> None:
    """Rows become FP8 bit for bit in both modes, whatever is in them and wherever they end."""
    rank, ranks, tokens = group.rank(), group.size(), 11  # no multiple of the kinds
    for dtype, quant in itertools.product((torch.bfloat16, torch.float16), reference.QUANT_MODES):
        cases = [
            layer(ranks, "flat", 100, hidden=hidden, dtype=dtype, quant=quant, tokens=(tokens,) * ranks).case
            for hidden in HIDDEN_OF_CONVERSION
        ]
        with layer_buffer(cases[-1], group, device, mode="auto", scale_bytes=96) as buffer:
            for case, mode in itertools.product(cases, ("ll", "ht")):
                inputs, made = case.inputs(), torch.Generator().manual_seed(case.hidden)
                for given in inputs:
                    groups = _groups_to_convert(tokens * -(-case.hidden // 128), dtype, made)
                    given.x.copy_(groups.view(tokens, -1)[:, : case.hidden])
                given, how = inputs[rank], {**case.dispatch_kwargs(), "mode": mode}
                mine = (each.to(buffer.device) for each in (given.x, given.topk_idx, given.topk_weights))
                out = nccl_ep.dispatch(*mine, buffer=buffer, **how)
                want = reference.dispatch(inputs, **case.dispatch_kwargs())[rank]
                check_dispatch(out, want, f"{dtype} {quant} hidden {case.hidden} {mode} rank {rank}")


def long_rows(group: Any, device: Any) -> None:
    """Combine shares a token out where its row is of several pieces: 1,024 numbers each, of which warps take 2 or 4."""
    rank, ranks = group.rank(), group.size()
    for layout, hidden in itertools.product(("flat", "packed"), (2048, 2056, 5128, 9216)):
        case = layer(ranks, layout, hidden, hidden=hidden, tokens=(9,) * ranks)
        with layer_buffer(case.case, group, device) as buffer:
            for _ in range(2):
                out = case.send(buffer)
                case.check_dispatch(out, rank)
                case.combine_rows(buffer, out.handle, case.rows[rank].to(buffer.device))  # checks it


def _run_once(case: Expected, group: Any, device: Any, **options: Any) -> None:
    """All operations, after a dispatch of a token too many that is refused."""
    with layer_buffer(case.case, group, device, **options) as buffer:
        most, kwargs = case.case.max_tokens, {**case.case.dispatch_kwargs(), "mode": "ht"}
        x, ids = torch.zeros(most + 1, case.case.hidden), torch.zeros(most + 1, case.case.topk, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"{most + 1} tokens, but max_tokens is {most}"):
            nccl_ep.dispatch(x.to(buffer.device, case.case.dtype), ids.to(buffer.device), buffer=buffer, **kwargs)
        out = case.send(buffer)
        case.check_dispatch(out, group.rank())
        case.combine_rows(buffer, out.handle, case.rows[group.rank()].to(buffer.device))
        case.combine_weights(buffer, out.handle)


def rows_of_64_kib(group: Any, device: Any, **changes: Any) -> None:
    """The longest there are, of numbers of two and of four bytes."""
    tokens, ranks = 3, group.size()
    few = {"topk": 2, "max_tokens": tokens, "tokens": (tokens,) * ranks, **changes}
    for layout, dtype in itertools.product(LAYOUTS, (torch.bfloat16, torch.float32)):
        rows = {"dtype": dtype, "rows_dtype": dtype, "hidden": 65536 // dtype.itemsize}
        case = layer(ranks, layout, 110, capacity=capacity_of(layout, ranks, tokens), **rows, **few)
        _run_once(case, group, device, dtype=dtype)


def many_tokens(group: Any, device: Any, **changes: Any) -> None:
    """65,536 tokens a rank, of which the last has one less."""
    most, ranks = 65536, group.size()
    tokens = (most,) * (ranks - 1) + (most - 1,)
    few = {"hidden": 16, "topk": 2, "num_experts": 2 * ranks, "max_tokens": most, "tokens": tokens, **changes}
    for layout in ("flat", "packed"):
        _run_once(layer(ranks, layout, 111, **few), group, device)


BODIES = (live_outputs, overwrite_inputs, both_modes, own_layouts, conversion, long_rows, rows_of_64_kib)
SLOW_BODIES = (many_tokens,)  # too slow for emulated GPUs


# ---- CUDA graphs with routing that changes


def run_ht_graphs(rank: int, replays: int) -> dict[bool, tuple[int, float]]:
    """Wrong elements, and microseconds of a replay, of graphs with outputs of their own and with given ones."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    with ht_chain_buffer(group, device) as buffer:
        return {given: replay_ht_graphs(buffer, replays, given=given, seed=given) for given in (False, True)}


# ---- As a program


def _properties(case: Case) -> set[tuple[Any, ...]]:
    """What tells one path through the kernels from another."""
    plan = HtPlan.of(case)
    return {
        (case.layout, "quant" if case.quant else "bits"), ("sizes", plan.exact), ("arena", plan.arena),
        ("rows in the arena", plan.rows_in_arena), ("extra", len(plan.extra) > 0), ("given", plan.given),
        ("weights", case.combine_weights), ("capacity", case.layout, case.capacity_kind),
        ("padding", case.zero_padding),
        *(("cached", quant is not None) for _, _, quant in plan.cached),
    }  # fmt: skip


def covering_ht_cases() -> list[str]:
    """Few small cases of 2 to 4 ranks that have all properties between them, as arguments of this program."""
    small: dict[str, tuple[int, set[tuple[Any, ...]]]] = {}
    for seed in range(400):
        case = cuda_case(seed)
        size = case.num_experts * case.num_ranks * case.max_tokens * case.hidden
        if 2 <= case.num_ranks <= 4 and size < 2**16 and sum(case.tokens) > 4 and case.routing != "none":
            small[str(seed)] = (size, _properties(case))
    return [*cover(small), "wide"]  # many pieces of a row, many tokens of a warp


def run_argument(text: str) -> None:
    """A seed, or "wide"."""
    if text == "wide":
        case = wide_case(2, layout="packed", max_tokens=40, tokens=(40, 40))
        check_ht_case(case, device="cuda", num_sms=2)
    else:
        check_ht_case(cuda_case(int(text)), device="cuda")


if __name__ == "__main__":
    run_arguments(run_argument)
