"""DeepEP's low-latency methods on CPU ranks, against the oracle and against what DeepEP's users rely on."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C, deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import (
    IDS,
    QUANTS,
    DeepEpCase,
    deepep_cases,
    dispatched,
    one_rank,
    rebuilt,
    run_program,
    small_case,
)
from tests.support.expected import shared_buffer
from tests.support.patience import PATIENCE, Late, with_more_time
from tests.support.processes import run_processes

# ---- Against the oracle


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 30), (2, 40), (3, 25), (4, 25), (8, 8)])
def test_deepeps_methods_give_the_oracles_bits(num_ranks: int, count: int) -> None:
    """Every other one with hooks; handles are always rebuilt."""
    cases = deepep_cases(count, num_ranks, domain_size=None)
    assert {case.case.quant for case in cases} > {None} and {case.case.combine_weights for case in cases} > {"masked"}

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases) as buffer:
            for number, case in enumerate(cases):
                case.run(buffer, staged=number % 2 == 1)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("domain_size", [2, 1])
def test_deepeps_methods_give_the_oracles_bits_over_domains(domain_size: int) -> None:
    cases = deepep_cases(10, 4, domain_size=domain_size)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases, domain_size=domain_size, network_seed=3) as buffer:
            for number, case in enumerate(cases):
                case.run(buffer, staged=number % 2 == 1)

    run_ranks(4, body)


@pytest.mark.parametrize("quant", QUANTS)
def test_options_change_no_bit(quant: str | None) -> None:
    case = small_case(2, quant=quant, hidden=640)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            for options in ({}, {"staged": True}, {"async_finish": True}):
                case.run(buffer, **options)
                _, _, handle, event, hook = case.send(buffer)
                assert event.event is None and hook is None
                for more in ({"zero_copy": True}, {"use_logfmt": False}, {"out": torch.empty(8, 640).bfloat16()}):
                    staged = "staged" in options
                    y, event, hook = case.send_back(
                        buffer, handle, return_recv_hook=staged, async_finish="async_finish" in options, **more
                    )
                    assert (event.event is not None) == ("async_finish" in options)
                    if hook is not None:
                        hook()
                    case.check_combine(y, group.rank())
                    assert "out" not in more or y is more["out"]

    run_ranks(2, body)


@pytest.mark.parametrize("quant", QUANTS)
def test_logfmt_has_the_oracles_bits(quant: str | None) -> None:
    """The ranks' sums travel in 10 bits, whole and split: the bits are the oracle's."""
    case = small_case(2, quant=quant, hidden=640)
    narrow = DeepEpCase(dataclasses.replace(case.case, wire_dtype="logfmt"))
    assert not narrow.combined[0].equal(case.combined[0])

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            _, _, handle, _, _ = case.send(buffer)
            out = torch.empty(8, 640, dtype=torch.bfloat16)
            for options in ({}, {"return_recv_hook": True}, {"async_finish": True}, {"out": out}):
                y, _, hook = case.send_back(buffer, handle, use_logfmt=True, **options)
                if hook is not None:
                    hook()
                narrow.check_combine(y, group.rank())

    run_ranks(2, body)


@pytest.mark.skipif(_C.EMULATES_GPU, reason="GPUs count what crosses a network alone")
def test_logfmt_sends_fewer_bytes() -> None:
    case = small_case(2, hidden=2048)

    def body(group: ThreadGroup) -> list[int]:
        sent = []
        with shared_buffer(group, [case]) as buffer:
            _, _, handle, _, _ = case.send(buffer)
            for use_logfmt in (False, True):
                before = buffer.wire_bytes()["rows"][1 - group.rank()]
                case.send_back(buffer, handle, use_logfmt=use_logfmt)
                sent.append(buffer.wire_bytes()["rows"][1 - group.rank()] - before)
        return sent

    for plain, narrow in run_ranks(2, body):
        assert 0 < narrow <= 0.65 * plain


def test_two_batches_interleaved_with_hooks_keep_their_bits() -> None:
    """While the rows of one batch are on their way, the other's are worked on; ranks are out of step."""
    cases = [small_case(3, seed=seed, num_experts=6, topk=3) for seed in (3, 5)]

    def body(group: ThreadGroup) -> None:
        rank, pauses = group.rank(), random.Random(group.rank())
        with shared_buffer(group, cases) as buffer:
            back: Any = None
            flying = cases[0].send(buffer, return_recv_hook=True)
            for number in range(1, 21):
                now, following = cases[(number - 1) % 2], cases[number % 2]
                received, counts, handle, _, hook = flying
                if pauses.random() < 0.3:
                    sum(range(20000))
                hook()
                if back is not None:
                    back[2]()
                    following.check_combine(back[0], rank)
                flying = following.send(buffer, return_recv_hook=True)
                now.check_received(rank, received, counts, handle)
                back = now.send_back(buffer, rebuilt(handle), return_recv_hook=True)
            flying[4]()
            back[2]()

    run_ranks(3, body)


