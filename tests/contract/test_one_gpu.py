"""The contract of backends on one GPU that holds the whole world: each rank is a thread, an operation one launch."""

from __future__ import annotations

from tests.contract.suite import Contract
from tests.contract.world import Backend, Threads
from tests.support.gpus import needs_gpu, one_gpu_worlds

pytestmark = [*needs_gpu, one_gpu_worlds]


class TestOneGpu(Contract):
    world = Threads(3, Backend("cuda", is_one_launch=True))
