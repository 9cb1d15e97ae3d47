"""The contract of backends on an emulated GPU for each rank: run by tests/support/emulated.py."""

from __future__ import annotations

import pytest

from nccl_ep import _C
from tests.contract.suite import Contract
from tests.contract.world import Backend, Threads

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")


class TestEmulatedGpu(Contract):
    world = Threads(3, Backend())
