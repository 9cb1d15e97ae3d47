"""Combines of high throughput that begin while the rows are still being written, and wait for their signals. Rows are
poisoned until then, so that one that was read too soon shows in the bits. On CPU ranks and on emulated GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.config import combine_numbers, signalled_numbers
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ll.row_producer import RowProducer
from tests.support.expected import Expected, plain_case
from tests.support.harness import combine_options, make_buffer
from tests.support.op_checks import UTILS
from tests.support.patience import of_living_ranks

WAIT = of_living_ranks(60.0)
DELAY = 0.1 if _C.EMULATES_GPU else 0.002  # of a producer, so that kernels wait for it
SHORT = 4.0 if _C.EMULATES_GPU else 0.5  # emulated GPUs seldom look at the clock


def case_of(num_ranks: int, **changes: Any) -> Expected:
    sizes = {
        "num_experts": 2 * num_ranks, "topk": min(4, 2 * num_ranks), "max_tokens": 24, "layout": "packed",
        "expert_alignment": 4, "capacity_kind": "default",
    }  # fmt: skip
    return Expected(plain_case(num_ranks, **{**sizes, **changes}))


def buffer_of(case: Expected, group: ThreadGroup, **options: Any) -> nccl_ep.Buffer:
    return make_buffer(case.case, group, **{"mode": "ht", "device": "cpu", "timeout": WAIT, **options})


def combine_signalled(
    case: Expected, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, producer: RowProducer, **how: Any
) -> torch.Tensor:
    options = {**combine_options(case.case, buffer.rank, buffer.device), "num_sms": 1, **how}
    with producer:
        producer.begin()
        return nccl_ep.combine_send(
            producer.rows, handle, **options, row_signals=producer.signals, rows_per_signal=producer.rows_per_signal,
            signal_threshold=producer.threshold,
        ).receive()  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "expert_major": {"layout": "expert_major", "expert_alignment": 1, "capacity": 72},
    "weights given here": {"combine_weights": "masked"},
    "no weights": {"combine_weights": "none"},
    "one expert a rank": {"topk": 1},
    "dropped rows": {"capacity": 14, "capacity_kind": "overflowing"},
    "repeated experts": {"routing": "duplicates", "capacity": 120},
    "fp32": {"rows_dtype": torch.float32, "hidden": 96},
    "no tokens here": {"tokens": (0, 5, 24), "routing": "none"},
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_when_their_signals_come(name: str) -> None:
    """Several combines in one buffer, of blocks of other sizes, on the current stream and on the buffer's own."""
    case = case_of(3, **CASES[name])

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with buffer_of(case, group) as buffer:
            out = case.send(buffer)
            made = case.rows[rank]
            for turn, rows_per_signal in enumerate((1, 3, 8, made.shape[-2])):
                producer = RowProducer(
                    made, rows_per_signal, threshold=1 + turn, spare=5 * (turn % 2), seed=rank + turn, delay=DELAY
                )
                got = combine_signalled(case, buffer, out.handle, producer, num_sms=2, async_finish=turn % 2 == 1)
                case.check_combine(got, rank)

    run_ranks(3, body)


