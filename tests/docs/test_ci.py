"""CI compiles the CUDA kernels where a change touches what only a build with CUDA compiles."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests import ROOT


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
    found = re.search(r"^needs_kernels\(\) \{.*?^\}", (ROOT / ".ci/run").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    program = f"set -euo pipefail\nchanged() {{ {changed}; }}\n{found[0]}\nif needs_kernels; then echo yes; fi"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "yes\n" * wanted and not done.stderr and done.returncode == 0
