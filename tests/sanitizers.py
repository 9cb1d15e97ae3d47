"""compute-sanitizer over a program that prints "case NAME" after each case that its arguments name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck")  # racecheck sees shared memory only
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def run_sanitizers(program: str, cases: list[str], folder: Path, patience: float = 300.0) -> None:
    """All tools at once. Every tensor is an allocation of its own, so that memcheck sees its ends."""
    command = [sys.executable, program, *cases]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    logs = {tool: folder / tool for tool in TOOLS}
    running = {}
    try:
        for tool, log in logs.items():
            with log.open("w") as file:
                checked = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9"]
                if tool == "memcheck":  # torch asks the driver for much that it may not have
                    checked += ["--report-api-errors", "no"]
                running[tool] = subprocess.Popen([*checked, *command], env=env, stdout=file, stderr=subprocess.STDOUT)
        codes = {tool: process.wait(timeout=patience) for tool, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for tool, code in codes.items():
        text = logs[tool].read_text()
        assert code == 0 and f"case {cases[-1]}\n" in text, f"{tool} ended with {code}:\n{text[-4000:]}"
