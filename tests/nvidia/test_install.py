"""``import nccl.ep`` finds nccl_ep: in this process, through PYTHONPATH, beside NVIDIA's own packages."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import pytest

import nccl_ep
from nccl_ep.nvidia.__main__ import main
from nccl_ep.nvidia.install import shims
from tests import ROOT
from tests.deep_ep.test_install import python

IMPORTS = """
import importlib, importlib.util, sys
from nccl import ep
from nccl.ep import Group, Tensor, Layout
from nccl.ep.interop.torch import get_nccl_comm_from_group
import nccl_ep.nvidia
assert ep._ep_bindings is nccl_ep.nvidia.bindings
assert Group is nccl_ep.nvidia.Group and set(ep.__all__) == set(nccl_ep.nvidia.__all__)
for part in ("allocator", "enums", "group", "handle", "tensor"):
    module = importlib.import_module("nccl.ep." + part)
    for name in module.__all__:
        assert getattr(module, name) is getattr(ep, name), name
assert importlib.util.find_spec("nccl.ep") is not None and not hasattr(sys.modules["nccl"], "__version__")
"""
CORE = """
import nccl.core
from nccl.core import Communicator, UniqueId, get_unique_id
from nccl.core.typing import NcclDataType, NcclInvalid
assert Communicator is nccl_ep.nvidia.communicator.Communicator and NcclDataType.BFLOAT16 == 9
assert nccl.core.BFLOAT16 is NcclDataType.BFLOAT16 and int(nccl.core.HALF) == 6 and nccl.core.FLOAT8E4M3 == 10
"""


def nvidia(folder: Path, *parts: str) -> str:
    """Packages of NVIDIA's names."""
    for part in parts:
        (folder / "nccl" / part).mkdir(parents=True)
        (folder / "nccl" / part / "__init__.py").write_text("who = 'itself'\n")
    return str(folder)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had imported nothing of these names."""
    for name in [each for each in sys.modules if each == "nccl" or each.startswith("nccl.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_nccl_ep_is_found_after_a_call() -> None:
    done = python(f"import nccl_ep\nnccl_ep.install_as_nccl_ep()\nnccl_ep.install_as_nccl_ep()\n{IMPORTS}{CORE}")
    assert done.returncode == 0, done.stderr


def test_it_wins_through_pythonpath_over_an_installed_one_and_leaves_core_alone(tmp_path: Path) -> None:
    installed = nvidia(tmp_path, "ep", "core", "m2n")
    its_own = "\nimport nccl.core, nccl.m2n\nassert nccl.core.who == nccl.m2n.who == 'itself'"
    code = f"{IMPORTS}{its_own}\nnccl_ep.install_as_nccl_ep()  # is there already"
    done = python(code, path=os.pathsep.join([shims(), installed]))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("without")
def test_the_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``nccl.core`` is ours where nobody else's is there."""
    main(["path"])
    both = capsys.readouterr()
    assert [Path(each).name for each in both.out.strip().split(os.pathsep)] == ["shims", "core_shims"]
    assert both.err == ""
    sys.path.append(nvidia(tmp_path, "ep", "core"))
    main(["path"])
    one = capsys.readouterr()
    assert one.out.strip() == shims()
    assert f"nccl.ep is installed at {tmp_path}/nccl/ep/__init__.py" in one.err


@pytest.mark.usefixtures("without")
def test_refuses_what_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.append(nvidia(tmp_path, "ep"))
    importlib.import_module("nccl.ep")
    with pytest.raises(ImportError, match=f"has imported NVIDIA's nccl.ep, {tmp_path}/nccl/ep/__init__.py"):
        nccl_ep.install_as_nccl_ep()
    monkeypatch.setitem(sys.modules, "nccl.ep", types.ModuleType("nccl.ep"))
    with pytest.raises(ImportError, match="None, and may hold objects of it"):
        nccl_ep.install_as_nccl_ep()


@pytest.mark.usefixtures("without")
def test_refuses_a_nccl_that_is_no_namespace(tmp_path: Path) -> None:
    (tmp_path / "nccl.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    importlib.import_module("nccl")
    with pytest.raises(ImportError, match=f"nccl is {tmp_path}/nccl.py, must be a namespace package"):
        nccl_ep.install_as_nccl_ep()


WORKER = """
import multiprocessing

def work(_):
    from nccl.ep import Group
    return Group.__module__

if __name__ == "__main__":
    import nccl_ep; nccl_ep.install_as_nccl_ep()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [0]))
"""


@pytest.mark.slow
def test_spawned_workers_find_nccl_ep(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKER)
    done = python("", str(program), path=str(ROOT))
    assert done.stdout == "['nccl_ep.nvidia.group']\n", done.stderr
