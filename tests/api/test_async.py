"""Operations with ``async_finish`` on CPU ranks: done when the call returns. For GPUs: tests/gpu/test_deepep.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.cases import generate
from tests.support.expected import Expected, expected_cases, plain_case, shared_buffer
from tests.support.harness import check_case


@pytest.mark.parametrize("seeds", [range(25), range(25, 50), range(50, 75)])
def test_split_calls_on_the_buffers_stream_give_the_oracles_bits(seeds: range) -> None:
    for seed in seeds:
        check_case(generate(seed), staged=True, async_finish=True)


def test_any_number_may_be_open() -> None:
    cases = expected_cases(6, num_ranks=2)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, cases) as buffer:
            pending: list[Any] = []
            for case in cases:
                given = case.inputs[rank]
                pending.append(
                    nccl_ep.dispatch_send(
                        given.x, given.topk_idx, given.topk_weights, buffer=buffer, scales=given.scales,
                        async_finish=True, **case.case.dispatch_kwargs(),
                    )
                )  # fmt: skip
            for index in (5, 0, 3, 1, 4, 2):
                assert pending[index].event.event.query()
                out = pending[index].receive()
                cases[index].check_dispatch(out, rank)
                cases[index].combine(buffer, out.handle)
                with pytest.raises(nccl_ep.UsageError, match="received already"):
                    pending[index].receive()

    run_ranks(2, body)


def test_staged_operations_have_no_event() -> None:
    case = Expected(plain_case(1))
    given = case.inputs[0]
    with shared_buffer(ThreadGroup.make(1)[0], [case]) as buffer:
        pending = nccl_ep.dispatch_send(given.x, given.topk_idx, buffer=buffer, **case.case.dispatch_kwargs())
        assert pending.event.event is None
        back = nccl_ep.combine_send(case.rows[0], pending.receive().handle)
        assert back.event.event is None and back.receive().shape == given.x.shape


def test_overflow_is_raised_when_received() -> None:
    x, ids = torch.ones(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=3, hidden=64, topk=1, num_experts=1, device="cpu", on_overflow="raise"
    ) as buffer:
        pending = nccl_ep.dispatch_send(x, ids, buffer=buffer, num_experts=1, capacity=2, async_finish=True)
        with pytest.raises(nccl_ep.OverflowError, match="1 rows did not fit"):
            pending.receive()
        with pytest.raises(nccl_ep.UsageError, match="received already"):
            pending.receive()
        with pytest.raises(ValueError, match="3 tokens, but max_tokens is 2"):
            nccl_ep.dispatch_send(x, ids, buffer=buffer, num_experts=1, max_tokens=2, async_finish=True)
