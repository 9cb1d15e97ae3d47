"""What a rank with a GPU of its own does in tests/gpu/test_gpu.py. Run as a program: a few cases on one GPU, for
sanitizers."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from tests.gpu.chains import chain_buffer, replay_graphs
from tests.gpu.sanitizers import run_arguments
from tests.support.cases import SCALE_STRIDES, Case, generate
from tests.support.expected import Expected, plain_case, run_case, shared_buffer
from tests.support.gpus import on_gpu
from tests.support.harness import check_case, combine_case, dispatch_case, garble

DEADLINE, SLACK = 1.0, 6.0


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


def scale_cases(num_ranks: int) -> list[Case]:
    """Scales of the caller of all element sizes and strides, beside rows that end anywhere in a piece."""
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
    widths, hiddens, layouts = (16, 3, 37, 224), (512, 528, 1008), ("expert_major", "packed", "flat", "rank_major")
    cases = []
    for number, (dtype, strides, width) in enumerate(itertools.product(dtypes, (*SCALE_STRIDES, "aligned"), widths)):
        case = plain_case(
            num_ranks, seed=number, dtype=torch.int8, hidden=hiddens[number % 3],
            layout=layouts[(number + number // 4 + number // 16) % 4],
            content=("plain", "words")[number % 2], scales_dtype=dtype, scales_strides=strides, scales_width=width,
            zero_padding=number % 5 < 3, max_tokens=6, tokens=(5,) * num_ranks, tokens_kind="ragged",
        )  # fmt: skip
        cases.append(case)
    return cases


# ---- Cases


def run_overwritten(case: Expected, buffer: nccl_ep.Buffer) -> None:
    """Fused operations whose inputs are overwritten by the next kernel of the stream."""
    rank, device, given = buffer.rank, buffer.device, case.inputs[buffer.rank]
    x, ids, weights = (each.to(device, copy=True) for each in (given.x, given.topk_idx, given.topk_weights))
    out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
    garble(x, ids, weights)
    rows = case.rows[rank].to(device, copy=True)
    y = nccl_ep.combine(rows, out.handle)
    garble(rows)
    values = case.values[rank].to(device, copy=True)
    scalars = nccl_ep.combine_weights(values, out.handle)
    garble(values, out.handle.tensor)
    torch.cuda.synchronize()
    buffer.require_usable()
    case.check_dispatch(out, rank)
    case.check_combine(y.cpu(), rank)
    case.check_scalars(scalars.cpu(), rank)


def run_cases(rank: int, num_ranks: int, count: int, num_sms: tuple[int, ...]) -> int:
    """Generated cases, by turns staged and fused; a wide one with every number of SMs; overwritten inputs."""
    device = on_gpu(rank)
    cases = [Expected(case) for case in (*cuda_cases(count, num_ranks), *scale_cases(num_ranks))]
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


# ---- Beside a caller's GEMMs


def run_around_gemms(case: Expected, buffer: nccl_ep.Buffer, size: int = 2048) -> None:
    """A GEMM between send and receive of each operation; neither changes what the other gives."""
    rank, device = buffer.rank, buffer.device
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    want = a @ b
    given = case.given_on(buffer)
    pending = nccl_ep.dispatch_send(
        given.x, given.topk_idx, given.topk_weights, buffer=buffer, **case.case.dispatch_kwargs()
    )
    products = [a @ b]
    out = pending.receive()
    home = nccl_ep.combine_send(case.rows[rank].to(device), out.handle)
    products.append(a @ b)
    y = home.receive()
    case.check_dispatch(out, rank)
    case.check_combine(y.cpu(), rank)
    buffer.check()
    assert all(torch.equal(product, want) for product in products)


def run_beside_gemms(case: Expected, buffer: nccl_ep.Buffer, count: int = 200, size: int = 8192) -> None:
    """Operations while another stream has GEMMs, each of which fills the GPU: they end, and all is right."""
    rank, device = buffer.rank, buffer.device
    a, b, c = (torch.randn(size, size, device=device).bfloat16() for _ in range(3))
    case.run(buffer)
    torch.cuda.synchronize()
    side, end = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        want = a @ b
        for _ in range(count):
            torch.matmul(a, b, out=c)
        end.record()
    was_busy = not end.query()
    for number in range(5):
        out = dispatch_case(case.case, case.case.rank_input(rank), buffer, staged=number % 2 == 1)
        y = combine_case(case.case, case.rows[rank].to(device, copy=True), out.handle, rank, staged=number % 2 == 1)
        case.check_dispatch(out, rank)
        case.check_combine(y.cpu(), rank)
    buffer.check()
    torch.cuda.synchronize()
    assert was_busy, "the GEMMs were done before the first operation began"
    assert torch.equal(c, want)


def run_gemms(rank: int, num_ranks: int) -> None:
    device, case = on_gpu(rank), Expected(wide_case(num_ranks))
    with shared_buffer(rendezvous_of(dist.group.WORLD), [case], device=device) as buffer:
        run_around_gemms(case, buffer)
        run_beside_gemms(case, buffer)


# ---- CUDA graphs with routing that changes


def run_graphs(rank: int, replays: int) -> dict[bool, tuple[int, float]]:
    """Wrong elements, and microseconds of a replay, without and with programmatic dependent launch."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    with chain_buffer(group, device) as buffer:
        return {pdl: replay_graphs(buffer, replays, pdl=pdl) for pdl in (False, True)}


