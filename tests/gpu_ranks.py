"""What a rank with a GPU of its own does in test_gpu.py. Run as a program: a few cases on one GPU, for sanitizers."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import time
from typing import Any

import floor_calls
import pytest
import torch
import torch.distributed as dist
from cases import Case, generate
from expected import Expected, plain_case, shared_buffer
from harness import check_case, combine_case, dispatch_case

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of

HIDDEN, TOPK, TOKENS = 256, 4, 24  # of the graph tests
DEADLINE, SLACK = 1.0, 6.0
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def cuda_case(seed: int) -> Case:
    """The generated case, on one NVLink domain."""
    return dataclasses.replace(generate(seed), domain_size=None)


def cuda_cases(count: int, num_ranks: int) -> list[Case]:
    """The first generated cases of so many ranks."""
    fitting = (case for case in map(cuda_case, itertools.count()) if case.num_ranks == num_ranks)
    return list(itertools.islice(fitting, count))


def wide_case(num_ranks: int, **changes: Any) -> Case:
    """Work for many blocks."""
    return plain_case(
        num_ranks, **{
            "num_experts": 4 * num_ranks, "topk": 4, "hidden": 1024, "max_tokens": 96, "tokens": (96,) * num_ranks,
            **changes,
        }
    )  # fmt: skip


def _start(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _spoil(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_() if not tensor.is_contiguous() else tensor.view(torch.uint8).fill_(0x5A)


# ---- Cases


def run_case(case: Expected, buffer: nccl_ep.Buffer, *, staged: bool = False, **options: Any) -> None:
    """All operations of a case, this rank's results against the oracle's."""
    rank, device = buffer.rank, buffer.device
    out = dispatch_case(case.case, case.inputs[rank], buffer, staged=staged, **options)
    y = combine_case(case.case, case.rows[rank].to(device, copy=True), out.handle, rank, staged=staged, **options)
    scalars = nccl_ep.combine_weights(case.values[rank].to(device), out.handle)
    torch.cuda.synchronize()
    buffer.require_usable()  # its error says more than a difference does
    case.check_dispatch(out, rank)
    case.check_combine(y.cpu(), rank)
    case.check_scalars(scalars.cpu(), rank)


def run_overwritten(case: Expected, buffer: nccl_ep.Buffer) -> None:
    """Fused operations whose inputs are overwritten by the next kernel of the stream."""
    rank, device, given = buffer.rank, buffer.device, case.inputs[buffer.rank]
    x, ids, weights = (each.to(device, copy=True) for each in (given.x, given.topk_idx, given.topk_weights))
    out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
    _spoil(x, ids, weights)
    rows = case.rows[rank].to(device, copy=True)
    y = nccl_ep.combine(rows, out.handle)
    _spoil(rows)
    values = case.values[rank].to(device, copy=True)
    scalars = nccl_ep.combine_weights(values, out.handle)
    _spoil(values, out.handle.tensor)
    torch.cuda.synchronize()
    buffer.require_usable()
    case.check_dispatch(out, rank)
    case.check_combine(y.cpu(), rank)
    case.check_scalars(scalars.cpu(), rank)


def run_cases(rank: int, num_ranks: int, count: int, num_sms: tuple[int, ...]) -> int:
    """Generated cases, by turns staged and fused; a wide one with every number of SMs; overwritten inputs."""
    device = _start(rank)
    cases = [Expected(case) for case in cuda_cases(count, num_ranks)]
    wide = [Expected(wide_case(num_ranks, **how)) for how in ({}, {"quant": "fp8_ue8m0", "layout": "packed"})]
    group = rendezvous_of(dist.group.WORLD)
    with shared_buffer(group, cases + wide, device=device) as buffer:
        for number, case in enumerate(cases):
            run_case(case, buffer, staged=number % 2 == 1)
        for case, sms, staged in itertools.product(wide, num_sms, (False, True)):
            run_case(case, buffer, staged=staged, num_sms=sms)
        for _ in range(20):
            run_overwritten(wide[0], buffer)
        return int(buffer.stats()["dispatches"])


# ---- Floors of the benchmark


def replay_floors(case: Expected, buffer: nccl_ep.Buffer, replays: int, *, pdl: bool) -> None:
    """Chains of floors in graphs, an odd number of each, and real operations after every few replays."""
    handle = case.dispatch(buffer).handle
    buffer.runtime.set_pdl(pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):
            floor_calls.flags(buffer)
            floor_calls.push(handle, case.case.hidden * 2)
            floor_calls.push(handle, case.case.hidden * 2, combine=True, num_sms=8)
    for _ in range(replays):
        for _ in range(5):
            graph.replay()
        run_case(case, buffer)
    buffer.runtime.set_pdl(False)


def run_floors(rank: int, num_ranks: int) -> None:
    device = _start(rank)
    cases = [Expected(case) for case in cuda_cases(6, num_ranks)]
    cases += [Expected(wide_case(num_ranks)), Expected(plain_case(num_ranks))]
    with shared_buffer(rendezvous_of(dist.group.WORLD), cases, device=device) as buffer:
        floor_calls.run_between(cases, buffer, rounds=150, seed=num_ranks)
        for pdl in (False, True):
            replay_floors(cases[-2], buffer, 20, pdl=pdl)


# ---- CUDA graphs with routing that changes


def home_sum(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_ranks: int, experts: int) -> torch.Tensor:
    """What combine makes of untouched rows, to the bit: fp32 sums in the order of k, a bf16 row a rank, their sum."""
    owner = torch.where(ids >= 0, ids // (experts // num_ranks), -1)
    products = weights.unsqueeze(-1) * x.float().unsqueeze(1)
    total, has_total = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(owner[:, :1], dtype=torch.bool)
    for rank in range(num_ranks):
        partial, has_partial = torch.zeros_like(total), torch.zeros_like(has_total)
        for k in range(ids.shape[1]):
            is_here, product = owner[:, k : k + 1] == rank, products[:, k]
            added = torch.where(has_partial, partial + product, product)
            partial = torch.where(is_here, added, partial)
            has_partial |= is_here
        row = partial.bfloat16().float()
        total = torch.where(has_partial, torch.where(has_total, total + row, row), total)
        has_total |= has_partial
    return total.bfloat16()


def count_differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    bits = BITS[got.element_size()]
    return (got.view(bits) != want.view(bits)).sum()


class Supply:
    """Inputs for `slots` operations of a graph, replaced before each replay from pools of lengths without a common
    divisor, so that data and routing meet in ever new pairs."""

    def __init__(self, rank: int, experts: int, slots: int, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(1000 + rank)

        def noise(count: int, *shape: int) -> torch.Tensor:
            return torch.randn(count + slots, TOKENS, *shape, generator=random, device=device)

        ids = noise(67, experts).argsort(-1)[..., :TOPK].contiguous()
        ids[torch.rand(ids.shape, generator=random, device=device) < 0.15] = -1
        ids[::5] = torch.where(ids[::5] < experts // 2, ids[::5], -1)  # some replays leave ranks out
        ids[::7, ::2] = -1  # and some tokens have no expert at all
        self.pools = [noise(61, HIDDEN).bfloat16(), ids, noise(59, TOPK)]
        self.slots = slots
        self.now = [pool[:slots].clone() for pool in self.pools]  # x, ids, weights

    def next(self, number: int) -> None:
        for tensor, pool in zip(self.now, self.pools, strict=True):
            first = number % (len(pool) - self.slots)
            tensor.copy_(pool[first : first + self.slots])


def replay_graphs(buffer: nccl_ep.Buffer, replays: int, *, pdl: bool) -> int:
    """Graphs of 1, 3 and 4 pairs of dispatch and combine. Returns how many elements were wrong, of all replays."""
    ranks, device = buffer.num_ranks, buffer.device
    experts = 4 * ranks
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    buffer.runtime.set_pdl(pdl)

    def pairs(supply: Supply) -> list[torch.Tensor]:
        outs = []
        for x, ids, weights in zip(*supply.now, strict=True):
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=experts)
            outs.append(nccl_ep.combine(out.x, out.handle))
        return outs

    def check(supply: Supply, outs: list[torch.Tensor]) -> None:
        for x, ids, weights, y in zip(*supply.now, outs, strict=True):
            wrong.add_(count_differences(y, home_sum(x, ids, weights, ranks, experts)))

    number = 0
    for slots in (1, 3, 4):
        supply = Supply(buffer.rank, experts, slots, device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            check(supply, pairs(supply))  # eager, and the warm-up of all that is captured
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            check(supply, pairs(supply))
        for _ in range(replays // 3):
            number += 1
            supply.next(number * (1 + buffer.rank))
            if (number + 5 * buffer.rank) % 17 == 0:
                torch.cuda._sleep(200_000)  # ranks fall behind in turn
            graph.replay()
        check(supply, pairs(supply))  # eager again, at whatever parity the replays have left
        torch.cuda.synchronize()
        buffer.check()
    buffer.runtime.set_pdl(False)
    return int(wrong)


def graph_buffer(group: Any, device: torch.device) -> nccl_ep.Buffer:
    ranks = 1 if group is None else dist.get_world_size(group)
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=4 * ranks, device=device, timeout=30.0
    )


def run_graphs(rank: int, replays: int) -> dict[bool, int]:
    """Wrong elements without and with programmatic dependent launch."""
    with graph_buffer(dist.group.WORLD, _start(rank)) as buffer:
        return {pdl: replay_graphs(buffer, replays, pdl=pdl) for pdl in (False, True)}


# ---- Deadlines


def _within(seconds: float, start: float, what: str) -> None:
    took = time.monotonic() - start
    assert took < seconds, f"{what} took {took:.2f} s, at most {seconds} s"


def _expect_timeout(case: Expected, buffer: nccl_ep.Buffer, phase: str, out: nccl_ep.DispatchOutput) -> None:
    """Rank 0, when no other rank calls any more."""
    given, device = case.inputs[0], buffer.device
    x, ids, rows = given.x.to(device), given.topk_idx.to(device), case.rows[0].to(device)

    def dispatch() -> nccl_ep.DispatchOutput:
        return nccl_ep.dispatch(x, ids, buffer=buffer, **case.case.dispatch_kwargs())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dispatch()
        nccl_ep.combine(captured.x, captured.handle)
    start = time.monotonic()
    dispatch() if phase == "dispatch" else nccl_ep.combine(rows, out.handle)
    torch.cuda.synchronize()
    _within(DEADLINE + SLACK, start, "the call")
    start = time.monotonic()
    with pytest.raises(nccl_ep.TimeoutError) as caught:
        buffer.check()
    assert re.search(
        rf"rank 0 waited {DEADLINE:g} s for the [a-z -]+ of rank [1-9]\d* in {phase} \d+", str(caught.value)
    )
    later = (dispatch, lambda: nccl_ep.combine(rows, out.handle), buffer.check, buffer.require_usable)
    for call in later:
        with pytest.raises(nccl_ep.TimeoutError, match="the buffer has failed"):
            call()
    captured.counts.fill_(9)
    captured.handle.tensor.fill_(1 << 29)  # what nobody writes any more: no row, and combine must not look there
    graph.replay()
    torch.cuda.synchronize()
    assert captured.counts.eq(0).all(), "a replay on a failed buffer shows rows"
    _within(DEADLINE, start, "what came after the failure")


def run_deadlines(rank: int, num_ranks: int) -> None:
    """In each phase only rank 0 calls; it must give up in time. A new buffer then works in the same processes."""
    device = _start(rank)
    case = Expected(plain_case(num_ranks))
    group = rendezvous_of(dist.group.WORLD)
    for phase in ("dispatch", "combine"):
        buffer = shared_buffer(group, [case], device=device)
        run_case(case, buffer)
        out = dispatch_case(case.case, case.inputs[rank], buffer)
        torch.cuda.synchronize()
        dist.barrier()
        buffer.set_timeout(DEADLINE)
        if rank == 0:
            _expect_timeout(case, buffer, phase, out)
        dist.barrier()
        start = time.monotonic()
        buffer.destroy()
        _within(DEADLINE + SLACK, start, "destroy()")
        with shared_buffer(group, [case], device=device) as fresh:
            run_case(case, fresh)


def run_mismatches(rank: int) -> list[str]:
    """Ranks 0 and 1 make different calls; both must name both. Returns the texts."""
    device = _start(rank)
    case, other = Expected(plain_case(2)), Expected(plain_case(2, hidden=128))
    group = rendezvous_of(dist.group.WORLD)
    texts = []
    for kind in ("dispatch", "combine"):
        buffer = shared_buffer(group, [case, other], device=device)
        out = dispatch_case(case.case, case.inputs[rank], buffer)
        mine = other if rank == 1 else case
        if kind == "dispatch":
            dispatch_case(mine.case, mine.inputs[rank], buffer)
        else:
            nccl_ep.combine(mine.rows[rank].to(device), out.handle)
        torch.cuda.synchronize()
        with pytest.raises(nccl_ep.MismatchError) as caught:
            buffer.check()
        texts.append(str(caught.value))
        dist.barrier()
        buffer.destroy()
    with shared_buffer(group, [case], device=device) as buffer:
        run_case(case, buffer)
    return texts


if __name__ == "__main__":
    for number, text in enumerate(sys.argv[1:]):
        check_case(cuda_case(int(text)), device="cuda", staged=number % 2 == 1)
        print("case", text, flush=True)
