"""NVIDIA's ep_test and ep_bench, unchanged, over this library on CPU ranks.

Whoever wants them fetches them; they are no part of this repository. NCCL_EXTENSIONS names a clone.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.c.test_nvidia_tests import CLONE, compile_on_cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE.is_dir(), reason="NCCL_EXTENSIONS names no clone of NVIDIA/nccl-extensions"),
]

# Options of theirs, each with the checks of the program itself. It has graphs, too: there are none on CPU ranks.
EP_TEST = {
    "ll": "-a ll", "ll-send-only": "-a ll -s both", "ll-random": "-a ll -r", "ht": "-a ht",
    "ht-expert-major": "-a ht -L em", "ht-exact": "-a ht -q", "ht-exact-expert-major": "-a ht -L em -q",
    "ht-cached": "-a ht -c", "ht-cached-random": "-a ht -c -r", "ht-experts": "-a ht -e 64",
}  # fmt: skip
LL_EM, LL_RM, HT = "-a ll -L em", "-a ll -L rm", "-a ht"
FWD = "--dispatch-quantization scales-forward"
EP_BENCH = {
    "ll-em": LL_EM, "ll-rm": LL_RM, "ll-em-int32": f"{LL_EM} -I", "ll-rm-int32": f"{LL_RM} -I",
    "ll-em-unequal": f"{LL_EM} -N", "ll-rm-unequal": f"{LL_RM} -N", "ll-em-fewer": f"{LL_EM} -l 3",
    "ll-em-whole": f"{LL_EM} --disable-token-dropping", "ll-rm-global": f"{LL_RM} --expert-id-kind global",
    "ll-rm-local": f"{LL_RM} --expert-id-kind local", "ll-rm-window": f"{LL_RM} -z", "ll-em-own-memory": f"{LL_EM} -U",
    "ll-em-fp16": f"{LL_EM} --datatype fp16", "ll-em-fp32": f"{LL_EM} --datatype fp32",
    "ll-rm-fp32": f"{LL_RM} --datatype fp32",
    "ll-em-fp8": f"{LL_EM} -d 512 -D --dispatch-quantization ds-fp8e3m4",
    "ll-rm-fp8": f"{LL_RM} -d 512 -D --dispatch-quantization ds-fp8e3m4",
    "ll-em-forward": f"{LL_EM} -D {FWD}", "ll-rm-forward": f"{LL_RM} -D {FWD}",
    "ll-rm-forward-fp4": f"{LL_RM} -D {FWD} --scales-forward-token-dtype fp4x2 --scales-forward-scale-dtype uint8",
    "ll-rm-mxfp8": f"{LL_RM} -d 512 -D --mxfp8",
    "ht-flat": f"{HT} -L fl", "ht-em": f"{HT} -L em", "ht-em-aligned": f"{HT} -L em -A 8", "ht-int32": f"{HT} -I",
    "ht-unequal": f"{HT} -N", "ht-em-unequal": f"{HT} -L em -N", "ht-fewer": f"{HT} -l 3", "ht-own-memory": f"{HT} -U",
    "ht-room": f"{HT} -R 40", "ht-em-room": f"{HT} -L em -R 80", "ht-global": f"{HT} --expert-id-kind global",
    "ht-window": f"{HT} -z", "ht-em-window": f"{HT} -L em -z", "ht-em-local-dup": f"{HT} -L em --ht-em-mode local_dup",
    "ht-em-nvlink-dup": f"{HT} -L em --ht-em-mode nvlink_dup", "ht-fp16": f"{HT} --datatype fp16",
    "ht-fp32": f"{HT} --datatype fp32", "ht-mxfp8": f"{HT} -d 512 -D --mxfp8",
    "ht-em-mxfp8": f"{HT} -L em -d 512 -D --mxfp8",
    "ht-forward-bf16": f"{HT} -D {FWD} --scales-forward-token-dtype bf16 --scales-forward-scale-dtype fp32",
}  # fmt: skip
SIZES = "-t 16 -d 256 -k 2 -e 8 -w 1 -i 2 --validate"


def without_fp4(program: Path, folder: Path) -> Path:
    """The program as it is where CUDA has no FP4 types: a benchmark of NVFP4 has a kernel. It asks for the header."""
    headers = re.findall(r'^#include ([<"].*[>"])$', program.read_text(), re.MULTILINE)
    before = [f"#include {each}" for each in headers if each not in ("<cuda_fp4.h>", "<cupti.h>")]
    whole = folder / f"{program.stem}.cc"
    whole.write_text("\n".join([*before, "#undef __has_include", f'#include "{program}"', ""]))
    return whole


@pytest.fixture(scope="module")
def programs(prefix: Path, library_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name in ("ep_test", "ep_bench"):
        source = without_fp4(CLONE / f"{name}.cu", folder)
        compile_on_cpu([source], folder / name, prefix, library_file, [f"-I{ROOT}/tests/c/nvidia/mpi"])
    return folder


def run_ranks_of(program: Path, arguments: str, num_ranks: int, **environment: str) -> list[tuple[int, str]]:
    """The exit code of each rank, and what it said; ranks that still wait for one that has failed are ended."""
    name = f"/{program.name}_{secrets.token_hex(8)}"
    ranks = [
        subprocess.Popen(
            [program, *arguments.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment, "MPI_NAME": name, "MPI_RANK": str(rank), "MPI_RANKS": str(num_ranks)},
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    ended = []
    for rank in ranks:
        if any(code not in (0, 2) for code, _ in ended):
            rank.kill()
        try:
            text = rank.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            rank.kill()
            text = rank.communicate()[0]
        ended.append((rank.returncode, text))
    return ended


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("arguments", EP_TEST.values(), ids=EP_TEST)
def test_ep_test(programs: Path, arguments: str, num_ranks: int) -> None:
    for code, text in run_ranks_of(programs / "ep_test", f"{arguments} -t 10 -d 512", num_ranks):
        assert code == 0 and not re.search("FAILED|failed|[Ee]rror", text), text


@pytest.mark.parametrize("arguments", EP_BENCH.values(), ids=EP_BENCH)
def test_ep_bench(programs: Path, arguments: str) -> None:
    """A rank ends with 2, if a check of the program fails on any. One check asks for more than docs/c_api.md promises:
    low latency's combine must have the bits of the program's own order of additions, and here partial sums of a rank
    are rounded before they travel. Its bound on the angle, which it still prints, holds."""
    ranks = run_ranks_of(programs / "ep_bench", f"{SIZES} {arguments}", 2)
    said = "\n".join(text for _, text in ranks)
    told = re.findall(r"^Global validation: Dispatch=(\w+)(?:, Combine=(\w+))?", said, re.MULTILINE)
    assert len(told) == 1 and all(code in (0, 2) for code, _ in ranks), said
    dispatch, combine = told[0]
    assert dispatch == "PASSED", said
    if combine not in ("", "PASSED"):
        angles = [float(each) for each in re.findall(r"cosine_diff=([\d.e+-]+)", said)]
        assert arguments.startswith("-a ll") and angles and max(angles) < 1e-5, said


def test_ep_bench_of_masks(programs: Path) -> None:
    """Ranks 1 and 3 of four stay away, one after the other, and are masked. The others clean masks without them."""
    ranks = run_ranks_of(programs / "ep_bench", f"{SIZES} {LL_EM} --mask-test", 4, NCCL_EP_TIMEOUT_MS="5000")
    for code, text in (ranks[0], ranks[2]):
        for check in (
            "dispatch mask check",
            "combine mask check",
            "mask clean check",
            r"async error after clean: 0 \(",
        ):
            assert re.search(rf"{check}.*PASSED", text), text
        assert "FAILED" not in text.partition("=== Active-Mask Test ===")[2] and code in (0, 2), text  # 2: last bits
