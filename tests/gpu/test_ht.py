"""High throughput on CUDA against the oracle: on one GPU that holds the whole world, and with a GPU for each rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import run_ranks
from tests import ROOT
from tests.gpu import handles, ht_chains, ht_failures, ht_ranks, ranks
from tests.gpu.sanitizers import TOOLS, needs_sanitizer, run_sanitizer
from tests.ht.harness import HtCoverage, check_ht_case
from tests.support.expected import plain_case
from tests.support.gpus import (
    NUM_SMS,
    TEST_ALL,
    WORLDS,
    in_processes,
    needs_gpu,
    num_cases,
    num_replays,
    on_one_gpu,
    one_gpu_worlds,
    ranks_on_gpus,
)
from tests.support.processes import processes, run_processes

NUM_CASES, NUM_REPLAYS = num_cases(400), num_replays(10000 if TEST_ALL else 2000)
PATIENCE = 200.0  # seconds for a world of processes
pytestmark = needs_gpu


# ---- The world on one GPU


@one_gpu_worlds
def test_generated_cases_on_one_gpu_give_the_oracles_bits() -> None:
    coverage = HtCoverage()
    for seed in range(NUM_CASES):
        num_sms = (0, 1, 3)[seed % 3]
        coverage.add(check_ht_case(ranks.cuda_case(seed), device="cuda", num_sms=num_sms))
    print("\n" + coverage.report())
    if NUM_CASES >= 400:
        assert not coverage.missing()


@one_gpu_worlds
@pytest.mark.parametrize("num_sms", NUM_SMS)
@pytest.mark.parametrize("number", range(5))
def test_number_of_sms_changes_no_bit(number: int, num_sms: int) -> None:
    """In a world of one rank all SMs may be asked for; of three, the launch has a third of them for each."""
    for num_ranks in (1, 3):
        check_ht_case(ht_ranks.wide_cases(num_ranks)[number], device="cuda", num_sms=num_sms)


@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2, 4))
@pytest.mark.parametrize("body", ht_ranks.BODIES + ht_ranks.SLOW_BODIES + handles.BODIES)
def test_high_throughput_keeps_each_promise_on_one_gpu(body: Any, num_ranks: int) -> None:
    """See each body: outputs that live, inputs that are overwritten, both modes, a layout of each rank's own, FP8,
    the largest sizes."""
    run_ranks(num_ranks, lambda group: body(group, "cuda"))


@one_gpu_worlds
def test_one_buffer_serves_many_cases() -> None:
    for num_ranks in (1, 2, 4):
        cases = [ht_ranks.ExpectedHt(case) for case in ranks.cuda_cases(30, num_ranks)]
        run_ranks(num_ranks, partial(ht_ranks.run_in_one_buffer, cases=cases, device="cuda"))


# ---- A world of one rank


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "given"])
def test_graphs_of_one_rank_are_right(given: bool) -> None:
    with ht_chains.ht_chain_buffer(None, torch.device("cuda", 0)) as buffer:
        wrong, microseconds = ht_chains.replay_ht_graphs(buffer, NUM_REPLAYS, given=given)
    print(f"{NUM_REPLAYS} replays, {microseconds:.0f} us each")
    assert wrong == 0


def test_exact_sizes_refuse_a_capture() -> None:
    """With a sentence, before anything is launched: the buffer works on."""
    case = plain_case(1, layout="flat", num_experts=4, topk=2)
    given = case.inputs()[0]
    x, ids = given.x.cuda(), given.topk_idx.cuda()
    how: dict[str, Any] = {"num_experts": 4, "mode": "ht", "layout": "flat", "capacity": "exact"}
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=8, hidden=64, topk=2, num_experts=4, mode="ht", device="cuda", timeout=30.0
    ) as buffer:
        want = nccl_ep.dispatch(x, ids, buffer=buffer, **how)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            with pytest.raises(ValueError, match="exact sizes waits for the host and cannot be captured"):
                nccl_ep.dispatch(x, ids, buffer=buffer, **how)
            graph.capture_end()
        torch.cuda.synchronize()
        again = nccl_ep.dispatch(x, ids, buffer=buffer, **how)
        assert torch.equal(again.x, want.x) and len(again.x) == int(again.total) == 8
        buffer.check()


def test_a_capture_works_beside_exact_sizes() -> None:
    """A graph that was captured between calls of exact sizes replays between further ones."""
    case = ht_ranks.ExpectedHt(plain_case(1, layout="packed", num_experts=4, topk=2))
    given = case.inputs[0]
    x, ids = given.x.cuda(), given.topk_idx.cuda()
    how: dict[str, Any] = {"num_experts": 4, "mode": "ht", "layout": "packed"}
    with ht_ranks.shared_ht_buffer(None, [case.case], device="cuda") as buffer:
        want = nccl_ep.dispatch(x, ids, buffer=buffer, capacity="exact", **how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = nccl_ep.dispatch(x, ids, buffer=buffer, capacity=len(want.x), **how)
        for _ in range(21):
            captured.x.fill_(7)
            graph.replay()
            exact = nccl_ep.dispatch(x, ids, buffer=buffer, capacity="exact", **how)
            assert torch.equal(captured.x, want.x) and torch.equal(exact.x, want.x)
        buffer.check()


@one_gpu_worlds
@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_no_setting_of_the_allocator_changes_a_bit(setting: str) -> None:
    """In a process of its own, as torch reads them once."""
    cases = [*ht_ranks.covering_ht_cases()]
    env = os.environ | {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
    command = [sys.executable, "-m", ht_ranks.__name__, *cases]
    got = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert got.returncode == 0 and f"case {cases[-1]}\n" in got.stdout, got.stdout + got.stderr[-4000:]


# ---- Ranks in processes, each with a GPU of its own


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_generated_cases_over_nccl_give_the_oracles_bits(num_ranks: int, tmp_path: Path) -> None:
    """With them wide ones with every number of SMs, and the bodies of the world on one GPU."""
    count = max(NUM_CASES // 6, 1)
    got = run_processes(num_ranks, ht_ranks.run_ht_cases, tmp_path, num_ranks, count, NUM_SMS, timeout=PATIENCE)
    assert len(set(got)) == 1 and got[0] >= count + 5 * len(NUM_SMS), got


@ranks_on_gpus
def test_graphs_over_nccl_are_right(tmp_path: Path) -> None:
    """Replays with new data and routing each time, of odd numbers of operations, staged and in place."""
    replays = in_processes(NUM_REPLAYS)
    got = run_processes(WORLDS[-1], ht_ranks.run_ht_graphs, tmp_path, replays, timeout=PATIENCE)
    for rank, found in enumerate(got):
        print(f"rank {rank}: {replays} replays, us each, staged and given: {[round(t) for _, t in found.values()]}")
        assert [wrong for wrong, _ in found.values()] == [0, 0]


@ranks_on_gpus
def test_a_rank_that_does_not_call(tmp_path: Path) -> None:
    run_processes(2, ht_failures.run_ht_deadlines, tmp_path, 2, timeout=PATIENCE)


@ranks_on_gpus
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    with processes(2, ht_failures.run_with_a_dead_rank, tmp_path) as world:
        outcome = world.wait(0, PATIENCE)
        assert world.wait(1).exitcode == ht_failures.DEAD
    assert not outcome.error and outcome.exitcode == 0, outcome.error
    assert re.search(f"{ht_failures.SILENT_RANK} in high-throughput combine 1 ", outcome.value), outcome.value


@ranks_on_gpus
@pytest.mark.parametrize("who_is_inside", [0, 1], ids=["the other is inside", "the killed is inside"])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_rank_that_is_killed_amid_an_operation(kind: str, who_is_inside: int, tmp_path: Path) -> None:
    with processes(2, ht_failures.run_killed_amid, tmp_path, kind, who_is_inside) as world:
        outcome = world.wait(0, PATIENCE)
        assert world.wait(1).exitcode == -signal.SIGKILL
    assert not outcome.error and outcome.exitcode == 0, outcome.error
    pattern = rf"rank 0 waited 1 s for the [a-z ]+ of rank 1 in high-throughput {kind} \d+ "
    assert re.search(pattern, outcome.value), outcome.value
    is_unheard = "nothing of this call was heard from rank 1" in outcome.value
    assert is_unheard == (who_is_inside == 0), outcome.value


@ranks_on_gpus
def test_ranks_that_make_different_calls(tmp_path: Path) -> None:
    got = run_processes(2, ht_failures.run_ht_mismatches, tmp_path, timeout=PATIENCE)
    wanted = [
        (r"high-throughput dispatch\(bf16, hidden 256", r"high-throughput dispatch\(bf16, hidden 128"),
        (r"high-throughput dispatch\(", r"counts of a high-throughput dispatch\("),
        (r"high-throughput combine\(", r"high-throughput combine of weights\("),
    ]
    handles = [("combine 1", 1, 2), ("combine 3", 1, 3), ("dispatch 3", 1, 2)]  # of which dispatches
    for rank, texts in enumerate(got):
        for text, (step, *numbers) in zip(texts[len(wanted) :], handles, strict=True):
            mine, theirs = (f"rank {each} that of dispatch {numbers[each]}" for each in (rank, 1 - rank))
            assert f"handles of different dispatches to high-throughput {step}: {mine}, {theirs}" in text, text
        for text, calls in zip(texts[: len(wanted)], wanted, strict=True):
            assert "ranks made different calls in high-throughput " in text
            for each in (0, 1):
                assert re.search(rf"rank {each} called {calls[each]}", text), f"on rank {rank}: {text}"


# ---- compute-sanitizer


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizers_find_nothing(tool: str, tmp_path: Path) -> None:
    """A few cases of two to four ranks on one GPU."""
    run_sanitizer(tool, ht_ranks.__name__, ht_ranks.covering_ht_cases(), tmp_path)
