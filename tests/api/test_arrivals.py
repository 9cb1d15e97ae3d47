"""Blocks of rows that announce themselves: order, contract, errors. On CPU ranks and on emulated GPUs.

Outputs are poisoned before a dispatch, and a consumer beside it copies each block when its word has come. So a word
that is set before its rows shows in the bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.arrivals import Arrivals, Block
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ll.mask_ranks import Parted
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer
from tests.support.patience import PATIENCE, of_living_ranks

WAIT = of_living_ranks(60.0)
POISON = 0x7F

CASES: dict[str, dict[str, Any]] = {
    "expert_major": {"capacity": 36},
    "packed": {"layout": "packed", "expert_alignment": 4},
    "dropped rows": {"capacity": 3, "capacity_kind": "overflowing"},
    "packed, dropped rows": {
        "layout": "packed", "expert_alignment": 4, "capacity": 14, "capacity_kind": "overflowing",
    },
    "repeated experts": {"routing": "duplicates", "num_experts": 6, "topk": 4, "capacity": 50},
    "fp8": {"quant": "fp8", "hidden": 256, "capacity": 36},
    "padding": {"layout": "packed", "expert_alignment": 8, "zero_padding": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rows_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_LATE_WEAK", "1")  # as on GPUs, where nothing but a fence orders their stores


def buffer_of(case: Expected, group: ThreadGroup) -> nccl_ep.Buffer:
    """For both modes."""
    return case_buffer(case.case, group, mode="auto", device="cpu", timeout=WAIT)


class Consumer:
    """A thread that copies rows of the outputs as they are announced."""

    def __init__(self, arrivals: Arrivals, out: nccl_ep.DispatchOutput, blocks: int, expected: int) -> None:
        self.arrivals, self.blocks, self.expected = arrivals, blocks, expected
        tensors = [out.x] if out.scales is None else [out.x, out.scales]
        self.tensors = [each.view(-1, each.shape[-1]) for each in tensors]
        self.seen: list[tuple[Block, list[torch.Tensor]]] = []
        self.planned: list[Block] = []
        self.error: BaseException | None = None
        self._threads = [threading.Thread(target=each) for each in (self._plan, self._run)]

    def _plan(self) -> None:
        try:
            self.planned = self.arrivals.await_plan(WAIT, blocks=self.blocks, expected=self.expected)
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        try:
            for block in self.arrivals.await_blocks(WAIT, blocks=self.blocks, expected=self.expected):
                rows = slice(block.first, block.first + block.rows)
                self.seen.append((block, [each[rows].clone() for each in self.tensors]))
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Consumer:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._threads:
            each.join()

    def check(self, out: nccl_ep.DispatchOutput, where: str) -> None:
        assert self.error is None, where
        counts = [0] * out.counts.numel()
        for block, copies in self.seen:
            counts[block.expert] += block.rows
            for copy, whole in zip(copies, self.tensors, strict=True):
                end = block.first + block.rows
                same = torch.equal(copy.view(torch.uint8), whole[block.first : end].view(torch.uint8))
                assert same, f"{where}: {block} was announced before its rows"
        assert counts == out.counts.tolist(), where
        state, arrivals = self.arrivals.expected, self.arrivals
        blocks = [block.number for block, _ in self.seen]
        assert len(set(blocks)) == len(blocks), where
        by_number = sorted((block for block, _ in self.seen), key=lambda block: block.number)
        assert self.planned == by_number, f"{where}: the plan of blocks was announced before it was complete"
        assert int(arrivals.plan) == int(state) << 32 | len(blocks), where
        assert (arrivals.words[blocks] == state).all(), where


def blocks_of(case: Case, out: nccl_ep.DispatchOutput, rows_per_block: int) -> int:
    rows = out.x.shape[1] if case.layout == "expert_major" else out.x.shape[0]
    layout: Any = case.layout
    return Arrivals.blocks_of(layout, rows, case.num_experts // case.num_ranks, rows_per_block)


def dispatch_into(
    case: Expected, buffer: nccl_ep.Buffer, mode: str, out: nccl_ep.DispatchOutput, arrivals: Arrivals
) -> nccl_ep.DispatchOutput:
    if mode == "ht":
        return case.send(buffer, out=out, arrivals=arrivals)
    given = case.given_on(buffer)
    if mode == "cached":
        nccl_ep.dispatch_cached(
            given.x, out.handle, scales=given.scales, quant=case.case.quant, zero_padding=case.case.zero_padding,  # type: ignore[arg-type]
            out=nccl_ep.Payload(out.x, out.scales), arrivals=arrivals,
        )  # fmt: skip
        return out
    shape = nccl_ep.calls.DispatchCall.of(
        given.x, given.topk_idx, given.topk_weights, given.scales, (), buffer,
        *[case.case.dispatch_kwargs()[name] for name in ("num_experts",)], "ll", case.case.layout,  # type: ignore[arg-type]
        case.case.max_tokens, out.handle.capacity, case.case.expert_alignment, case.case.quant,  # type: ignore[arg-type]
        case.case.zero_padding, 0,
    )  # fmt: skip
    empty = torch.empty(0)
    arrivals.begin()
    arrivals.arm()
    torch.ops.nccl_ep.ll_dispatch_out.default(
        buffer._seq, *shape.args(), out.x, empty if out.scales is None else out.scales, out.weights,
        out.weights.new_empty(0, dtype=torch.int64), empty.int() if out.row_expert is None else out.row_expert,
        out._info, out.handle.tensor,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("mode", ["ll", "ht", "cached"])
def test_words_come_behind_their_rows(mode: str, num_ranks: int, name: str) -> None:
    watch(mode, Expected(plain_case(num_ranks, max_tokens=12, tokens=(12,) * num_ranks, **CASES[name])), name)


@pytest.mark.parametrize("name", ["expert_major", "packed", "fp8"])
@pytest.mark.parametrize("mode", ["ll", "ht", "cached"])
def test_words_come_behind_rows_of_other_domains(mode: str, name: str) -> None:
    watch(mode, Expected(plain_case(4, max_tokens=12, tokens=(12,) * 4, domain_size=2, **CASES[name])), name)


def watch(mode: str, case: Expected, name: str) -> None:
    def body(group: ThreadGroup) -> None:
        with buffer_of(case, group) as buffer:
            out = case.send(buffer, mode="ht" if mode == "cached" else mode)
            watch_turns(mode, case, buffer, out, case, 2 if name == "packed" else 4)

    run_ranks(case.case.num_ranks, body)


def watch_turns(
    mode: str, case: Expected, buffer: nccl_ep.Buffer, out: nccl_ep.DispatchOutput, want: Expected,
    rows_per_block: int,
) -> None:  # fmt: skip
    """Several dispatches announce in the same memory, which nobody clears. want: what comes."""
    blocks = blocks_of(case.case, out, rows_per_block)
    arrivals = Arrivals(buffer, blocks=blocks + 1, rows_per_block=rows_per_block)
    for turn in range(3):
        for tensor in (out.x, out.scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(POISON)
        for table in (arrivals.rows, arrivals.first, arrivals.experts):
            table.fill_(-POISON)
        with Consumer(arrivals, out, blocks, turn + 1) as consumer:
            out = dispatch_into(case, buffer, mode, out, arrivals)
        want.check_dispatch(out, buffer.rank)
        consumer.check(out, f"{case.where(buffer.rank)} turn {turn}")
        assert not arrivals.has_failed()


@pytest.mark.parametrize("name", ["expert_major", "packed"])
def test_words_come_where_ranks_are_masked(name: str) -> None:
    case = plain_case(4, max_tokens=12, tokens=(12,) * 4, **CASES[name])
    parted = Parted(case, first=frozenset({0, 2}))

    def body(group: ThreadGroup) -> None:
        with case_buffer(case, group, mode="ll", device="cpu", timeout=WAIT, enable_shrink=True) as buffer:
            parted.run_together(buffer)
            parted.part(buffer, lambda: group.allgather(b"", PATIENCE))
            mine = parted.parts[parted.number_of(buffer.rank)]
            watch_turns("ll", parted.whole, buffer, parted.whole.send(buffer, mode="ll"), mine, 4)

    run_ranks(4, body)


@pytest.fixture
def alone() -> Iterator[tuple[Expected, nccl_ep.Buffer]]:
    case = Expected(plain_case(1, capacity=8))
    with buffer_of(case, ThreadGroup.make(1)[0]) as buffer:
        yield case, buffer


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize(
    ("options", "blocks", "error", "text"),
    [
        ({"layout": "flat"}, 16, ValueError, "arrivals are for layouts of experts' rows, not for flat"),
        (
            {"layout": "packed", "expert_alignment": 6},
            16,
            ValueError,
            "expert_alignment is 6, must be a multiple of the 4",
        ),
        ({}, 3, ValueError, "arrivals have room for 3 blocks of 4 rows, the output has 4"),
    ],
)
def test_refusals(
    alone: tuple[Expected, nccl_ep.Buffer], mode: str, options: dict[str, Any], blocks: int, error: type[Exception],
    text: str,
) -> None:  # fmt: skip
    case, buffer = alone
    arrivals = Arrivals(buffer, blocks=blocks, rows_per_block=4)
    with pytest.raises(error, match=text):
        case.send(buffer, mode=mode, arrivals=arrivals, **options)
    before = arrivals.words.clone()
    case.send(buffer, mode=mode)  # the refused dispatch has left nothing behind
    assert torch.equal(arrivals.words, before)


def test_arrivals_are_of_their_buffer(alone: tuple[Expected, nccl_ep.Buffer]) -> None:
    case, buffer = alone
    with (
        buffer_of(case, ThreadGroup.make(1)[0]) as other,
        pytest.raises(nccl_ep.UsageError, match="arrivals are of another buffer"),
    ):
        case.send(buffer, arrivals=Arrivals(other, blocks=4))
    with pytest.raises(TypeError, match="arrivals is a bool, must be nccl_ep"):
        case.send(buffer, arrivals=True)
    for given in ({"blocks": 0}, {"blocks": 65536}, {"blocks": 1, "rows_per_block": 0}):
        with pytest.raises(ValueError, match="must be 1 to"):
            Arrivals(buffer, **given)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_output_before_it_is_complete(alone: tuple[Expected, nccl_ep.Buffer], mode: str) -> None:
    case, buffer = alone
    given, arrivals = case.given_on(buffer), Arrivals(buffer, blocks=4, rows_per_block=4)
    how = {**case.case.dispatch_kwargs(), "mode": mode}
    pending = nccl_ep.dispatch_send(
        given.x, given.topk_idx, given.topk_weights, buffer=buffer, **how, arrivals=arrivals, async_finish=True
    )
    early = pending.early_output
    assert sum(block.rows for block in arrivals.await_blocks(WAIT)) == int(early.counts.sum())
    assert pending.receive() is early
    case.check_dispatch(early, 0)
    plain = nccl_ep.dispatch_send(given.x, given.topk_idx, given.topk_weights, buffer=buffer, **how, async_finish=True)
    with pytest.raises(nccl_ep.UsageError, match="early_output is of a dispatch with async_finish and arrivals"):
        plain.early_output  # noqa: B018
    plain.receive()


def test_payload_before_it_is_complete(alone: tuple[Expected, nccl_ep.Buffer]) -> None:
    case, buffer = alone
    x, arrivals = case.given_on(buffer).x, Arrivals(buffer, blocks=4, rows_per_block=4)
    out = case.send(buffer, mode="ht")
    pending = nccl_ep.dispatch_cached_send(x, out.handle, arrivals=arrivals)
    early = pending.early_output
    assert sum(block.rows for block in arrivals.await_blocks(WAIT)) == int(out.counts.sum())
    assert pending.receive() is early
    for block in arrivals.await_blocks(WAIT):
        here = slice(block.first, block.first + block.rows)
        assert torch.equal(early.x.view(-1, x.shape[1])[here], out.x.view(-1, x.shape[1])[here])
    assert (
        nccl_ep.dispatch_cached_send(x, out.handle, scales=x.float()[:, :4].contiguous()).receive().scales is not None
    )
    small = Arrivals(buffer, blocks=3, rows_per_block=4)
    with pytest.raises(ValueError, match="arrivals have room for 3 blocks of 4 rows, the output has 4"):
        nccl_ep.dispatch_cached_send(x, out.handle, arrivals=small)
    nccl_ep.dispatch_cached(x, out.handle)  # the refused call has left nothing behind
    assert not small.words.any()


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_dead_rank_ends_the_wait_of_a_consumer(mode: str) -> None:
    case = Expected(plain_case(2, capacity=16))

    def body(group: ThreadGroup) -> None:
        with buffer_of(case, group) as buffer:
            out = case.send(buffer, mode=mode)
            if group.rank() == 1:
                return
            arrivals = Arrivals(buffer, blocks=16, rows_per_block=4)
            buffer.set_timeout(0.2)
            with Consumer(arrivals, out, 4, 1) as consumer, pytest.raises(nccl_ep.TimeoutError):
                case.send(buffer, mode=mode, arrivals=arrivals)
                buffer.check()  # on GPUs the call has returned
            assert isinstance(consumer.error, nccl_ep.TimeoutError)
            assert not consumer.planned
            assert arrivals.has_failed()
            with pytest.raises(nccl_ep.TimeoutError, match="dispatch 1 with these arrivals"):
                arrivals.check()
            arrivals.check()

    run_ranks(2, body)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_consumer_that_has_given_up_is_told_after_later_dispatches(
    alone: tuple[Expected, nccl_ep.Buffer], mode: str
) -> None:
    case, buffer = alone
    arrivals = Arrivals(buffer, blocks=4, rows_per_block=4)
    for turn in range(4):
        case.send(buffer, mode=mode, arrivals=arrivals)
        if turn == 1:
            arrivals.failed.copy_(arrivals.expected)  # as wait_rows does on a GPU
    assert not arrivals.has_failed()
    buffer.check()
    with pytest.raises(nccl_ep.TimeoutError, match=r"dispatch 2 .*, or a consumer of its rows, has given up"):
        arrivals.check()
    arrivals.check()
