"""A program of NVIDIA's NCCL EP that knows nccl_ep.h alone: on CPU ranks over stand-ins for CUDA and NCCL, on GPUs over
both themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from nccl_ep import _C
from tests import ROOT
from tests.c.case import TOOLS, run
from tests.c.test_headers import toolkit
from tests.support.gpus import NUM_GPUS, needs_gpu, several_gpus
from tests.support.patience import PATIENCE

PROGRAM = ROOT / "tests/c/nvidia/on_gpus.cc"
STAND_INS = [ROOT / "tests/c/nvidia" / name for name in ("on_cpu.cc", "without_nccl.cc")]


def run_ranks_of(program: Path, num_ranks: int, **options: Any) -> None:
    ranks = [
        subprocess.Popen(
            [program, str(rank), str(num_ranks), program.with_suffix(f".{num_ranks}")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks]
    for rank, text in enumerate(texts):
        assert ranks[rank].returncode == 0 and f"rank {rank}: all is right\n" in text, texts


@pytest.mark.skipif(len(toolkit()) < 2, reason="no headers of CUDA and NCCL")
def test_it_is_right_on_cpu_ranks(prefix: Path, library_file: Path, tmp_path: Path) -> None:
    includes = [f"-I{prefix}/include", *(part for path in toolkit() for part in ("-isystem", path))]
    libraries = [library_file, "-lpthread", "-ldl", "-lrt", f"-Wl,-rpath,{library_file.parent}"]
    run("c++", "-std=c++17", "-DON_CPU", *includes, PROGRAM, *STAND_INS, *libraries, "-o", tmp_path / "program")
    run_ranks_of(tmp_path / "program", 2)


@pytest.mark.gpu
@needs_gpu[1]
@several_gpus
def test_it_is_right_on_gpus(prefix: Path, library_file: Path, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import CUDA_HOME  # nvcc is searched for when it is imported

    if CUDA_HOME is None:
        pytest.skip("there is no CUDA toolkit to build with")
    torch.cuda.nccl.version()  # loads it
    nccl = Path(_C.nccl_info()["path"])
    includes = [f"-I{prefix}/include", *(f"-I{path}" for path in toolkit())]
    linked = (library_file, nccl)
    links = [f"-Xlinker={part}" for path in linked for part in (path, f"-rpath={path.parent}")]
    run(Path(CUDA_HOME) / "bin/nvcc", "-std=c++17", *includes, PROGRAM, *links, "-o", tmp_path / "program")
    environment = {**TOOLS, "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    run_ranks_of(tmp_path / "program", min(NUM_GPUS, 2), env=environment)
