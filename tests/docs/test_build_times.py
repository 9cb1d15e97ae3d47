"""tools/build_times.py adds up a log of ninja by what was built."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from pathlib import Path

import pytest

from tests import ROOT

build_times = Namespace(**runpy.run_path(str(ROOT / "tools/build_times.py")))

LOG = """# ninja log v7
0\t9000\t1\tCMakeFiles/ep_cuda.dir/csrc/cuda/ll/combine.cu.o\taa
10\t2010\t1\tCMakeFiles/_C.dir/csrc/torch/module.cc.o\tab
10\t110\t1\tCMakeFiles/_C.dir/cmake_pch.hxx.gch\tac
0\t500\t1\tCMakeFiles/ep_core.dir/csrc/base/overlap.cc.o\tad
0\t3000\t1\tCMakeFiles/ep_core_testing.dir/csrc/base/overlap.cc.o\tae
0\t700\t1\tCMakeFiles/ep_core.dir/csrc/gone.cc.o\taf
600\t900\t1\tlibnccl_ep.so\tb0
600\t900\t1\tlibnccl_ep.so.0\tb0
20\t4020\t2\tCMakeFiles/ep_cuda.dir/csrc/cuda/ll/combine.cu.o\taa
"""


@pytest.fixture
def build(tmp_path: Path) -> Path:
    for line in LOG.splitlines()[1:]:
        output = tmp_path / line.split("\t")[3]
        if "gone" not in output.name:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.touch()
    (tmp_path / ".ninja_log").write_text(LOG)
    return tmp_path


def test_the_last_run_of_each_command_counts_once(build: Path, tmp_path: Path) -> None:
    assert build_times.main([str(build), "--json", str(tmp_path / "sums.json")]) == 0
    sums = json.loads((tmp_path / "sums.json").read_text())["seconds"]
    assert sums == {
        "kernels": 4.0, "torch": 2.1, "c_api": 0.3, "core": 0.5, "tests": 3.0, "rest": 0.0, "all": pytest.approx(6.9)
    }  # fmt: skip


def test_a_sum_above_its_limit_is_named(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_times.main([str(build), "--limit", "kernels=4", "--limit", "all=7"]) == 0
    assert build_times.main([str(build), str(build), "--limit", "kernels=7.5", "--limit", "all=14"]) == 1
    assert capsys.readouterr().err == "kernels took 8.0 s, more than 7.5\n"
    with pytest.raises(SystemExit):
        build_times.main([str(build), "--limit", "kernel=4"])
    assert "'kernel' is none of kernels, torch" in capsys.readouterr().err


def test_logs_of_other_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="version 5"):
        build_times.commands(["# ninja log v4\n"], Path())
