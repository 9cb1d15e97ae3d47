"""CI: what it compiles, what it installs, and what it leaves to be looked at."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import ROOT


def function_of_ci(name: str) -> str:
    found = re.search(rf"^{name}\(\) \{{.*?^\}}", (ROOT / ".ci/run").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[0]


def test_what_may_be_looked_at_lies_in_one_folder(tmp_path: Path) -> None:
    """Of what there is: a run that has failed has less."""
    for each in ("build/docs/site/index.html", "build/docs/screenshots/index.png", "dist/a-1.whl"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(each)
    program = f"set -euo pipefail\n{function_of_ci('keep_artefacts')}\ntrap keep_artefacts EXIT\nexit 3"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    names = [*map(str.strip, done.stdout.splitlines()[1:])]
    assert (done.returncode, names, done.stderr) == (3, ["a-1.whl", "screenshots", "site"], "")
    assert done.stdout.startswith(f"ci: artefacts, in {tmp_path}/build/artefacts:\n")
    assert (tmp_path / "build/artefacts/screenshots/index.png").read_text() == "build/docs/screenshots/index.png"


@pytest.mark.parametrize("has_it", [True, False])
def test_what_is_not_on_pypi_is_installed_where_it_is_not(has_it: bool, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    program = f"""set -euo pipefail
id() {{ echo 0; }}
apt-get() {{ echo apt-get "$@"; [[ $1 != install ]]; }}
{function_of_ci("install")}
install chromium {tmp_path}/{"there" if has_it else "absent"} "no pictures"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    said = "apt-get update -qq\napt-get install -qq -y --no-install-recommends chromium\nci: no chromium, no pictures\n"
    assert (done.stdout, done.stderr, done.returncode) == ("" if has_it else said, "", 0)
    assert re.findall(r"^install (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE) == ["libgtest-dev", "chromium"]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("echo csrc/cuda/ll/combine.cu", True), ("echo csrc/torch/ops/arena_pool.cc", True),
        ("echo tests/torch_allocator/arena_pool_test.cc", True), ("echo nccl_ep/_version.py", True),
        ("printf 'docs/gone.md\\ncsrc/torch/gone.cc\\ncsrc/api/factory.cc\\n'", True), ("false", True),
        ("echo csrc/torch/ops/gradients.cc", False), ("echo csrc/torch/gone.cc", False),
        ("echo nccl_ep/buffer.py", False), ("true", False),
    ],
)  # fmt: skip
def test_kernels_are_compiled_where_a_change_touches_them(changed: str, wanted: bool) -> None:
    """``changed``: what tells the files; where it cannot, all is compiled."""
    needs_kernels = function_of_ci("needs_kernels")
    program = f"set -euo pipefail\nchanged() {{ {changed}; }}\n{needs_kernels}\nif needs_kernels; then echo yes; fi"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "yes\n" * wanted and not done.stderr and done.returncode == 0
