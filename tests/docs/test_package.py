"""What is packed: the library alone into a wheel, and what builds it into a source distribution."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("scikit_build_core")

PACK = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
build_sdist(sys.argv[1])
build_wheel(sys.argv[1], {"wheel.cmake": "false"})
"""


def test_the_benchmark_and_its_records_are_not_packed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PACK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,), (sources,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    with tarfile.open(sources) as archive:
        given = [name.partition("/")[2] for name in archive.getnames()]
    assert {"nccl_ep/report/page.css", "nccl_ep/report/page.js"} <= set(packed)
    assert "nccl_ep/buffer.py" in packed and "csrc/include/nccl_ep.h" in given
    assert "nccl_ep/deep_ep/shims/deep_ep.egg-info" in packed  # by which deep_ep has a version
    assert [name for name in packed if not name.startswith(("nccl_ep/", "nccl_ep-"))] == []
    measuring = [name for name in (*packed, *given) if "bench" in Path(name).parts and not name.startswith("csrc/")]
    assert measuring == [] and not any(name.startswith("records") for name in given)
