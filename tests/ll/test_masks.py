"""Rank masks (``enable_shrink``) on CPU ranks: low latency goes on without ranks that are late, or are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C, deep_ep
from nccl_ep.bootstrap import SoloRendezvous
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ll.mask_ranks import (
    PHASES,
    CaseOf,
    LateRank,
    Parted,
    come_at_the_deadline,
    go_on_without,
    masks_of,
    run_all,
    run_over_shapes,
)
from tests.support.cases import generate
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import case_buffer, dispatch_case
from tests.support.patience import DEADLINES, PATIENCE, Clock, with_more_time


def _cases(count: int, num_ranks: int, first: frozenset[int] | None = None) -> list[Parted]:
    found: list[Parted] = []
    seed = 0
    while len(found) < count:
        case = generate(seed)
        seed += 1
        if case.num_ranks == num_ranks and case.domain_size in (None, num_ranks):
            found.append(Parted(case, first))
    return found


def _barrier(group: ThreadGroup) -> Any:
    return lambda: group.allgather(b"", PATIENCE)


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 20), (3, 15), (4, 15), (8, 4)])
def test_two_groups_part_and_meet_again(num_ranks: int, count: int) -> None:
    cases = _cases(count, num_ranks)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [each.whole for each in cases], enable_shrink=True) as buffer:
            run_all(cases, buffer, _barrier(group))

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("ranks", [34, 66])
def test_masks_serve_more_ranks_than_bits_of_a_word(ranks: int) -> None:
    """The mask of the last rank stands in a second word, or in a third."""
    plain = plain_case(ranks, tokens=(1,) * ranks, max_tokens=1, num_experts=ranks, hidden=16)
    case = Parted(plain, frozenset(range(ranks - 1)))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case.whole], enable_shrink=True) as buffer:
            case.part(buffer, _barrier(group))
            case.run(buffer)
            assert masks_of(buffer) == sorted(case.groups[1 - case.number_of(buffer.rank)])

    run_ranks(ranks, body)


@pytest.mark.parametrize("first", [{0, 1}, {0, 2, 3}])
def test_sizes_may_change_while_ranks_are_masked(first: set[int]) -> None:
    cases = _cases(25, 4, frozenset(first))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [each.whole for each in cases], enable_shrink=True) as buffer:
            run_over_shapes(cases, buffer, _barrier(group))

    run_ranks(4, body)


# ---- Ranks that are late


def test_mask_consensus_keeps_healthy_ranks_together() -> None:
    """Rank 2 goes away. Rank 1 has masked it before, and is a call ahead of rank 0, which waits for rank 2."""
    case, pair = Expected(plain_case(3)), Expected(CaseOf.make(plain_case(3), frozenset({0, 1})))

    def body(group: ThreadGroup, deadline: float) -> None:
        rank = group.rank()
        for _ in range(3):
            with shared_buffer(group, [case], enable_shrink=True) as buffer:
                case.run(buffer)
                group.allgather(b"", PATIENCE)
                if rank == 1:
                    deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(2, True)
                group.allgather(b"", PATIENCE)
                go_on_without(2, buffer, case, pair, calls=4, deadline=deadline, group=group)

    with_more_time(lambda deadline: run_ranks(3, lambda group: body(group, deadline)), (0.4, *DEADLINES[1:]))


@pytest.mark.parametrize(("num_ranks", "turns"), [(2, 3), (4, 3), (3, 0)])
@pytest.mark.parametrize("phase", PHASES)
def test_a_late_rank_is_masked(phase: str, num_ranks: int, turns: int) -> None:
    late = LateRank(num_ranks, phase, turns)

    def run(deadline: float) -> None:
        run_ranks(num_ranks, lambda group: late.run(group, deadline))

    with_more_time(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_consensus_holds_where_a_rank_comes_at_the_deadline(layout: str) -> None:
    run_ranks(3, lambda group: come_at_the_deadline(group, layout, deadline=0.2, rounds=8))


def test_each_rank_masks_for_itself() -> None:
    """Rank 0 masks rank 2, which rank 1 goes on with."""
    case = Expected(plain_case(3))
    pairs = [Expected(CaseOf.make(case.case, frozenset(group))) for group in ({0, 1}, {0, 1, 2}, {1, 2})]

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], enable_shrink=True) as buffer:
            if rank == 0:
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(2, True)
            for _ in range(3):
                out = dispatch_case(case.case, case.inputs[rank], buffer)
                pairs[rank].check_dispatch(out, rank)
                group.allgather(b"", PATIENCE)
            assert masks_of(buffer) == [[2], [], [0]][rank]

    run_ranks(3, body)


# ---- The methods


def test_masks_are_cleaned_without_a_rank_that_stays_away() -> None:
    """It counts as active until the next operation, which does not wait for it. It cleans its own masks alone, too."""
    case = Parted(plain_case(3), frozenset({0, 1}))

    def body(group: ThreadGroup) -> None:
        away = sorted(case.groups[1 - case.number_of(group.rank())])
        with shared_buffer(group, [case.whole], enable_shrink=True) as buffer:
            clean = deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer
            if group.rank() != 2:
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(2, True)
                case.run(buffer)
            for turn in range(2):  # ranks 0 and 1, then rank 2
                if (group.rank() == 2) == (turn == 1):
                    buffer.set_timeout(1.0)
                    with Clock(4 * 1.0 + PATIENCE / 2):
                        clean()
                    assert masks_of(buffer) == []
                    buffer.set_timeout(2 * PATIENCE)
                    with Clock(PATIENCE):
                        for _ in range(2):
                            case.run(buffer)
                            assert masks_of(buffer) == away
                group.allgather(b"", PATIENCE)
            clean()
            assert masks_of(buffer) == []
            case.whole.run(buffer)

    run_ranks(3, body)


def test_ranks_are_masked_one_by_one_and_come_back_together() -> None:
    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        with shared_buffer(group, [Expected(plain_case(3))], enable_shrink=True) as buffer:
            deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer((rank + 1) % 3, mask=True)
            deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer((rank + 1) % 3, mask=True)
            deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer((rank + 2) % 3)
            assert masks_of(buffer) == [(rank + 1) % 3]
            with pytest.raises(nccl_ep.UsageError, match=rf"rank {(rank + 1) % 3} is masked, .* do not come back one"):
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer((rank + 1) % 3, False)
            with pytest.raises(ValueError, match=f"rank {rank} to mask is this rank itself"):
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(rank, True)
            for wrong in (-1, 3):
                with pytest.raises(ValueError, match=f"rank_to_mask is {wrong}, must be 0 to 2"):
                    deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(wrong, True)
            deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
            assert masks_of(buffer) == []

    run_ranks(3, body)


def test_extra_tensors_whose_operations_could_leave_out_different_ranks_are_refused() -> None:
    case = Expected(plain_case(1))
    given, how = case.inputs[0], case.case.dispatch_kwargs()
    extra = [torch.arange(8.0 * len(given.x)).view(-1, 8) + i for i in range(2)]
    with shared_buffer(SoloRendezvous(), [case], enable_shrink=True) as buffer:
        with pytest.raises(ValueError, match="2 extra tensors take 2 operations, which may leave out different ranks"):
            nccl_ep.dispatch(given.x, given.topk_idx, given.topk_weights, buffer=buffer, extra=extra, **how)
        out = nccl_ep.dispatch(given.x, given.topk_idx, given.topk_weights, buffer=buffer, extra=extra[:1], **how)
        case.check_dispatch(out, 0)


def test_an_open_send_is_received_before_masks_are_cleaned() -> None:
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        given = case.inputs[group.rank()]
        with shared_buffer(group, [case], enable_shrink=True) as buffer:
            pending = nccl_ep.dispatch_send(
                given.x, given.topk_idx, given.topk_weights, buffer=buffer, **case.case.dispatch_kwargs()
            )
            clean = deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer
            with pytest.raises(nccl_ep.UsageError, match="a dispatch was sent and has not been received"):
                clean()
            if group.rank() == 1:
                with pytest.raises(nccl_ep.UsageError, match="a dispatch was sent and has not been received"):
                    clean()
            case.check_dispatch(pending.receive(), group.rank())
            if group.rank() == 0:
                with pytest.raises(nccl_ep.UsageError, match="on rank 1: a call was sent and has not been received"):
                    clean()
            clean()
            case.run(buffer)

    run_ranks(2, body)


def test_a_buffer_without_masks_has_none_to_set() -> None:
    """A buffer that was made without has none to set, and a late rank fails it."""
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            with pytest.raises(nccl_ep.UsageError, match="cannot be masked: the buffer was made without masks"):
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(1 - group.rank(), True)
            deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(1 - group.rank(), False)
            assert masks_of(buffer) == []
            if group.rank() == 0:
                deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()  # nobody else comes
                buffer.set_timeout(0.2)
                for _ in range(2):
                    with pytest.raises(nccl_ep.TimeoutError, match="nothing of this call was heard from rank 1"):
                        dispatch_case(case.case, case.inputs[0], buffer)
                        buffer.check()  # of a GPU: tells what its kernel found

    run_ranks(2, body)


def test_ranks_that_cannot_have_masks_are_told() -> None:
    case = [Expected(plain_case(2))]

    def disagree(group: ThreadGroup) -> None:
        with pytest.raises(nccl_ep.MismatchError, match="whether late ranks are masked"):
            shared_buffer(group, case, enable_shrink=group.rank() == 1)

    def apart(group: ThreadGroup) -> None:
        with pytest.raises(ValueError, match="late ranks can be masked among the ranks of one domain"):
            shared_buffer(group, case, enable_shrink=True, domain_size=1)

    run_ranks(2, disagree)
    if not _C.EMULATES_GPU:  # GPUs mask across domains: tests/network/test_emulated_masks.py
        run_ranks(2, apart)


def test_high_throughput_knows_no_masks() -> None:
    """It goes to all ranks, masked or not."""
    case = Expected(plain_case(2, layout="flat"))

    def body(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, device="cpu", mode="auto", timeout=PATIENCE, enable_shrink=True) as buffer:
            deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(1 - group.rank(), True)
            case.check_dispatch(case.send(buffer), group.rank())
            assert masks_of(buffer) == [1 - group.rank()]

    run_ranks(2, body)
