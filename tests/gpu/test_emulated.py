"""The kernels of CUDA against the oracle on emulated GPUs, one a rank: what stands in test_gpu.py, test_ht.py and
test_delays.py where there are real ones. Run by tests/support/emulated.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from bench.stamps import KERNELS, STAMPS, over_calls
from nccl_ep import _C
from nccl_ep.placement import ExpertMap, map_experts, rebalance_experts
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import deepep_cases
from tests.deep_ep.normal_ranks import check_layout, layout_of, normal_buffer
from tests.gpu import chains, handles, ht_chains, ht_ranks, odd_addresses, ranks
from tests.gpu.delays import COMBINE, DISPATCH, SEARCHES, Search, delays, meet, set_testing, stress
from tests.ht.harness import HtCoverage, check_ht_case
from tests.support.expected import Expected, large_cases, plain_case, shared_buffer
from tests.support.harness import case_buffer, check_case
from tests.support.patience import DEADLINES, PATIENCE, Late, with_more_time

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

NUM_CASES = int(os.environ.get("NCCL_EP_EMULATOR_CASES", "160"))
NUM_SMS = (1, 2, 3)
RUNS = 60  # of a chain, in the search for a planted bug
HT_ROUNDS = 25
NO_EXPERT = 2**31 - 1  # csrc/runtime/common/expert_map.h
PERCENT = 2000  # of a delay's usual length: an emulated call takes so much longer


# ---- Generated cases


@pytest.mark.parametrize("part", range(4))
def test_generated_cases_give_the_oracles_bits(part: int) -> None:
    for seed in range(part, NUM_CASES, 4):
        check_case(ranks.cuda_case(seed), staged=seed % 3 == 1)


# Blocks, their warps, and which of them send and receive (csrc/cuda/launch/launch_util.h: tuned). steps: of a piece.
SHARED = "2,5,2,1,0,1,3,{steps},1,0", "3,5,3,1,0,1,3,{steps},1,0"
SEPARATE = "3,4,1,2,1,0,3,2,1,0"


@pytest.mark.parametrize("plan", SHARED)
def test_blocks_that_send_and_receive_give_the_oracles_bits(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dispatches of many tokens have them on few SMs; here those of few tokens, too."""
    for seed in range(int(plan[0]), NUM_CASES, 4):
        case = ranks.cuda_case(seed)
        is_light = case.quant is None and case.dtype.is_floating_point and case.scales_dtype is None
        if not str(case.quant).startswith("nvfp4"):  # its pieces have one step
            monkeypatch.setenv("EP_PLAN_D", plan.format(steps=4 if is_light else 2))
            check_case(case, staged=seed % 3 == 1)


