"""The contract of backends on an emulated GPU for each rank, in one domain and between two. Run by
tests/support/emulated.py.
"""

from __future__ import annotations

import pytest

from nccl_ep import _C
from tests.contract.suite import Contract
from tests.contract.world import Backend, Threads

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")


class TestEmulatedGpu(Contract):
    world = Threads(3, Backend())


class TestEmulatedNetwork(Contract):
    world = Threads(4, Backend(domain_size=2, options={"network_seed": 7, "ll_network": "rail"}, has_rail=True))
