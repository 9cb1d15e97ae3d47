"""The contract of a backend. To hold one to it, write

    class TestMine(Contract):
        world = Threads(3, Backend(...))

World.run brings ranks to life, Backend says how buffers are made and what this one has not got; a test that asks for
that skips itself, with the reason. What is compared with is the oracle, nccl_ep/reference/.
"""

from __future__ import annotations

from tests.contract.bits import Bits
from tests.contract.counts import Counts
from tests.contract.deadlines import Deadlines
from tests.contract.errors import Errors
from tests.contract.reuse import Reuse
from tests.contract.sums import Sums
from tests.contract.world import World


class Contract(Bits, Sums, Counts, Errors, Deadlines, Reuse):
    world: World

    @classmethod
    def teardown_class(cls) -> None:
        cls.world.close()
