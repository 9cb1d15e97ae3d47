"""An extension that is missing, or that cannot be loaded: `import nccl_ep` says why in one sentence, and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from nccl_ep import _C
from nccl_ep.extension import parse_build
from tests import ROOT


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "nccl_ep", found / "nccl_ep", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return found


# `make newest` gives every process an extension that does not lie in nccl_ep/.
in_the_package = pytest.mark.skipif("nccl_ep_other_build" in sys.modules, reason="the extension is of another build")


@in_the_package
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


# What is changed in a copy of the file, and what is said then.
AGAIN = "(pip install --force-reinstall --no-deps --no-cache-dir . in its clone)"
SYMBOL = b"THPVariableClass"  # of torch's, which the extension wants
OLDER = {b"nccl_ep_build|torch=2": b"nccl_ep_build|torch=1"}
CHANGES = {
    "of another torch that loads": (OLDER, "was built for torch 1."),
    "of another torch": ({**OLDER, SYMBOL: b"THPVariableClasZ"}, "was built for torch 1."),
    "of this torch": ({SYMBOL: b"THPVariableClasZ"}, "undefined symbol: THPVariableClasZ): build nccl_ep again"),
    "without a library": ({b"libtorch_python.so": b"libtorch_pythoz.so"}, "needs libtorch_pythoz.so, which is not"),
    "of a newer system": ({b"GLIBC_2.34": b"GLIBC_2.94"}, "was built on a newer system than this one ("),
}


@in_the_package
@pytest.mark.parametrize("name", CHANGES)
def test_an_extension_that_cannot_be_loaded_says_what_to_do(name: str, clone: Path, tmp_path: Path) -> None:
    changes, says = CHANGES[name]
    data = Path(_C.__file__).read_bytes()
    for old, new in changes.items():
        if old not in data:
            pytest.skip(f"this build does not have {old.decode()}")
        data = data.replace(old, new)
    package = tmp_path / "nccl_ep"
    shutil.copytree(clone / "nccl_ep", package)
    (package / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", "import nccl_ep"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: {package}/_C") and says in said and AGAIN in said, done.stderr
    assert (f"and this is torch {torch.__version__}: " in said) == ("another torch" in name)


def test_an_extension_says_what_it_was_built_for() -> None:
    found = parse_build(_C.BUILD)
    assert found["torch"] == torch.__version__ and bool(found["cuda"]) == _C.has_cuda() and found["architectures"]
