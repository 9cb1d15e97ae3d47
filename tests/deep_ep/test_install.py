"""``import deep_ep`` finds nccl_ep: in this process, through PYTHONPATH, in spawned workers. Not beside DeepEP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

IMPORTS = """
import deep_ep, deep_ep.utils, deep_ep_cpp, deep_ep._C, importlib.util
from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap
from deep_ep_cpp import Config as ConfigToo, EventHandle as HandleToo
import nccl_ep
assert Buffer is nccl_ep.deep_ep.Buffer and Config is ConfigToo is deep_ep._C.Config
assert EventHandle is Handle is HandleToo is nccl_ep.EventHandle and EventOverlap is Overlap
for name in ("deep_ep", "deep_ep.utils", "deep_ep_cpp"):
    spec = importlib.util.find_spec(name)  # vLLM asks so
    assert spec is not None and spec.name == name and spec.loader is not None, name
assert deep_ep.__version__.startswith("2.") and set(deep_ep.__all__) == set(nccl_ep.deep_ep.__all__)
"""


def python(code: str, *arguments: str, path: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), path])), OMP_NUM_THREADS="1")
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=cwd)


def shims() -> str:
    done = python("", "-m", "nccl_ep.deep_ep", "path")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.strip()


def test_deep_ep_is_found_after_a_call() -> None:
    code = f"import nccl_ep\nnccl_ep.install_as_deep_ep()\nnccl_ep.install_as_deep_ep()\n{IMPORTS}"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_deep_ep_is_not_found_before_a_call() -> None:
    done = python("import nccl_ep, nccl_ep.deep_ep, importlib.util; print(importlib.util.find_spec('deep_ep'))")
    assert done.stdout == "None\n", done.stderr


def test_deep_ep_is_found_through_pythonpath() -> None:
    folder = shims()
    assert sorted(path.name for path in Path(folder).iterdir() if path.name != "__pycache__") == [
        "deep_ep",
        "deep_ep_cpp.py",
    ]
    done = python(f"{IMPORTS}\nnccl_ep.install_as_deep_ep()  # is there already", path=folder)
    assert done.returncode == 0, done.stderr


WORKER = """
import multiprocessing

def work(_):
    import deep_ep
    with deep_ep.Buffer(None, 1 << 20, device="cpu") as buffer:
        return type(buffer).__module__

if __name__ == "__main__":
    INSTALL
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [0]))
"""


@pytest.mark.parametrize("way", ["call", "path"])
def test_spawned_workers_find_deep_ep(way: str, tmp_path: Path) -> None:
    install = "import nccl_ep; nccl_ep.install_as_deep_ep()" if way == "call" else "pass"
    program = tmp_path / "program.py"
    program.write_text(WORKER.replace("INSTALL", install))
    done = python("", str(program), path="" if way == "call" else shims())
    assert done.stdout == "['nccl_ep.deep_ep.v1.buffer']\n", done.stderr


def test_refuses_where_deepep_is_installed(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("who = 'itself'\n")
    code = """
import nccl_ep
try:
    nccl_ep.install_as_deep_ep()
except ImportError as error:
    import deep_ep
    print(error, deep_ep.who)
"""
    for code_first in ("", "import deep_ep\n"):
        done = python(code_first + code, path=str(tmp_path))
        assert done.stdout.startswith(f"DeepEP itself is installed (deep_ep at {tmp_path}"), done.stderr
        assert done.stdout.endswith("import nccl_ep.deep_ep in place of deep_ep itself\n")
    done = python("", "-m", "nccl_ep.deep_ep", "path", path=str(tmp_path))
    assert done.stdout.strip() == shims() and f"deep_ep is installed at {tmp_path}" in done.stderr


def test_a_module_made_up_is_not_ours() -> None:
    code = """
import sys, types, nccl_ep
sys.modules["deep_ep"] = types.ModuleType("deep_ep")
nccl_ep.install_as_deep_ep()
"""
    assert "deep_ep at a module that was made up in this process" in python(code).stderr


PLUGIN = """
import importlib, importlib.util, os, tomllib
points = tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"]["vllm.general_plugins"]
module, name = points["nccl_ep"].split(":")
for switch in ("yes", "0", "1"):
    os.environ["NCCL_EP_FOR_VLLM"] = switch
    try:
        getattr(importlib.import_module(module), name)()
    except ValueError as error:
        print(error)
    print(importlib.util.find_spec("deep_ep") is not None)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_the_plugin_of_vllm_obeys_the_environment() -> None:
    """In a process of vLLM: deep_ep is nccl_ep if the environment asks for it, and otherwise nothing has changed."""
    done = python(PLUGIN, cwd=ROOT)
    assert done.stdout.splitlines() == ["NCCL_EP_FOR_VLLM is 'yes', must be 0 or 1", "False", "False", "True"], (
        done.stderr
    )
