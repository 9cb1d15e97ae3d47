"""One shape, checked and measured. All ranks call everything here together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from nccl_ep import Buffer

from . import floors, measure, operations, records
from .measure import Effort
from .memory import taken_by
from .operations import Call, Operations
from .records import Record
from .rivals.torch_all_to_all import RIVALS
from .workload import Checked, Shape, fitted, make_buffer, make_inputs
from .world import BenchError, Skipped, World

T = TypeVar("T")
OPS = ("dispatch", "combine", "pair")
_BUFFER_SECONDS = 15.0  # deadline of the operations: a rank that failed is given up after it
_MB = 1e6


@dataclass(frozen=True)
class Plan:
    """What to measure of every shape. is_cached, is_staged: high throughput's other variants; fits_capacity: low
    latency has the capacity of the routing, as high throughput always has."""

    figures: list[str]
    apis: list[str]
    num_sms: list[int]
    is_cached: bool = False
    is_staged: bool = False
    fits_capacity: bool = False


@dataclass(frozen=True)
class Sampled(Generic[T]):
    """What every rank found, and the operations of which some needed a copy on a rank (high throughput)."""

    ranks: list[T]
    staged: frozenset[str] = frozenset()


class Configuration:
    """Measures one shape. Here in low latency; high throughput changes some steps.

    Args:
        plan: what. note: takes each record, progress: a line now and then, on every rank.

    ``failures`` says what went wrong without ending the measurement.
    """

    bench = "ll"

    def __init__(
        self,
        world: World,
        shape: Shape,
        effort: Effort,
        note: Callable[[Record], None],
        plan: Plan,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.world, self.effort, self._note, self.plan = world, effort, note, plan
        self._progress = progress
        self.failures: list[str] = []
        self._inputs = world.together(lambda: make_inputs(shape))
        self._given = self._inputs[world.rank].to(world.device)
        self.shape = world.together(lambda: fitted(shape, self._inputs)) if self.fits_capacity() else shape
        self._common: Record = {
            "bench": self.bench, "ranks": shape.num_ranks, "tokens": shape.tokens, "hidden": shape.hidden,
            "topk": shape.topk, "experts": shape.num_experts, "dtype": shape.dtype, "layout": shape.layout,
            "routing": shape.routing, "num_sms": 0, "seed": shape.seed, "device": world.device_name(),
            "revision": records.revision(), "date": records.today(),
        }  # fmt: skip
        if shape.enable_shrink:
            self._common["enable_shrink"] = True

    # ---- Records

    def _record(self, **fields: Any) -> None:
        self._note(records.make(self._common, **fields))

    def _timed(self, body: Callable[[], list[float]], **fields: Any) -> None:
        """A record of what ``body`` samples, or of why it could not. BenchError: nothing can follow."""
        try:
            sampled = self._sample(body)
            value, p99 = records.slowest(sampled.ranks)
        except (Skipped, BenchError) as reason:
            self._not_measured(reason, **fields)
        else:
            self._record(value=value, p99=p99, **fields, **self._placed(fields["op"], sampled))

    def _sample(self, body: Callable[[], T]) -> Sampled[T]:
        return Sampled(self.world.agree(body))

    def _placed(self, op: str, sampled: Sampled[Any]) -> Record:
        """Fields that say how an operation ran."""
        return {}

    def _not_measured(self, reason: Exception, **fields: Any) -> None:
        self._record(value=None, skipped=str(reason), **fields)
        if isinstance(reason, BenchError):
            self.failures.append(f"{fields['op']} {fields['figure']}: {reason}")
            self.world.together(self.world.synchronize)

    # ---- The library

    def fits_capacity(self) -> bool:
        return self.plan.fits_capacity

    def measure_library(self) -> None:
        """Raises BenchError when the results are wrong, or the library no longer works."""
        self._measure_buffer(None)
        self._record_wire()

    def _measure_buffer(self, arena_bytes: int | None) -> None:
        world = self.world
        buffer = self._make_buffer(arena_bytes)
        try:
            begin = time.monotonic()
            checked = world.together(lambda: Checked(self.shape, world.rank, self._inputs, buffer))
            self._progress(f"equal to the oracle, which took {time.monotonic() - begin:.1f} s")
            for num_sms in self.plan.num_sms:
                for api in self.plan.apis:
                    self._measure_api(api, buffer, checked, num_sms)
            world.together(buffer.check)
        finally:
            buffer.destroy()

    def _measure_api(self, api: str, buffer: Buffer, checked: Checked, num_sms: int) -> None:
        if api == "deepep" and num_sms != 0:  # its methods leave the choice to the library
            return
        given = (self.shape, buffer, self._given, checked)
        make = {
            "native": partial(operations.native_operations, *given, num_sms),
            "ops": partial(operations.op_operations, *given, num_sms),
            "deepep": partial(operations.deepep_operations, *given),
        }
        fields = {"system": "nccl_ep", "api": api, "num_sms": num_sms}
        self._measure_operations(buffer, self.world.together(make[api]), fields)

    def _make_buffer(self, arena_bytes: int | None) -> Buffer:
        """With records of the memory that it takes."""
        world = self.world

        def make() -> tuple[Buffer, float, float, float]:
            seconds = world.patience(_BUFFER_SECONDS)
            buffer, taken = taken_by(lambda: make_buffer(self.shape, world.device, seconds, arena_bytes), world.device)
            stats = buffer.stats()
            arena = stats["arena_bytes"] if self.shape.mode == "ht" else 0
            return buffer, (stats["window_bytes"] - arena) / _MB, taken / _MB, arena / _MB

        buffer, *sizes = world.together(make)
        if "memory" in self.plan.figures:
            window, total, arena = (max(values) for values in zip(*world.agree(lambda: sizes), strict=True))
            fields = {"system": "nccl_ep", "api": "native", "op": "pair", "unit": "MB"}
            self._record(figure="memory", value=round(window, 3), **fields)
            if world.is_cuda:
                self._record(figure="memory_total", value=round(total, 3), **fields)
            if arena:
                self._record(figure="memory_arena", value=round(arena, 3), **fields)
        return buffer

    def _measure_operations(self, buffer: Buffer, made: Operations, fields: Record) -> None:
        world, effort = self.world, self.effort
        ops = tuple(made.calls)
        sms = {op: self._sms_of(buffer, made.get(op), op) for op in ops}
        if "kernel" in self.plan.figures:
            self._measure_kernels(buffer, made, sms, fields)
        functions: dict[str, Callable[[Call], list[float]]] = {
            "graph": lambda call: self._graph_times(buffer, call),
            "graph_pdl": lambda call: measure.graph_pdl_times(world, buffer, call, effort),
            "event": lambda call: measure.event_times(world, call, effort),
            "host": lambda call: measure.host_times(world, call, effort),
        }
        for figure, function in functions.items():
            if figure in self.plan.figures:
                for op in ops:
                    call = made.in_graph(op) if figure.startswith("graph") else made.get(op)
                    self._timed(partial(function, call), op=op, figure=figure, num_sms_used=sms[op], **fields)

    def _graph_times(self, buffer: Buffer, call: Call) -> list[float]:
        """Of operations that do not overlap one another."""
        return measure.plain_graph_times(self.world, buffer, call, self.effort)

    def _kernel_times(self, buffer: Buffer, call: Call, names: dict[str, str]) -> dict[str, list[float]]:
        """Without programmatic launch: a kernel that begins early and waits for the one before would count both."""
        with measure.without_pdl(buffer):
            return measure.kernel_times(self.world, call, self.effort, names)

    def _sms_of(self, buffer: Buffer, call: Call, op: str) -> int | None:
        """That an operation uses, by its plan: a block runs on one. None on CPU ranks."""
        self.world.together(call)
        dispatch, combine = buffer.runtime.last_blocks()
        blocks = {"combine": combine, "pair": max(dispatch, combine)}.get(op, dispatch)
        if not self.world.is_cuda or blocks == 0:
            return None
        return min(blocks, torch.cuda.get_device_properties(self.world.device).multi_processor_count)

    def _measure_kernels(self, buffer: Buffer, made: Operations, sms: dict[str, int | None], fields: Record) -> None:
        """Records the figure "kernel" of all but the pair, a run of which has the kernels of all."""
        names = {op: measure.KERNELS[op] for op in made.calls if op != "pair"}
        try:
            sampled = self._sample(partial(self._kernel_times, buffer, made.get("pair"), names))
        except (Skipped, BenchError) as reason:
            self._not_measured(reason, op="pair", figure="kernel", **fields)
            return
        for op in names:
            value, p99 = records.slowest([times[op] for times in sampled.ranks])
            placed = self._placed(op, sampled)
            self._record(op=op, figure="kernel", num_sms_used=sms[op], value=value, p99=p99, **fields, **placed)

    # ---- Floors

    def _record_wire(self) -> None:
        if self.world.is_cuda:
            for op, value in floors.wire_us(self.shape, self._inputs).items():
                self._record(system="floor_wire", api="computed", op=op, figure="graph", value=round(value, 3))

    # ---- The others

    def measure_rival(self, name: str) -> None:
        """Event times of a way in torch. What keeps it from running becomes the record."""
        fields = {"system": name, "api": "torch", "figure": "event", "layout": "packed"}
        try:
            rival = self.world.together(lambda: RIVALS[name](self.shape, self.world, self._given))
            rows, received = self.world.together(rival.check)
        except (Skipped, BenchError) as reason:
            self._not_measured(reason, op="pair", **fields)
            return
        calls: dict[str, Call] = {
            "dispatch": rival.dispatch,
            "combine": lambda: rival.combine(rows, received),
            "pair": lambda: rival.combine(rows, rival.dispatch()),
        }
        for op in OPS:
            self._timed(partial(measure.event_times, self.world, calls[op], self.effort), op=op, **fields)
        self.world.together(rival.close)