def test_a_handle_lives_on_after_other_dispatches() -> None:
    """Used after other dispatches, more than once, and rebuilt."""
    cases = deepep_cases(5, 2, domain_size=None)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases) as buffer:
            handles = [case.send(buffer)[2] for case in cases]
            for index in (4, 0, 2, 0, 1, 3):
                y, _, _ = cases[index].send_back(buffer, rebuilt(handles[index]))
                cases[index].check_combine(y, group.rank())

    run_ranks(2, body)


def test_a_program_written_for_deepep_runs(tmp_path: Path) -> None:
    """Ranks are processes that know one another by a gloo group alone."""
    assert run_processes(2, run_program, tmp_path, 2) == [16, 16]


# ---- The constructor, sizes, memory


def test_constructor_is_deepeps() -> None:
    parameters = list(inspect.signature(deep_ep.Buffer.__init__).parameters.values())[1:]
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == [
        ("group", None), ("num_nvl_bytes", 0), ("num_rdma_bytes", 0), ("low_latency_mode", False),
        ("num_qps_per_rank", 24), ("allow_nvlink_for_low_latency_mode", True), ("allow_mnnvl", False),
        ("use_fabric", False), ("explicitly_destroy", False), ("enable_shrink", False), ("comm", None),
    ]  # fmt: skip
    with deep_ep.Buffer(None, 256, 1 << 22, True, 4, True, False, False, True, device="cpu") as buffer:
        assert (buffer.rank, buffer.group_size, buffer.group, buffer.num_sms) == (0, 1, None, 20)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (256, 1 << 22, True)
        assert buffer.explicitly_destroy and not buffer.enable_shrink and buffer.runtime is not None


