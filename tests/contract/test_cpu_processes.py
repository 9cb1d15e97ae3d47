"""The contract of backends on the CPU: ranks that are processes."""

from __future__ import annotations

import pytest

from nccl_ep import _C
from tests.contract.suite import Contract
from tests.contract.world import Backend, LivingProcesses

pytestmark = pytest.mark.skipif(_C.EMULATES_GPU, reason="emulated GPUs are of one process")


class TestCpuProcesses(Contract):
    world = LivingProcesses(2, Backend(counts_bytes=True))
