"""nccl_ep_signals.cuh, which users' kernels include. tests/gpu/test_arrivals.py runs one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.gpu.cuda_consumer import SOURCE, compiled, has_nvcc

pytestmark = pytest.mark.skipif(not has_nvcc(), reason="no nvcc here")

# The memory, as the dispatch has it and as the header has it.
SAME = """
#include "runtime/common/arrivals.h"
#include <nccl_ep_signals.cuh>
using Ours = ep::Arrivals;
using Theirs = nccl_ep::Arrivals;
#define SAME(word) static_assert(int(Ours::word) == Theirs::word, #word)
SAME(kExpected); SAME(kFailed); SAME(kHeader); SAME(kRows); SAME(kFirst); SAME(kExperts); SAME(kTables);
"""


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_kernel_needs_nothing_but_the_header(arch: str, tmp_path: Path) -> None:
    ptx = compiled(SOURCE, tmp_path / "consumer.ptx", f"-arch={arch}", "-ptx").read_text()
    wait, row = ptx.index("ld.acquire.gpu.global.s64"), ptx.index("st.global.u32")
    assert wait < row < ptx.index("red.release.gpu.global.add.s32")
    assert "bar.sync" in ptx[wait:row]


def test_the_header_has_the_dispatch_s_places(tmp_path: Path) -> None:
    source = tmp_path / "same.cu"
    source.write_text(SAME)
    compiled(source, tmp_path / "same.ptx", "-std=c++20", "-arch=sm_90", "-ptx", f"-I{ROOT / 'csrc'}")
