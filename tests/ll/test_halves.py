"""Combines in halves whose weights the home ranks give: the sending half waits for no rank, and the bits are those of a
whole combine. All ranks split such a combine, or none. On CPU ranks and on emulated GPUs."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.deepep_ranks import DeepEpCase, small_case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import combine_options
from tests.support.patience import of_living_ranks

WAIT = of_living_ranks(60.0)


def weighted_case(num_ranks: int, **changes: Any) -> Expected:
    """Tokens with several experts on a rank, weights at combine of which some skip their row."""
    sizes = {"num_experts": 2 * num_ranks, "topk": min(4, 2 * num_ranks), "combine_weights": "masked"}
    return Expected(plain_case(num_ranks, **{**sizes, **changes}))


def combine_by(case: Expected, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, *, in_halves: bool) -> torch.Tensor:
    """The rows are overwritten between the halves: the sending half is done with them."""
    rows = case.rows[buffer.rank].clone()
    options = combine_options(case.case, buffer.rank, buffer.device)
    if not in_halves:
        return nccl_ep.combine(rows, handle, **options)
    pending = nccl_ep.combine_send(rows, handle, **options)
    rows.fill_(7)
    return pending.receive()


CASES = {
    "several experts a rank": {},
    "one expert a rank": {"topk": 1},
    "dropped rows": {"capacity": 3, "capacity_kind": "overflowing"},
    "repeated experts": {"routing": "duplicates"},
    "packed": {"layout": "packed"},
    "fp32": {"rows_dtype": torch.float32, "hidden": 96},
    "fp16 in rows of an odd piece": {"rows_dtype": torch.float16, "hidden": 1000},
    "all weights": {"combine_weights": "tensor"},
    "infinities and NaNs": {"rows_content": "special"},
    "sums of another type": {"wire_dtype": torch.float32},
    "sums in FP8": {"wire_dtype": "fp8", "hidden": 400},
    "sums in LogFMT": {"wire_dtype": "logfmt", "rows_dtype": torch.float16, "hidden": 272},
    "special sums in FP8": {"wire_dtype": "fp8", "rows_content": "special"},
    "special sums in LogFMT": {"wire_dtype": "logfmt", "rows_content": "special"},
}
# Sums travel here, in halves too.
SUMS = {
    "weights of dispatch": {"combine_weights": "dispatch"},
    "no weights": {"combine_weights": "none"},
}
WIRES = (None, torch.float32, "fp8", "logfmt")


@pytest.mark.parametrize("name", [*CASES, *SUMS])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_halves_have_the_bits_of_a_whole_combine(name: str, num_ranks: int) -> None:
    """Whole and split ones follow each other in one buffer."""
    case = weighted_case(num_ranks, **{**CASES, **SUMS}[name])

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            for in_halves in (False, True, True, False, True):
                case.check_combine(combine_by(case, buffer, out.handle, in_halves=in_halves), group.rank())

    run_ranks(num_ranks, body)


def run_every_mix(case: Expected, num_ranks: int, **options: Any) -> None:
    """In each call some ranks combine in halves, the others at once."""

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT, **options) as buffer:
            out = case.dispatch(buffer)
            for mix in range(1 << num_ranks):
                got = combine_by(case, buffer, out.handle, in_halves=bool(mix >> group.rank() & 1))
                case.check_combine(got, group.rank())

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_mix_of_sums_has_the_same_bits(name: str, num_ranks: int) -> None:
    run_every_mix(weighted_case(num_ranks, **SUMS[name]), num_ranks)


def test_every_mix_with_masks_has_the_same_bits() -> None:
    run_every_mix(weighted_case(2), 2, enable_shrink=True)


SPLIT, WHOLE = "split combine with weights of the home rank", "combine with weights of the home rank"


@pytest.mark.parametrize(("num_ranks", "mix"), [(n, mix) for n in (2, 3) for mix in range(1, (1 << n) - 1)])
def test_a_mix_of_weighted_ones_is_refused(num_ranks: int, mix: int) -> None:
    """Bit r of the mix: rank r splits. Each rank's error names its own call and that of a rank of the other kind."""
    case = weighted_case(num_ranks)

    def body(group: ThreadGroup) -> str:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            with pytest.raises(nccl_ep.MismatchError) as error:
                combine_by(case, buffer, out.handle, in_halves=bool(mix >> group.rank() & 1))
                buffer.check()
            return str(error.value)

    for rank, text in enumerate(run_ranks(num_ranks, body)):
        own, other = (SPLIT, WHOLE) if mix >> rank & 1 else (WHOLE, SPLIT)
        named = re.search(r"rank (\d) called ([^(]*)\(.* rank (\d) called ([^(]*)\(", text)
        assert named, text
        assert named.group(1, 2, 4) == (str(rank), own, other)
        assert (mix >> int(named[3]) & 1) != (mix >> rank & 1)


