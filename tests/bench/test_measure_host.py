"""The program that measures how long the host is kept, on CPU ranks: what it calls, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_every_interface_has_a_figure(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    command = [sys.executable, "-m", "bench.measure_host", str(path), "--device", "cpu", "--mode", mode]
    subprocess.run([*command, "--rounds", "1", "--tokens", "2"], cwd=ROOT, check=True, timeout=120)
    records = json.loads(path.read_text())
    assert {"ops", "native", "deepep"} <= {each["api"] for each in records}
    assert all(each["value"] > 0 and each["tokens"] == 2 for each in records)
