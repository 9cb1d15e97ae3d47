"""DeepEP's normal mode on CPU ranks, against the oracle and against what DeepEP's users rely on."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep, reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import rebuilt
from tests.deep_ep.low_latency_ranks import small_case as low_latency_case
from tests.deep_ep.normal_ranks import (
    NormalCase,
    normal_arguments,
    normal_buffer,
    normal_cases,
    replay_in_place,
    replay_new_routing,
    run_program,
    small_case,
)  # fmt: skip
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes

HALF = torch.bfloat16
WAYS: list[dict[str, Any]] = [{}, {"async_finish": True}, {"config": nccl_ep.Config(num_sms=4)}]


# ---- Against the oracle


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 30), (2, 40), (3, 25), (4, 72), (8, 8)])
def test_the_normal_mode_gives_the_oracles_bits(num_ranks: int, count: int) -> None:
    cases = normal_cases(count, num_ranks, domain_size=None)
    if count >= 25:
        seen = {(each.with_topk, each.worst > 0, each.case.biases) for each in cases}
        assert {each[:2] for each in seen} == {(True, False), (True, True), (False, False)}
        assert {each[2] for each in seen} == {0, 1, 2}
        assert any(each.inputs[0].scales is not None for each in cases)

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group) as buffer:
            for number, case in enumerate(cases):
                previous = {"previous_event": buffer.capture()} if number % 2 else {}
                case.run(buffer, **WAYS[number % 3], **previous)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("domain_size", [2, 1])
def test_the_normal_mode_gives_the_oracles_bits_over_domains(domain_size: int) -> None:
    cases = normal_cases(12, 4, domain_size=domain_size, rows_dtype=HALF)

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group, domain_size=domain_size, network_seed=3) as buffer:
            for number, case in enumerate(cases):
                case.run(buffer, **WAYS[number % 3])

    run_ranks(4, body)


NOBODY = [torch.full((8, 3), -1)] * 3
ALL_TO_ONE = [torch.arange(3).repeat(8, 1) % 2] * 3
EMPTY = {
    "no tokens of one rank": {"tokens": (0, 8, 5)}, "no tokens at all": {"tokens": (0, 0, 0)},
    "no choices": {"ids": NOBODY}, "one rank gets all": {"ids": ALL_TO_ONE},
}  # fmt: skip


@pytest.mark.parametrize("how", ["exact", "worst", "by ranks"])
@pytest.mark.parametrize("changes", EMPTY.values(), ids=EMPTY)
def test_ranks_may_have_no_tokens_or_get_none(changes: dict[str, Any], how: str) -> None:
    case = small_case(3, num_experts=6, topk=3, **changes)
    case.with_topk = how != "by ranks"
    case.worst = max(case.totals) + 2 if how == "worst" else 0
    run_ranks(3, lambda group: _run_alone(group, case))


def _run_alone(group: ThreadGroup, case: NormalCase) -> None:
    with normal_buffer(group) as buffer:
        case.run(buffer)


def test_more_worst_tokens_than_can_come() -> None:
    case = small_case(2)
    case.with_topk, case.worst, case.alignment = True, 50_000, 1
    run_ranks(2, lambda group: _run_alone(group, case))


def test_tokens_beyond_the_worst_are_dropped_and_counted() -> None:
    """The first rows are there, the others are dropped and counted; what is combined misses them."""
    case = small_case(2, ids=[torch.tensor([[0, 2]] * 8)] * 2)
    case.with_topk, case.worst, case.alignment = True, 11, 1

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with normal_buffer(group) as buffer:
            recv_x, recv_idx, _, counts, handle, _ = case.send(buffer)
            assert counts == [] and recv_x.shape == (11, 64) and buffer.stats()["dropped_rows"] == 5
            assert not reference.first_difference(recv_x, case.results[rank].x[:11])
            assert recv_idx.tolist() == [[0, -1] if rank == 0 else [-1, 0]] * 11
            again, *_ = buffer.dispatch(case.payload(buffer), handle=handle)
            assert torch.equal(again, recv_x)
            combined, _, _ = buffer.combine(torch.ones(11, 64, dtype=HALF), handle)
            kept = 8 if rank == 0 else 3
            assert combined[:, 0].tolist() == [2.0] * kept + [0.0] * (8 - kept)
        text = r"5 rows did not fit into num_worst_tokens 11: \[8, 8\]"
        with normal_buffer(group, on_overflow="raise") as buffer, pytest.raises(nccl_ep.OverflowError, match=text):
            case.send(buffer)

    run_ranks(2, body)


@pytest.mark.parametrize("strides", ["row", "column", "vector"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_rows_travel_with_their_scales(dtype: torch.dtype, strides: str) -> None:
    ids = [torch.tensor([[0, 3], [2, -1], [1, 0]]), torch.tensor([[3, 2], [-1, -1], [1, 2]])]

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        words = torch.arange(3 * 32, dtype=torch.uint8).view(3, 32) + 100 * rank
        scales = torch.arange(6.0).view(3, 2) + 10 * rank
        scales = {"row": scales, "column": scales.t().contiguous().t(), "vector": scales[:, 1]}[strides]
        with normal_buffer(group) as buffer:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids[rank], 4)
            (rows, got), _, _, _, handle, _ = buffer.dispatch(
                (words.view(dtype), scales), None, per_rank, None, is_in_rank, per_expert, ids[rank], torch.ones(3, 2)
            )
            places = [[(0, 0), (0, 2), (1, 2)], [(0, 0), (0, 1), (1, 0), (1, 2)]][rank]  # (source, token)
            columns = slice(None) if strides != "vector" else 1
            want = torch.stack([(torch.arange(6.0).view(3, 2) + 10 * r)[t, columns] for r, t in places])
            assert got.is_contiguous() and torch.equal(got, want)
            assert rows.dtype == dtype and rows.view(torch.uint8)[:, 0].tolist() == [
                100 * r + 32 * t for r, t in places
            ]
            again, scales_again = buffer.dispatch((words.view(dtype), scales), handle)[0]
            assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8)) and torch.equal(scales_again, want)

    run_ranks(2, body)


def test_scales_have_gradients_where_rows_have_none() -> None:
    ids = torch.tensor([[0, 3], [2, -1], [1, 0]])  # of ranks 0 and 1, of rank 1, of rank 0

    def body(group: ThreadGroup) -> None:
        words, scales = torch.ones(3, 32, dtype=torch.uint8), torch.ones(3, 2, requires_grad=True)
        with normal_buffer(group) as buffer:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
            (_, got), *_ = buffer.dispatch(
                (words, scales), None, per_rank, None, is_in_rank, per_expert, ids, torch.ones(3, 2)
            )
            (got * (1 + group.rank())).sum().backward()
        assert scales.grad is not None and scales.grad.tolist() == [[3, 3], [2, 2], [1, 1]]

    run_ranks(2, body)


def test_combine_takes_other_rows_than_dispatch_gave() -> None:
    """combine takes other widths and dtypes than dispatch had."""
    case = small_case(2)
    case.with_topk, case.worst = True, 0

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group) as buffer:
            *_, handle, _ = case.send(buffer)
            number = len(handle[3])
            for dtype, hidden in ((torch.float32, 128), (torch.float16, 8)):
                combined, _, _ = buffer.combine(torch.ones(number, hidden, dtype=dtype), handle)
                copies = handle[4].sum(1)
                assert combined.dtype == dtype and combined.shape == (8, hidden)
                assert combined.tolist() == copies.unsqueeze(1).expand(-1, hidden).tolist()

    run_ranks(2, body)


# ---- More than there is room for


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, None), (3, None), (4, 2)])
def test_the_window_grows_for_more_tokens(num_ranks: int, domain_size: int | None) -> None:
    """One rank has too many tokens: all make a larger window, once, and what was there before goes on."""
    tokens = (400, *(3,) * (num_ranks - 1))
    small = small_case(num_ranks, domain_size=domain_size)
    large = small_case(num_ranks, domain_size=domain_size, seed=9, max_tokens=400, tokens=tokens, tokens_kind="mixed")
    for case in (small, large):
        case.with_topk, case.worst = True, 0

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with normal_buffer(group, 20_000 * num_ranks, domain_size=domain_size, timeout=PATIENCE) as buffer:
            handle = small.check_received(rank, small.send(buffer))
            old = buffer.core.empty([4, 8], torch.float32).fill_(3)
            before = buffer.stats()
            assert before["grown"] == 0
            received = large.send(buffer)
            case_handle = large.check_received(rank, received)
            after = buffer.stats()
            assert after["grown"] == 1 and after["window_bytes"] > before["window_bytes"]
            assert after["ht_dispatches"] == before["ht_dispatches"] + 3  # counts; then counts and rows
            assert received[0].shape[0] == large.totals[rank] and old.tolist() == [[3.0] * 8] * 4
            for case, each in ((small, handle), (large, case_handle)):
                combined, _, _ = case.send_back(buffer, each)
                case.check_combined(rank, combined)
                case.check_rows(rank, buffer.dispatch(case.payload(buffer), each)[0])
                case.run(buffer)
            assert buffer.stats()["grown"] == 1 and buffer.stats()["ht_combines"] == 8

    run_ranks(num_ranks, body)


def test_a_buffer_with_two_windows_is_one_buffer() -> None:
    """Findings, counters, deadline and end are of both; low latency goes on in the first, with a send open too."""
    low = low_latency_case(1, hidden=128)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 128, 1, 2)
    how = {"num_rdma_bytes": hint, "low_latency_mode": True}
    with normal_buffer(None, 20_000, **how) as buffer:

        def dispatch(ids: torch.Tensor) -> None:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 2)
            x, weights = torch.ones(len(ids), 64, dtype=HALF), torch.ones(ids.shape)
            buffer.dispatch(x, None, per_rank, None, is_in_rank, per_expert, ids, weights)

        dispatch(torch.tensor([[0, 7]] * 3))
        received, counts, handle, _, hook = low.send(buffer, return_recv_hook=True)
        dispatch(torch.tensor([[0, 9]] * 500))
        assert buffer.stats()["grown"] == 1 and buffer.stats()["dispatches"] <= 1
        hook()
        low.check_received(0, received, counts, handle)
        assert buffer.stats()["invalid_ids"] == 3 + 2 * 500  # the counts of 500 tokens were told twice
        assert sum(buffer.core.wire_bytes()["rows_count"]) == 3 + 500 + len(low.inputs[0].x)
        for number in (3, 500):
            with pytest.raises(ValueError, match=f"{number} expert ids"):
                buffer.check()
        buffer.check()
        buffer.set_timeout(5.0)
    with pytest.raises(nccl_ep.UsageError, match="destroyed"):
        dispatch(torch.tensor([[0, 1]] * 500))
    with pytest.raises(nccl_ep.UsageError, match="destroyed"):
        dispatch(torch.tensor([[0, 1]] * 3))


def test_ranks_that_do_not_grow_together() -> None:
    """The one that is alone gets an error that names the other, and the buffer has not changed."""
    case = small_case(2, max_tokens=400, tokens=(400, 3), tokens_kind="mixed")
    case.with_topk, case.worst = True, 0
    few, met = small_case(2, max_tokens=3, tokens=(3, 3), tokens_kind="full"), threading.Barrier(2)

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group, 40_000) as buffer:
            grow = buffer._grow

            def grow_alone(sizes: Any) -> None:
                if group.rank() == 1:
                    pytest.skip("this rank leaves")
                buffer.set_timeout(0.5)
                grow(sizes)

            buffer._grow = grow_alone  # type: ignore[method-assign]
            told = (
                rf"rank 0 was growing {buffer.name} in a dispatch of DeepEP's normal mode, .*: "
                r"rank 0 waited 0\.5 s for all ranks to make or grow .* nothing was heard from rank 1$"
            )
            with pytest.raises((nccl_ep.TimeoutError, pytest.skip.Exception), match=f"{told}|this rank leaves"):
                case.send(buffer)
            assert buffer.stats()["grown"] == 0
            met.wait(PATIENCE)
            buffer.set_timeout(PATIENCE)
            few.run(buffer)

    run_ranks(2, body)


# ---- Handles


def test_a_handle_lives_on_after_other_dispatches() -> None:
    """Used after other dispatches, more than once, rebuilt and copied."""
    cases = normal_cases(5, 2, domain_size=None)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with normal_buffer(group) as buffer:
            handles = [case.send(buffer)[4] for case in cases]
            for index in (4, 0, 2, 0, 1, 3):
                how = [rebuilt, lambda handle: tuple(each.clone() for each in handle), list][index % 3]
                combined, _, _ = cases[index].send_back(buffer, how(handles[index]))
                cases[index].check_combined(rank, combined)
                cases[index].check_rows(rank, buffer.dispatch(cases[index].payload(buffer), how(handles[index]))[0])

    run_ranks(2, body)


class _Dispatch(torch.autograd.Function):
    """As training frameworks write it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, buffer: Any, kept: Any) -> Any:
        per_rank, per_node, per_expert, is_in_rank, event = buffer.get_dispatch_layout(ids, 4, None, True)
        recv_x, recv_idx, recv_weights, _, handle, event = buffer.dispatch(
            x, None, per_rank, per_node, is_in_rank, per_expert, ids, weights, previous_event=event, async_finish=True,
            allocate_on_comm_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        kept.append(handle)
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor) -> Any:  # type: ignore[override]
        dx, dweights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.saved_tensors, topk_weights=grad_weights)
        return dx, dweights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: Any, buffer: Any) -> torch.Tensor:
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        combined: torch.Tensor = buffer.combine(rows, handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.buffer.dispatch(grad.contiguous(), ctx.saved_tensors)[0], None, None


@pytest.mark.parametrize("offload", [False, True])
def test_a_layer_has_the_gradients_of_plain_torch(offload: bool) -> None:
    """Also with saved tensors that are copied to and fro, as offloading of activations does."""
    made = torch.Generator().manual_seed(3)
    ids = [torch.rand(6, 4, generator=made).topk(2).indices for _ in range(2)]
    xs = [torch.randn(6, 16, generator=made) for _ in range(2)]
    weights = [torch.rand(6, 2, generator=made) for _ in range(2)]
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0])  # of each expert

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with normal_buffer(group) as buffer:
            x, w = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            kept: list[Any] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
            with hooks if offload else torch.autograd.graph.save_on_cpu():
                recv_x, recv_idx, recv_weights = _Dispatch.apply(x, w, ids[rank], buffer, kept)
                factors = scale[2 * rank : 2 * rank + 2][recv_idx.clamp(min=0)].masked_fill(recv_idx < 0, 0)
                rows = recv_x * (recv_weights * factors).sum(1, keepdim=True)
                y = _Combine.apply(rows, kept[0], buffer)
            (y * y).sum().backward()

            x2, w2 = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            y2 = x2 * (w2 * scale[ids[rank]]).sum(1, keepdim=True)
            (y2 * y2).sum().backward()
            for mine, theirs in ((y, y2), (x.grad, x2.grad), (w.grad, w2.grad)):
                torch.testing.assert_close(mine, theirs)

    run_ranks(2, body)


