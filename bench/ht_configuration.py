"""High throughput's part of a configuration: the arena, cached routes, and whether a copy was needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from nccl_ep import Buffer
from nccl_ep.reference import EXPERT_LAYOUTS

from . import measure, operations
from .configuration import Configuration, Sampled
from .operations import Call, Operations
from .records import Record
from .workload import Checked, arena_bytes_for

T = TypeVar("T")
OPS = ("routing", "dispatch", "combine", "pair")
_COUNTERS = {"dispatch": "staged_dispatches", "combine": "staged_combines"}
IN_PLACE, STAGED = "in_place", "staged"


class HtConfiguration(Configuration):
    """As Configuration, once with everything in the arena and (is_staged) once with nothing there."""

    bench = "ht"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._common |= {"cached": False, "alignment": self.shape.alignment, "placement": None}
        self._buffer: Buffer | None = None
        self._arena = IN_PLACE

    def fits_capacity(self) -> bool:
        return True

    def measure_library(self) -> None:
        for placement in (IN_PLACE, STAGED) if self.plan.is_staged else (IN_PLACE,):
            self._arena = placement
            self._common["placement"] = placement  # of the records of memory; others say what was counted
            try:
                arena_bytes = arena_bytes_for(self.shape, self.world.device)
                self._measure_buffer(arena_bytes if placement == IN_PLACE else 0)
            finally:
                self._buffer, self._common["placement"] = None, None
        self._record_wire()

    def _make_buffer(self, arena_bytes: int | None) -> Buffer:
        self._buffer = super()._make_buffer(arena_bytes)
        return self._buffer

    def _measure_api(self, api: str, buffer: Buffer, checked: Checked, num_sms: int) -> None:
        super()._measure_api(api, buffer, checked, num_sms)
        if self.plan.is_cached:
            make = {"native": operations.native_cached, "ops": operations.op_cached}[api]
            made: Operations = self.world.together(partial(make, self.shape, buffer, self._given, checked, num_sms))
            fields = {"system": "nccl_ep", "api": api, "num_sms": num_sms, "cached": True}
            self._measure_operations(buffer, made, fields)

    def _measure_operations(self, buffer: Buffer, made: Operations, fields: Record) -> None:
        calls = dict(made.calls)
        if self._arena == STAGED and self.shape.layout in EXPERT_LAYOUTS:
            calls.pop("combine", None)  # adds up rows at their owner, wherever they lie: the same as in place
        super()._measure_operations(buffer, Operations(calls, made.captured), fields)

    def _graph_times(self, buffer: Buffer, call: Call) -> list[float]:
        """As operations are launched: programmatically, inside a dispatch and one behind the other."""
        return measure.graph_times(self.world, call, self.effort)

    def _kernel_times(self, buffer: Buffer, call: Call, names: dict[str, str]) -> dict[str, list[float]]:
        """Likewise. Combine's kernel begins when dispatch's second one ends, since that lets none begin earlier."""
        return measure.kernel_times(self.world, call, self.effort, names)

    def _sample(self, body: Callable[[], T]) -> Sampled[T]:
        if self._buffer is None:  # a rival
            return super()._sample(body)
        before = self._count()
        ranks = self.world.agree(body)
        counted = self.world.agree(lambda: self._count_since(before))
        return Sampled(ranks, frozenset(op for op in _COUNTERS if any(each[op] for each in counted)))

    def _placed(self, op: str, sampled: Sampled[Any]) -> Record:
        if self._buffer is None:
            return {}
        touched = _COUNTERS.keys() if op == "pair" else {op if op in _COUNTERS else "dispatch"}
        return {"placement": STAGED if sampled.staged & touched else IN_PLACE}

    def _count(self) -> dict[str, int]:
        assert self._buffer is not None
        stats = self._buffer.stats()
        return {op: stats[name] for op, name in _COUNTERS.items()}

    def _count_since(self, before: dict[str, int]) -> dict[str, int]:
        self.world.synchronize()
        return {op: count - before[op] for op, count in self._count().items()}
