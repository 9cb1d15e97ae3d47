"""DeepEP's low-latency methods on GPUs, against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep import low_latency_ranks
from tests.deep_ep.low_latency_ranks import deepep_cases, small_case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.gpus import WORLDS, busy, needs_gpu, on_one_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = needs_gpu
WAYS: list[dict[str, Any]] = [{}, {"staged": True}, {"async_finish": True}]


@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2, 4))
def test_generated_cases_on_one_gpu_give_the_oracles_bits(num_ranks: int) -> None:
    """In turn fused, with hooks, on the buffer's own stream; the last for one rank alone, as several on one GPU share a
    stream."""
    ways = WAYS if num_ranks == 1 else WAYS[:2]
    cases = deepep_cases(20 if num_ranks == 4 else 30, num_ranks, domain_size=None)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases, device="cuda") as buffer:
            for number, case in enumerate(cases):
                case.run(buffer, **ways[number % len(ways)])
            buffer.require_usable()

    run_ranks(num_ranks, body)


def test_async_runs_beside_the_current_stream() -> None:
    case = small_case(1)
    with shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda") as buffer:
        case.run(buffer, async_finish=True)
        comm = buffer.get_comm_stream()
        assert comm == buffer.get_comm_stream() and comm != torch.cuda.current_stream() and comm.priority < 0
        torch.cuda.synchronize()
        received, counts, handle, event, _ = case.send(buffer, async_finish=True)
        slow = busy(200)  # on the current stream, which the operation does not wait for
        comm.synchronize()
        assert event.event is not None and event.event.query() and not slow.query()
        assert event.extra_tensors
        event.current_stream_wait()
        case.check_received(0, received, counts, handle)

        x, ids = case.inputs[0].x.cuda(), case.inputs[0].topk_idx.cuda()
        slow = busy(200)
        *_, event, _ = deep_ep.Buffer.of(buffer).low_latency_dispatch(x, ids, 8, 2, use_fp8=False, async_finish=True)
        # It waits for what the current stream had to do.
        assert not event.event.query() and not slow.query()
        with event:
            pass
        torch.cuda.synchronize()


def async_dispatch(buffer: deep_ep.Buffer, x: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    return buffer.low_latency_dispatch(x, ids, 8, 2, use_fp8=False, async_finish=True)


@pytest.mark.parametrize("waits", ["nobody", "the caller", "another stream"])
def test_inputs_of_async_operations_are_kept_until_read(waits: str) -> None:
    """What goes in is kept until the operation has read it: by the event while there is one, by the allocator when that
    went and the caller's stream does not wait for it. Where it does, the memory is free at once."""
    case = small_case(1)
    with deep_ep.Buffer.of(shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda")) as buffer:
        ids = case.inputs[0].topk_idx.cuda()
        rows = torch.full((len(ids), case.case.hidden), 3.0, device="cuda").bfloat16()
        async_dispatch(buffer, rows.clone(), ids)[3].current_stream_wait()  # what a first call sets up
        torch.cuda.synchronize()
        comm = buffer.get_comm_stream()
        x = rows.clone()
        place = x.data_ptr()

        def is_free() -> bool:
            """Whether that place is among more than all that the allocator has had so far."""
            return place in [each.data_ptr() for each in [torch.empty_like(rows) for _ in range(4096)]]

        is_free()  # the allocator asks the driver for memory now
        with torch.cuda.stream(comm):
            slow = busy(1000)
        received, counts, _, event, _ = async_dispatch(buffer, x, ids)
        if waits == "the caller":
            event.current_stream_wait()
        elif waits == "another stream":
            torch.cuda.Stream().wait_event(event.cuda_event)
        assert any(each.data_ptr() == place for each in event.extra_tensors)
        del x
        before = is_free()
        del event
        after = is_free()
        assert not slow.query(), "the operation must not have ended yet"
        assert (before, after) == (False, waits == "the caller")
        torch.cuda.synchronize()
        for expert, count in enumerate(counts.tolist()):
            assert (received[expert, :count] == 3).all()
        assert counts.sum() > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_events_where_another_gpu_is_the_current_one() -> None:
    """The handle of a default stream names the current device's."""
    case = small_case(1)
    torch.cuda.set_device(0)
    with deep_ep.Buffer.of(shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda:1")) as buffer:
        ids = case.inputs[0].topk_idx.to("cuda:1")
        rows = torch.full((len(ids), case.case.hidden), 3.0, device="cuda:1").bfloat16()
        its_own = torch.cuda.default_stream(1)
        for _ in range(2):  # the second event has been used before
            torch.cuda.synchronize(1)
            with torch.cuda.stream(buffer.get_comm_stream()):
                slow = busy(200)
            received, counts, _, event, _ = async_dispatch(buffer, rows, ids)
            its_own.wait_event(event.cuda_event)
            behind = torch.cuda.Event()
            behind.record(its_own)
            assert not behind.query() and not slow.query() and torch.cuda.current_device() == 0
            behind.synchronize()
            assert slow.query()
            assert all((received[expert, :count] == 3).all() for expert, count in enumerate(counts.tolist()))


def test_an_event_is_for_one_operation() -> None:
    """Events are used again when they are gone: not before."""
    case = small_case(1)
    with deep_ep.Buffer.of(shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda")) as buffer:
        x, ids = case.inputs[0].x.cuda(), case.inputs[0].topk_idx.cuda()
        first = async_dispatch(buffer, x, ids)[3]
        torch.cuda.synchronize()
        slow = busy(200)
        second = async_dispatch(buffer, x, ids)[3]
        assert first.event.query() and not second.event.query()
        del first
        third = async_dispatch(buffer, x, ids)[3]
        assert not second.event.query() and not third.event.query() and not slow.query()
        third.cuda_event.synchronize()
        assert second.event.query() and third.event.query() and slow.query()


def test_native_async_runs_beside_the_current_stream() -> None:
    case = Expected(plain_case(1))
    given, kwargs = case.inputs[0], case.case.dispatch_kwargs()
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    with shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda") as buffer:
        for _ in range(2):  # the first has streams to make
            torch.cuda.synchronize()
            pending = nccl_ep.dispatch_send(x, ids, weights, buffer=buffer, async_finish=True, **kwargs)
            rows = case.rows[0].cuda()
            slow = busy(200)
            pending.event.event._event.synchronize()
            was_beside = not slow.query()
            out = pending.receive()
            y = nccl_ep.combine_send(rows, out.handle, async_finish=True).receive()
            case.check_dispatch(out, 0)
            case.check_combine(y.cpu(), 0)
        assert was_beside


def test_a_hook_runs_on_the_stream_of_its_dispatch() -> None:
    case = small_case(1)
    with shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda") as buffer:
        case.run(buffer)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            received, counts, handle, _, hook = case.send(buffer, return_recv_hook=True)
            slow = busy(200)
        hook()
        beside = torch.cuda.Event()
        beside.record()
        beside.synchronize()
        assert not slow.query()
        torch.cuda.synchronize()
        case.check_received(0, received, counts, handle)


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("quant", low_latency_ranks.QUANTS)
def test_replays_follow_new_routing(quant: str | None, way: int) -> None:
    """src_info, layout_range, scales and counts of a replay are those of its routing."""
    cases = [small_case(1, quant=quant, hidden=640, num_experts=4, seed=2 * seed + 1) for seed in range(6)]
    given = [case.inputs[0] for case in cases]
    with deep_ep.Buffer.of(shared_buffer(ThreadGroup.make(1)[0], cases, device="cuda")) as buffer:
        x, ids = given[0].x.cuda(), given[0].topk_idx.cuda()
        weights, rows = torch.empty(8, 2, device="cuda"), cases[0].rows[0].cuda()
        masked = torch.empty_like(ids)
        hooks, is_async = way == 1, way == 2

        def layer() -> tuple[Any, ...]:
            received, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, 8, 4, **low_latency_ranks.QUANTS[quant], return_recv_hook=hooks, async_finish=is_async
            )
            hook() if hooks else is_async and event.current_stream_wait()
            y, event, hook = buffer.low_latency_combine(
                rows, masked, weights, handle, return_recv_hook=hooks, async_finish=is_async
            )
            hook() if hooks else is_async and event.current_stream_wait()
            return received, counts, handle, y

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            received, counts, handle, y = layer()
        for case in cases * 3:
            kwargs = case.case.rank_combine_kwargs(0)
            x.copy_(case.inputs[0].x)
            ids.copy_(case.inputs[0].topk_idx)
            masked.copy_(ids if kwargs["topk_idx"] is None else kwargs["topk_idx"])
            weights.copy_(kwargs["weights"])
            rows.copy_(case.rows[0])
            graph.replay()
            torch.cuda.synchronize()
            case.check_received(0, received, counts, handle)
            case.check_combine(y.cpu(), 0)


def test_statistics_are_added_up() -> None:
    case = small_case(1)
    with shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda") as buffer:
        waits = torch.full((1,), 5, dtype=torch.int64, device="cuda")
        stats = torch.ones(2, dtype=torch.int32, device="cuda")
        case.send(buffer, cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=waits)
        assert stats.tolist() == (case.results[0].counts + 1).tolist()
        assert waits.tolist() == [5]  # nobody waits for itself


def test_masks_are_zero_and_scratch_has_its_bytes() -> None:
    with deep_ep.Buffer(None, 0, 1 << 22, low_latency_mode=True, device="cuda") as buffer:
        status = torch.full((1,), 3, dtype=torch.int32, device="cuda")
        buffer.low_latency_query_mask_buffer(status)
        assert status.item() == 0
        assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().shape == (1 << 22,)


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_deepeps_methods_over_nccl_give_the_oracles_bits(num_ranks: int, tmp_path: Path) -> None:
    assert (
        run_processes(num_ranks, low_latency_ranks.run_cases, tmp_path, num_ranks, 30, timeout=150.0)
        == [30] * num_ranks
    )


@ranks_on_gpus
def test_a_send_does_not_wait_for_a_late_rank(tmp_path: Path) -> None:
    """The ranks that are not late have long ended theirs when the late one begins. Where ranks share a GPU they take
    turns on it, so that a send has another chance."""
    for took in run_processes(2, low_latency_ranks.run_late_send, tmp_path, 2, timeout=150.0):
        assert min(took[1:]) < 1000 * low_latency_ranks.LATE / 3, f"sends took {took} ms"


@ranks_on_gpus
def test_waits_are_measured(tmp_path: Path) -> None:
    """Nobody waits for itself, all for the last rank."""
    num_ranks = WORLDS[-1]
    got = run_processes(num_ranks, low_latency_ranks.run_waits, tmp_path, num_ranks, timeout=150.0)
    for rank, rounds in enumerate(got):
        assert len(rounds) == 4
        for waits in rounds:
            assert min(waits) >= 0 and waits[rank] == 0, (rank, rounds)
            assert rank == num_ranks - 1 or waits[-1] > 0, (rank, rounds)


@ranks_on_gpus
def test_a_program_written_for_deepep_runs(tmp_path: Path) -> None:
    assert run_processes(2, low_latency_ranks.run_program, tmp_path, 2, "cuda", 3, timeout=150.0) == [48, 48]