# ---- Both modes


def test_both_modes_may_follow_in_any_order() -> None:
    """One buffer, as those who serve make it: normal operations between send and receive of low-latency ones."""
    normal = normal_cases(6, 2, domain_size=None)
    low = [low_latency_case(2, seed=seed, hidden=128) for seed in (3, 5)]
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 128, 2, 4)

    def body(group: ThreadGroup) -> None:
        rank, order = group.rank(), random.Random(5)
        with normal_buffer(group, num_rdma_bytes=hint, low_latency_mode=True) as buffer:
            assert buffer.stats()["mode"] == "auto"
            for number in range(12):
                case = order.choice(normal)
                received, counts, handle, _, hook = low[number % 2].send(buffer, return_recv_hook=True)
                case.run(buffer)
                hook()
                low[number % 2].check_received(rank, received, counts, handle)
                buffer.clean_low_latency_buffer(8, 128, 4)
                combined, _, hook = low[number % 2].send_back(buffer, handle, return_recv_hook=True)
                case.run(buffer, async_finish=True)
                hook()
                low[number % 2].check_combine(combined, rank)
            out = nccl_ep.dispatch(
                torch.ones(2, 16), torch.tensor([[0, 3]] * 2), buffer=buffer.core, num_experts=4, max_tokens=2,
                mode="ht", layout="flat",
            )  # fmt: skip
            assert int(out.total) == 4

    run_ranks(2, body)


