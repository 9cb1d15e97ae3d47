"""An extension that is missing, or that cannot be loaded: `import nccl_ep` says why in one sentence, and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from nccl_ep import _C
from nccl_ep.extension import parse_build
from tests import ROOT

# Each line of its input says: the folder to start in, one of PYTHONPATH, a module, whether that is the program or is
# imported, and the file for errors. Each is run by a fork, since to import torch takes seconds; nccl_ep is new to it.
PROGRAM = """
import json, os, runpy, signal, sys
import torch
for line in sys.stdin:
    folder, path, name, is_program, said = json.loads(line)
    if os.fork() == 0:
        signal.alarm(120)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        os.chdir(folder)
        sys.path[:1] = [folder, path]
        runpy.run_module(name, run_name="__main__", alter_sys=True) if is_program else __import__(name)
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
Start = Callable[..., str]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """What is said on the standard error by a program that fails."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(folder: Path, path: Path, name: str, is_program: bool = False) -> str:
            said = path / "said.txt"
            print(json.dumps([str(folder), str(path), name, is_program, str(said)]), file=process.stdin, flush=True)
            assert process.stdout.readline() == "1\n", said.read_text()
            return said.read_text()

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "nccl_ep", found / "nccl_ep", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return found


# `make newest` gives every process an extension that does not lie in nccl_ep/.
in_the_package = pytest.mark.skipif("nccl_ep_other_build" in sys.modules, reason="the extension is of another build")


@in_the_package
@pytest.mark.parametrize(("name", "is_installed"), [("nccl_ep.doctor", True), ("nccl_ep.deep_ep", False)])
def test_an_unbuilt_clone_says_what_to_do(
    name: str, is_installed: bool, clone: Path, start: Start, tmp_path: Path
) -> None:
    installed = tmp_path / "nccl_ep" / f"_C{EXTENSION_SUFFIXES[0]}"
    if is_installed:
        installed.parent.mkdir()
        installed.write_bytes(b"")
    text = start(clone, tmp_path, name, is_program=name == "nccl_ep.doctor")
    assert "circular" not in text
    said = text.splitlines()[-1]
    assert f"nccl_ep in {clone}/nccl_ep has no extension _C for Python" in said
    assert f"make build in {clone}, " in said  # and the path of these tests may have another nccl_ep
    here = f"make build in {clone}, then {clone}/.venv/bin/python"
    there = f"start Python in another folder, to get {installed.parent}; for programs of the clone itself: {here}"
    assert said.endswith(there) == is_installed


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
def test_an_extension_that_cannot_be_loaded_says_what_to_do(
    name: str, clone: Path, start: Start, tmp_path: Path
) -> None:
    changes, says = CHANGES[name]
    data = Path(_C.__file__).read_bytes()
    for old, new in changes.items():
        if old not in data:
            pytest.skip(f"this build does not have {old.decode()}")
        data = data.replace(old, new)
    package = tmp_path / "nccl_ep"
    shutil.copytree(clone / "nccl_ep", package)
    (package / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(data)
    text = start(tmp_path, tmp_path, "nccl_ep")
    said = text.splitlines()[-1]
    assert said.startswith(f"ImportError: {package}/_C") and says in said and AGAIN in said, text
    assert (f"and this is torch {torch.__version__}: " in said) == ("another torch" in name)


def test_an_extension_says_what_it_was_built_for() -> None:
    found = parse_build(_C.BUILD)
    assert found["torch"] == torch.__version__ and bool(found["cuda"]) == _C.has_cuda() and found["architectures"]
