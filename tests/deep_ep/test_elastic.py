"""DeepEP V2's ``ElasticBuffer`` on CPU ranks, against what the routing of all ranks says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.deep_ep import ElasticBuffer, EPBuffer, EPHandle, EventHandle, EventOverlap
from nccl_ep.deep_ep.v2.arguments import Shapes
from nccl_ep.room import room_for_shapes
from nccl_ep.testing import run_ranks
from tests.deep_ep.elastic_ranks import replay_new_routing
from tests.support.ranks import DEVICE

HALF = torch.bfloat16
EXPERTS, TOPK, HIDDEN, MOST = 8, 3, 64, 9
SYNCS = pytest.mark.parametrize("sync", [True, False])
EXPANDS = pytest.mark.parametrize("expand", [True, False])


@dataclass
class World:
    """Tokens of all ranks. Small integers, so that sums are exact in bf16."""

    ranks: int
    tokens: tuple[int, ...] = ()
    x: list[torch.Tensor] = field(init=False)
    idx: list[torch.Tensor] = field(init=False)
    weights: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.tokens = self.tokens or tuple([MOST, 0, 4, 7][: self.ranks])
        self.x = [torch.randint(-4, 5, (count, HIDDEN), generator=draw).to(HALF) for count in self.tokens]
        self.idx = [torch.rand(count, EXPERTS, generator=draw).topk(TOPK)[1] for count in self.tokens]
        self.weights = [torch.rand(count, TOPK, generator=draw) for count in self.tokens]
        for each in self.idx:
            if len(each) > 2:
                each[1, 0], each[2] = -1, -1

    def local(self, rank: int) -> range:
        count = EXPERTS // self.ranks
        return range(rank * count, (rank + 1) * count)

    def received(self, rank: int) -> list[tuple[int, int]]:
        """(source rank, token) in the order of flat rows."""
        local = self.local(rank)
        return [
            (source, token)
            for source, ids in enumerate(self.idx)
            for token, row in enumerate(ids.tolist())
            if any(expert in local for expert in row)
        ]

    def expanded(self, rank: int) -> list[list[tuple[int, int, int]]]:
        """(source rank, token, k) of each local expert, in the order of its rows."""
        return [
            [
                (source, token, row.index(expert))
                for source, ids in enumerate(self.idx)
                for token, row in enumerate(ids.tolist())
                if expert in row
            ]
            for expert in self.local(rank)
        ]

    def on(self, body: Callable[[ElasticBuffer, int], Any], **options: Any) -> list[Any]:
        def run(group: Any) -> Any:
            sizes = {
                "num_max_tokens_per_rank": MOST,
                "hidden": HIDDEN,
                "num_topk": TOPK,
                "num_gpu_timeout_secs": 60,
            } | options
            with ElasticBuffer(group, device=DEVICE, on_invalid_ids="count", **sizes) as buffer:
                return body(buffer, group.rank())

        return run_ranks(self.ranks, run)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def rows_per_expert(world: World, rank: int, alignment: int) -> tuple[list[int], list[int], list[int]]:
    """Counts, starts and ends of the experts' rows."""
    counts = [len(rows) for rows in world.expanded(rank)]
    starts, ends, at = [], [], 0
    for count in counts:
        starts.append(at)
        ends.append(at + count)
        at = round_up(at + count, alignment)
    return counts, starts, ends


