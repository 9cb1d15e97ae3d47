"""The contract of backends over NCCL: ranks are processes, each with a GPU of its own."""

from __future__ import annotations

from tests.contract.suite import Contract
from tests.contract.world import Backend, LivingProcesses
from tests.support.gpus import WORLDS, needs_gpu, ranks_on_gpus

pytestmark = [*needs_gpu, ranks_on_gpus]


class TestNccl(Contract):
    world = LivingProcesses(min(WORLDS[-1], 4), Backend("cuda"))
