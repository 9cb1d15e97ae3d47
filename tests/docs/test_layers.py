"""tools/check_layers.py on small trees, each with one fault."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools/check_layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_layers", module)
    spec.loader.exec_module(module)
    return module


def messages(tool: ModuleType, root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return list(tool.messages(root, list(files)))


def include(*headers: str) -> str:
    return "".join(f'#include "{header}"\n' for header in headers)


GOOD = {
    "csrc/base/check.h": "int raise();\n",
    "csrc/layout/common/wire.h": include("base/check.h") + "// As base/check.h: raise says.\n",
    "csrc/cuda/ll/common/geometry.h": include("layout/common/wire.h"),
    "csrc/cuda/ll/dispatch/send.cuh": include("cuda/ll/common/geometry.h"),
    "csrc/cuda/ll/links/send.cuh": include("cuda/ll/dispatch/send.cuh"),
    "csrc/cuda/launch/launch.h": include("cuda/ll/common/geometry.h") + "// cuda/ll/*.cu use it.\n",
    "csrc/cuda/ll/dispatch.cu": include("cuda/launch/launch.h", "cuda/ll/links/send.cuh"),
    "csrc/cuda/host/backend.cc": include("cuda/launch/launch.h"),
    "nccl_ep/__init__.py": "from .buffer import Buffer\n",
    "nccl_ep/_C.pyi": "",
    "nccl_ep/buffer.py": '"""Windows are of csrc/base/check.h."""\nfrom . import _C\n',
    "docs/page.md": "See `csrc/base/`, and others' `hybridep.py`.\n",
}


def test_a_tree_in_order_has_no_message(tool: ModuleType, tmp_path: Path) -> None:
    assert messages(tool, tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("csrc/base/up.h", include("layout/common/wire.h"), "in csrc/, base may not see layout"),
        ("csrc/layout/common/up.h", include("layout/ll/rail.h"), "in csrc/layout, common may not see ll"),
        ("csrc/layout/ht/rail.h", include("layout/ll/rail.h"), "in csrc/layout, ht may not see ll"),
        ("csrc/cuda/ll/combine/send.cuh", include("cuda/ll/dispatch/send.cuh"), "combine may not see dispatch"),
        ("csrc/cuda/ll/dispatch/up.cuh", include("cuda/ll/links/send.cuh"), "dispatch may not see links"),
        ("csrc/cuda/ll/kernel.cuh", include("cuda/launch/launch.h"), "ll may not see launch"),
        ("csrc/cuda/ht/route.cu", include("cuda/ll/dispatch/send.cuh"), "ht* may not see ll"),
        ("csrc/cuda/ht/common/geometry.h", include("cuda/ll/common/geometry.h"), "ht may not see ll"),
        ("csrc/layout/new/wire.h", include("layout/common/wire.h"), "does not have new"),
        ("csrc/layout/ll/rail.h", "int a;\n" + include("base/check.h"), "in mid-file"),
        ("csrc/layout/ll/rail.h", "// As base/checks.h says.\n", "names base/checks.h, which does not exist"),
        ("csrc/layout/ll/rail.h", "// base/check.h: fail\n", "names base/check.h: fail, but fail is not in it"),
        ("docs/other.md", "See `csrc/cuda/lh/`.\n", "names csrc/cuda/lh/, which does not exist"),
        ("nccl_ep/handle.py", "import nccl_ep.deep_ep\n", "imports deep_ep in line 1"),
        ("nccl_ep/handle.py", '"""tests/test_x.py"""\n', "names tests/test_x.py, which does not exist"),
    ],
)
def test_a_fault_is_named(tool: ModuleType, tmp_path: Path, name: str, text: str, message: str) -> None:
    files = {"csrc/layout/ll/rail.h": "", **GOOD, name: text}
    found = messages(tool, tmp_path, files)
    assert len(found) == 1 and message in found[0] and found[0].startswith(name), found


def test_a_circle_of_includes_is_named(tool: ModuleType, tmp_path: Path) -> None:
    files = {"csrc/base/a.h": include("base/b.h"), "csrc/base/b.h": include("base/c.h"), "csrc/base/c.h": ""}
    assert messages(tool, tmp_path, GOOD | files) == []
    files["csrc/base/c.h"] = include("base/a.h")
    assert messages(tool, tmp_path, GOOD | files) == ["a circle: base/a.h -> base/b.h -> base/c.h -> base/a.h"]


@pytest.mark.parametrize("late", ["from .buffer import Buffer", "from nccl_ep import buffer", "from . import Buffer"])
def test_a_circle_of_imports_is_named_though_one_is_in_a_function(tool: ModuleType, tmp_path: Path, late: str) -> None:
    files = {
        "nccl_ep/buffer.py": "from .handle import Handle\n",
        "nccl_ep/handle.py": f"def make():\n    {late}\n",
    }
    (found,) = messages(tool, tmp_path, GOOD | files)
    assert found.startswith("a circle: nccl_ep") and "nccl_ep.handle -> nccl_ep" in found