@SYNCS
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_by_token_are_those_that_come(ranks: int, sync: bool, alignment: int) -> None:
    world = World(ranks)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
        stats = torch.ones(EXPERTS // ranks, dtype=torch.int32)
        rows, ids, row_weights, handle, event = buffer.dispatch(
            x, idx, weights, stats, num_experts=EXPERTS, expert_alignment=alignment, do_cpu_sync=sync
        )
        expected, local = world.received(rank), world.local(rank)
        count = len(expected)
        assert event.event is None and isinstance(handle, EPHandle)
        assert rows.shape[0] == (count if sync else ranks * MOST) and ids is not None and row_weights is not None
        for i, (source, token) in enumerate(expected):
            assert torch.equal(rows[i], world.x[source][token])
            for k, expert in enumerate(world.idx[source][token].tolist()):
                assert ids[i, k] == (expert - local[0] if expert in local else -1)
                assert row_weights[i, k] == (world.weights[source][token, k] if expert in local else 0)
        assert (ids[count:] == -1).all()

        counts, _, _ = rows_per_expert(world, rank, alignment)
        rounded = [round_up(each, alignment) for each in counts]
        assert handle.num_recv_tokens_per_expert_list == (rounded if sync else [])
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(rounded).cumsum(0).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert stats.tolist() == [1 + each for each in counts]
        of_rank = [sum(source <= r for source, _ in expected) for r in range(ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == of_rank
        assert handle.psum_num_recv_tokens_per_scaleup_rank.dtype == torch.int32
        metadata = handle.recv_src_metadata
        assert metadata.shape == (handle.num_recv_tokens, 2 + TOPK)
        assert metadata[:count, 0].tolist() == [source * MOST + token for source, token in expected]
        assert metadata[:count, 1].tolist() == list(range(count))

        # The experts' work: each doubles, the caller adds up those of a rank.
        y = torch.zeros_like(rows)
        y[:count] = rows[:count] * 2 * (ids[:count] >= 0).sum(1, keepdim=True)
        bias = torch.full_like(x, 3)
        combined, home_weights, _ = buffer.combine(y, handle, row_weights, (bias, bias))
        chosen = (idx >= 0).sum(1, keepdim=True)
        assert torch.equal(combined, x * 2 * chosen + 6)
        assert home_weights is not None and torch.equal(home_weights, weights * (idx >= 0))

        again, ids_again, weights_again, same, _ = buffer.dispatch(x + 1, handle=handle, num_sms=handle.num_sms)
        assert same is handle and weights_again is None
        assert torch.equal(again[:count], rows[:count] + 1) and torch.equal(ids_again, ids)
        more, _, weights_again, _, _ = buffer.dispatch(x, handle=handle, topk_weights=weights * 2)
        assert torch.equal(more[:count], rows[:count]) and torch.equal(weights_again, row_weights * 2)

    world.on(body)


@SYNCS
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("alignment", [1, 8])
def test_expanded_rows_are_sorted_by_expert(ranks: int, sync: bool, alignment: int) -> None:
    world = World(ranks)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
        local = EXPERTS // ranks
        stats = torch.zeros(local, dtype=torch.int32)
        rows, ids, row_weights, handle, _ = buffer.dispatch(
            x, idx, weights, stats, num_experts=EXPERTS, expert_alignment=alignment, do_cpu_sync=sync, do_expand=True,
            do_zero_padding=True,
        )  # fmt: skip
        counts, starts, ends = rows_per_expert(world, rank, alignment)
        whole = round_up(ends[-1], alignment)
        assert ids is None and row_weights is not None and row_weights.dim() == 1
        assert rows.shape[0] == whole if sync else rows.shape[0] >= ranks * MOST * min(TOPK, local)
        assert handle.num_recv_tokens_per_expert_list == (
            [round_up(each, alignment) for each in counts] if sync else []
        )
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts == stats.tolist()
        is_row = torch.zeros(len(rows), dtype=torch.bool)
        for start, expert in zip(starts, world.expanded(rank), strict=True):
            for i, (source, token, k) in enumerate(expert):
                assert torch.equal(rows[start + i], world.x[source][token])
                assert row_weights[start + i] == world.weights[source][token, k]
                is_row[start + i] = True
        assert (rows[~is_row] == 0).all() and (row_weights[~is_row] == 0).all()

        received = world.received(rank)
        metadata = handle.recv_src_metadata[: len(received)]
        assert metadata[:, 0].tolist() == [source * MOST + token for source, token in received]
        at = {place: start + i for start, rows in zip(starts, world.expanded(rank), strict=True)
              for i, place in enumerate(rows)}  # fmt: skip
        for entry, (source, token) in zip(metadata.tolist(), received, strict=True):
            assert entry[2:] == [at.get((source, token, k), -1) for k in range(TOPK)]
        of_rank = [sum(source <= r for source, _ in received) for r in range(ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == of_rank

        combined, home_weights, _ = buffer.combine(rows * 2, handle, row_weights, torch.ones_like(x))
        assert torch.equal(combined, x * 2 * (idx >= 0).sum(1, keepdim=True) + 1)
        assert home_weights is not None and torch.equal(home_weights, weights * (idx >= 0))

        again, _, weights_again, _, _ = buffer.dispatch(
            x - 1, handle=handle, topk_weights=weights * 3, do_expand=True, do_zero_padding=True
        )
        assert torch.equal(again[is_row], rows[is_row] - 1) and (again[~is_row] == 0).all()
        assert torch.equal(weights_again, row_weights * 3)
        without, _, none, _, _ = buffer.dispatch(x, handle=handle, do_expand=True)
        assert torch.equal(without[is_row], rows[is_row]) and none is None

    world.on(body)


@EXPANDS
@SYNCS
def test_scales_travel_with_their_rows(expand: bool, sync: bool) -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        x = world.x[rank].to(torch.float8_e4m3fn)
        scales = world.x[rank][:, :2].float().t().contiguous().t()  # column-major, as they are for a grouped GEMM
        call: dict[str, Any] = {
            "topk_idx": world.idx[rank], "num_experts": EXPERTS, "do_expand": expand, "do_cpu_sync": sync,
        }  # fmt: skip
        (rows, row_scales), _, none, _, _ = buffer.dispatch((x, scales), **call)
        (same, transposed), _, _, handle, _ = buffer.dispatch((x, scales), use_tma_aligned_col_major_sf=True, **call)
        assert none is None and rows.dtype == x.dtype and row_scales.is_contiguous()
        assert transposed.stride(0) == 1 and transposed.stride(1) % 4 == 0 and transposed.stride(1) >= len(rows)
        starts, ends = (rows_per_expert(world, rank, 1)[1:]) if expand else ([0], [len(world.received(rank))])
        for start, end in zip(starts, ends, strict=True):
            assert torch.equal(row_scales[start:end], rows[start:end, :2].float())
            assert torch.equal(transposed[start:end], row_scales[start:end])
            assert torch.equal(same[start:end].float(), rows[start:end].float())
        (again, scales_again), *_ = buffer.dispatch((x, scales * 2), handle=handle, do_expand=expand)
        assert torch.equal(again[: ends[-1]].float(), rows[: ends[-1]].float())
        assert torch.equal(scales_again[: ends[-1]], row_scales[: ends[-1]] * 2)

    world.on(body, use_fp8_dispatch=True)


def test_small_calls_take_low_latency_and_large_ones_do_not() -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        call: dict[str, Any] = {"num_experts": EXPERTS, "topk_idx": world.idx[rank]}
        for most, sync, kind in ((MOST, False, "dispatch"), (MOST, True, "ht_dispatch"), (4096, False, "ht_dispatch")):
            before = buffer.core.stats()["calls"]
            buffer.dispatch(world.x[rank], num_max_tokens_per_rank=most, do_cpu_sync=sync, **call)
            after = buffer.core.stats()["calls"]
            assert {name for name in after if after[name] != before[name]} == {kind}, (most, sync)

    world.on(body, num_max_tokens_per_rank=4096)


def test_bytes_alone_are_for_high_throughput() -> None:
    world = World(2)

    def body(group: Any) -> None:
        rank = group.rank()
        with ElasticBuffer(group, 1 << 22, device=DEVICE) as buffer:
            assert buffer.num_bytes == 1 << 22 and buffer.core.stats()["mode"] == "ht"
            rows, _, _, handle, _ = buffer.dispatch(
                world.x[rank], world.idx[rank], num_experts=EXPERTS, num_max_tokens_per_rank=MOST, do_cpu_sync=False
            )
            assert torch.equal(buffer.combine(rows, handle)[0].ne(0).any(1), world.x[rank].ne(0).any(1)
                               & (world.idx[rank] >= 0).any(1))  # fmt: skip
            buffer.barrier()
            with pytest.raises(ValueError, match="num_max_tokens_per_rank is not given"):
                buffer.dispatch(world.x[rank], world.idx[rank], num_experts=EXPERTS)

    run_ranks(2, body)


def test_the_hint_is_what_a_buffer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    if DEVICE == "cpu":  # where there is a GPU, the hint is for buffers there
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        hint = ElasticBuffer.get_buffer_size_hint(buffer.group, MOST, HIDDEN, num_topk=TOPK, use_fp8_dispatch=True)
        assert buffer.num_bytes == hint and hint % (2 << 20) == 0
        assert buffer.core.stats()["window_bytes"] <= hint

    def grown(buffer: ElasticBuffer, rank: int) -> int:
        return int(buffer.core.stats()["window_bytes"])

    def hint_of(group: Any) -> int:
        return ElasticBuffer.get_buffer_size_hint(group, MOST, HIDDEN, TOPK)

    class OfTwo:  # as much of a group as a hint needs
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
            raise AssertionError("a hint is local")

    world.on(body)
    asked = hint_of(OfTwo()) + (8 << 20)
    assert all(each >= 8 << 20 for each in world.on(grown, num_bytes=asked))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_the_hint_has_the_arena_of_a_buffer(device_type: str, tokens: int) -> None:
    shapes = Shapes(2, tokens, 7168, TOPK, True, device_type)
    arguments = {"dtype": HALF, "arena_bytes": None, "late_weights": False, **shapes.arguments(0)}
    room = room_for_shapes(2, 2, device_type=device_type, **arguments)
    assert room.ht is not None and room.ht.arena_bytes == shapes.arena_bytes < shapes.num_bytes()


def test_partial_sums_are_not_rounded_without_multiple_reduction() -> None:
    """256 + 1 + 1 in bf16 is 256 if partial sums are rounded, and 258 if they are not: one rank has the two ones."""
    idx = torch.tensor([[0, 1, 2]])

    def sums(buffer: ElasticBuffer, rank: int) -> float:
        x = torch.ones(1, HIDDEN, dtype=HALF)
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_expand=True)
        values = torch.tensor([[256.0], [1.0]] if rank == 0 else [[1.0], [0.0]])[: len(rows)]
        for source in range(2):  # rows of both ranks' tokens
            values = torch.cat([values, values]) if source else values
        y = torch.empty_like(rows)
        if rank == 0:
            y[:2], y[2:] = 256, 1  # expert 0, expert 1
        else:
            y[:] = 1
        return float(buffer.combine(y, handle)[0][0, 0])

    world = World(2)
    assert world.on(sums) == [256.0, 256.0] and world.on(sums, allow_multiple_reduction=False) == [258.0, 258.0]


# ---- Events


@SYNCS
def test_events_order_the_callers_streams(sync: bool) -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        before = buffer.capture()
        assert isinstance(before, EventHandle)
        rows, _, _, handle, event = buffer.dispatch(
            world.x[rank], world.idx[rank], num_experts=EXPERTS, previous_event=before,
            previous_event_before_epilogue=EventHandle(), async_with_compute_stream=True,
            allocate_on_comm_stream=True, do_cpu_sync=sync,
        )  # fmt: skip
        calls = []
        assert isinstance(event, EventOverlap) and event.event is not None
        event.register_hook_after_wait(lambda: calls.append("hook"))
        with pytest.raises(AssertionError, match="a hook already"):
            event.register_hook_after_wait(lambda: None)
        with event(release_handle=True) as same:
            assert same is event and calls == []
        assert calls == ["hook"] and event.event is None
        with pytest.raises(AssertionError):
            event.current_stream_wait()
        combined, none, event = buffer.combine(rows, handle, previous_event=before, async_with_compute_stream=True)
        event.current_stream_wait()
        assert none is None and combined.shape == world.x[rank].shape

    world.on(body)


def test_a_deferred_epilogue_gives_results_by_its_event() -> None:
    world = World(2)

    def body(group: Any) -> None:
        rank = group.rank()
        with EPBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, device=DEVICE) as buffer:
            call: dict[str, Any] = {"topk_idx": world.idx[rank], "num_experts": EXPERTS, "do_expand": True}
            event = buffer.dispatch(world.x[rank], async_with_compute_stream=True, defer_epilogue=True, **call)
            rows, none, no_weights, handle = event.current_stream_wait()
            assert none is None and no_weights is None and event.wait() is None
            combined, _ = buffer.combine(rows, handle, async_with_compute_stream=True, defer_epilogue=True).wait()
            assert torch.equal(combined, world.x[rank] * (world.idx[rank] >= 0).sum(1, keepdim=True))
            assert len(buffer.dispatch(world.x[rank], **call)) == 5 and len(buffer.combine(rows, handle)) == 3
            with pytest.raises(ValueError, match="defer_epilogue is set and async_with_compute_stream is not"):
                buffer.combine(rows, handle, defer_epilogue=True)

    run_ranks(2, body)


# ---- Handles


def test_handles_live_together_and_copy_what_they_are_told() -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        x, idx = world.x[rank], world.idx[rank]
        made = [
            buffer.dispatch(x, idx, num_experts=EXPERTS, do_cpu_sync=sync, do_handle_copy=copies)
            for sync in (True, False) for copies in (True, False)
        ]  # fmt: skip
        for (rows, _, _, handle, _), copies in reversed(list(zip(made, [True, False] * 2, strict=True))):
            assert (handle.topk_idx.data_ptr() != idx.data_ptr()) == (copies and idx.numel() > 0)
            sums = buffer.combine(rows, handle)[0]
            ranks = [((idx // (EXPERTS // 2)) == r).logical_and(idx >= 0).any(1) for r in range(2)]
            assert torch.equal(sums, x * sum(each.to(HALF) for each in ranks).unsqueeze(1))
            handle.recv_src_metadata = handle.recv_src_metadata[:1]  # DeepEP's tests do
            assert len(handle.recv_src_metadata) <= 1

    world.on(body)


def test_ids_that_changed_are_not_counted() -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        _, ids, _, handle, _ = buffer.dispatch(world.x[rank], world.idx[rank], num_experts=EXPERTS, do_cpu_sync=False)
        ids += 1
        with pytest.raises(nccl_ep.UsageError, match="recv_topk_idx was changed in place"):
            handle.psum_num_recv_tokens_per_expert  # noqa: B018
        with pytest.raises(AttributeError, match="the EPHandle of nccl_ep has no 'channel_linked_list'"):
            handle.channel_linked_list  # noqa: B018

    world.on(body)


@EXPANDS
def test_gradients_come_from_the_ops_below(expand: bool) -> None:
    """Without a function of the caller's own: they come from the ops below."""
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        x, weights = world.x[rank].float().requires_grad_(), world.weights[rank].clone().requires_grad_()
        idx = world.idx[rank]
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=EXPERTS, do_expand=expand, do_zero_padding=expand
        )
        applied = row_weights if expand else row_weights.sum(1)
        combined = buffer.combine(rows * applied.unsqueeze(1), handle)[0]
        combined.sum().backward()
        own = weights.detach() * (idx >= 0)
        torch.testing.assert_close(x.grad, own.sum(1, keepdim=True).expand_as(x))
        expected = x.detach().sum(1, keepdim=True) * (idx >= 0)
        torch.testing.assert_close(weights.grad, expected)

    world.on(body, hidden=2 * HIDDEN)


# ---- Refusals


def test_arguments_without_meaning_are_refused() -> None:
    for keywords, text in (
        ({}, "give the bytes, or the other two"),
        ({"num_bytes": 1 << 22, "num_cpu_bytes": 1 << 21}, "num_cpu_bytes is 2097152"),
        ({"num_topk": 33}, "num_topk is 33, must be 0 to 32"),
    ):
        with pytest.raises(ValueError, match=text):
            ElasticBuffer(None, device=DEVICE, **keywords)
    with pytest.raises(TypeError, match="lb_allocation_plan_or_num_bytes"):
        EPBuffer(None, 1 << 22, device=DEVICE, lb_allocation_plan_or_num_bytes=1)
    idx = torch.zeros(1, 1, dtype=torch.int64)
    x = torch.ones(1, HIDDEN, dtype=HALF)
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": 2, "hidden": HIDDEN, "device": DEVICE}
    with ElasticBuffer(None, **sizes) as buffer, ElasticBuffer(None, **sizes) as other:
        rows, _, weights, handle, _ = buffer.dispatch(x, idx, torch.ones(1, 1), num_experts=1)
        for call, kind, text in (
            (lambda: buffer.dispatch(x, num_experts=1), TypeError, "topk_idx is None"),
            (lambda: buffer.dispatch(x, idx), TypeError, "num_experts is None"),
            (lambda: buffer.dispatch(x, idx, num_experts=1, do_zero_padding=True), ValueError, "do_expand is not"),
            (lambda: buffer.dispatch(x, idx, num_experts=1, expert_alignment=0), ValueError, "expert_alignment is 0"),
            (lambda: buffer.dispatch(x, idx, num_experts=1, previous_event=1), TypeError, "previous_event is a int"),
            (lambda: buffer.dispatch((x,), idx, num_experts=1), ValueError, "x has 1 elements"),
            (lambda: buffer.dispatch(x, idx, handle=handle), ValueError, "topk_idx is given with a handle"),
            (lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True), ValueError, "do_cpu_sync is set with a"),
            (lambda: buffer.dispatch(x, handle=handle, do_expand=True), ValueError, "do_expand is True, but the"),
            (lambda: buffer.dispatch(x, handle=handle, num_experts=2), ValueError, "num_experts is 2, but the handle"),
            (lambda: buffer.dispatch(x, handle=(1,)), TypeError, "handle is a tuple, must be the EPHandle"),
            (lambda: other.combine(rows, handle), nccl_ep.UsageError, "the handle is of buffer"),
            (lambda: other.dispatch(x, handle=handle), nccl_ep.UsageError, "the handle is of buffer"),
            (lambda: buffer.combine(rows, handle, weights[0]), ValueError, r"topk_weights is torch.float32 \[1\]"),
            (lambda: buffer.combine(rows, handle, bias=[x, x, x]), ValueError, "3 biases, at most 2"),
            (lambda: buffer.dispatch(x.repeat(3, 1), idx.repeat(3, 1), num_experts=1), ValueError,
             "3 tokens"),
        ):  # fmt: skip
            with pytest.raises(kind, match=text):
                call()
        stats = torch.zeros(3, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"recv_stats is torch.int32 \[3\], must be torch.int32 \[1\]"):
            buffer.dispatch(x, idx, None, stats, num_experts=1)
        for name in ("engram_fetch", "pp_send", "all_gather", "lb_prefetch_weights"):
            assert not hasattr(buffer, name)
        with pytest.raises(AttributeError, match="has no 'pp_send': sends between pipeline stages has no meaning"):
            buffer.pp_send  # noqa: B018
        assert torch.equal(buffer.combine(rows, handle)[0], x)


def test_attributes_that_callers_read_are_there() -> None:
    world = World(2)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        assert (buffer.rank_idx, buffer.num_ranks, buffer.num_max_tokens_per_rank) == (rank, 2, MOST)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 2) == buffer.get_logical_domain_size()
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size() == (1, 2)
        num_sms = buffer.get_theoretical_num_sms(EXPERTS, TOPK)
        assert num_sms % 2 == 0 and num_sms >= 4
        assert 0 < buffer.get_theoretical_num_qps(num_sms) <= buffer.num_allocated_qps
        buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
        rows, *_, handle, _ = buffer.dispatch(world.x[rank], world.idx[rank], num_experts=EXPERTS, num_sms=num_sms)
        assert handle.num_sms == num_sms and handle.expert_alignment == 1 and not handle.do_expand
        buffer.combine(rows, handle, num_sms=num_sms, num_qps=3)

    world.on(body)
    world.on(lambda buffer, _: buffer.get_theoretical_num_sms(8, 2) >= 64, prefer_overlap_with_compute=False)


def test_counts_between_domains_are_those_of_a_place() -> None:
    """Of two ranks each: counts are those of a place in all domains."""
    world = World(4)

    def body(buffer: ElasticBuffer, rank: int) -> None:
        assert buffer.get_physical_domain_size() == (2, 2) and buffer.scaleout_rank_idx == rank // 2
        _, _, _, handle, _ = buffer.dispatch(world.x[rank], world.idx[rank], num_experts=EXPERTS)
        received = world.received(rank)
        of_place = [sum(source % 2 <= place for source, _ in received) for place in range(2)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == of_place
        _, _, _, handle, _ = buffer.dispatch(world.x[rank], world.idx[rank], num_experts=EXPERTS, do_cpu_sync=False)
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == of_place

    world.on(body, num_max_tokens_per_rank=MOST, num_bytes=1 << 22, hidden=0, domain_size=2)
    world.on(body, domain_size=2)


@EXPANDS
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(("ranks", "most"), [(1, 8), (1, 4096), (2, 8)])
def test_replays_follow_new_routing(ranks: int, most: int, expand: bool, is_async: bool) -> None:
    """What graphs hold on GPUs (tests/gpu/test_deepep_v2.py)."""
    run_ranks(ranks, lambda group: replay_new_routing(group, "cpu", most, expand, is_async, 4))
