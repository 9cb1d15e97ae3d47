"""Sources that were not built: `import nccl_ep` beside them says so, and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "nccl_ep", found / "nccl_ep", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return found


# `make newest` gives every process an extension that does not lie in nccl_ep/.
@pytest.mark.skipif("nccl_ep_other_build" in sys.modules, reason="the extension is that of another build")
@pytest.mark.parametrize(
    ("arguments", "is_installed"), [(("-m", "nccl_ep.doctor"), True), (("-c", "import nccl_ep.deep_ep"), False)]
)
def test_an_unbuilt_clone_says_what_to_do(
    arguments: tuple[str, str], is_installed: bool, clone: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "nccl_ep" / f"_C{EXTENSION_SUFFIXES[0]}"
    if is_installed:
        installed.parent.mkdir()
        installed.write_bytes(b"")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=clone, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and "circular" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert f"nccl_ep in {clone}/nccl_ep has no extension _C for Python" in said
    assert f"make build in {clone}, or pip install {clone}" in said
    assert (f"start Python in another folder, to get {installed.parent}, or " in said) == is_installed
