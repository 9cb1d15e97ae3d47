"""The CUDA backend against the oracle: on one GPU that holds the whole world, and with a GPU for each rank."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu import chains, odd_addresses, ranks
from tests.gpu.sanitizers import TOOLS, needs_sanitizer, run_sanitizer
from tests.ht.harness import check_ht_case
from tests.support.expected import Expected, large_cases, plain_case, shared_buffer
from tests.support.gpus import (
    NUM_SMS,
    TEST_ALL,
    WORLDS,
    busy,
    in_processes,
    needs_gpu,
    num_cases,
    num_replays,
    on_one_gpu,
    one_gpu_worlds,
    ranks_on_gpus,
    several_gpus,
)
from tests.support.harness import check_case, combine_case, dispatch_case, make_buffer
from tests.support.processes import run_processes

NUM_CASES, NUM_REPLAYS = num_cases(600), num_replays(10000 if TEST_ALL else 2000)
PATIENCE = 150.0  # seconds for a world of processes
pytestmark = needs_gpu


# ---- The world on one GPU


@one_gpu_worlds
def test_generated_cases_on_one_gpu_give_the_oracles_bits() -> None:
    for seed in range(NUM_CASES):
        check_case(ranks.cuda_case(seed), device="cuda", staged=seed % 3 == 1)


@one_gpu_worlds
@pytest.mark.parametrize("staged", [False, True], ids=["fused", "staged"])
def test_large_cases_on_one_gpu_give_the_oracles_bits(staged: bool) -> None:
    for case in large_cases():
        check_case(case, device="cuda", staged=staged)


@one_gpu_worlds
@pytest.mark.parametrize("staged", [False, True], ids=["fused", "staged"])
@pytest.mark.parametrize("num_sms", NUM_SMS)
def test_number_of_sms_changes_no_bit(num_sms: int, staged: bool) -> None:
    for layout, quant in (("expert_major", None), ("packed", "fp8")):
        case = ranks.wide_case(3, layout=layout, quant=quant)
        check_case(case, device="cuda", staged=staged, num_sms=num_sms)


@one_gpu_worlds
@pytest.mark.parametrize("num_sms", [*NUM_SMS, 2])
def test_many_calls_on_few_sms_free_their_banks(num_sms: int) -> None:
    """A bank is used again after two calls: whoever forgets to free one shows it here."""
    case = Expected(ranks.wide_case(2))

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with make_buffer(case.case, group, device="cuda") as buffer:
            for _ in range(5):
                out = dispatch_case(case.case, case.inputs[rank], buffer, num_sms=num_sms)
                y = combine_case(case.case, case.rows[rank].cuda(), out.handle, rank, num_sms=num_sms)
                case.check_dispatch(out, rank)
                case.check_combine(y.cpu(), rank)
            buffer.check()

    run_ranks(2, body)


@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2))
def test_gemms_of_the_caller_keep_their_bits(num_ranks: int) -> None:
    case = Expected(ranks.wide_case(num_ranks))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], device="cuda") as buffer:
            ranks.run_around_gemms(case, buffer)
            ranks.run_beside_gemms(case, buffer)

    run_ranks(num_ranks, body)


# ---- A world of one rank


def test_scales_of_an_output_begin_at_any_element() -> None:
    odd_addresses.check_all(None, "cuda")


def _launches(call: Callable[[], Any]) -> tuple[dict[str, int], list[str]]:
    """How often the call launches each kernel, by the profiler's table, and the kernels of its trace: both as DeepEP's
    benchmark reads them."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        call()
        torch.cuda.synchronize()
    averages = run.key_averages()
    lines = averages.table(sort_by="cuda_time_total", max_name_column_width=100).split("\n")
    counts = {row.key: row.count for row in averages}
    for word in ("dispatch", "combine"):  # a long name is cut in the table
        assert sum(word in line for line in lines) == sum(word in name for name in counts), lines
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        return counts, [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def _expect_kernels(call: Callable[[], Any], **expected: list[int]) -> None:
    """Of each word, the launches of the kernels whose names have it."""
    found, trace = _launches(call)
    for word, launches in expected.items():
        assert [count for name, count in sorted(found.items()) if word in name] == launches, (word, found)
        assert sum(f"::{word}" in name for name in trace) == sum(launches), (word, trace)


def test_a_profiler_finds_one_kernel_a_kind() -> None:
    """Benchmarks look for one kernel with "dispatch" in its name and one with "combine"; a split call has two."""
    x, ids = torch.randn(8, 64, device="cuda").bfloat16(), torch.randint(0, 4, (8, 2), device="cuda")
    weights = torch.rand(8, 2, device="cuda")
    sizes: dict[str, Any] = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cuda"}
    with nccl_ep.Buffer.for_shapes(None, mode="auto", **sizes) as buffer:
        how: dict[str, Any] = {"buffer": buffer, "num_experts": 4}

        def fused(**options: Any) -> None:
            out = nccl_ep.dispatch(x, ids, weights, **how, **options)
            nccl_ep.combine(out.x, out.handle)

        def staged() -> None:
            out = nccl_ep.dispatch_send(x, ids, weights, **how).receive()
            nccl_ep.combine_send(out.x, out.handle).receive()

        def deepep(use_hook: bool) -> None:
            options = {"return_recv_hook": use_hook}
            rows, _, handle, _, hook = deep_ep.Buffer.of(buffer).low_latency_dispatch(
                x, ids, 8, 4, use_fp8=False, **options
            )
            if hook is not None:
                hook()
            _, _, hook = deep_ep.Buffer.of(buffer).low_latency_combine(rows, ids, weights, handle, **options)
            if hook is not None:
                hook()

        _expect_kernels(fused, dispatch=[1], combine=[1])
        _expect_kernels(staged, dispatch=[2], combine=[2])
        _expect_kernels(lambda: deepep(False), dispatch=[1], combine=[1])
        _expect_kernels(lambda: deepep(True), dispatch=[2], combine=[2])
        for layout in ("packed", "rank_major", "flat"):
            _expect_kernels(partial(fused, layout=layout), dispatch=[1], combine=[1])
        high = partial(fused, mode="ht", layout="flat")
        _expect_kernels(high, dispatch_route=[1], dispatch_send=[1], dispatch=[1, 1], combine=[1])
        buffer.check()


@several_gpus
def test_another_device_is_the_current_one() -> None:
    """As with torch's own ops. Calls of the default stream, which has the same handle on every GPU."""
    case = plain_case(1)
    torch.cuda.set_device(0)
    check_case(case, device="cuda:1")
    check_ht_case(case, device="cuda:1")
    ids = torch.tensor([[0, 1], [1, -1]], device="cuda:1")
    counts, is_in_rank = torch.ops.nccl_ep.token_layout(ids, 2, 1, 2)
    assert counts.tolist() == [1, 2, 1, 2] and is_in_rank.tolist() == [[True, True], [False, True]]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_graphs_of_one_rank_are_right(pdl: bool) -> None:
    with chains.chain_buffer(None, torch.device("cuda", 0)) as buffer:
        wrong, microseconds = chains.replay_graphs(buffer, NUM_REPLAYS, pdl=pdl)
    print(f"{NUM_REPLAYS} replays, {microseconds:.0f} us each")
    assert wrong == 0


def test_the_graph_test_sees_a_wrong_bit() -> None:
    x = torch.randn(8, 16, device="cuda").bfloat16()
    ids, weights = torch.randint(0, 4, (8, 2), device="cuda"), torch.rand(8, 2, device="cuda")
    want = chains.home_sum(x, ids, weights, 2, 4)
    got = want.clone()
    assert chains.count_differences(got, want).item() == 0
    got.view(torch.int16)[3, 5] ^= 1
    assert chains.count_differences(got, want).item() == 1


def test_inputs_may_be_overwritten_at_once() -> None:
    case = Expected(ranks.wide_case(1))
    with make_buffer(case.case, None, device="cuda") as buffer:
        for _ in range(10):
            ranks.run_overwritten(case, buffer)


def test_calls_on_two_streams_run_in_call_order() -> None:
    """The second call is on a stream that has nothing else to wait for."""
    case = Expected(plain_case(1))
    given = case.inputs[0]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with make_buffer(case.case, None, device="cuda") as buffer:
        ranks.run_case(case, buffer)
        for first, second in (streams, streams[::-1]):
            last = torch.cuda.Event()
            with torch.cuda.stream(first):
                slow = busy(200)
                out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
            with torch.cuda.stream(second):
                again = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
                last.record()
            time.sleep(0.02)
            was_early, was_slow = last.query(), not slow.query()
            torch.cuda.synchronize()
            buffer.check()
            assert was_slow, "the first stream was done too soon to tell"
            assert not was_early, "the second call did not wait for the first"
            case.check_dispatch(out, 0)
            case.check_dispatch(again, 0)


def test_two_streams_in_one_capture_keep_their_order() -> None:
    """Calls on branches of a graph that only this buffer orders; and eager calls before and after it."""
    case = Expected(plain_case(1))
    given = case.inputs[0]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()

    with make_buffer(case.case, None, device="cuda") as buffer:

        def pair() -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
            return nccl_ep.combine(out.x, out.handle)

        want = pair()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            outs = [pair()]
            with torch.cuda.stream(side):
                outs += [pair(), pair()]
            outs.append(pair())
            torch.cuda.current_stream().wait_stream(side)
        for number in range(50):
            for y in outs:
                y.fill_(9)
            graph.replay()
            if number % 10 == 0:
                assert torch.equal(pair(), want)
            for y in outs:
                assert torch.equal(y, want)
        buffer.check()


def test_a_capture_behind_what_is_no_kernel() -> None:
    """Programmatic launches behind a memset, a copy and a join of streams, which have no kernel to overlap with."""
    case = Expected(plain_case(1, layout="flat"))
    given = case.inputs[0]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    for mode in ("ll", "ht"):
        with make_buffer(case.case, None, device="cuda", mode=mode) as buffer:
            how = {**case.case.dispatch_kwargs(), "mode": mode}
            graph, side, mine = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.empty_like(x)
            scratch = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            with torch.cuda.graph(graph):
                mine.copy_(x)
                out = nccl_ep.dispatch(mine, ids, weights, buffer=buffer, **how)
                scratch.zero_()
                first = nccl_ep.combine(out.x, out.handle)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    scratch.fill_(1)
                torch.cuda.current_stream().wait_stream(side)
                second = nccl_ep.combine(out.x, out.handle)
            want = x.clone()
            for scale in (1.0, 2.0):
                x.copy_(want * scale)
                for y in (first, second, mine):
                    y.fill_(9)
                graph.replay()
                out_now = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **how)
                y = nccl_ep.combine(out_now.x, out_now.handle)
                assert torch.equal(first, y), mode
                assert torch.equal(second, y), mode
            buffer.check()