def test_blocks_that_only_send_serve_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on many SMs."""
    monkeypatch.setenv("EP_PLAN_D", SEPARATE)
    for number, layout in enumerate(("expert_major", "packed", "flat")):
        check_case(ranks.wide_case(3, layout=layout, capacity=None), staged=number == 1)


@pytest.mark.parametrize("part", range(4))
def test_generated_cases_of_high_throughput_give_the_oracles_bits(part: int) -> None:
    coverage = HtCoverage()
    for seed in range(part, NUM_CASES, 4):
        coverage.add(check_ht_case(ranks.cuda_case(seed), num_sms=(0, 1, 3)[seed % 3]))
    print("\n" + coverage.report())


def test_scales_of_the_caller_travel_unchanged() -> None:
    for number, case in enumerate(ranks.scale_cases(2)):
        check_case(case, staged=number % 3 == 1, num_sms=number % 2 + 1)


def test_scales_of_an_output_begin_at_any_element() -> None:
    run_ranks(2, partial(odd_addresses.check_all, device="cpu"))


@pytest.mark.parametrize("part", range(3))
def test_large_cases_give_the_oracles_bits(part: int) -> None:
    """More than 64 bins, whose info and starts take several rounds; rows of many pieces."""
    for number, case in enumerate(large_cases()[part::3]):
        check_case(case, staged=number % 3 == 1, num_sms=number % 2 + 1)


def test_dropped_rows_of_many_experts_are_added_up() -> None:
    """130 experts on a rank, of each of which most rows are dropped: several warps count them."""
    sizes = {"num_experts": 260, "topk": 8, "max_tokens": 24, "tokens": (24, 24), "capacity": 1}
    check_case(plain_case(**sizes, capacity_kind="overflowing"))


@pytest.mark.parametrize("alignment", [2**30, 2**31 - 1])
def test_starts_that_no_int_holds_are_right(alignment: int) -> None:
    case = Expected(plain_case(layout="packed", num_experts=16, topk=4, expert_alignment=alignment, capacity=40))
    check_case(case.case)

    def body(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, mode="ht") as buffer:
            case.check_dispatch(case.send(buffer), group.rank())

    run_ranks(2, body)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_delays_change_no_bit(mode: str) -> None:
    for seed in range(NUM_CASES // 8):
        with delays(seed=seed + 1):
            if mode == "ll":
                check_case(ranks.cuda_case(seed), staged=seed % 3 == 1)
            else:
                check_ht_case(ranks.cuda_case(seed), num_sms=seed % 4)


def test_delays_change_no_bit_of_deepeps_methods() -> None:
    cases = deepep_cases(8, 3, domain_size=None)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases) as buffer:
            for number, case in enumerate(cases):
                case.run(buffer, staged=number % 2 == 1)

    for seed in (1, 2):
        with delays(seed=seed):
            run_ranks(3, body)


@pytest.mark.parametrize("num_sms", NUM_SMS)
def test_number_of_sms_changes_no_bit(num_sms: int) -> None:
    for layout, quant in (("expert_major", None), ("packed", "fp8")):
        for staged in (False, True):
            check_case(ranks.wide_case(3, layout=layout, quant=quant), staged=staged, num_sms=num_sms)
    for case in ht_ranks.wide_cases(3):
        check_ht_case(case, num_sms=num_sms)


def test_the_last_plans_are_told_in_words() -> None:
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            assert buffer.runtime.last_plans() == ["", ""]
            case.run(buffer)
            blocks, plans = buffer.runtime.last_blocks(), buffer.runtime.last_plans()
            for count, plan in zip(blocks, plans, strict=True):
                assert count > 0 and plan.startswith(f"{count} blocks of ") and " receive with " in plan

    run_ranks(2, body)


@pytest.mark.parametrize("num_ranks", [33, 64])
def test_more_ranks_than_lanes_give_the_oracles_bits(num_ranks: int) -> None:
    case = plain_case(num_ranks, topk=8, tokens=(4,) * num_ranks, max_tokens=4)
    check_case(case, num_sms=1)
    check_ht_case(case, num_sms=1)


@pytest.mark.parametrize(
    ("tokens", "topk", "num_experts", "idx_dtype"),
    [
        ((333, 127, 65), 7, 48, torch.int64),  # ids that are loaded one by one
        ((333, 127, 65), 3, 48, torch.int32),
        ((201, 64), 8, 8192, torch.int32),  # counters without copies, few placing warps
        ((2060, 33), 32, 32, torch.int64),  # a second tile; a share that does not fit
    ],
)
def test_every_shape_of_routing_gives_the_oracles_bits(
    tokens: tuple[int, ...], topk: int, num_experts: int, idx_dtype: torch.dtype
) -> None:
    case = plain_case(
        len(tokens), topk=topk, tokens=tokens, max_tokens=max(tokens), num_experts=num_experts, idx_dtype=idx_dtype,
        hidden=8, layout="flat",
    )  # fmt: skip
    check_ht_case(case, num_sms=2)


# ---- Buffers that live longer than a case: ranks may be a call ahead of others


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_buffer_serves_many_cases(num_ranks: int) -> None:
    cases = [Expected(case) for case in ranks.cuda_cases(20, num_ranks)]
    ht_cases = [ht_ranks.ExpectedHt(each.case) for each in cases]

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases) as buffer:
            for number, case in enumerate([*cases, *reversed(cases)]):
                case.run(buffer, staged=number % 3 == 1)
        ht_ranks.run_in_one_buffer(group, ht_cases, "cpu")

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("body", ht_ranks.BODIES + handles.BODIES)
def test_high_throughput_keeps_each_promise(body: Any, num_ranks: int) -> None:
    run_ranks(num_ranks, lambda group: body(group, "cpu"))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_layout_of_tokens_is_counted_right(num_ranks: int) -> None:
    """Blocks that take several rounds, one that has few tokens, none at all; ids that are none."""

    def body(group: ThreadGroup) -> None:
        made = torch.Generator().manual_seed(group.rank())
        with normal_buffer(group) as buffer:
            for tokens, topk, dtype in ((700, 3, torch.int64), (5, 9, torch.int32), (0, 2, torch.int64)):
                ids = torch.randint(-2, 15, (tokens, topk), generator=made).to(dtype)
                check_layout(buffer, ids, 12)
                counts, is_in_rank = torch.ops.nccl_ep.token_layout(ids, 6, 3, 12)  # on CUDA no buffer has domains yet
                per_rank, per_domain, per_expert, want = layout_of(ids, 12, 6, 2)
                assert counts.tolist() == per_rank + (per_domain or []) + per_expert
                assert is_in_rank.tolist() == want

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("counts", [False, True])
def test_choices_of_experts_are_mapped_right(counts: bool) -> None:
    """Blocks that take several rounds, few tokens, none; ids that are none, and for others what a dispatch refuses."""
    made = torch.Generator().manual_seed(1)
    placed = rebalance_experts(torch.rand(1, 24, generator=made), 40, 1, 1, 4)[0][0]
    copies = [(placed == expert).nonzero().flatten().tolist() for expert in range(24)]
    mapped = ExpertMap(placed, 24, rank=3)
    mapped.load += 5
    total = torch.full((24,), 5)
    for tokens, topk, dtype in ((7000, 3, torch.int64), (5, 9, torch.int32), (0, 2, torch.int64)):
        ids = torch.randint(-2, 26, (tokens, topk), generator=made).to(dtype)
        load = mapped.load if counts else None
        got = map_experts(ids, mapped.logical_to_physical_map, mapped.logical_count, rank=3, load=load)
        assert got.dtype == dtype and got.tolist() == [
            [e if e < 0 else NO_EXPERT if e >= 24 else copies[e][(token + 3) % len(copies[e])] for e in row]
            for token, row in enumerate(ids.tolist())
        ]
        total += torch.bincount(ids[(ids >= 0) & (ids < 24)].flatten().long(), minlength=24)
    assert mapped.load.tolist() == (total.tolist() if counts else [5] * 24)


def _run_chain(chain: chains.Chain, runs: int) -> int:
    """Wrong elements of all runs, on this rank."""
    for _ in range(runs - 1):
        chain.run()
        chain.renew()
    return chain.finish()


@pytest.mark.parametrize("seed", [0, 3], ids=["plain", "delays"])
def test_chains_are_right_whatever_the_order(seed: int) -> None:
    def body(group: ThreadGroup) -> int:
        wrong = 0
        with chains.chain_buffer(group, "cpu") as buffer:
            for letters in chains.CHAINS:
                wrong += _run_chain(chains.Chain(letters, buffer), 5)
            for number, how in enumerate(() if seed else chains.HOWS):
                letters = chains.CHAINS[number % 3]
                wrong += _run_chain(chains.Chain(letters, buffer, how=how), 2)
        with ht_chains.ht_chain_buffer(group, "cpu") as buffer:
            for letters in ht_chains.HT_CHAINS:
                wrong += _run_chain(ht_chains.HtChain(letters, buffer, given=False), 2)
        return wrong

    with delays(seed=seed, percent=PERCENT):
        assert run_ranks(4, body) == [0] * 4


# ---- Ranks that are missing, or do something else


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_silent_rank_is_named(mode: str, phase: str) -> None:
    case = Expected(plain_case(3, layout="flat"))

    def run(deadline: float) -> None:
        def body(group: ThreadGroup) -> str:
            with case_buffer(case.case, group, mode=mode, device="cpu") as buffer:
                out = case.send(buffer, mode=mode)
                meet(group)
                if group.rank() == 1:
                    meet(group)
                    return ""
                buffer.set_timeout(deadline)
                with pytest.raises(nccl_ep.TimeoutError) as caught:
                    if phase == "dispatch":
                        case.send(buffer, mode=mode)
                    else:
                        nccl_ep.combine(out.x, out.handle)
                    buffer.check()
                meet(group)
                return str(caught.value)

        texts = run_ranks(3, body)
        for rank in (0, 2):
            assert f"rank {rank} waited {deadline:g} s for" in texts[rank] and f"{phase} " in texts[rank]
            if "of rank 1" not in texts[rank]:  # some ranks are slow here
                raise Late(texts[rank])

    with_more_time(run)


@pytest.mark.parametrize(("kind", "layout"), [(DISPATCH, "flat"), (DISPATCH, "packed"), (COMBINE, "packed")])
def test_rows_that_nobody_announces_end_at_the_deadline(kind: int, layout: str) -> None:
    """All ranks wait for rows, by way of the warp that watches where rows are copied, and end with the deadline."""
    case = Expected(plain_case(2, layout=layout))

    def body(group: ThreadGroup, deadline: float) -> str:
        with case_buffer(case.case, group, mode="ht", device="cpu") as buffer:
            out = case.send(buffer)
            meet(group)
            if group.rank() == 0:
                set_testing(bugs=["unannounced_rows"], kinds=kind)
            buffer.set_timeout(deadline)
            meet(group)
            with pytest.raises(nccl_ep.TimeoutError) as caught:
                if kind == DISPATCH:
                    out = case.send(buffer)
                else:
                    nccl_ep.combine(case.rows[buffer.rank], out.handle)
                buffer.check()
            assert kind == COMBINE or not out.counts.any()  # nothing was received
            meet(group)
            return str(caught.value)

    def run(deadline: float) -> None:
        try:
            texts = run_ranks(2, lambda group: body(group, deadline))
        finally:
            set_testing()
        for rank, text in enumerate(texts):
            assert f"rank {rank} waited {deadline:g} s for" in text
            if ("row" if kind == DISPATCH else "read") not in text:
                raise Late(text)

    with_more_time(run, (0.5, *DEADLINES[1:]))


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_other_calls_are_told_apart(mode: str) -> None:
    cases = [Expected(plain_case(2, layout="flat", hidden=hidden)) for hidden in (64, 128)]

    def body(group: ThreadGroup) -> str:
        with case_buffer(cases[1].case, group, mode=mode, device="cpu", timeout=PATIENCE) as buffer:
            with pytest.raises(nccl_ep.MismatchError) as caught:
                cases[group.rank()].send(buffer, mode=mode)
                buffer.check()
            meet(group)
            return str(caught.value)

    for text in run_ranks(2, body):
        assert "64" in text and "128" in text


def test_other_calls_are_told_apart_by_blocks_that_come_late() -> None:
    """A block may find the other rank's call and give up before the one begins that would tell of this rank's."""
    cases = [Expected(plain_case(2, layout="flat", hidden=hidden)) for hidden in (64, 128)]

    def body(group: ThreadGroup, seed: int) -> str:
        with case_buffer(cases[1].case, group, mode="ht", device="cpu", timeout=PATIENCE) as buffer:
            meet(group)
            if group.rank() == seed % 2:
                time.sleep(0.05)
            with pytest.raises(nccl_ep.EpError) as caught:
                cases[group.rank()].send(buffer, mode="ht")
                buffer.check()
            meet(group)
            return type(caught.value).__name__

    for seed in range(1, 41):
        with delays(seed=seed, percent=5 * PERCENT):
            assert run_ranks(2, partial(body, seed=seed)) == ["MismatchError"] * 2, seed


# ---- Planted bugs


def _run_search(search: Search, seed: int, bugs: tuple[str, ...]) -> str:
    """What went wrong in the chain of the search, on any rank; empty: nothing."""

    def body(group: ThreadGroup) -> str:
        with search.buffer(group, "cpu") as buffer:
            chain = search.chain(buffer, seed)
            chain.run()
            if bugs:
                buffer.set_timeout(4.0)
            meet(group)
            if group.rank() == 0:
                set_testing(seed=seed, bugs=list(bugs), kinds=search.kinds, percent=PERCENT)
            meet(group)
            return stress(chain, chain.run, RUNS if bugs else RUNS // 8, group, batch=1)

    try:
        return run_ranks(4, body)[0]
    finally:
        set_testing()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_SMS", "2")
    monkeypatch.setattr(ht_chains.HtChain, "tokens", 40)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", list(SEARCHES))
def test_planted_bugs_are_found(name: str) -> None:
    search, seed = SEARCHES[name], 1 + list(SEARCHES).index(name)
    found = _run_search(search, seed, search.bugs)
    print(f"{name}: {found}")
    assert found, f"{name}: not noticed in {RUNS} runs"


def _send_and_look(buffer: nccl_ep.Buffer, case: Expected, rank: int) -> nccl_ep.Handle:
    out = case.send(buffer)
    case.check_dispatch(out, rank)
    return out.handle


def _combine_and_overwrite(buffer: nccl_ep.Buffer, case: Expected, rank: int, handle: nccl_ep.Handle) -> None:
    rows = buffer.empty(case.rows[rank].shape, case.rows[rank].dtype).copy_(case.rows[rank])
    y = nccl_ep.combine(rows, handle)
    rows.zero_()
    case.check_combine(y, rank)


def _together(group: ThreadGroup, step: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The step's result, and its errors on all ranks: no rank waits in the next one for a rank that ends with this."""
    result, problem = None, ""
    try:
        result = step(*args)
    except Exception as error:
        problem = str(error)
    return result, meet(group, problem[:300])