def test_thirty_two_choices() -> None:
    case = weighted_case(2, num_experts=40, topk=32)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            case.check_combine(combine_by(case, buffer, out.handle, in_halves=True), group.rank())

    run_ranks(2, body)


def in_turn(group: ThreadGroup, has_ended: list[threading.Event], send: Any) -> Any:
    """Each rank begins its sending half when that of the rank before it has ended."""
    rank = group.rank()
    if rank > 0:
        assert has_ended[rank - 1].wait(WAIT), f"the sending half of rank {rank - 1} waits for one that has not begun"
    sent = send()
    has_ended[rank].set()
    return sent


@pytest.mark.parametrize("wire", WIRES)
def test_a_sending_half_waits_for_no_rank(wire: Any) -> None:
    """Each rank's sending half ends before the next rank's begins, several times in a row."""
    case = weighted_case(3, wire_dtype=wire)
    calls = [[threading.Event() for _ in range(3)] for _ in range(4)]

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], timeout=2 * WAIT) as buffer:
            out = case.dispatch(buffer)
            options = combine_options(case.case, rank, buffer.device)
            for has_ended in calls:
                rows = case.rows[rank].clone()
                pending = in_turn(group, has_ended, lambda rows=rows: nccl_ep.combine_send(rows, out.handle, **options))
                rows.fill_(7)
                case.check_combine(pending.receive(), rank)

    run_ranks(3, body)


@pytest.mark.parametrize("use_logfmt", [False, True])
def test_a_sending_half_of_deepep_waits_for_no_rank(use_logfmt: bool) -> None:
    case = DeepEpCase(dataclasses.replace(small_case(2).case, wire_dtype="logfmt" if use_logfmt else None))
    options = {"return_recv_hook": True, "use_logfmt": use_logfmt}
    has_ended = [threading.Event(), threading.Event()]

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=2 * WAIT) as buffer:
            _, _, handle, _, _ = case.send(buffer)
            y, _, hook = in_turn(group, has_ended, lambda: case.send_back(buffer, handle, **options))
            hook()
            case.check_combine(y, group.rank())

    run_ranks(2, body)


@pytest.mark.skipif(_C.EMULATES_GPU, reason="between domains of GPUs the sending half forwards the weights")
def test_over_domains_of_cpu_ranks() -> None:
    case = weighted_case(4, domain_size=2)
    has_ended = [threading.Event() for _ in range(4)]

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], domain_size=2, network_seed=3, timeout=2 * WAIT) as buffer:
            out = case.dispatch(buffer)
            options = combine_options(case.case, rank, buffer.device)
            pending = in_turn(
                group, has_ended, lambda: nccl_ep.combine_send(case.rows[rank].clone(), out.handle, **options)
            )
            case.check_combine(pending.receive(), rank)

    run_ranks(4, body)


def rows_sent(buffer: nccl_ep.Buffer) -> int:
    """So far; emulated GPUs do not count them."""
    return 0 if _C.EMULATES_GPU else sum(buffer.wire_bytes()["rows_count"])


def test_a_window_without_room_for_the_rows_has_the_same_bits() -> None:
    """Then sums are sent, for which the sending half waits: as many rows as by a whole combine."""
    case = weighted_case(2, topk=4, num_experts=4)
    plain = case.case
    routing, dispatched, roomy = _C.sizes_for(2, 4, 4, plain.max_tokens, 256, 2 * plain.hidden)
    combined = _C.sizes_for(2, 4, 1, plain.max_tokens, 256, 2 * plain.hidden)[2]
    assert combined < roomy

    def body(group: ThreadGroup) -> list[int]:
        rows = []
        for room in (roomy, combined):
            with shared_buffer(group, [case], sizes=(routing, dispatched, room), timeout=WAIT) as buffer:
                out = case.dispatch(buffer)
                for in_halves in (False, True):
                    before = rows_sent(buffer)
                    case.check_combine(combine_by(case, buffer, out.handle, in_halves=in_halves), group.rank())
                    rows.append(rows_sent(buffer) - before)
        return rows

    for whole, split, whole_again, sums in run_ranks(2, body):
        assert whole == whole_again == sums and (split > whole or _C.EMULATES_GPU)


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    case = weighted_case(2)
    may_leave = threading.Event()

    def body(group: ThreadGroup) -> str:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            if group.rank() == 1:
                assert may_leave.wait(2 * WAIT)
                return ""
            buffer.set_timeout(1.0)
            options = combine_options(case.case, 0, buffer.device)
            pending = nccl_ep.combine_send(case.rows[0], out.handle, **options)
            try:
                with pytest.raises(nccl_ep.TimeoutError, match="rank 1") as error:
                    pending.receive()
                    buffer.check()
                return str(error.value)
            finally:
                may_leave.set()

    assert "combine" in run_ranks(2, body)[0]
