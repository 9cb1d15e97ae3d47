"""The unit tests of NVIDIA's nccl-extensions, unchanged, over this library on four CPU ranks.

Whoever wants them fetches them; they are no part of this repository. NCCL_EXTENSIONS names a clone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.c.case import run
from tests.c.test_headers import toolkit

CLONE = Path(os.environ.get("NCCL_EXTENSIONS", "/nowhere")) / "nccl_ep"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE.is_dir(), reason="NCCL_EXTENSIONS names no clone of NVIDIA/nccl-extensions"),
]
RANKS = 4
OURS = [ROOT / "tests/c/nvidia" / name for name in ("on_cpu.cc", "without_nccl.cc", "inside.cc")]

# By file: how many tests there are, and which of them want what docs/c_api.md says is otherwise here.
FILES: dict[str, tuple[int, set[str]]] = {
    "public_struct_abi": (3, set()),
    "tensor_create": (3, set()),
    "output_layout": (16, set()),
    "recv_topk_idx_flags": (12, set()),
    "ht_bwd": (7, set()),
    "ht_overflow_drop": (6, {"EmLocalPermuteDeepFlatOverflowPhantomRowsZeroed"}),
    "ht_stale_routing_map": (1, set()),
    "lifecycle": (10, set()),
    "ll_group_epoch": (1, set()),
    "quantization_recipe": (31, {"NvFp4CombineExpertMajorProducesWeightedBf16", "NvFp4CombineRankMajorProducesBf16"}),
    "zero_copy": (13, set()),
}


def own_headers(folder: Path) -> list[str]:
    """Flags. Their internal headers name the enumerations once more, for kernels: an empty file stands in for it."""
    (folder / "nccl_ep").mkdir()
    shutil.copy(CLONE / "include/common.hpp", folder / "nccl_ep")
    (folder / "nccl_ep/ep_enums.h").write_text("#pragma once\n")
    return [f"-I{folder}", f"-I{folder}/nccl_ep", f"-I{CLONE}"]


def their_headers(folder: Path) -> list[str]:
    """Flags: theirs alone, where a package of theirs has them."""
    (folder / "nccl_ep").mkdir()
    shutil.copy(CLONE / "include/nccl_ep.h", folder)
    for name in ("common.hpp", "ep_enums.h"):
        shutil.copy(CLONE / "include" / name, folder / "nccl_ep")
    return [f"-I{folder}", f"-I{folder}/nccl_ep", f"-I{CLONE}"]


def compile_on_cpu(sources: list[Path], program: Path, prefix: Path, library_file: Path, flags: list[str]) -> None:
    """``flags`` are of their sources; ours have our header."""
    system = [part for path in toolkit() for part in ("-isystem", path)]
    objects = []
    for source in (*sources, *OURS):
        objects.append(program.parent / f"{program.name}_{source.stem}.o")
        mine = ["-DON_CPU", f"-I{prefix}/include"]
        includes = mine if source in OURS else [*flags, *mine]
        run("c++", "-std=c++17", "-w", *includes, *system, "-x", "c++", "-c", source, "-o", objects[-1])
    libraries = [library_file, "-lgtest", "-lpthread", "-ldl", "-lrt", f"-Wl,-rpath,{library_file.parent}"]
    run("c++", *objects, *libraries, "-o", program)


def build(name: str, prefix: Path, library_file: Path, folder: Path, headers: list[str]) -> Path:
    compile_on_cpu([CLONE / f"tests/test_{name}.cu"], folder / name, prefix, library_file, headers)
    return folder / name


def run_file(program: Path, count: int, otherwise: set[str]) -> None:
    """On four ranks: all tests run, and pass but for those."""
    ranks = [
        subprocess.Popen(
            [program, f"--rank={rank}", f"--nranks={RANKS}", f"--uid-file={program.parent}/uid"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    for text in texts:
        ran = re.findall(r"^\[ RUN      \] (\S+)", text, re.MULTILINE)
        passed = re.findall(r"^\[       OK \] (\S+)", text, re.MULTILINE)
        left = {name.partition(".")[2] for name in set(ran) - set(passed)}
        assert len(ran) == count and left <= otherwise, text


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_theirs(name: str, prefix: Path, library_file: Path, tmp_path: Path) -> None:
    run_file(build(name, prefix, library_file, tmp_path, own_headers(tmp_path)), *FILES[name])


@pytest.mark.parametrize("name", ["output_layout", "recv_topk_idx_flags", "ht_bwd", "ll_group_epoch"])
def test_a_file_that_was_compiled_with_their_header(
    name: str, prefix: Path, library_file: Path, tmp_path: Path
) -> None:
    run_file(build(name, prefix, library_file, tmp_path, their_headers(tmp_path)), *FILES[name])
