"""One shape, checked and measured. All ranks call everything here together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nccl_ep import Buffer

from . import floors, measure, records
from .measure import Effort, Operations
from .records import Record
from .rivals import RIVALS
from .workload import Checked, Shape, make_inputs
from .world import BenchError, Skipped, World

OPS = ("dispatch", "combine", "pair")
_BUFFER_SECONDS = 15.0  # deadline of the operations: a rank that failed is given up after it
_MB = 1e6


class Configuration:
    """Measures one shape.

    Args:
        figures, apis, num_sms: which ones. note: takes each record, progress: a line now and then, on every rank.

    ``failures`` says what went wrong without ending the measurement.
    """

    def __init__(
        self,
        world: World,
        shape: Shape,
        effort: Effort,
        note: Callable[[Record], None],
        *,
        figures: list[str],
        apis: list[str],
        num_sms: list[int],
        with_floors: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.world, self.shape, self.effort, self._note = world, shape, effort, note
        self.figures, self.apis, self.num_sms, self.with_floors = figures, apis, num_sms, with_floors
        self._progress = progress
        self.failures: list[str] = []
        self._common: Record = {
            "ranks": shape.num_ranks, "tokens": shape.tokens, "hidden": shape.hidden, "topk": shape.topk,
            "experts": shape.num_experts, "dtype": shape.dtype, "layout": shape.layout, "routing": shape.routing,
            "num_sms": 0, "seed": shape.seed, "device": world.device_name(), "revision": records.revision(),
            "date": records.today(),
        }  # fmt: skip
        self._inputs = world.together(lambda: make_inputs(shape))
        self._given = self._inputs[world.rank].to(world.device)

    def _record(self, **fields: Any) -> None:
        self._note(records.make(self._common, **fields))

    def _timed(self, body: Callable[[], list[float]], **fields: Any) -> None:
        """A record of what ``body`` samples, or of why it could not. BenchError: nothing can follow."""
        try:
            value, p99 = records.slowest(self.world.agree(body))
        except (Skipped, BenchError) as reason:
            self._not_measured(reason, **fields)
        else:
            self._record(value=value, p99=p99, **fields)

    def _not_measured(self, reason: Exception, **fields: Any) -> None:
        self._record(value=None, skipped=str(reason), **fields)
        if isinstance(reason, BenchError):
            self.failures.append(f"{fields['op']} {fields['figure']}: {reason}")
            self.world.together(self.world.synchronize)

    # ---- The library

    def measure_library(self) -> None:
        """Raises BenchError when the results are wrong, or the library no longer works."""
        world = self.world
        buffer = self._make_buffer()
        try:
            begin = time.monotonic()
            checked = world.together(lambda: Checked(self.shape, world.rank, self._inputs, buffer))
            self._progress(f"equal to the oracle, which took {time.monotonic() - begin:.1f} s")
            for num_sms in self.num_sms:
                for api in self.apis:
                    given = (self.shape, buffer, self._given, checked)
                    if api == "deepep" and num_sms != 0:  # its methods leave the choice to the library
                        continue
                    make = {
                        "native": partial(measure.native_operations, *given, num_sms),
                        "ops": partial(measure.op_operations, *given, num_sms),
                        "deepep": partial(measure.deepep_operations, *given),
                    }
                    operations = world.together(make[api])
                    self._measure_operations(buffer, operations, {"system": "nccl_ep", "api": api, "num_sms": num_sms})
            if self.with_floors:
                self._measure_floors(buffer, checked)
            world.together(buffer.check)
        finally:
            buffer.destroy()
        if world.is_cuda:
            for op, value in floors.wire_us(self.shape, self._inputs).items():
                self._record(system="floor_wire", api="computed", op=op, figure="graph", value=round(value, 3))

    def _make_buffer(self) -> Buffer:
        """With records of the memory that it takes."""
        shape, world = self.shape, self.world

        def make() -> tuple[Buffer, float, float]:
            world.synchronize()
            before = torch.cuda.mem_get_info()[0] if world.is_cuda else 0
            buffer = Buffer.for_shapes(
                torch.distributed.group.WORLD, max_tokens=shape.tokens, hidden=shape.hidden, topk=shape.topk,
                num_experts=shape.num_experts, dtype=shape.payload.combined, device=world.device,
                timeout=_BUFFER_SECONDS,
            )  # fmt: skip
            world.synchronize()
            taken = before - torch.cuda.mem_get_info()[0] if world.is_cuda else 0
            return buffer, buffer.stats()["window_bytes"] / _MB, taken / _MB

        buffer, *sizes = world.together(make)
        if "memory" in self.figures:
            window, total = (max(values) for values in zip(*world.agree(lambda: sizes), strict=True))
            fields = {"system": "nccl_ep", "api": "native", "op": "pair", "unit": "MB"}
            self._record(figure="memory", value=round(window, 3), **fields)
            if world.is_cuda:
                self._record(figure="memory_total", value=round(total, 3), **fields)
        return buffer

    def _measure_operations(self, buffer: Buffer, operations: Operations, fields: Record) -> None:
        world, effort = self.world, self.effort
        sms = self._measure_kernels(operations, fields) if "kernel" in self.figures else dict.fromkeys(OPS)
        functions: dict[str, Callable[[measure.Call], list[float]]] = {
            "graph": lambda call: measure.graph_times(world, call, effort),
            "graph_pdl": lambda call: measure.graph_pdl_times(world, buffer, call, effort),
            "event": lambda call: measure.event_times(world, call, effort),
            "host": lambda call: measure.host_time(world, call, effort),
        }
        for figure, function in functions.items():
            if figure in self.figures:
                for op in OPS:
                    body = partial(function, operations.get(op))
                    self._timed(body, op=op, figure=figure, num_sms_used=sms[op], **fields)

    def _measure_kernels(self, operations: Operations, fields: Record) -> dict[str, int | None]:
        """Records the figure "kernel" of both operations. Returns the SMs that they use: a block runs on one."""
        sms: dict[str, int | None] = dict.fromkeys(OPS)
        found: dict[str, measure.KernelTimes] = {}
        try:
            found = self.world.together(lambda: measure.kernel_times(self.world, operations.pair, self.effort))
        except (Skipped, BenchError) as reason:
            self._not_measured(reason, op="pair", figure="kernel", **fields)
        for op, times in found.items():
            all_sms = torch.cuda.get_device_properties(self.world.device).multi_processor_count
            sms[op] = min(times.blocks, all_sms)
            body: Callable[[], list[float]] = partial(list, times.samples)
            self._timed(body, op=op, figure="kernel", num_sms_used=sms[op], **fields)
        sms["pair"] = max(filter(None, sms.values()), default=None)
        return sms

    def _measure_floors(self, buffer: Buffer, checked: Checked) -> None:
        """CPU ranks: the times of the same bytes over the host's transport, which are no floor of anything."""
        handle, figure = checked.out.handle, "graph" if self.world.is_cuda else "event"
        measured = measure.graph_times if self.world.is_cuda else measure.event_times
        calls = [("floor_flags", "dispatch", 0, floors.flags_call(buffer))]
        calls += [
            ("floor_push", op, num_sms, floors.push_call(self.shape, op, buffer, handle, num_sms))
            for num_sms in self.num_sms
            for op in OPS
        ]
        for system, op, num_sms, call in calls:
            body = partial(measured, self.world, call, self.effort)
            self._timed(body, system=system, api="ops", op=op, figure=figure, num_sms=num_sms)

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
        calls: dict[str, measure.Call] = {
            "dispatch": rival.dispatch,
            "combine": lambda: rival.combine(rows, received),
            "pair": lambda: rival.combine(rows, rival.dispatch()),
        }
        for op in OPS:
            self._timed(partial(measure.event_times, self.world, calls[op], self.effort), op=op, **fields)
        self.world.together(rival.close)