def _dispatch_and_overwrite(group: ThreadGroup, cases: list[Expected]) -> str:
    """What is wrong at once in what a call leaves, as soon as it has ended; empty: nothing. Inputs are overwritten."""
    rank = group.rank()
    with ht_ranks.shared_ht_buffer(group, [each.case for each in cases], device="cpu", arena_bytes=1 << 25) as buffer:
        for number in range(HT_ROUNDS):
            case = cases[number % len(cases)]
            handle, problems = _together(group, _send_and_look, buffer, case, rank)
            if not problems:
                _, problems = _together(group, _combine_and_overwrite, buffer, case, rank, handle)
            if problems:
                return f"round {number}: {'; '.join(problems)}"
    return ""


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [("", 3), ("early_rows", DISPATCH), ("torn_rows", DISPATCH), ("early_rows", COMBINE), ("early_done", COMBINE)],
)
def test_planted_bugs_of_high_throughput_are_found(bug: str, kinds: int) -> None:
    """What is too early by a few steps: seen by a caller who looks, or writes, as soon as the call has ended."""
    cases = [Expected(case) for case in ht_ranks.wide_cases(3)]
    with delays(seed=1, bugs=[bug] if bug else [], kinds=kinds, percent=PERCENT):
        found = run_ranks(3, partial(_dispatch_and_overwrite, cases=cases))[0]
    print(f"{bug}: {found}")
    assert bool(found) == bool(bug), found