# ---- Deadlines


def within(seconds: float, start: float, what: str) -> None:
    took = time.monotonic() - start
    assert took < seconds, f"{what} took {took:.2f} s, at most {seconds} s"


def expect_failed(
    calls: Sequence[Callable[[], Any]], graph: torch.cuda.CUDAGraph, captured: nccl_ep.DispatchOutput, start: float
) -> None:
    """All calls say that the buffer has failed, soon after ``start``; and a replay of a dispatch and its combine shows
    no rows."""
    for call in calls:
        with pytest.raises(nccl_ep.TimeoutError, match="the buffer has failed"):
            call()
    captured.counts.fill_(9)
    captured.handle.tensor.fill_(1 << 29)  # what nobody writes any more: no row, and combine must not look there
    graph.replay()
    torch.cuda.synchronize()
    assert captured.counts.eq(0).all(), "a replay on a failed buffer shows rows"
    within(DEADLINE, start, "what came after the failure")


def leave_alone(buffer: nccl_ep.Buffer, expect_timeout: Callable[[], None]) -> None:
    """All ranks: only rank 0 goes on, to its timeout; then each destroys the buffer, in time as well."""
    dist.barrier()
    buffer.set_timeout(DEADLINE)
    if buffer.rank == 0:
        expect_timeout()
    dist.barrier()
    start = time.monotonic()
    buffer.destroy()
    within(DEADLINE + SLACK, start, "destroy()")


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
    within(DEADLINE + SLACK, start, "the call")
    start = time.monotonic()
    with pytest.raises(nccl_ep.TimeoutError) as caught:
        buffer.check()
    pattern = rf"rank 0 waited {DEADLINE:g} s for the [a-z -]+ of rank [1-9]\d* in {phase} \d+"
    assert re.search(pattern, str(caught.value)), f"{phase}: {caught.value}"
    later = (dispatch, lambda: nccl_ep.combine(rows, out.handle), buffer.check, buffer.require_usable)
    expect_failed(later, graph, captured, start)


def run_deadlines(rank: int, num_ranks: int) -> None:
    """In each phase only rank 0 calls; it must give up in time. A new buffer then works in the same processes."""
    device = on_gpu(rank)
    case = Expected(plain_case(num_ranks))
    group = rendezvous_of(dist.group.WORLD)
    for phase in ("dispatch", "combine"):
        buffer = shared_buffer(group, [case], device=device)
        run_case(case, buffer)
        out = dispatch_case(case.case, case.inputs[rank], buffer)
        torch.cuda.synchronize()
        leave_alone(buffer, partial(_expect_timeout, case, buffer, phase, out))
        with shared_buffer(group, [case], device=device) as fresh:
            run_case(case, fresh)


