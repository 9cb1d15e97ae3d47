"""When memory of an operation on a buffer's own stream is free, on a device that only writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests import ROOT

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_memory_of_operations_on_another_stream_is_kept(tmp_path: Path) -> None:
    from torch.utils import cpp_extension  # takes half a second, which all workers would wait

    libraries = Path(torch.__file__).parent / "lib"
    headers = [ROOT / "csrc", ROOT / "csrc" / "include", *cpp_extension.include_paths(), sysconfig.get_path("include")]
    module = tmp_path / f"fake_device{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(
        [
            str(COMPILER), "-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-shared",
            *(f"-I{each}" for each in headers), str(HERE / "fake_device.cc"), "-o", str(module), f"-L{libraries}",
            f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
        ],
        check=True, timeout=300,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "checks.py"), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right:") == (HERE / "checks.py").read_text().count("\ndef check_")