def test_one_rank_waits_for_signals_and_the_others_have_none() -> None:
    case = case_of(3)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with buffer_of(case, group) as buffer:
            out = case.send(buffer)
            options = combine_options(case.case, rank, buffer.device)
            for turn in range(3):
                if rank == turn:
                    got = combine_signalled(case, buffer, out.handle, RowProducer(case.rows[rank], 4, seed=turn))
                else:
                    got = nccl_ep.combine(case.rows[rank].clone(), out.handle, **options, num_sms=1)
                case.check_combine(got, rank)

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("changes", "place", "text"),
    [
        ({}, (2,), "row block 2 in high-throughput combine 1"),
        (
            {"layout": "expert_major", "capacity": 8, "expert_alignment": 1},
            (1, 1),
            "row block 1 of local expert 1's rows in high-throughput combine 1",
        ),
    ],
)
def test_a_signal_that_does_not_come_is_named_at_the_deadline(
    changes: dict[str, Any], place: tuple[int, ...], text: str
) -> None:
    case = case_of(1, topk=2, max_tokens=8, tokens=(8,), **changes)

    def body(group: ThreadGroup) -> str:
        with buffer_of(case, group) as buffer:
            out = case.send(buffer)
            rows = case.rows[0]
            blocks = -(-rows.shape[-2] // 4)
            signals = torch.full((blocks,) if rows.dim() == 2 else (2, blocks), 2, dtype=torch.int32)
            signals[place] = 1
            buffer.set_timeout(SHORT)
            with pytest.raises(nccl_ep.TimeoutError) as error:
                nccl_ep.combine_send(
                    rows, out.handle, row_signals=signals, rows_per_signal=4, signal_threshold=2, num_sms=1
                )
                buffer.check()
            return str(error.value)

    (told,) = run_ranks(1, body)
    assert f"rank 0 waited {SHORT:g} s for the signal of {text} (expected 2, saw 1)" in told, told


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"row_signals": torch.ones(2)}, ValueError, "row_signals is torch.float32, must be torch.int32"),
        ({"row_signals": torch.ones(2, dtype=torch.int32)}, ValueError, r"has shape \[2\], must be \[\d+\]"),
        ({"row_signals": torch.ones(2, 9, dtype=torch.int32)}, ValueError, r"has shape \[2, 9\], must be \[\d+\]"),
        ({"row_signals": None}, ValueError, "rows_per_signal is 4, but there are no row_signals"),
        ({"rows_per_signal": 0}, ValueError, "rows_per_signal is 0, must be at least 1"),
        ({"signal_threshold": 0}, ValueError, "signal_threshold is 0, must be from 1 to 2147483647"),
        ({"num_sms": 0}, ValueError, "num_sms is 0: with row_signals it must be positive"),
        ({"wire_dtype": torch.float32}, ValueError, "rows are bf16, the wire fp32, outputs bf16, must be of one type"),
        ({"wire_dtype": "fp8"}, ValueError, "rows are bf16, the wire .*, must be of one type"),
    ],
)
def test_bad_signals_are_refused_and_harm_nothing(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    case = case_of(1, topk=2)

    def body(group: ThreadGroup) -> None:
        with buffer_of(case, group) as buffer:
            out = case.send(buffer)
            good: dict[str, Any] = {
                "row_signals": torch.ones(64, dtype=torch.int32), "rows_per_signal": 4, "num_sms": 1,
            }  # fmt: skip
            with pytest.raises(error, match=text):
                nccl_ep.combine_send(case.rows[0], out.handle, **{**good, **changes})
            with pytest.raises(ValueError, match="has no gradient"):
                nccl_ep.combine_send(case.rows[0].clone().requires_grad_(), out.handle, **good)
            case.check_combine(combine_signalled(case, buffer, out.handle, RowProducer(case.rows[0], 4)), 0)
            assert buffer.stats()["ht_combines"] == 1

    run_ranks(1, body)


def test_opcheck_passes() -> None:
    case = case_of(1)
    with buffer_of(case, ThreadGroup.make(1)[0]) as buffer:
        handle = case.send(buffer).handle
        signals = {"rows_per_signal": 4, "signal_threshold": 1, "num_sms": 1}
        numbers = signalled_numbers(combine_numbers(handle, "dispatch", torch.bfloat16)[1], *signals.values())
        args = (
            buffer._seq, case.rows[0], handle.tensor, handle.slots, None, None, [], handle.num_tokens, handle.capacity,
            numbers, torch.ones(64, dtype=torch.int32),
        )  # fmt: skip
        for util in UTILS:
            torch.library.opcheck(torch.ops.nccl_ep.ht_combine_signalled.default, args, test_utils=util)
        case.check_combine(torch.ops.nccl_ep.ht_combine_signalled.default(*args), 0)


def test_rows_that_are_read_where_they_lie_have_no_signals() -> None:
    case = case_of(2, layout="flat", expert_alignment=1, combine_weights="none")

    def body(group: ThreadGroup) -> None:
        with buffer_of(case, group) as buffer:
            out = case.send(buffer)
            signals = torch.ones(64, dtype=torch.int32)
            with pytest.raises(ValueError, match="row_signals are for layouts of experts' rows, not for flat"):
                nccl_ep.combine_send(
                    case.rows[group.rank()], out.handle, row_signals=signals, rows_per_signal=4, num_sms=1
                )

    run_ranks(2, body)