def run_mismatches(rank: int) -> list[str]:
    """Ranks 0 and 1 make different calls, or give handles of different dispatches; both must name both. Returns the
    texts."""
    device = on_gpu(rank)
    case, other = Expected(plain_case(2)), Expected(plain_case(2, hidden=128))
    group = rendezvous_of(dist.group.WORLD)
    texts = []
    for kind in ("dispatch", "combine", "handles", "replayed", "weighted", "split", "scalars"):
        buffer = shared_buffer(group, [case, other], device=device)
        given = case.given_on(buffer)
        out = dispatch_case(case.case, given, buffer)
        mine = other if rank == 1 else case
        if kind not in ("dispatch", "combine"):
            _give_another_handle(kind, case, buffer, out, given)
        elif kind == "dispatch":
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


def _give_another_handle(kind: str, case: Expected, buffer: nccl_ep.Buffer, first: Any, given: Any) -> None:
    """Rank 0 gives that of the first dispatch, rank 1 that of a later one."""
    graph, rows = torch.cuda.CUDAGraph(), case.rows[buffer.rank].to(buffer.device)
    if kind == "replayed":  # the handle in the graph is that of the last replay
        with torch.cuda.graph(graph):
            second = dispatch_case(case.case, given, buffer)
            nccl_ep.combine(rows, second.handle)
        graph.replay()
        graph.replay()
    else:
        second = dispatch_case(case.case, given, buffer)
    for out in (second, first):  # all give the same: that is right
        nccl_ep.combine(rows, out.handle)
    torch.cuda.synchronize()
    buffer.check()
    handle = (first, second)[buffer.rank].handle
    weights = torch.ones(given.topk_idx.shape, device=buffer.device)
    if kind == "scalars":
        nccl_ep.combine_weights(case.values[buffer.rank].to(buffer.device), handle)
    elif kind == "split":
        nccl_ep.combine_send(rows, handle).receive()
    else:
        nccl_ep.combine(rows, handle, weights=weights if kind == "weighted" else None)


# ---- Sanitizers


def _properties(case: Case, staged: bool, *, full: bool) -> set[tuple[Any, ...]]:
    """What tells one path through the kernels from another."""
    is_opaque = not case.dtype.is_floating_point or case.dtype.itemsize == 1 or case.scales_dtype is not None
    payload = case.quant if full else "fp8" if case.quant else None
    found: set[tuple[Any, ...]] = {
        (case.layout, payload or ("opaque" if is_opaque else "float")),
        ("weights", case.combine_weights),
        ("staged", staged),
    }
    if full:
        out = case.out_dtype or case.rows_dtype
        found |= {
            ("types", case.rows_dtype, case.wire_dtype or out, out), ("ids", case.idx_dtype), (case.routing,),
            ("capacity", case.layout, case.capacity_kind), ("padding", case.zero_padding),
        }  # fmt: skip
    return found


def cover(cases: dict[str, tuple[int, set[tuple[Any, ...]]]]) -> list[str]:
    """Few of the cases, each a size and properties, that have all properties between them; of equals the smallest."""
    missing = set[tuple[Any, ...]]().union(*(properties for _, properties in cases.values()))
    chosen = []
    while missing:
        name, (_, most) = max(cases.items(), key=lambda item: (len(item[1][1] & missing), -item[1][0]))
        missing -= most
        chosen.append(name)
    return chosen


def covering_cases(*, full: bool) -> list[str]:
    """Few small cases of 2 to 4 ranks that have all properties between them, as arguments of this program."""
    small: dict[str, tuple[int, set[tuple[Any, ...]]]] = {}
    for seed in range(400):
        case = cuda_case(seed)
        size = case.num_experts * case.num_ranks * case.max_tokens * case.hidden
        if 2 <= case.num_ranks <= 4 and size < 2**17 and sum(case.tokens) > 4 and case.routing != "none":
            for staged in (False, True):
                small[f"{seed}{'s' * staged}"] = (size, _properties(case, staged, full=full))
    return [*cover(small), "wide"]  # long rows, in pieces of four steps


def run_argument(text: str) -> None:
    """A seed, with an "s" if staged, or "wide"."""
    if text == "wide":
        check_case(wide_case(2, max_tokens=20, tokens=(20, 20)), device="cuda")
    else:
        check_case(cuda_case(int(text.rstrip("s"))), device="cuda", staged=text.endswith("s"))


if __name__ == "__main__":
    run_arguments(run_argument)
