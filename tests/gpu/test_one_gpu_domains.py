"""Kernels that cross domains, with all ranks on one GPU and a NIC block in every launch (csrc/cuda/host/one_gpu).

On a GPU, and on an emulated one: NCCL_EP_EMULATOR_GPUS=1 python tests/support/emulated.py THIS FILE.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccl_ep import _C
from tests.gpu import one_gpu_domains
from tests.gpu.one_gpu_domains import TOPOLOGIES, run_ht, run_ll, wide_cases
from tests.gpu.sanitizers import TOOLS, needs_sanitizer, run_sanitizer
from tests.ht.harness import HtCoverage
from tests.support.cases import cases_of
from tests.support.gpus import NUM_GPUS, num_cases

IS_EMULATED = _C.EMULATES_GPU and os.environ.get("NCCL_EP_EMULATOR_GPUS") == "1"
_reason = "no GPU here" if NUM_GPUS == 0 else "a NIC block is in builds with -DNCCL_EP_LAB=ON"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_EMULATED and (NUM_GPUS == 0 or _C.EMULATES_GPU or not hasattr(_C, "set_gpu_testing")), reason=_reason
    ),
]
NUM_CASES = num_cases(8 if IS_EMULATED else 60)
on_topologies = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: f"{each[0]}x{each[1]}")


@on_topologies
def test_low_latency_between_domains_gives_the_oracles_bits(topology: tuple[int, int]) -> None:
    for number, case in enumerate([*cases_of(topology, NUM_CASES), *wide_cases(topology)]):
        run_ll(case, number)


def test_the_mesh_of_low_latency_gives_the_oracles_bits() -> None:
    for number, case in enumerate([*cases_of((2, 2), NUM_CASES, first=2000), *wide_cases((2, 2))]):
        run_ll(case, number, "mesh")


def test_blocks_that_share_a_channel_give_the_oracles_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share the rows of a channel, as they do where a rank has more SMs."""
    monkeypatch.setenv("EP_PLAN_R", "3,4,5,4")
    for number, case in enumerate([*cases_of((2, 2), NUM_CASES, first=900), *wide_cases((2, 2))]):
        run_ll(case, number)


@on_topologies
def test_high_throughput_between_domains_gives_the_oracles_bits(topology: tuple[int, int]) -> None:
    coverage = HtCoverage()
    for number, case in enumerate([*cases_of(topology, NUM_CASES, first=500), *wide_cases(topology)]):
        run_ht(case, number, coverage)
    print("\n" + coverage.report())


@needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizers_find_nothing(tool: str, tmp_path: Path) -> None:
    """A few cases of both modes, of two domains of two."""
    run_sanitizer(tool, one_gpu_domains.__name__, one_gpu_domains.arguments(3), tmp_path)
