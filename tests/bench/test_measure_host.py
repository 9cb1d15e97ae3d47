"""The programs that measure how long the host is kept, on CPU ranks: what they call, and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.host_in_turns import Tree, Turns, take_turns

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
    path = tmp_path / "host.json"
    command = [sys.executable, "-m", "bench.host_in_turns", str(path), str(ROOT), str(ROOT), "--device", "cpu"]
    command += ["--tokens", "2", "--rounds", "2", "--processes", "1", "--seconds", "100", "--revisions", "a", "b"]
    made = subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    records = json.loads(path.read_text())
    assert all(each["value"] > 0 and each["tokens"] == 2 for each in records)
    old, new, ratio = records[:3]
    assert [each["revision"] for each in (old, new, ratio)] == ["a", "b", "b"]
    assert [each["figure"] for each in (old, new, ratio)] == ["host", "host", "ratio"]
    assert [each["unit"] for each in (old, new, ratio)] == ["us", "us", "x"]
    first, *_ = made.stdout.splitlines()
    times = [f"{each['value']:.2f}" for each in (old, new)]
    assert first.split() == ["ll", "ops", "dispatch", *times, "us", f"{ratio['value']:.3f}"]


def script(program: str, seconds: float = 60) -> Tree:
    return Tree(ROOT, [sys.executable, "-c", program], seconds)


def test_the_ratio_is_of_turns_beside_one_another() -> None:
    """A host that becomes slower with each turn."""
    slower = """if True:
        import time
        print('["call"]', flush=True)
        for turn in range(7):
            input()
            print({} * 2.0**turn, flush=True)
    """
    taken: dict[str, Turns] = {}
    take_turns(script(slower.format(1)), script(slower.format(3)), 6, taken)
    assert taken["call"].old == [2.0**turn for turn in range(1, 7)]
    assert taken["call"].ratio == 3


def test_turns_end_with_the_deadline_or_a_failure() -> None:
    sleeps = "import time; time.sleep(60)"
    for program, error, says in (
        (sleeps, TimeoutError, "has not ended within"),
        ("raise SystemExit(3)", RuntimeError, "has ended with 3"),
    ):
        trees = script(program, 1.5), script(sleeps, 1.5)
        with pytest.raises(error, match=says):
            take_turns(*trees, 1, {})
        assert all(each.process.returncode not in (None, 0) for each in trees)