# ---- Ranks in processes, each with a GPU of its own


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_generated_cases_over_nccl_give_the_oracles_bits(num_ranks: int, tmp_path: Path) -> None:
    """With it: staged and fused, every number of SMs, and inputs that are overwritten at once."""
    count = max(NUM_CASES // 6, 1)
    got = run_processes(num_ranks, ranks.run_cases, tmp_path, num_ranks, count, NUM_SMS, timeout=PATIENCE)
    given = len(ranks.scale_cases(num_ranks))
    assert got == [count + given + 2 * 2 * len(NUM_SMS) + 20] * num_ranks


@ranks_on_gpus
def test_graphs_over_nccl_are_right(tmp_path: Path) -> None:
    """Replays with new data and routing each time, of odd numbers of operations, without and with PDL."""
    replays = in_processes(NUM_REPLAYS)
    got = run_processes(WORLDS[-1], ranks.run_graphs, tmp_path, replays, timeout=PATIENCE)
    for rank, found in enumerate(got):
        print(f"rank {rank}: {replays} replays, us each, plain and with PDL: {[round(t) for _, t in found.values()]}")
        assert [wrong for wrong, _ in found.values()] == [0, 0]


@ranks_on_gpus
def test_gemms_of_the_caller_keep_their_bits_over_nccl(tmp_path: Path) -> None:
    run_processes(2, ranks.run_gemms, tmp_path, 2, timeout=PATIENCE)


@ranks_on_gpus
def test_a_rank_that_does_not_call(tmp_path: Path) -> None:
    run_processes(2, ranks.run_deadlines, tmp_path, 2, timeout=PATIENCE)


@ranks_on_gpus
def test_ranks_that_make_different_calls(tmp_path: Path) -> None:
    got = run_processes(2, ranks.run_mismatches, tmp_path, timeout=PATIENCE)
    handles = [("combine 3", 2), ("combine 5", 3), ("combine 3", 2), ("combine 3", 2), ("combine 3", 2)]
    for rank, texts in enumerate(got):
        for text, (step, later) in zip(texts[2:], handles, strict=True):
            numbers = (1, later)  # of which dispatches
            mine, theirs = (f"rank {each} that of dispatch {numbers[each]}" for each in (rank, 1 - rank))
            assert f"handles of different dispatches to {step}: {mine}, {theirs}" in text, text
        for kind, text in zip(("dispatch", "combine"), texts[:2], strict=True):
            assert f"ranks made different calls in {kind}" in text
            for each, hidden in ((0, 64), (1, 128)):
                assert f"rank {each} called {kind}(bf16, hidden {hidden}" in text, f"on rank {rank}: {text}"


# ---- compute-sanitizer


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizers_find_nothing(tool: str, tmp_path: Path) -> None:
    """A few cases of two to four ranks on one GPU."""
    run_sanitizer(tool, ranks.__name__, ranks.covering_cases(full=TEST_ALL), tmp_path)
