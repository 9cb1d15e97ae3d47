"""The floors of the benchmark on CPU ranks: what they send, and that they leave the window as the protocol needs it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.config import combine_args
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.api.test_ops import Calls
from tests.bench import floor_calls
from tests.support.expected import Expected, expected_cases, plain_case, shared_buffer
from tests.support.harness import make_buffer
from tests.support.patience import PATIENCE, Late, with_more_time

ROW_BYTES = 128


@pytest.mark.parametrize("domain_size", [None, 2, 1])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_a_floor_pushes_the_rows_of_the_operation(layout: str, domain_size: int | None) -> None:
    """One row a (token, rank) that is not at home, of a dispatch and back: bytes and rows, by receiver."""
    case = Expected(plain_case(4, layout=layout, domain_size=domain_size, tokens=(8, 0, 3, 5)))
    rows = reference.wire_rows(case.inputs, num_experts=case.case.num_experts)  # [sender, receiver]
    remote = rows - torch.diag(torch.diag(rows))
    assert int(remote.sum()) > 10

    def body(group: ThreadGroup) -> None:
        with make_buffer(case.case, group) as buffer:
            handle = case.dispatch(buffer).handle
            for combine, expected in ((False, remote[buffer.rank]), (True, remote[:, buffer.rank])):
                before = buffer.wire_bytes()
                floor_calls.push(handle, ROW_BYTES - 3, combine=combine)  # padded to 16 bytes
                after = buffer.wire_bytes()
                sent = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
                assert sent["rows_count"] == expected.tolist()
                assert sent["rows"] == (expected * ROW_BYTES).tolist()
                assert sent["other"] == [64] * 4  # a op header
            before = buffer.wire_bytes()
            floor_calls.flags(buffer)
            after = buffer.wire_bytes()
            flags = [b - a for a, b in zip(before["other"], after["other"], strict=True)]
            assert flags == [0 if peer == buffer.rank else 8 for peer in range(4)]
            assert after["rows"] == before["rows"]

    run_ranks(4, body)


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, None), (2, None), (4, None), (4, 2), (3, 1)])
def test_real_operations_between_floors_keep_their_bits(num_ranks: int, domain_size: int | None) -> None:
    cases = expected_cases(3, num_ranks=num_ranks, domain_size=domain_size)
    cases.append(Expected(plain_case(num_ranks, domain_size=domain_size, max_tokens=4, tokens=(4,) * num_ranks)))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases, domain_size=domain_size) as buffer:
            floor_calls.run_between(cases, buffer, rounds=25, seed=num_ranks)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("domain_size", [None, 1])
def test_flags_wait_for_all_ranks(domain_size: int | None) -> None:
    case = plain_case(3, domain_size=domain_size)
    called = [0.0] * 3
    returned = [0.0] * 3

    def body(group: ThreadGroup) -> None:
        with make_buffer(case, group) as buffer:
            for late in range(3):
                if buffer.rank == late:
                    time.sleep(0.05)
                called[buffer.rank] = time.monotonic()
                floor_calls.flags(buffer)
                returned[buffer.rank] = time.monotonic()
                assert returned[buffer.rank] >= called[late]
                group.allgather(b"", PATIENCE)

    run_ranks(3, body)


@pytest.mark.parametrize("domain_size", [None, 1])
def test_a_flag_that_does_not_come(domain_size: int | None) -> None:
    def run(deadline: float) -> None:
        def body(group: ThreadGroup) -> str:
            with make_buffer(plain_case(3, domain_size=domain_size), group) as buffer:
                floor_calls.flags(buffer)
                group.allgather(b"", PATIENCE)
                buffer.set_timeout(deadline)
                text = ""
                if buffer.rank != 1:
                    with pytest.raises(nccl_ep.TimeoutError) as caught:
                        floor_calls.flags(buffer)
                    text = str(caught.value)
                    with pytest.raises(nccl_ep.TimeoutError, match=r"the buffer has failed: .* flag of rank \d"):
                        buffer.check()
                group.allgather(b"", PATIENCE)
                return text

        match = rf"waited {deadline:g} s for the flag of rank (\d) in exchange of flags 2 \(expected 2, saw 1\)"
        for text in run_ranks(3, body)[::2]:
            found = re.search(match, text)
            assert found, text
            if found[1] != "1":
                raise Late(text)

    with_more_time(run)


def test_ranks_that_make_different_calls() -> None:
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        with make_buffer(case.case, group) as buffer:
            handle = case.dispatch(buffer).handle
            with pytest.raises(nccl_ep.MismatchError, match="ranks made different calls in dispatch 2") as raised:
                if buffer.rank == 0:
                    floor_calls.push(handle, ROW_BYTES)
                else:
                    case.dispatch(buffer)
            assert "rank 0 called pushes alone(8 bits, hidden 128, top-2" in str(raised.value)
            assert "rank 1 called dispatch(bf16, hidden 64" in str(raised.value)

    run_ranks(2, body)


def test_a_floor_refuses_sizes_without_sense() -> None:
    case = Expected(plain_case(1))
    with make_buffer(case.case, None) as buffer:
        handle = case.dispatch(buffer).handle
        for row_bytes in (0, -16):
            with pytest.raises(ValueError, match=f"row_bytes is {row_bytes}"):
                floor_calls.push(handle, row_bytes)
        with pytest.raises(ValueError, match="num_sms is -1"):
            floor_calls.push(handle, ROW_BYTES, num_sms=-1)
        with pytest.raises(ValueError, match="a row of 80000 bytes"):
            floor_calls.push(handle, 80000)
        with pytest.raises(ValueError, match="the window is too small"):
            floor_calls.push(handle, 65536)
        args: list[Any] = [buffer._seq, handle.tensor[:-4], *combine_args(handle), ROW_BYTES, False, 0]
        with pytest.raises(ValueError, match="handle has shape"):
            torch.ops.nccl_ep.ll_floor_push.default(*args)
        calls = Calls(case, buffer)
        for kind in ("dispatch", "combine"):
            sent = getattr(torch.ops.nccl_ep, f"ll_{kind}_send").default(*calls.args[f"ll_{kind}_send"])
            with pytest.raises(nccl_ep.UsageError, match=f"{kind} . was sent and has not been received"):
                floor_calls.push(handle, ROW_BYTES, combine=kind == "combine")
            floor_calls.flags(buffer)  # need nothing of a kind
            recv = list(calls.args[f"ll_{kind}_recv"])
            if kind == "dispatch":
                recv[1] = sent
            getattr(torch.ops.nccl_ep, f"ll_{kind}_recv").default(*recv)
        case.run(buffer)