@pytest.mark.usefixtures("_small")
def test_the_chains_of_the_search_find_nothing_without_a_bug() -> None:
    tried = {(search.letters, search.to_rank_0, search.is_ht) for search in SEARCHES.values()}
    for letters, to_rank_0, is_ht in sorted(tried):
        assert not _run_search(Search((), DISPATCH | COMBINE, letters, to_rank_0, is_ht), 1, ())


# ---- What builds with stamps have besides


def _run_every_kernel(group: ThreadGroup, case: Expected, mode: str) -> None:
    """A whole combine is another kernel than one that waits for signals."""
    rows, weights = case.rows[group.rank()], case.inputs[group.rank()].topk_weights
    num_experts, capacity, _ = rows.shape
    signals = {"row_signals": torch.ones(num_experts, 1, dtype=torch.int32), "rows_per_signal": capacity}
    with case_buffer(case.case, group, mode=mode, device="cpu") as buffer:
        handle = case.send(buffer, mode=mode).handle
        nccl_ep.combine(rows, handle)
        nccl_ep.combine_send(rows, handle, weights=weights, **signals, num_sms=1).receive()


@pytest.mark.parametrize("mode", sorted(KERNELS))
def test_every_kernel_passes_its_phases_in_order(mode: str) -> None:
    """Of the builds with stamps: every kernel's warps have passed its phases, in their order."""
    case = Expected(ranks.wide_case(2, layout="expert_major", capacity=2 * 96))
    run_ranks(2, partial(_run_every_kernel, case=case, mode=mode))
    for kernel in {each for kernels in KERNELS[mode].values() for each in kernels}:
        passed = over_calls([_C.time_line(kernel)])
        assert {"kStart", "kEpochKnown", "kEnd"} <= passed.keys() <= set(STAMPS), (kernel, passed)
        assert passed["kStart"][0] == 0 and all(first <= passed["kEnd"][2] for first, _, _ in passed.values()), passed
        assert over_calls([_C.time_line(kernel)]) == {}, "taken already"
