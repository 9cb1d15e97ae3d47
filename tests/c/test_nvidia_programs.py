"""NVIDIA's own programs and unit tests, unchanged, over this library on GPUs.

Whoever wants them fetches them; they are no part of this repository. NCCL_EXTENSIONS names a clone. The programs need
an MPI, for example that of ``pip install mpich``; the unit tests need GoogleTest and four ranks. With fewer GPUs these
share them: NCCL_MULTI_RANK_GPU_ENABLE=1, and a communicator that needs no NCCL (tests/c/nvidia/without_nccl.cc).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.c.case import run
from tests.c.test_headers import toolkit
from tests.c.test_nvidia_tests import CLONE, FILES, own_headers, run_file
from tests.c.test_nvidia_tests import RANKS as RANKS_OF_TESTS
from tests.support.gpus import NUM_GPUS, SHARED_GPUS, needs_gpu, several_gpus

MPIEXEC = Path(shutil.which("mpiexec") or "/nowhere/bin/mpiexec")
MPI = MPIEXEC.resolve().parents[1]
pytestmark = [
    *needs_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE.is_dir(), reason="NCCL_EXTENSIONS names no clone of NVIDIA/nccl-extensions"),
]
with_mpi = pytest.mark.skipif(not (MPI / "include/mpi.h").exists(), reason="no mpiexec with headers of MPI on PATH")
RANKS = 4 if NUM_GPUS >= 4 else 2  # of the programs

# Options of theirs, each with the checks of the program itself.
EP_TEST = {
    "ll": "-a ll", "ll-send-only": "-a ll -s both", "ll-graph": "-a ll -g", "ll-128-tokens": "-a ll -t 128",
    "ht": "-a ht", "ht-expert-major": "-a ht -L em", "ht-exact": "-a ht -q", "ht-graph": "-a ht -g",
    "ht-cached": "-a ht -c -r", "ht-4096-tokens": "-a ht -t 4096",
}  # fmt: skip
SHORT = "--validate --warmup 2 --iters 5"
EP_BENCH = {
    "ll-expert-major": "-a ll -L em -t 128", "ll-rank-major": "-a ll -L rm -t 128",
    "ht-flat": "-a ht -L fl -t 4096", "ht-expert-major": "-a ht -L em -t 1024 -A 16", "ht-int32": "-a ht -t 256 -I",
    "ht-unequal-tokens": "-a ht -t 512 -N",
}  # fmt: skip


def nvcc(sources: list[str | Path], program: Path, prefix: Path, library_file: Path, *flags: str | Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    includes = [f"-I{prefix}/include", *(part for path in toolkit() for part in ("-isystem", path))]
    nccl = next(Path(path).parent / "lib/libnccl.so.2" for path in toolkit() if (Path(path) / "nccl.h").exists())
    linked = [
        (f"-L{each.parent}", f"-l:{each.name}", f"-Xlinker=-rpath={each.parent}") for each in (library_file, nccl)
    ]
    libraries = [*sum(linked, ()), "-lcuda"]
    options = ["-std=c++17", f"-arch=sm_{major}{minor}", "-w", "--expt-relaxed-constexpr", "--extended-lambda"]
    run("nvcc", *options, *includes, *flags, *sources, *libraries, "-o", program)


@pytest.fixture(scope="module")
def programs(prefix: Path, library_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    linked = [f"-I{MPI}/include", f"-L{MPI}/lib", "-lmpi", f"-Xlinker=-rpath={MPI}/lib"]
    for name in ("ep_test", "ep_bench"):
        nvcc([CLONE / f"{name}.cu"], folder / name, prefix, library_file, *linked)
    return folder


def run_program(program: Path, arguments: str, *codes: int) -> str:
    done = subprocess.run(
        [MPIEXEC, "-n", str(RANKS), program, *arguments.split()],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode in (0, *codes), done.stdout
    return done.stdout


@with_mpi
@several_gpus
@pytest.mark.parametrize("arguments", EP_TEST.values(), ids=EP_TEST)
def test_ep_test(programs: Path, arguments: str) -> None:
    text = run_program(programs / "ep_test", arguments)
    assert not re.search("FAILED|[Ee]rror:", text), text


@with_mpi
@several_gpus
@pytest.mark.parametrize("arguments", EP_BENCH.values(), ids=EP_BENCH)
def test_ep_bench(programs: Path, arguments: str) -> None:
    text = run_program(programs / "ep_bench", f"{arguments} {SHORT}", 2)  # 2: a check of its own fails
    told = re.findall(r"^(?:Global validation|Rank \d+ validation failure): Dispatch=(\w+), Combine=(\w+)", text, re.M)
    assert told and {dispatch for dispatch, _ in told} == {"PASSED"}, text
    if {combine for _, combine in told} != {"PASSED"}:
        # The program asks for the bits of its own order of additions. Here partial sums of a rank are rounded before
        # they travel (docs/semantics.md); its bound on the angle, which it still prints, holds.
        angles = [float(each) for each in re.findall(r"cosine_diff=([\d.e+-]+)", text)]
        assert arguments.startswith("-a ll") and angles and max(angles) < 1e-5, text


@pytest.mark.skipif(
    NUM_GPUS < RANKS_OF_TESTS and not SHARED_GPUS, reason=f"{NUM_GPUS} GPUs here: their tests have four ranks"
)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_theirs(name: str, prefix: Path, library_file: Path, tmp_path: Path) -> None:
    program = tmp_path / name
    flags = [*own_headers(tmp_path), "-lgtest", "-lpthread", "-lrt", "-ldl"]
    ours = [ROOT / "tests/c/nvidia/inside.cc"]
    if NUM_GPUS < RANKS_OF_TESTS:
        ours.append(ROOT / "tests/c/nvidia/without_nccl.cc")
    nvcc([CLONE / f"tests/test_{name}.cu", *ours], program, prefix, library_file, *flags)
    run_file(program, *FILES[name])