class _Communicator:
    """What is used of mpi4py's."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank()

    def Get_size(self) -> int:
        return self._group.size()

    def allgather(self, mine: object) -> list[Any]:
        return [pickle.loads(each) for each in self._group.allgather(pickle.dumps(mine), PATIENCE)]


def test_a_communicator_of_mpi_may_stand_for_a_group() -> None:
    case = small_case(2)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 64, 2, 4)

    def body(group: ThreadGroup) -> None:
        comm = _Communicator(group)
        with deep_ep.Buffer(None, 0, hint, low_latency_mode=True, comm=comm, device="cpu") as buffer:
            assert (buffer.rank, buffer.group_size) == (group.rank(), 2) and buffer.group is comm
            case.run(buffer)

    run_ranks(2, body)


def test_signatures_are_deepeps() -> None:
    def names(method: Any) -> list[str]:
        every = inspect.signature(method).parameters.values()
        return [each.name for each in every if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]

    assert names(deep_ep.Buffer.low_latency_dispatch) == [
        "x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "cumulative_local_expert_recv_stats",
        "dispatch_wait_recv_cost_stats",
    ]  # fmt: skip  # what follows is in two orders: test_nvfp4.py
    assert inspect.signature(deep_ep.Buffer.low_latency_dispatch).parameters["use_fp8"].default is True
    assert names(deep_ep.Buffer.low_latency_combine) == [
        "x", "topk_idx", "topk_weights", "handle", "use_logfmt", "zero_copy", "async_finish", "return_recv_hook",
        "out", "combine_wait_recv_cost_stats", "overlap", "src_signals", "src_signal_expect_value",
    ]  # fmt: skip
    assert names(deep_ep.Buffer.get_low_latency_rdma_size_hint) == [
        "num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (8, 16, 2, 64), (128, 7168, 4, 256), (1024, 2880, 8, 512)])
def test_the_size_hint_suffices_for_every_topk(shape: tuple[int, int, int, int]) -> None:
    """What the window of that many bytes is split into has room for every top-k: for routing and sums of all, and for
    rows that travel in place of sums up to top-8."""
    max_tokens, hidden, ranks, experts = shape
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, ranks, experts)
    assert hint % 128 == 0
    split = _C.sizes_for_window(ranks, hint)
    for topk in (1, 8, 32):
        sizes = max_tokens, 2 * hidden, 2 * hidden
        need = *_C.sizes_for(ranks, experts, topk, *sizes)[:3], _C.sizes_for(ranks, experts, min(topk, 8), *sizes)[3]
        assert all(have >= want for have, want in zip(split, need, strict=True)), (split, need)
    if max_tokens >= 128:
        assert hint < 1.5 * 2 * (2 * need[0] + 2 * max(need[1], need[2] + need[3])), "the hint wastes memory"


def test_a_buffer_of_the_hint_runs() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 64, 1, 4)
    ids = torch.arange(32).repeat(8, 1) % 4
    with deep_ep.Buffer(None, 0, hint, low_latency_mode=True, device="cpu") as buffer:
        buffer.clean_low_latency_buffer(8, 64, 4)
        _, counts, _, _, _ = buffer.low_latency_dispatch(torch.ones(8, 64).bfloat16(), ids, 8, 4, use_fp8=False)
        assert counts.tolist() == [8, 8, 8, 8]  # of 64 rows each, those past the R * M there is room for are dropped


def test_clean_says_what_does_not_fit() -> None:
    with one_rank() as buffer:
        buffer.clean_low_latency_buffer(4, 64, 2)
        with pytest.raises(ValueError, match=r"too small for 400 tokens a rank, hidden 6400, 2 experts: a bank needs"):
            buffer.clean_low_latency_buffer(400, 6400, 2)


@pytest.mark.parametrize("hidden", [0, -7168, 9, 33000, 1 << 30])
def test_rows_that_no_operation_has_are_refused(hidden: int) -> None:
    text = f"rows of {hidden} x torch.bfloat16 have {2 * hidden} bytes, must be a multiple of 16 up to 65536"
    with pytest.raises(ValueError, match=text):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(128, hidden, 8, 256)
    with one_rank() as buffer, pytest.raises(ValueError, match=text):
        buffer.clean_low_latency_buffer(4, hidden, 2)


@pytest.mark.parametrize("ranks", [0, -8, 1 << 31])
def test_ranks_that_no_world_has_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"num_ranks is {ranks}, must be 1 to 2147483647"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, ranks, 256)


def test_local_buffer_tensor_is_scratch() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 64, 1, 2)
    with deep_ep.Buffer(None, 256, hint, low_latency_mode=True, device="cpu", timeout=5.0) as buffer:
        whole = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        assert whole.shape == (hint,) and whole.dtype == torch.int8
        ids, rows, _, handle, _, hook = dispatched(buffer, return_recv_hook=True)
        whole.fill_(0x5A)  # in the middle of an operation
        hook()
        y, _, _ = buffer.low_latency_combine(rows, ids, torch.ones(3, 2), handle)
        assert y[:, 0].tolist() == [2, 1, 2]
        part = buffer.get_local_buffer_tensor(torch.float32, torch.Size([2, 3]), 8, use_rdma_buffer=True)
        assert part.shape == (2, 3) and part.data_ptr() == whole.data_ptr() + 8
        assert buffer.get_local_buffer_tensor(torch.int64).shape == (32,)
        assert buffer.get_local_buffer_tensor(torch.int64, (2, 3), 8).shape == (2, 3)
        assert buffer.get_local_buffer_tensor(torch.int8, (0,)).numel() == 0
        assert buffer.get_local_buffer_tensor(torch.int8, ()).shape == ()
        for size, offset in ((torch.Size([65]), 0), (torch.Size([64]), 4), (None, 2), (None, -4), ((-2, -3), 0)):
            with pytest.raises(ValueError, match="num_nvl_bytes is 256"):
                buffer.get_local_buffer_tensor(torch.float32, size, offset)


def test_combine_buffer_is_the_same_each_time() -> None:
    with one_rank() as buffer:
        *_, handle, _, _ = dispatched(buffer)
        first = buffer.get_next_low_latency_combine_buffer(handle)
        assert first.shape == (2, 4, 64) and first.dtype == torch.bfloat16 and first.is_contiguous()
        *_, other, _, _ = dispatched(buffer)
        assert buffer.get_next_low_latency_combine_buffer(other) is first


# ---- Masks


def test_one_rank_has_masks_but_none_to_set() -> None:
    with one_rank(enable_shrink=True) as buffer:
        status = torch.full((1,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0]
        buffer.low_latency_update_mask_buffer(0, False)
        buffer.low_latency_update_mask_buffer(0)
        buffer.low_latency_clean_mask_buffer()
        with pytest.raises(ValueError, match="rank 0 to mask is this rank itself"):
            buffer.low_latency_update_mask_buffer(0, mask=True)
        with pytest.raises(ValueError, match="rank_to_mask is 1, must be 0 to 0"):
            buffer.low_latency_update_mask_buffer(1)
        for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(1)):
            with pytest.raises(ValueError, match=r"must be torch.int32 \[1\]"):
                buffer.low_latency_query_mask_buffer(wrong)

    def two_ranks(group: ThreadGroup) -> None:
        with (
            deep_ep.Buffer.of(shared_buffer(group, [small_case()])) as buffer,
            pytest.raises(ValueError, match=r"strides .*must be contiguous"),
        ):
            buffer.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.int32)[::2])

    run_ranks(2, two_ranks)


# ---- Events and hooks


def test_events_of_a_cpu_buffer_are_complete() -> None:
    with one_rank() as buffer:
        *_, event, hook = dispatched(buffer, async_finish=True)
        assert hook is None and event.event is not None and event.event.query()
        event.current_stream_wait()
        assert event.extra_tensors is None or all(isinstance(t, torch.Tensor) for t in event.extra_tensors)
        with event as same:
            assert same is event
        assert buffer.get_comm_stream() is buffer.get_comm_stream()
        captured = buffer.capture()
        assert captured.event is not None
        captured.current_stream_wait()
        nccl_ep.EventOverlap(nccl_ep.EventHandle()).current_stream_wait()


def test_an_event_that_is_not_there() -> None:
    with one_rank() as buffer:
        *_, event, hook = dispatched(buffer)
        assert event.event is None and hook is None
        with pytest.raises(AssertionError, match="no event"):
            event.current_stream_wait()
        with event:  # DeepEP's allows it
            pass


def test_a_hook_works_once() -> None:
    with one_rank() as buffer:
        ids, rows, counts, handle, event, hook = dispatched(buffer, return_recv_hook=True)
        assert event.event is None
        with pytest.raises(nccl_ep.UsageError, match="has not been received"):
            dispatched(buffer)
        hook()
        assert counts.tolist() == [2, 3]
        with pytest.raises(nccl_ep.UsageError, match="called already"):
            hook()
        y, _, hook = buffer.low_latency_combine(rows, ids, torch.ones(3, 2), handle, return_recv_hook=True)
        hook()
        assert y[:, 0].tolist() == [2, 1, 2]


@pytest.mark.parametrize("staged", [False, True], ids=["fused", "hook"])
def test_a_combine_before_the_hook_is_refused(staged: bool) -> None:
    """It could only wait for itself. One of an earlier dispatch goes on beside the open one."""
    with one_rank() as buffer:
        _, rows, _, earlier, _, _ = dispatched(buffer)
        _, later_rows, _, handle, _, receive = dispatched(buffer, return_recv_hook=True)

        def combine(x: torch.Tensor, handle: Any) -> list[float]:
            y, _, hook = buffer.low_latency_combine(x, IDS, torch.ones(3, 2), handle, return_recv_hook=staged)
            if hook is not None:
                hook()
            return y[:, 0].tolist()

        for same in (handle, rebuilt(handle)):
            with pytest.raises(nccl_ep.UsageError, match="of this handle was sent and has not been received: call its"):
                combine(later_rows, same)
        assert combine(rows, earlier) == [2, 1, 2]
        assert buffer.stats()["calls"]["combine"] == 1  # nothing was launched for the others
        receive()
        assert combine(later_rows, handle) == [2, 1, 2]


def test_an_unreceived_dispatch_of_a_destroyed_buffer_is_refused() -> None:
    buffer = one_rank()
    _, rows, _, handle, _, hook = dispatched(buffer, return_recv_hook=True)
    buffer.destroy()
    for call in (lambda: buffer.low_latency_combine(rows, IDS, torch.ones(3, 2), handle), hook, hook):
        with pytest.raises(nccl_ep.UsageError, match=rf"the buffer ({re.escape(buffer.name)} )?was destroyed"):
            call()


def test_a_hook_whose_rows_were_dropped_has_received() -> None:
    with one_rank(on_overflow="raise") as buffer:
        x, twice = torch.ones(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, twice, 4, 2, use_fp8=False, return_recv_hook=True
        )
        with pytest.raises(nccl_ep.OverflowError, match="2 rows did not fit"):
            hook()
        with pytest.raises(nccl_ep.UsageError, match="called already"):
            hook()
        assert counts.tolist() == [4, 0]
        assert buffer.low_latency_combine(rows, twice, torch.ones(3, 2), handle)[0][:, 0].tolist() == [2, 2, 0]


# ---- Statistics


def test_received_rows_are_counted() -> None:
    case = small_case(2)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            stats = torch.full((2,), 5, dtype=torch.int32)
            for staged in (False, True, False):
                *_, hook = case.send(buffer, cumulative_local_expert_recv_stats=stats, return_recv_hook=staged)
                if hook is not None:
                    hook()
            assert stats.tolist() == (5 + 3 * case.results[group.rank()].counts).tolist()

    run_ranks(2, body)


def test_statistics_over_what_is_read_or_written() -> None:
    memory = torch.zeros(128, dtype=torch.uint8)
    rows, ids = memory[:48].view(torch.bfloat16).view(3, 8), torch.tensor([[0, 1], [1, 0], [0, -1]])
    counts, waited = memory[40:48].view(torch.int32), memory[40:48].view(torch.int64)
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("cumulative_local_expert_recv_stats", "x", {"cumulative_local_expert_recv_stats": counts}),
        ("dispatch_wait_recv_cost_stats", "x", {"dispatch_wait_recv_cost_stats": waited}),
        ("dispatch_wait_recv_cost_stats", "topk_idx", {"dispatch_wait_recv_cost_stats": ids.view(-1)[:1]}),
        (
            "dispatch_wait_recv_cost_stats", "cumulative_local_expert_recv_stats",
            {"cumulative_local_expert_recv_stats": memory[64:72].view(torch.int32),
             "dispatch_wait_recv_cost_stats": memory[64:72].view(torch.int64)},
        ),
    ]  # fmt: skip
    with one_rank() as buffer:
        for mine, other, stats in refused:
            with pytest.raises(ValueError, match=rf"{mine} of shape .* overlaps {other} of shape"):
                buffer.low_latency_dispatch(rows, ids, 4, 2, use_fp8=False, **stats)
        received, _, handle, _, _ = buffer.low_latency_dispatch(rows, ids, 4, 2, use_fp8=False)
        behind = handle[0].as_strided((8 + 12,), (1,))[8:].view(torch.bfloat16).view(3, 8)
        for mine, other, given in (
            ("combine_wait_recv_cost_stats", "out", {"out": rows, "combine_wait_recv_cost_stats": waited}),
            ("out", "the handle", {"out": behind}),
        ):
            with pytest.raises(ValueError, match=rf"{mine} of shape .* overlaps {other} of shape"):
                buffer.low_latency_combine(received, ids, torch.ones(3, 2), handle, **given)
        assert buffer.stats()["calls"] == {**buffer.stats()["calls"], "dispatch": 1, "combine": 0}


def test_waits_are_measured() -> None:
    """Rank 1 is late for each operation: rank 0 waits for it, and nobody for itself. Waits add to what was there."""
    case, before = small_case(2), 1 << 50

    def run(late: float) -> None:
        def body(group: ThreadGroup) -> list[tuple[list[int], float]]:
            waits = []

            def timed(call: Callable[..., Any], *args: Any, stats: str) -> None:
                waited = torch.full((2,), before)
                group.allgather(b"", PATIENCE)
                time.sleep(late * group.rank())
                start = time.monotonic_ns()
                call(*args, **{stats: waited})
                waits.append(((waited - before).tolist(), time.monotonic_ns() - start))

            with shared_buffer(group, [case]) as buffer:
                _, _, handle, _, _ = case.send(buffer)
                timed(case.send, buffer, stats="dispatch_wait_recv_cost_stats")
                timed(case.send_back, buffer, handle, stats="combine_wait_recv_cost_stats")
            return waits

        for waits, took in run_ranks(2, body)[0]:
            assert waits[0] == 0 and 0 <= waits[1] <= took, (waits, took)
            if waits[1] < late / 2 * 1e9:
                raise Late(f"rank 0 waited {waits[1]} ns for rank 1")

    with_more_time(run)
