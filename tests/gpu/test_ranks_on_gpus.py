"""Tests that are written for CPU ranks in threads, as they are, by two processes with a GPU each: ``nccl.ep``, the
buffers of Hybrid-EP and DeepEP V2, ``combine(scale=)``. (tests/support/ranks.py)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.support import ranks
from tests.support.gpus import needs_gpu, ranks_on_gpus
from tests.support.processes import run_processes

# By file: what has another form there, or no meaning on two GPUs, and how many tests are left at least.
FILES: dict[str, tuple[str, int]] = {
    # tests/gpu/test_masks.py has ranks that are late.
    "tests/nvidia/test_group.py": ("late_is_an_error or communicator or test_tensors", 16),
    "tests/nvidia/test_low_latency.py": ("", 26),
    "tests/nvidia/test_high_throughput.py": ("", 14),
    "tests/nvidia/test_tensorrt_llm_callers.py": ("", 4),
    "tests/nvidia/test_sglang_callers.py": ("", 5),
    "tests/nvidia/test_vllm_callers.py": ("", 9),
    "tests/nvidia/test_transformer_engine.py": ("takes_the_place", 5),
    # Domains of one GPU are apart without a network: tests/gpu/test_gin.py.
    "tests/deep_ep/test_hybrid.py": ("domain", 24),
    "tests/deep_ep/test_elastic.py": ("domains or replays", 33),
    "tests/api/test_scale.py": ("compiler", 43),
}


def check(found: list[tuple[dict[str, int], str]], least: int) -> None:
    for rank, (counted, text) in enumerate(found):
        assert not text, f"rank {rank}: {text}"
        assert counted["passed"] >= least and counted == found[0][0], counted


@pytest.mark.gpu
@needs_gpu[1]
@ranks_on_gpus
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_tests_of_ranks(name: str, tmp_path: Path) -> None:
    without, least = FILES[name]
    arguments = [str(ROOT / name), *(["-k", f"not ({without})"] if without else [])]
    check(run_processes(2, ranks.on_gpus, tmp_path, arguments, tmp_path, timeout=150.0), least)


def test_ranks_in_processes_run_tests_of_ranks_in_threads(tmp_path: Path) -> None:
    """How the others run, on the CPU."""
    arguments = [str(ROOT / "tests/nvidia/test_tensorrt_llm_callers.py"), "-k", "bf16 or fp8_bytes"]
    check(run_processes(2, ranks.on_gpus, tmp_path, arguments, tmp_path, "cpu"), 2)
