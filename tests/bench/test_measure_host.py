"""The programs that measure how long the host is kept, on CPU ranks: what they call, and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.host_in_turns import take_turns

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_every_interface_has_a_figure(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    command = [sys.executable, "-m", "bench.measure_host", str(path), "--device", "cpu", "--mode", mode]
    subprocess.run([*command, "--rounds", "1", "--tokens", "2"], cwd=ROOT, check=True, timeout=120)
    records = json.loads(path.read_text())
    assert {"ops", "native", "deepep"} <= {each["api"] for each in records}
    assert all(each["value"] > 0 and each["tokens"] == 2 for each in records)


def test_two_trees_take_turns(tmp_path: Path) -> None:
    path, known = tmp_path / "host.json", {"--device": "cpu", "--mode": "ll", "--rounds": "2", "--tokens": "1"}
    command = [sys.executable, "-m", "bench.host_in_turns", "--seconds", "100", str(path), str(ROOT), str(ROOT), "--"]
    arguments = [text for pair in known.items() for text in pair]
    made = subprocess.run([*command, *arguments], cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    records = json.loads(path.read_text())
    old, new = records[: len(records) // 2], records[len(records) // 2 :]
    assert [each["op"] for each in old] == [each["op"] for each in new]
    first, *_ = made.stdout.splitlines()
    assert first.split()[:5] == ["ll", "ops", "dispatch", f"{old[0]['value']:.2f}", f"{new[0]['value']:.2f}"]


def test_turns_end_with_the_deadline_or_a_failure(tmp_path: Path) -> None:
    def started(code: str) -> list[subprocess.Popen[bytes]]:
        return [subprocess.Popen([sys.executable, "-c", each]) for each in (code, "import time; time.sleep(60)")]

    for code, error in (("import time; time.sleep(60)", TimeoutError), ("raise SystemExit(3)", RuntimeError)):
        processes = started(code)
        with pytest.raises(error):
            take_turns(processes, 1.5)
        assert all(each.wait(10) != 0 for each in processes)
