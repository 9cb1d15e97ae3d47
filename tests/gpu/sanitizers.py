"""compute-sanitizer over a module, run as a program, that prints "case NAME" after each case of its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nccl_ep import _C
from tests import ROOT

BARRIERS = "NCCL_EP_TEST_BARRIERS"  # not empty: the sanitizer hands on no variable that is
_OWN_ERROR, _TRIES = "Internal Sanitizer Error", 2  # it has lost track of a launch, now and then
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
_reason = "no compute-sanitizer here" if SANITIZER is None else "several ranks on one GPU: build with -DNCCL_EP_LAB=ON"
needs_sanitizer = pytest.mark.skipif(SANITIZER is None or not hasattr(_C, "set_gpu_testing"), reason=_reason)

# Warps hand a call's context on by a release and an acquire in shared memory. racecheck sees barriers alone, and builds
# with NCCL_EP_LAB have one there.
TOOLS = ("memcheck", "racecheck", "synccheck")


def _complains_of_itself(text: str) -> bool:
    """All that the summary counts, hazards and errors, are errors of the tool's own."""
    own = text.count(_OWN_ERROR)
    summary = re.search(r"SUMMARY: (?:(\d+) hazards? displayed \()?(\d+) error", text)
    return own > 0 and summary is not None and all(int(count) == own for count in summary.groups() if count)


def run_sanitizer(tool: str, module: str, cases: list[str], folder: Path, patience: float = 300.0) -> None:
    """Every tensor is an allocation of its own, so that memcheck sees its ends."""
    checked = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":  # torch asks the driver for much that it may not have
        checked += ["--report-api-errors", "no"]
    else:
        checked += ["--num-cuda-barriers", "100"]  # of a block
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} | ({BARRIERS: "1"} if tool == "racecheck" else {})
    log = folder / tool
    for _ in range(_TRIES):
        with log.open("w") as file:
            done = subprocess.run(
                [*checked, sys.executable, "-m", module, *cases],
                cwd=ROOT,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=patience,
            )
        text = log.read_text()
        if not _complains_of_itself(text):
            break
    ended = f"{tool} ended with {done.returncode}:\n{text[-4000:]}"
    assert done.returncode in (0, 9) and f"case {cases[-1]}\n" in text, ended
    if _complains_of_itself(text):
        pytest.skip(f"{tool} lost track of launches, {_TRIES} times, and found nothing in the others")
    assert done.returncode == 0, ended


def run_arguments(run: Callable[[str], None]) -> None:
    """The program."""
    if BARRIERS in os.environ:
        _C.set_gpu_testing(0, barriers=True)
    for text in sys.argv[1:]:
        run(text)
        print("case", text, flush=True)
