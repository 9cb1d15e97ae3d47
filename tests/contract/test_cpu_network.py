"""The contract of backends on the CPU between domains: what crosses is delayed, and comes in another order."""

from __future__ import annotations

import pytest

from nccl_ep import _C
from tests.contract.suite import Contract
from tests.contract.world import Backend, Threads

pytestmark = pytest.mark.skipif(_C.EMULATES_GPU, reason="ranks on the CPU run the kernels of an emulated GPU here")


class TestCpuNetwork(Contract):
    world = Threads(4, Backend(domain_size=2, options={"network_seed": 7}))
