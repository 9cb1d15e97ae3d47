"""What a rank does in tests/gpu/test_ht.py where others do not come to a call of high throughput, die, or call
another."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from tests.gpu.layers import layer, layer_buffer
from tests.gpu.ranks import DEADLINE, SLACK, expect_failed, leave_alone, within
from tests.ht.harness import HT_STEPS, ht_step
from tests.support.expected import Expected
from tests.support.gpus import busy, on_gpu
from tests.support.harness import synchronize

DEAD = 7  # exit code of a rank that leaves without a word

# Some threads wait for one part of a rank's message, some for another: whose time is up first, says so.
SILENT_RANK = r"for the (op header|routing message) of rank [1-9]\d*"


def _expect_ht_timeout(case: Expected, buffer: nccl_ep.Buffer, phase: str, out: nccl_ep.DispatchOutput) -> None:
    """Rank 0, when no other rank calls any more."""
    step, graph, given = ht_step(phase, case, buffer, out), torch.cuda.CUDAGraph(), case.given_on(buffer)
    with torch.cuda.graph(graph):  # in which nothing may be copied from ordinary host memory
        captured = case.send(buffer, given)
        nccl_ep.combine(captured.x, captured.handle)
    start = time.monotonic()
    with pytest.raises(nccl_ep.TimeoutError) as caught:  # exact sizes say so at once
        step()
        torch.cuda.synchronize()
        buffer.check()
    within(DEADLINE + SLACK, start, "the call")
    kind = "dispatch" if phase in ("dispatch", "exact", "cached") else "combine"
    pattern = rf"rank 0 waited {DEADLINE:g} s {SILENT_RANK} in high-throughput {kind} \d+"
    assert re.search(pattern, str(caught.value)), f"{phase}: {caught.value}"
    start = time.monotonic()
    expect_failed((step, lambda: case.send(buffer), buffer.check, lambda: buffer.empty([1])), graph, captured, start)
    assert captured.weights.eq(0).all(), "a replay on a failed buffer shows rows"
    assert captured.topk_idx is None or captured.topk_idx.eq(-1).all()


def run_ht_deadlines(rank: int, num_ranks: int) -> None:
    """In each phase only rank 0 calls; it must give up in time. A new buffer then works in the same processes."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    for phase, layout in zip(HT_STEPS, ("flat", "packed", "rank_major", "flat", "packed", "expert_major"), strict=True):
        case = layer(num_ranks, layout, 30)
        buffer = layer_buffer(case.case, group, device)
        out = case.send(buffer)
        case.check_dispatch(out, rank)
        leave_alone(buffer, partial(_expect_ht_timeout, case, buffer, phase, out))
        with layer_buffer(case.case, group, device) as fresh:
            out = case.send(fresh)
            case.check_dispatch(out, rank)
            case.check_combine(nccl_ep.combine(case.rows[rank].to(device), out.handle).cpu(), rank)


def run_with_a_dead_rank(rank: int) -> str:
    """Rank 1's process leaves between two operations. Returns what the other hears."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    case = layer(2, "packed", 31)
    buffer = layer_buffer(case.case, group, device)
    out = case.send(buffer)
    case.check_dispatch(out, rank)
    dist.barrier()
    if rank == 1:
        os._exit(DEAD)
    buffer.set_timeout(DEADLINE)
    start = time.monotonic()
    with pytest.raises(nccl_ep.TimeoutError) as caught:
        nccl_ep.combine(case.rows[rank].to(device), out.handle)
        torch.cuda.synchronize()
        buffer.check()
    buffer.destroy()
    within(2 * DEADLINE + SLACK, start, "all of it")
    return str(caught.value)


def run_killed_amid(rank: int, kind: str, who_is_inside: int) -> str:
    """Rank 1's process is killed: while it is inside an operation that rank 0 begins later, or while rank 0 is inside
    one that rank 1 has called behind other work. Returns what rank 0 hears."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    case = layer(2, "packed", 33)
    buffer = layer_buffer(case.case, group, device)
    given, out = case.given_on(buffer), case.send(buffer)
    case.check_dispatch(out, rank)
    case.combine(buffer, out.handle)
    step = partial(case.send, buffer, given) if kind == "dispatch" else ht_step(kind, case, buffer, out)
    synchronize(device)
    dist.barrier()
    if rank == 1:
        threading.Timer(DEADLINE / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if who_is_inside == 0:
            busy(3000)
        step()
        synchronize(device)
        return "the operation has ended without rank 0"
    buffer.set_timeout(DEADLINE)
    if who_is_inside == 1:
        time.sleep(DEADLINE)
    start = time.monotonic()
    with pytest.raises(nccl_ep.TimeoutError) as caught:
        step()
        synchronize(device)
        buffer.check()
    buffer.destroy()
    within(2 * DEADLINE + SLACK, start, "all of it")
    return str(caught.value)


def run_ht_mismatches(rank: int) -> list[str]:
    """Ranks 0 and 1 make different calls, or give handles of different dispatches; both must name both. Returns the
    texts."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    case, other = layer(2, "packed", 32), layer(2, "packed", 32, hidden=128)
    texts = []
    for what in ("hidden", "exact", "combine", "handles", "replayed", "cached"):
        buffer = layer_buffer(case.case, group, device)
        given, out = case.given_on(buffer), case.send(buffer)
        graph, twice = torch.cuda.CUDAGraph(), out
        if what == "replayed":  # the handle in the graph is that of the last replay
            with torch.cuda.graph(graph):
                twice = case.send(buffer, given)
                nccl_ep.combine(twice.x, twice.handle)
            graph.replay()
            graph.replay()
        elif what in ("handles", "cached"):
            twice = case.send(buffer)
        out = (out, twice)[rank]
        synchronize(device)
        with pytest.raises(nccl_ep.MismatchError) as caught:
            if what == "hidden":
                (case, other)[rank].send(buffer)
            elif what == "exact":
                case.send(buffer, **({"capacity": "exact"} if rank else {}))
            elif what in ("handles", "replayed", "cached"):
                ht_step("cached" if what == "cached" else "combine", case, buffer, out)()
            else:
                ht_step(("combine", "scalars")[rank], case, buffer, out)()
            synchronize(device)
            buffer.check()
        texts.append(str(caught.value))
        dist.barrier()
        buffer.destroy()
    return texts
