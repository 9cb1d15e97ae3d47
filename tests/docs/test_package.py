"""What is packed: the library alone into a wheel, and what builds it into a source distribution."""

import re
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
        (about,) = (archive.read(name).decode() for name in packed if name.endswith(".dist-info/METADATA"))
    with tarfile.open(sources) as archive:
        given = [name.partition("/")[2] for name in archive.getnames()]
    assert {"nccl_ep/report/page.css", "nccl_ep/report/page.js"} <= set(packed)
    assert "nccl_ep/buffer.py" in packed and "csrc/include/nccl_ep.h" in given
    assert "nccl_ep/deep_ep/shims/deep_ep.egg-info" in packed  # by which deep_ep has a version
    assert [name for name in packed if not name.startswith(("nccl_ep/", "nccl_ep-"))] == []
    measuring = [name for name in (*packed, *given) if "bench" in Path(name).parts and not name.startswith("csrc/")]
    assert measuring == [] and not any(name.startswith("records") for name in given)
    assert check_page(about.partition("\n\n")[2]) == []


def check_page(text: str) -> list[str]:
    """What an index cannot show: pictures, and links to other files of the clone."""
    assert text.startswith("# nccl_ep\n")
    return re.findall(r"!\[|\]\((?!https?://)[^)]*", text)


def test_the_program_of_an_indexs_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "tools/index_page.md").read_text(), re.DOTALL)
    check = "torch.testing.assert_close(y.float(), 2 * x.float() * weights.sum(1, keepdim=True), rtol=0.02, atol=0.02)"
    exec(f"{code}    {check}", {})


def test_what_an_index_cannot_show_is_seen() -> None:
    text = "# nccl_ep\n![picture](a.svg) [page](docs/a.md) [site](https://example.com)"
    assert check_page(text) == ["![", "](a.svg", "](docs/a.md"]
