"""This library, to the bit of the oracle, by each of its interfaces."""

from __future__ import annotations

from dataclasses import replace

from .. import records
from ..measure import KERNELS
from ..operations import deepep_operations, native_operations, op_operations
from ..workload import Checked, Given, Shape, arena_bytes_for, fitted, make_buffer, make_inputs
from ..world import World
from .interface import Rival

ON_CPU = True
_LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat", "packed")}
_ALIGNMENT, _TIMEOUT = 128, 30.0


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return _LAYOUTS[mode] if dtype == "bf16" else _LAYOUTS[mode][:1]


class Ours(Rival):
    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        if shape.layout == "packed":
            shape = fitted(replace(shape, alignment=_ALIGNMENT), make_inputs(shape))
            self.note = f"alignment {_ALIGNMENT}"
        super().__init__(world, shape, inputs)
        self.version = records.revision()
        self.kernels = {op: KERNELS[op] for op in ("dispatch", "combine")}
        arena = arena_bytes_for(shape, world.device) if shape.mode == "ht" else None
        self.buffer = make_buffer(shape, world.device, world.patience(_TIMEOUT), arena)

    def check(self) -> None:
        shape, given = self.shape, self.given
        checked = Checked(shape, self.world.rank, make_inputs(shape), self.buffer)
        self.ways["native"] = native_operations(shape, self.buffer, given, checked, 0)
        self.ways["ops"] = op_operations(shape, self.buffer, given, checked, 0)
        if (shape.mode, shape.layout) == ("ll", "expert_major") and shape.dtype in ("bf16", "fp8"):
            self.ways["deepep"] = deepep_operations(shape, self.buffer, given, checked)

    def close(self) -> None:
        self.ways.clear()
        self.buffer.destroy()


make = Ours
