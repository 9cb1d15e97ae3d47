"""Windows of cuMem, which need no communicator, between processes with a GPU each. NCCL_EP_TEST_WINDOW=cumem runs all
other GPU tests with such windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from bench.measure_memory import SIZES
from bench.memory import taken_by
from nccl_ep.bootstrap import rendezvous_of
from tests.gpu import ht_ranks, ranks
from tests.support.expected import Expected, run_case, shared_buffer
from tests.support.gpus import needs_gpu, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = [*needs_gpu, ranks_on_gpus]
BESIDE_THE_WINDOW = 32e6  # bytes: kernels, state, and what a window's size is rounded up to


def _has_bits(rank: int, num_ranks: int) -> int:
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    cases = [Expected(case) for case in ranks.cuda_cases(8, num_ranks)]
    with shared_buffer(group, cases, device=device, window="cumem") as buffer:
        for number, case in enumerate(cases):
            run_case(case, buffer, staged=number % 2 == 1)
    wide = [ht_ranks.ExpectedHt(case) for case in ht_ranks.wide_cases(num_ranks)]
    with ht_ranks.shared_ht_buffer(group, [each.case for each in wide], device=device, window="cumem") as buffer:
        for each in wide:
            each.run(buffer)
        return int(buffer.stats()["ht_dispatches"])


def test_both_modes_have_the_oracles_bits(tmp_path: Path) -> None:
    assert min(run_processes(2, _has_bits, tmp_path, 2)) >= 5


def _loses(rank: int) -> tuple[int, int]:
    device = on_gpu(rank)
    torch.zeros(1, device=device)
    world, make = dist.group.WORLD, nccl_ep.Buffer.for_shapes
    buffer, lost = taken_by(lambda: make(world, **SIZES, device=device, window="cumem"), device, dist.barrier)
    with buffer:
        return lost, buffer.stats()["window_bytes"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="another rank's memory is on this GPU")
def test_a_gpu_loses_little_more_than_the_window(tmp_path: Path) -> None:
    for lost, window in run_processes(2, _loses, tmp_path):
        assert window <= lost <= window + BESIDE_THE_WINDOW
