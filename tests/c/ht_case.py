"""A rank's high-throughput use of the C library: generated cases, held against the oracle as those of Python are."""

from __future__ import annotations

import ctypes as c
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import EXTRA, QUANTS, SECOND, CaseRun, as_given, refused, tensor
from tests.ht.harness import HtPlan, HtRankResult, check_extra, extra_tensor, oracle, oracle_kwargs
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case
from tests.support.gpus import on_gpu
from tests.support.harness import check_results


class Memory:
    """Device memory at an address, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(address: int, sizes: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor in memory that somebody else owns."""
    size = torch.Size(sizes).numel() * dtype.itemsize
    if device.type == "cuda":
        made = torch.as_tensor(Memory(address, size), device=device)
    else:
        made = torch.frombuffer((c.c_char * size).from_address(address), dtype=torch.uint8)
    return made.view(dtype).view(sizes)


def is_routed(case: Case, plan: HtPlan) -> bool:
    """Whether the handle is routed in a step of its own: exact sizes must be, a part of the others is."""
    return plan.exact or case.seed % 3 == 0


class HtCaseRun(CaseRun):
    """As CaseRun, in high throughput and with what HtPlan leaves open. Outputs lie in the arena while it has room."""

    def __init__(
        self, library: Library, expected: Expected, plan: HtPlan, group: ThreadGroup, device: str, **config: Any
    ) -> None:
        case = expected.case
        row = case.hidden * case.dtype.itemsize + -(-case.scales_width * 8 // 16) * 16
        row += sum(hidden * dtype.itemsize for hidden, dtype in plan.extra)
        row = max([row, *(hidden * dtype.itemsize + 416 for hidden, dtype, _ in plan.cached)]) + 16
        output = case.num_ranks * case.max_tokens * (row + case.hidden * 4)
        arena = {"none": 0, "tight": output // 2, "ample": 64 * output + (1 << 20)}[plan.arena]
        super().__init__(
            library, expected, group, False, device, algorithm=c_api.HIGH_THROUGHPUT, max_token_bytes=row,
            arena_bytes=arena, **config,
        )  # fmt: skip
        self.plan = plan
        self.blocks: list[int] = []

    def new(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(sizes).numel() * dtype.itemsize
        if size == 0 or self.plan.arena == "none":
            return super().new(sizes, dtype)
        memory = c.c_void_p()
        self.library.MemAlloc(self.group, memory, size)
        assert memory.value is not None
        self.blocks.append(memory.value)
        return tensor_at(memory.value, sizes, dtype, self.device)

    def free(self) -> None:
        for block in self.blocks:
            self.library.MemFree(self.group, block)
        self.blocks.clear()

    def handle_config(self) -> c_api.HandleConfig:
        case, capacity = self.case, self.case.capacity or 0
        if self.plan.exact and case.layout != "rank_major":
            capacity = c_api.EXACT
        elif case.layout == "expert_major" and case.capacity is None:
            capacity = case.num_ranks * case.max_tokens
        return c_api.HandleConfig(
            layout=c_api.LAYOUTS[case.layout], capacity=capacity, expert_alignment=case.expert_alignment
        )

    def new_info(self) -> torch.Tensor:
        case = self.case
        is_packed, by_expert = case.layout == "packed", case.layout in ("expert_major", "packed")
        bins = case.num_experts // case.num_ranks if by_expert else case.num_ranks
        info = self.new([3 * bins + 3 if is_packed else 2 * bins + 2], torch.int32)
        info.view(torch.uint8).fill_(0xA5)
        return info

    def route(self, handle: c.c_void_p) -> torch.Tensor:
        info = self.new_info()
        self.library.RouteHandle(handle, tensor(info), self.stream())
        return info

    def send(self, handle: c.c_void_p, info: torch.Tensor | None = None) -> dict[str, Any]:
        """A dispatch. info: of ncclEpRouteHandle, with which the handle was routed."""
        case, given = self.case, self.expected.inputs[self.rank]
        x, weights, scales = map(self.move, (given.x, given.topk_weights, given.scales))
        extra = [self.move(extra_tensor(case, self.rank, i, *what)) for i, what in enumerate(self.plan.extra)]
        inputs = c_api.DispatchInputs(
            tokens=tensor(x), topk_weights=tensor(weights), scales=tensor(scales),
            extra=[tensor(each) for each in extra],
        )  # fmt: skip
        config = c_api.DispatchConfig(quant=QUANTS[case.quant], zero_padding=case.zero_padding, num_sms=self.num_sms)
        made = as_given(
            self.run_dispatch(handle, inputs, config),
            tokens=x,
            scales=scales,
            **dict(zip(EXTRA, extra, strict=False)),
        )
        assert (made["info"] is None) == (info is not None)
        return made if info is None else {**made, "info": info}

    def kept(self, made: dict[str, Any]) -> nccl_ep.DispatchOutput:
        """Of a dispatch, what stays when its memory goes."""
        on_host = {name: None if each is None else each.clone().cpu() for name, each in made.items()}
        out = self.output(on_host)
        out.extra = tuple(on_host[name] for name in EXTRA[: len(self.plan.extra)])
        return out

    def cached(self, handle: c.c_void_p, number: int) -> nccl_ep.Payload:
        hidden, dtype, quant = self.plan.cached[number]
        x = self.move(extra_tensor(self.case, self.rank, 10 + number, hidden, dtype))
        config = c_api.DispatchConfig(
            cached=1, quant=QUANTS[quant], zero_padding=self.case.zero_padding, num_sms=self.num_sms
        )
        made = as_given(self.run_dispatch(handle, c_api.DispatchInputs(tokens=tensor(x)), config), tokens=x)
        assert all(made[name] is None for name in ("topk_weights", "topk_idx", "row_expert", "info"))
        return nccl_ep.Payload(
            made["tokens"].clone().cpu(), None if made["scales"] is None else made["scales"].clone().cpu()
        )

    def round(self, handle: c.c_void_p) -> HtRankResult:
        expected, rank = self.expected, self.rank
        ids = self.move(expected.inputs[rank].topk_idx)
        self.library.UpdateHandle(handle, tensor(ids))
        if is_routed(self.case, self.plan):
            info = self.route(handle)
            self.send(handle, info)
            assert ids is not None
            ids.fill_(-1)  # nobody looks at them any more
            made = self.send(handle, info)
        else:
            made = self.send(handle)
        cached = [self.cached(handle, number) for number in range(len(self.plan.cached))]
        rows = self.case.expert(made["tokens"], expected.results[rank], rank)
        if self.plan.rows_in_arena:
            rows = self.new(list(rows.shape), rows.dtype).copy_(rows)
        values, scalars = self.move(expected.values[rank]), torch.empty_like(expected.scalars[rank], device=self.device)
        combined = self.combine_rows(handle, rows, values, scalars)
        assert torch.equal(self.combine_rows(handle, rows).view(torch.uint8), combined.view(torch.uint8))
        assert torch.equal(self.scalars(handle), scalars.cpu())
        return HtRankResult(self.kept(made), cached, combined, scalars.cpu(), [])

    def info(self) -> Any:
        info = c_api.GroupInfo()
        self.library.GroupGetInfo(self.group, info)
        return info

    def run_rounds(self) -> tuple[list[HtRankResult], Any]:
        """Two rounds with one handle; and what the group counted."""
        library, config, size = self.library, self.handle_config(), c.c_size_t()
        library.HandleMemSize(self.group, config, size)
        memory = torch.full((size.value + 64,), 0x77, dtype=torch.uint8, device=self.device)
        handle = c.c_void_p()
        library.InitHandle(handle, self.group, config, memory.data_ptr() if self.case.seed % 2 else None)
        results = []
        for _ in range(2):
            results.append(self.round(handle))
            self.free()
        assert (memory[size.value :] == 0x77).all(), "the library wrote past the handle's memory"
        told = c_api.HandleInfo()
        library.HandleGetInfo(handle, told)
        rows = results[-1].dispatched.x.shape[:-1][-1]
        assert (told.algorithm, told.topk, told.capacity) == (c_api.HIGH_THROUGHPUT, self.case.topk, rows)
        counted = self.info()
        dispatches = (3 if is_routed(self.case, self.plan) else 1) + len(self.plan.cached)
        assert (counted.num_ht_dispatches, counted.num_ht_combines) == (2 * dispatches, 6)
        assert counted.arena_free_bytes == counted.arena_bytes
        library.Check(self.group) if self.has_good_ids() else None
        library.HandleDestroy(handle)
        library.GroupDestroy(self.group)
        return results, counted

    def has_good_ids(self) -> bool:
        ids = self.expected.inputs[self.rank].topk_idx
        return bool(((ids >= -1) & (ids < self.case.num_experts)).all())


def run_ht_case(library: Library, case: Case, *, device: str = "cpu", num_sms: int = 0) -> Counter[str]:
    """Runs the case; fails with its description where a bit differs. Returns which ways were taken, by rank."""
    plan, expected = HtPlan.of(case), Expected(case)
    kwargs = oracle_kwargs(case, plan, expected.inputs)
    expected.results = oracle(expected.inputs, kwargs)
    expected.values = [case.scalars(result, rank) for rank, result in enumerate(expected.results)]

    def body(group: ThreadGroup) -> tuple[list[HtRankResult], Any]:
        run = HtCaseRun(library, expected, plan, group, device)
        run.num_sms = num_sms
        return run.run_rounds()

    got = run_ranks(case.num_ranks, body)
    for number in range(2):
        results = [rounds[number] for rounds, _ in got]
        check_results(case, expected.inputs, expected.results, results, f"{case.describe()} {plan} round {number}")
        check_extra(case, plan, expected.inputs, kwargs, dict(enumerate(results)))
    ways = Counter({
        "exact": plan.exact, "routed": is_routed(case, plan), "cached": len(plan.cached), "extra": len(plan.extra),
    })  # fmt: skip
    for _, counted in got:
        ways["staged dispatch" if counted.num_staged_dispatches else "written in place"] += 1
        if case.layout in ("flat", "rank_major"):
            ways["staged combine" if counted.num_staged_combines else "read in place"] += 1
    return ways


def run_route_that_fails(library: Library, group: Any, device: str, meet: Callable[[], object]) -> None:
    """Rank 1 leaves rank 0 alone in its second route, and the info tensor there says that nothing was received. The
    ranks then meet."""
    expected = Expected(plain_case(2, layout="packed"))
    run = HtCaseRun(library, expected, HtPlan.of(expected.case), group, device)
    handle, ids = c.c_void_p(), run.move(expected.inputs[run.rank].topk_idx)
    library.InitHandle(handle, run.group, run.handle_config(), None)
    library.UpdateHandle(handle, tensor(ids))
    assert run.route(handle).cpu().any()
    if run.rank == 0:
        library.GroupSetTimeout(run.group, 2 * SECOND)
        info = run.new_info()

        def route() -> None:
            library.RouteHandle(handle, tensor(info), None)
            if device == "cuda":
                torch.cuda.synchronize()
                library.Check(run.group)

        refused(c_api.TIMEOUT, "rank 1", route)
        assert not info.cpu().any(), info
    meet()
    run.free()
    library.HandleDestroy(handle)
    library.GroupDestroy(run.group)


def run_route_that_fails_over_nccl(rank: int, library_file: Path) -> None:
    on_gpu(rank)
    run_route_that_fails(Library(library_file), rendezvous_of(dist.group.WORLD), "cuda", dist.barrier)


WAYS = (
    "exact",
    "routed",
    "cached",
    "extra",
    "staged dispatch",
    "written in place",
    "staged combine",
    "read in place",
)
