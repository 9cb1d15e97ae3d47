"""Split combines whose weights the home ranks give: the send waits for no rank, and the bits are those of a
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
from nccl_ep.room import LlSizes, Room
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import DeepEpCase, small_case
from tests.ll.late_send import weighted_case
from tests.support.expected import Expected, shared_buffer
from tests.support.harness import combine_options
from tests.support.patience import of_living_ranks

WAIT = of_living_ranks(60.0)


def combine_by(case: Expected, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, *, is_split: bool) -> torch.Tensor:
    """The rows are overwritten between send and receive: the send is done with them."""
    rows = case.rows[buffer.rank].clone()
    options = combine_options(case.case, buffer.rank, buffer.device)
    if not is_split:
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
# Sums travel here, in split combines too.
SUMS = {
    "weights of dispatch": {"combine_weights": "dispatch"},
    "no weights": {"combine_weights": "none"},
}
WIRES = (None, torch.float32, "fp8", "logfmt")


def run_split(num_ranks: int, name: str, domain_size: int | None = None, **options: Any) -> None:
    """Whole and split ones follow each other in one buffer."""
    case = weighted_case(num_ranks, domain_size=domain_size, **{**CASES, **SUMS}[name])
    options = {"timeout": WAIT, "domain_size": domain_size or num_ranks, **options}

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], **options) as buffer:
            out = case.dispatch(buffer)
            for is_split in (False, True, True, False, True):
                case.check_combine(combine_by(case, buffer, out.handle, is_split=is_split), group.rank())

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("name", [*CASES, *SUMS])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_split_combine_has_the_bits_of_a_whole_one(name: str, num_ranks: int) -> None:
    run_split(num_ranks, name)


@pytest.mark.parametrize("name", [*CASES, *SUMS])
def test_a_split_combine_with_masks_has_the_same_bits(name: str) -> None:
    run_split(3, name, enable_shrink=True)


# Several domains: ranks, ranks of a domain, and what else the buffer is made with.
CROSSINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2x1 rail": (2, 1, {}),
    "2x2 rail": (4, 2, {}),
    "3x2 rail": (6, 2, {}),
    "2x2 mesh": (4, 2, {"ll_network": "mesh"}),
    # CPU ranks of several domains have no masks.
    **({"2x2 mesh, masks": (4, 2, {"ll_network": "mesh", "enable_shrink": True})} if _C.EMULATES_GPU else {}),
}


@pytest.mark.parametrize("name", [*CASES, *SUMS])
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_a_split_combine_between_domains_has_the_same_bits(crossing: str, name: str) -> None:
    num_ranks, domain_size, options = CROSSINGS[crossing]
    run_split(num_ranks, name, domain_size, **options)


def run_every_mix(case: Expected, num_ranks: int, **options: Any) -> None:
    """In each call some ranks split their combine, the others do not."""

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT, **options) as buffer:
            out = case.dispatch(buffer)
            for mix in range(1 << num_ranks):
                got = combine_by(case, buffer, out.handle, is_split=bool(mix >> group.rank() & 1))
                case.check_combine(got, group.rank())

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_mix_of_sums_has_the_same_bits(name: str, num_ranks: int) -> None:
    run_every_mix(weighted_case(num_ranks, **SUMS[name]), num_ranks)


SPLIT, WHOLE = "split combine with weights of the home rank", "combine with weights of the home rank"


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("num_ranks", "mix"), [(n, mix) for n in (2, 3) for mix in range(1, (1 << n) - 1)])
def test_a_mix_of_weighted_ones_is_refused(num_ranks: int, mix: int, masks: bool) -> None:
    """Bit r of the mix: rank r splits. Each rank's error names its own call and that of a rank of the other kind."""
    case = weighted_case(num_ranks)

    def body(group: ThreadGroup) -> str:
        with shared_buffer(group, [case], timeout=WAIT, enable_shrink=masks) as buffer:
            out = case.dispatch(buffer)
            with pytest.raises(nccl_ep.MismatchError) as error:
                combine_by(case, buffer, out.handle, is_split=bool(mix >> group.rank() & 1))
                buffer.check()
            return str(error.value)

    for rank, text in enumerate(run_ranks(num_ranks, body)):
        own, other = (SPLIT, WHOLE) if mix >> rank & 1 else (WHOLE, SPLIT)
        named = re.search(r"rank (\d) called ([^(]*)\(.* rank (\d) called ([^(]*)\(", text)
        assert named, text
        assert named.group(1, 2, 4) == (str(rank), own, other)
        assert (mix >> int(named[3]) & 1) != (mix >> rank & 1)


def test_thirty_two_choices_of_a_token_are_weighted_at_home() -> None:
    case = weighted_case(2, num_experts=40, topk=32)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], timeout=WAIT) as buffer:
            out = case.dispatch(buffer)
            case.check_combine(combine_by(case, buffer, out.handle, is_split=True), group.rank())

    run_ranks(2, body)


def in_turn(group: ThreadGroup, has_ended: list[threading.Event], send: Any) -> Any:
    """Each rank begins its send when that of the rank before it has ended."""
    rank = group.rank()
    if rank > 0:
        assert has_ended[rank - 1].wait(WAIT), f"the send of rank {rank - 1} waits for one that has not begun"
    sent = send()
    has_ended[rank].set()
    return sent


WORLDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one domain": (3, 3, {}), "masks": (3, 3, {"enable_shrink": True}), **CROSSINGS,
}  # fmt: skip


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_send_waits_for_no_rank(world: str, wire: Any) -> None:
    """Each rank's send ends before the next rank's begins, several times in a row."""
    num_ranks, domain_size, options = WORLDS[world]
    case = weighted_case(num_ranks, wire_dtype=wire, domain_size=domain_size)
    calls = [[threading.Event() for _ in range(num_ranks)] for _ in range(4)]
    options = {"domain_size": domain_size, "timeout": 2 * WAIT, **options}

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], **options) as buffer:
            out = case.dispatch(buffer)
            given = combine_options(case.case, rank, buffer.device)
            for has_ended in calls:
                rows = case.rows[rank].clone()
                pending = in_turn(group, has_ended, lambda rows=rows: nccl_ep.combine_send(rows, out.handle, **given))
                rows.fill_(7)
                case.check_combine(pending.receive(), rank)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("use_logfmt", [False, True])
def test_a_send_of_deepep_waits_for_no_rank(use_logfmt: bool) -> None:
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


def rows_sent(buffer: nccl_ep.Buffer) -> int:
    """So far; emulated GPUs do not count them."""
    return 0 if _C.EMULATES_GPU else sum(buffer.wire_bytes()["rows_count"])


def test_a_window_without_room_for_the_rows_has_the_same_bits() -> None:
    """Then sums are sent, for which the send waits: as many rows as by a whole combine."""
    case = weighted_case(2, topk=4, num_experts=4)
    plain = case.case
    *rest, unweighted = _C.sizes_for(2, 4, 4, plain.max_tokens, 256, 2 * plain.hidden)
    assert unweighted == (4 - 1) * plain.max_tokens * 2 * plain.hidden

    def body(group: ThreadGroup) -> list[int]:
        rows = []
        for room in (unweighted, unweighted - 128):
            with shared_buffer(group, [case], _room=Room(LlSizes(*rest, room)), timeout=WAIT) as buffer:
                out = case.dispatch(buffer)
                for is_split in (False, True):
                    before = rows_sent(buffer)
                    case.check_combine(combine_by(case, buffer, out.handle, is_split=is_split), group.rank())
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
