"""The kernels of the layer whose experts begin while rows come, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_have_the_results_and_gradients_of_torch() -> None:
    """Also where rows that do not exist are NaN."""
    pytest.importorskip("triton")
    # A process of its own: Triton asks for its interpreter when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.overlapped_kernels"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for case, distances in json.loads(done.stdout).items():
        for name, each in distances.items():
            assert each < 1e-5, f"{case}: {name} is off by {each}"
