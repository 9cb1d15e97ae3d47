"""A rival for the tests of ``bench rivals``: every rank has all tokens, and needs no exchange."""

from __future__ import annotations

from bench.operations import Operations
from bench.rivals.interface import Rival, require_rows
from bench.workload import Given, Shape
from bench.world import Skipped, World

ON_CPU = True


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return ("flat",) if mode == "ht" else ("expert_major", "rank_major")


class StandIn(Rival):
    version, note = "1.5", "does nothing"

    def check(self) -> None:
        rows = self.every("x")[self.here(self.every("topk_idx"))]
        require_rows("rows", rows.flip(0), rows)
        applied = (self.given.weights * self.factors()[self.given.topk_idx]).sum(1, keepdim=True)
        self.require_sum(self.given.x.float() * applied)
        self.ways[None] = Operations({"pair": lambda: rows.sum()})


def make(world: World, shape: Shape, inputs: list[Given]) -> Rival:
    if shape.mode == "ht":
        raise Skipped("has no high throughput")
    if shape.layout == "rank_major":
        raise ImportError("No module named 'stand_in_of_ranks'")
    return StandIn(world, shape, inputs)
