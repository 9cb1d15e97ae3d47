"""Two queues of work that run at the same time: operations in one, GEMMs in the other. Streams on a GPU, else threads.

All ranks call everything here together, with the same numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .measure import Effort, _timing_event, event_times, graph_times
from .operations import Call
from .world import Skipped, World


class Lanes(Protocol):
    num_sms: int  # of the device; 0: it has none

    def run(self, chains: int, gemms: int) -> tuple[float, float]:
        """So many chains of operations and so many GEMMs, side by side. Microseconds of one operation, of one GEMM."""
        ...

    def widen(self, on_all_sms: bool) -> None:
        """GEMMs take all SMs from now on, or again those that operations leave them."""


class ThreadLanes:
    """For CPU ranks: shows that the code runs."""

    num_sms = 0

    def __init__(self, world: World, op: Call, gemm: Call, chain: int) -> None:
        self._world, self._op, self._gemm, self._chain = world, op, gemm, chain

    def run(self, chains: int, gemms: int) -> tuple[float, float]:
        taken = [0.0, 0.0]
        errors: list[Exception] = []

        def work(lane: int, call: Call, count: int) -> None:
            begin = time.perf_counter()
            try:
                for _ in range(count):
                    call()
            except Exception as error:
                errors.append(error)
            taken[lane] = (time.perf_counter() - begin) * 1e6 / max(count, 1)

        self._world.gate.wait()
        beside = threading.Thread(target=work, args=(1, self._gemm, gemms))
        beside.start()
        work(0, self._op, chains * self._chain)
        beside.join()
        if errors:
            raise errors[0]
        return taken[0], taken[1]

    def widen(self, on_all_sms: bool) -> None:
        pass


class StreamLanes:
    """Operations in graphs on a stream of high priority, GEMMs on another.

    partition: "green", GEMMs in a green context of the SMs that are left; "carveout", on any, but laid out for so many;
    "none", as if they were alone.
    """

    def __init__(self, world: World, op: Call, gemm: Call, chain: int, num_sms: int, partition: str) -> None:
        self._world, self._gemm, self._chain = world, gemm, chain
        self.num_sms = torch.cuda.get_device_properties(world.device).multi_processor_count
        if num_sms >= self.num_sms:
            raise Skipped(f"{num_sms} SMs for the operation leave none of {self.num_sms}")
        self._left_out: int | None = None
        if partition == "carveout":
            if not hasattr(torch._C, "_set_sm_carveout_experimental"):
                raise Skipped("this torch cannot tell cuBLAS how many SMs to use")
            self._left_out = num_sms
        self._is_wide = False
        self._all: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._rest: Any = self._all
        if partition == "green":
            self._context, self._rest = _green_stream(world.device, (self.num_sms - num_sms) // 8 * 8)
        self._ops: Any = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        self._ops.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._ops):
            op()
        with torch.cuda.graph(self._graph, stream=self._ops, capture_error_mode="thread_local"):
            for _ in range(chain):
                op()
        for is_wide in (True, False):
            self.widen(is_wide)
            with _on(self._gemms), self._layout():
                gemm()  # cuBLAS makes its workspace of a stream
        world.synchronize()

    def run(self, chains: int, gemms: int) -> tuple[float, float]:
        events = [_timing_event() for _ in range(4)]
        self._world.gate.wait()
        self._world.align()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        for stream, layout, call, count, begin, end in (
            (self._gemms, self._layout(), self._gemm, gemms, *events[2:]),
            (self._ops, nullcontext(), self._graph.replay, chains, *events[:2]),
        ):
            with _on(stream), layout:
                torch.cuda.current_stream().wait_event(ready)
                begin.record()
                for _ in range(count):
                    call()
                end.record()
        self._world.synchronize()
        op, gemm = events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])
        return op * 1e3 / max(chains * self._chain, 1), gemm * 1e3 / max(gemms, 1)

    def widen(self, on_all_sms: bool) -> None:
        self._is_wide = on_all_sms

    @property
    def _gemms(self) -> Any:
        return self._all if self._is_wide else self._rest

    def _layout(self) -> AbstractContextManager[None]:
        if self._left_out is None:
            return nullcontext()
        return _laid_out(None if self._is_wide else self._left_out)


@contextmanager
def _laid_out(left_out: int | None) -> Iterator[None]:
    """GEMMs by cuBLASLt, for all SMs but so many: one block for each SM of the GPU would need a second wave."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # cuBLAS does not ask
    torch._C._set_sm_carveout_experimental(left_out)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(before)


def _on(stream: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def _green_stream(device: torch.device, num_sms: int) -> tuple[Any, Any]:
    """A green context of so many SMs (GPUs give them out in eights) and a stream in it. Raises Skipped."""
    try:
        from torch.cuda import green_contexts
    except ImportError:
        raise Skipped("this torch has no green contexts") from None
    if not green_contexts.SUPPORTED:
        raise Skipped("this torch was built without green contexts")
    try:
        context: Any = green_contexts.GreenContext.create(num_sms=num_sms, device_id=device.index)
        return context, context.Stream()
    except (RuntimeError, AttributeError) as error:  # no such partition; torch 2.10 has no streams of it
        raise Skipped(f"no green context of {num_sms} SMs: {str(error).splitlines()[0]}") from None


def make_lanes(world: World, op: Call, gemm: Call, chain: int, num_sms: int, partition: str) -> Lanes:
    """Raises Skipped where this machine has no such partition."""
    if not world.is_cuda:
        return ThreadLanes(world, op, gemm, chain)
    return StreamLanes(world, op, gemm, chain, num_sms, partition)


class SplitTimer:
    """Times of one call, of many in a graph; on CPU ranks of one by one."""

    def __init__(self, world: World, chain: int, iterations: int) -> None:
        self._world, self._effort = world, Effort(3, iterations, chain, 0)

    def run(self, call: Call) -> list[float]:
        return (graph_times if self._world.is_cuda else event_times)(self._world, call, self._effort)