def test_a_program_written_for_deepep_runs(tmp_path: Path) -> None:
    """Ranks are processes that know one another by a gloo group alone."""
    assert run_processes(2, run_program, tmp_path, 2) == [24, 24]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replays_follow_new_routing(num_ranks: int, is_async: bool) -> None:
    """What a graph captures on a GPU."""
    assert run_ranks(num_ranks, lambda group: replay_new_routing(group, "cpu", is_async, 12)) == [12] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_need_no_staging_copies(num_ranks: int) -> None:
    counts = {"ht_dispatches": 8, "ht_combines": 4, "staged_dispatches": 0, "staged_combines": 0}
    assert run_ranks(num_ranks, lambda group: replay_in_place(group, "cpu", 4)) == [counts] * num_ranks


# ---- Events


def test_events_order_the_callers_streams() -> None:
    with normal_buffer(None) as buffer:
        arguments = normal_arguments(buffer)
        *_, handle, event = buffer.dispatch(**arguments)
        assert event.event is None
        for previous in (buffer.capture(), nccl_ep.EventHandle(), nccl_ep.EventOverlap()):
            *_, event = buffer.dispatch(
                **arguments, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
            )
            assert event.event is not None and event.event.query()
            event.current_stream_wait()
            with buffer.combine(arguments["x"][:2], handle, previous_event=previous, async_finish=True)[2]:
                pass
