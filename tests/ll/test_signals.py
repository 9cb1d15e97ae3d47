"""Combines whose send begins while the rows are still being written, and waits for their signals. Rows are
poisoned until then, so that one that was read too soon shows in the bits. On CPU ranks and on emulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.room import LlSizes, Room
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ll.row_producer import RowProducer
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import combine_options
from tests.support.patience import of_living_ranks

WAIT = of_living_ranks(60.0)


def weighted_case(num_ranks: int, **changes: Any) -> Expected:
    sizes = {"num_experts": 2 * num_ranks, "topk": min(4, 2 * num_ranks), "combine_weights": "masked"}
    return Expected(plain_case(num_ranks, **{**sizes, **changes}))


def combine_signalled(
    case: Expected, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, producer: RowProducer, num_sms: int = 1
) -> torch.Tensor:
    """The rows are overwritten between send and receive."""
    options = combine_options(case.case, buffer.rank, buffer.device)
    with producer:
        producer.begin()
        pending = nccl_ep.combine_send(
            producer.rows, handle, **options, row_signals=producer.signals, rows_per_signal=producer.rows_per_signal,
            signal_threshold=producer.threshold, num_sms=num_sms,
        )  # fmt: skip
    producer.rows.view(torch.uint8).fill_(0x5A)
    return pending.receive()


CASES: dict[str, dict[str, Any]] = {
    "several experts a rank": {},
    "one expert a rank": {"topk": 1},
    "dropped rows": {"capacity": 3, "capacity_kind": "overflowing"},
    "repeated experts": {"routing": "duplicates"},
    "fp32": {"rows_dtype": torch.float32, "hidden": 96},
    "fp16 in rows of an odd piece": {"rows_dtype": torch.float16, "hidden": 2600},
    "infinities and NaNs": {"rows_content": "special"},
    "words of the protocol": {"rows_content": "words"},
    "packed": {"layout": "packed", "expert_alignment": 4},
}


def check_signalled(case: Expected, producer_of: Callable[[int], RowProducer]) -> None:
    """One combine on each rank, of rows that its producer still writes."""

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            case.check_combine(combine_signalled(case, buffer, out.handle, producer_of(rank)), rank)

    run_ranks(case.case.num_ranks, body)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_leave_when_their_signals_come(name: str, num_ranks: int) -> None:
    """Several combines in one buffer, of blocks of other sizes."""
    case = weighted_case(num_ranks, **CASES[name])

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            made = case.rows[rank]
            for turn, rows_per_signal in enumerate((1, 3, made.shape[-2], 1000)):
                producer = RowProducer(
                    made, rows_per_signal, threshold=1 + turn, spare=5 * (turn % 2), seed=rank + turn
                )
                got = combine_signalled(case, buffer, out.handle, producer, num_sms=1 + turn % 3)
                case.check_combine(got, rank)

    run_ranks(num_ranks, body)


def test_signals_serve_more_tokens_than_lanes() -> None:
    case = weighted_case(2, max_tokens=400, tokens=(400, 371), hidden=16, topk=3)

    check_signalled(case, lambda rank: RowProducer(case.rows[rank], 64, seed=rank))


def test_one_rank_waits_for_signals_and_the_others_have_none() -> None:
    case = weighted_case(3)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            options = combine_options(case.case, rank, buffer.device)
            for turn in range(3):
                if rank == turn:
                    got = combine_signalled(case, buffer, out.handle, RowProducer(case.rows[rank], 2, seed=turn))
                else:
                    got = nccl_ep.combine_send(case.rows[rank].clone(), out.handle, **options).receive()
                case.check_combine(got, rank)

    run_ranks(3, body)


def test_unsigned_signals_serve_whole_experts() -> None:
    case = weighted_case(2)

    def producer_of(rank: int) -> RowProducer:
        producer = RowProducer(case.rows[rank], case.rows[rank].shape[1], threshold=7, seed=rank)
        producer.signals = producer.signals.view(torch.uint32)
        return producer

    check_signalled(case, producer_of)


def test_signals_serve_tokens_without_rows_here_and_ranks_without_tokens() -> None:
    case = weighted_case(2, tokens=(0, 5), routing="none")

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            case.check_combine(combine_signalled(case, buffer, out.handle, RowProducer(case.rows[rank], 4)), rank)

    run_ranks(2, body)


def test_a_signal_that_does_not_come_is_named_at_the_deadline() -> None:
    """All blocks but one have come. What the error says, all later calls say."""
    case = weighted_case(1, num_experts=3, topk=3, combine_weights="tensor")

    def body(group: ThreadGroup) -> str:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            producer = RowProducer(case.rows[0], 4, threshold=2)
            for expert, block in producer.blocks:
                producer.write(expert, block)
            producer.signals[2, 1] = 1
            buffer.set_timeout(0.5)
            options = combine_options(case.case, 0, buffer.device)
            with pytest.raises(nccl_ep.TimeoutError) as error:
                nccl_ep.combine_send(
                    producer.rows, out.handle, **options, row_signals=producer.signals, rows_per_signal=4,
                    signal_threshold=2, num_sms=1,
                )  # fmt: skip
                buffer.check()
            with pytest.raises(nccl_ep.TimeoutError, match="signal of row block 1 of local expert 2's rows"):
                buffer.check()
            return str(error.value)

    (text,) = run_ranks(1, body)
    want = "rank 0 waited 0.5 s for the signal of row block 1 of local expert 2's rows in combine 1 (expected 2, saw 1)"
    assert want in text and "nothing of this call" not in text, text


GOOD = {"row_signals": torch.ones(2, 2, dtype=torch.int32), "rows_per_signal": 4, "num_sms": 1}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"row_signals": [1, 1]}, TypeError, "row_signals is a list, must be a tensor"),
        ({"row_signals": torch.ones(2, 2)}, ValueError, "row_signals is torch.float32, must be torch.int32"),
        ({"row_signals": torch.ones(2, 3, dtype=torch.int32)}, ValueError, r"has shape \[2, 3\], must be \[2, 2\]"),
        ({"row_signals": torch.ones(3, dtype=torch.int32)}, ValueError, r"has shape \[3\], must be \[2, 2\]"),
        (
            {"row_signals": torch.ones(2, 4, dtype=torch.int32)[:, ::2]},
            ValueError,
            "row_signals of shape .* is not contiguous",
        ),
        ({"row_signals": torch.ones(2, 2, dtype=torch.int32, device="meta")}, ValueError, "row_signals is on meta"),
        ({"row_signals": None}, ValueError, "rows_per_signal is 4, but there are no row_signals"),
        ({"rows_per_signal": 0}, ValueError, "rows_per_signal is 0, must be at least 1"),
        ({"rows_per_signal": -3}, ValueError, "rows_per_signal is -3, must be at least 1"),
        ({"rows_per_signal": 2.5}, TypeError, "rows_per_signal is 2.5"),
        ({"signal_threshold": 0}, ValueError, "signal_threshold is 0, must be from 1 to 2147483647"),
        ({"signal_threshold": 1 << 31}, ValueError, "signal_threshold is 2147483648, must be from 1 to 2147483647"),
        ({"num_sms": 0}, ValueError, "num_sms is 0: with row_signals it must be positive"),
        ({"async_finish": True}, ValueError, "split combine of low latency, without async_finish"),
        ({"weights": "dispatch"}, ValueError, r"as they are: give weights \[tokens, top-k\] at combine"),
        ({"weights": None}, ValueError, r"as they are: give weights \[tokens, top-k\] at combine"),
        ({"wire_dtype": torch.float32}, ValueError, "rows are bf16, the wire fp32, outputs bf16, must be of one type"),
        ({"wire_dtype": "fp8"}, ValueError, "rows are bf16, the wire .*, must be of one type"),
        ({"out_dtype": torch.float32}, ValueError, "rows are bf16, the wire fp32, outputs fp32, must be of one type"),
    ],
)
def test_bad_signals_are_refused_and_harm_nothing(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    """Nothing is sent, and the next call is unharmed."""
    case = weighted_case(1, topk=2, combine_weights="tensor")

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            options = {**combine_options(case.case, 0, buffer.device), **GOOD, **changes}
            with pytest.raises(error, match=text):
                nccl_ep.combine_send(case.rows[0], out.handle, **options)
            producer = RowProducer(case.rows[0], 4)
            case.check_combine(combine_signalled(case, buffer, out.handle, producer), 0)
            assert buffer.stats()["combines"] == 1

    run_ranks(1, body)


def refusal(case: Expected, body_of: Any = None, **options: Any) -> str:
    """What the first rank of a buffer with these options says to signals."""
    num_ranks = case.case.num_ranks

    def body(group: ThreadGroup) -> str:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=WAIT, **options) as buffer:
            out = case.dispatch(buffer)
            how = combine_options(case.case, rank, buffer.device)
            rows = case.rows[rank]
            signals = torch.ones(rows.shape[0] if rows.dim() == 3 else 1, 1, dtype=torch.int32)
            with pytest.raises(ValueError) as error:
                nccl_ep.combine_send(rows, out.handle, **how, row_signals=signals, rows_per_signal=1 << 20, num_sms=1)
            return str(error.value)

    return str(run_ranks(num_ranks, body)[0])


def test_where_sums_travel_signals_are_refused() -> None:
    assert "the buffer has masks (enable_shrink)" in refusal(weighted_case(2), enable_shrink=True)
    assert "for layouts of experts' rows, not for flat" in refusal(
        weighted_case(2, layout="flat", combine_weights="none")
    )
    case = weighted_case(2, topk=4, num_experts=4)
    plain = case.case
    sizes = nccl_ep._C.sizes_for(2, 4, 4, plain.max_tokens, 256, 2 * plain.hidden)
    text = refusal(case, _room=Room(LlSizes(*sizes[:3])))
    assert "no room for every choice of a token, of which there are 4" in text
