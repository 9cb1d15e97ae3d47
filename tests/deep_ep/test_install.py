"""``import deep_ep`` finds nccl_ep: in this process, through PYTHONPATH, in spawned workers. Not beside DeepEP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.processes import run_python

IMPORTS = """
import deep_ep, deep_ep.utils, deep_ep_cpp, deep_ep._C, importlib.util
from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap
from deep_ep_cpp import Config as ConfigToo, EventHandle as HandleToo
import nccl_ep
assert Buffer is nccl_ep.deep_ep.Buffer and Config is ConfigToo is deep_ep._C.Config
assert EventHandle is Handle is HandleToo is nccl_ep.EventHandle and EventOverlap is Overlap
from deep_ep import get_logical_domain_size, get_physical_domain_size
import deep_ep.buffer, deep_ep.buffers.elastic, deep_ep.buffers.legacy, deep_ep.utils.event
from deep_ep.utils.envs import dist_print, get_physical_domain_size as same, init_dist, init_seed
from deep_ep.utils.math import align, calc_diff, ceil_div, count_bytes, per_token_cast_back, per_token_cast_to_fp8
from deep_ep.utils.testing import bench, bench_kineto
assert deep_ep.buffer.Buffer is deep_ep.buffers.legacy.Buffer is Buffer and same is get_physical_domain_size
assert deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer and deep_ep.utils.event.EventOverlap is Overlap
for name in ("deep_ep", "deep_ep.utils", "deep_ep_cpp"):
    spec = importlib.util.find_spec(name)  # vLLM asks so
    assert spec is not None and spec.name == name and spec.loader is not None, name
from importlib.metadata import version
assert version("deep_ep") == deep_ep.__version__ == f"2.1.0+nccl_ep.{nccl_ep.__version__}"
assert deep_ep.__version__.startswith("2.") and set(deep_ep.__all__) == set(nccl_ep.deep_ep.__all__)
"""


def python(code: str, *arguments: str, path: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), path])), OMP_NUM_THREADS="1")
    command = [*(["-c", code] if code else []), *arguments]
    return run_python(*command, environment=environment, timeout=300, cwd=cwd or Path.cwd())


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
        "deep_ep.egg-info",
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


@pytest.fixture
def deepep_itself(tmp_path: Path) -> Path:
    """As a distribution of DeepEP is installed: sgl-deep-ep is one, whose modules are deep_ep."""
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("who = 'itself'\n")
    about = tmp_path / "deep_ep-1.2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    return tmp_path


def test_refuses_where_deepep_is_installed(deepep_itself: Path) -> None:
    code = """
import nccl_ep
try:
    nccl_ep.install_as_deep_ep()
except ImportError as error:
    import deep_ep
    print(error, deep_ep.who)
"""
    done = python(code, path=str(deepep_itself))
    assert done.stdout.startswith(f"DeepEP itself is installed (deep_ep at {deepep_itself}"), done.stderr
    assert done.stdout.endswith("(override=True), or NCCL_EP_OVERRIDE_DEEP_EP=1 in the environment itself\n")
    done = python(f"import deep_ep\n{code}".replace("()", "(override=True)", 1), path=str(deepep_itself))
    assert done.stdout.startswith(f"DeepEP itself is imported already (deep_ep at {deepep_itself}"), done.stderr
    done = python("", "-m", "nccl_ep.deep_ep", "path", path=str(deepep_itself))
    assert done.stdout.strip() == shims() and f"deep_ep is installed at {deepep_itself}" in done.stderr


def test_nccl_ep_comes_before_deepep_where_the_call_says_so(deepep_itself: Path) -> None:
    """In this process, in spawned ones, and for who asks after the version."""
    program = deepep_itself / "program.py"
    install = "import nccl_ep; [nccl_ep.install_as_deep_ep(override=True) for _ in range(2)]"
    program.write_text(WORKER.replace("INSTALL", install) + IMPORTS.replace("\n", "\n    "))
    done = python("", str(program), path=str(deepep_itself))
    assert done.stdout == "['nccl_ep.deep_ep.v1.buffer']\n" and done.returncode == 0, done.stderr


def test_nccl_ep_comes_before_deepep_where_the_environment_says_so(
    deepep_itself: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the program says comes first."""
    monkeypatch.setenv("NCCL_EP_OVERRIDE_DEEP_EP", "1")
    code = """
import nccl_ep
try:
    nccl_ep.install_as_deep_ep(override=False)
except ImportError as error:
    print(error)
nccl_ep.install_as_deep_ep()
"""
    done = python(code + IMPORTS, path=str(deepep_itself))
    assert done.stdout.startswith("DeepEP itself is installed") and done.returncode == 0, done.stderr


def test_other_answers_than_yes_and_no_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import nccl_ep

    with pytest.raises(TypeError, match="override is 'yes', must be True or False"):
        nccl_ep.install_as_deep_ep("yes")  # type: ignore[arg-type]
    monkeypatch.setenv("NCCL_EP_OVERRIDE_DEEP_EP", "yes")
    with pytest.raises(ValueError, match="NCCL_EP_OVERRIDE_DEEP_EP is 'yes', must be 0 or 1"):
        nccl_ep.install_as_deep_ep()


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


OF_VLLM = '''
"""vllm/utils/import_utils.py of vLLM 0.33.0, in what matters here."""
import os
import re

DEEPEP_V2_MIN_NCCL_VERSION_RAW = 23004
FOUND = 22809


def deep_ep_v2_unavailable_reason():
    import deep_ep
    assert hasattr(deep_ep, "ElasticBuffer")
    return f"requires NCCL {DEEPEP_V2_MIN_NCCL_VERSION_RAW}" if FOUND < DEEPEP_V2_MIN_NCCL_VERSION_RAW else None


def checks_gin():
    return os.environ.get("EP_DISABLE_GIN", "0") == "0"
'''

ASK = """
import os
from nccl_ep.integrations import vllm
for gin in (None, "0"):
    if gin is not None:
        os.environ["EP_DISABLE_GIN"] = gin
    vllm.register()
    from vllm.utils import import_utils
    print(import_utils.deep_ep_v2_unavailable_reason(), import_utils.checks_gin())
print(vllm._OLDEST_NCCL)
"""


def test_the_plugin_answers_what_vllm_asks_of_deepep_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL 2.30.4 and GIN: nccl_ep needs neither in a domain. What the user has said of GIN stays."""
    (tmp_path / "vllm" / "utils").mkdir(parents=True)
    (tmp_path / "vllm" / "utils" / "import_utils.py").write_text(OF_VLLM)
    monkeypatch.setenv("NCCL_EP_FOR_VLLM", "1")
    done = python(ASK, path=str(tmp_path))
    oldest = re.search(r"kOldestNccl = (\d+);", (ROOT / "csrc/transport/nccl/version.h").read_text())
    assert oldest is not None and done.stdout.splitlines() == ["None False", "None True", oldest[1]], done.stderr
