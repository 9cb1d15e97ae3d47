"""Rank masks on GPUs: on one that holds the whole world, and with a GPU for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import cuda_cases
from tests.gpu.sanitizers import TOOLS, needs_sanitizer, run_sanitizer
from tests.ll import mask_ranks
from tests.ll.mask_ranks import Parted, run_on_one_gpu, run_over_shapes
from tests.support.gpus import WORLDS, needs_gpu, num_cases, one_gpu_worlds, ranks_on_gpus
from tests.support.processes import processes, run_processes

NUM_CASES = num_cases(60)
pytestmark = needs_gpu


@one_gpu_worlds
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_two_groups_part_and_meet_on_one_gpu(num_ranks: int) -> None:
    run_on_one_gpu([Parted(case) for case in cuda_cases(max(NUM_CASES // 3, 1), num_ranks)])


@one_gpu_worlds
def test_sizes_may_change_while_ranks_are_masked_on_one_gpu() -> None:
    first = frozenset({0, 1})
    run_on_one_gpu([Parted(case, first) for case in cuda_cases(max(NUM_CASES // 3, 2), 3)], run_over_shapes)


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_ranks_part_and_meet_over_nccl(num_ranks: int, tmp_path: Path) -> None:
    count = max(NUM_CASES // 6, 1)
    assert (
        run_processes(num_ranks, mask_ranks.run_masks, tmp_path, num_ranks, count, timeout=200.0) == [count] * num_ranks
    )


@ranks_on_gpus
def test_survivors_of_a_rank_that_dies_go_on(tmp_path: Path) -> None:
    num_ranks = WORLDS[-1]
    with processes(num_ranks, mask_ranks.run_without_the_dead, tmp_path, num_ranks) as world:
        outcomes = [world.wait(rank, timeout=150.0) for rank in range(num_ranks)]
    assert [outcome.exitcode for outcome in outcomes] == [0] * (num_ranks - 1) + [mask_ranks.DEAD], outcomes


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizers_find_nothing(tool: str, tmp_path: Path) -> None:
    run_sanitizer(tool, mask_ranks.__name__, ["expert_major", "packed", "flat"], tmp_path)
