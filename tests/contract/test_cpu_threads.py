"""The contract of backends on the CPU: ranks that are threads and share memory."""

from __future__ import annotations

import pytest

from nccl_ep import _C
from tests.contract.suite import Contract
from tests.contract.world import Backend, Threads

pytestmark = pytest.mark.skipif(_C.EMULATES_GPU, reason="ranks on the CPU run the kernels of an emulated GPU here")


class TestCpuThreads(Contract):
    world = Threads(3, Backend(counts_bytes=True))
