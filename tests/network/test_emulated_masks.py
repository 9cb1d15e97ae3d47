"""Masks of late ranks between domains of emulated GPUs (``enable_shrink``), over the mesh and a simulated network: run
by tests/support/emulated.py. What the ranks do is tests/ll/mask_ranks.py's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

import nccl_ep
from nccl_ep import _C, deep_ep
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.delays import COMBINE, DISPATCH, delays
from tests.ll.mask_ranks import (
    PHASES,
    CaseOf,
    LateRank,
    Parted,
    come_at_the_deadline,
    fail_to_clean,
    go_on_without,
    masks_of,
    run_all,
    run_over_shapes,
)
from tests.network.test_emulated_network import LIMIT, name_of
from tests.support.cases import cases_of
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.patience import DEADLINES, PATIENCE, with_more_time

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

TOPOLOGIES = ((2, 1), (2, 2), (4, 1), (2, 3))  # domains, ranks of each
SLOW = 100_007  # of the network: what was sent to a rank that was masked since lands in later calls
MASKS: dict[str, Any] = {"enable_shrink": True, "ll_network": "auto"}


def run_parts(cases: list[Parted], run: Any, **options: Any) -> None:
    """run: run_all, or another that makes all calls of a rank."""

    def body(group: ThreadGroup) -> None:
        how = {**MASKS, "domain_size": cases[0].whole.case.domain_size, **options}
        with shared_buffer(group, [each.whole for each in cases], **how) as buffer:
            run(cases, buffer, lambda: group.allgather(b"", PATIENCE))

    run_ranks(cases[0].whole.case.num_ranks, body, timeout=LIMIT)


@pytest.mark.parametrize("seed", [0, 31, SLOW], ids=["in order", "late", "slow"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
def test_two_groups_part_and_meet_again(topology: tuple[int, int], seed: int) -> None:
    """Together, apart with other numbers of calls, together again when masks were cleaned."""
    run_parts([Parted(case) for case in cases_of(topology, 3, first=3000 + seed % 97)], run_all, network_seed=seed)


@pytest.mark.parametrize("first", [{0, 1}, {0, 3}, {0, 1, 2}], ids=["by domains", "by rails", "without one"])
def test_sizes_may_change_while_ranks_are_masked(first: set[int]) -> None:
    cases = [Parted(case, frozenset(first)) for case in cases_of((2, 2), 6, first=3000)]
    run_parts(cases, run_over_shapes, network_seed=9)


# ---- Ranks that are late


@pytest.mark.parametrize("topology", [(2, 1), (2, 2), (4, 1)], ids=name_of)
@pytest.mark.parametrize("phase", PHASES)
def test_a_late_rank_is_masked(phase: str, topology: tuple[int, int]) -> None:
    """One of another domain, or of the own one: the rest goes on with right bits, and it comes back."""
    late = LateRank(topology[0] * topology[1], phase, 2, domain_size=topology[1])
    with_more_time(lambda deadline: run_ranks(late.missing + 1, functools.partial(late.run, deadline=deadline)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_consensus_holds_where_a_rank_comes_at_the_deadline(layout: str) -> None:
    run_ranks(3, lambda group: come_at_the_deadline(group, layout, deadline=0.5, rounds=4, domain_size=1))


def test_a_dead_rank_is_masked() -> None:
    """The others go on without it for good: masks cannot be cleaned."""
    case = Parted(plain_case(4, domain_size=2), frozenset({0, 1, 2}))

    def body(group: ThreadGroup, deadline: float, beside: ThreadGroup) -> None:
        with shared_buffer(group, [case.whole], domain_size=2, network_seed=5, **MASKS) as buffer:
            case.run_together(buffer)
            go_on_without(3, buffer, case.whole, case.parts[0], calls=1, deadline=deadline, group=beside)
            if group.rank() != 3:
                buffer.set_timeout(PATIENCE)
                case.run(buffer)
                buffer.set_timeout(deadline)
            fail_to_clean(3, buffer, beside)
            if group.rank() != 3:
                buffer.set_timeout(PATIENCE)
                case.run(buffer)
                assert masks_of(buffer) == [3]
            beside.allgather(b"", PATIENCE)

    def run(deadline: float) -> None:
        ends = ThreadGroup.make(4)
        run_ranks(4, lambda group: body(group, deadline, ends[group.rank()]))

    with_more_time(run, (2.0, *DEADLINES[1:]))


def test_masks_that_were_cleaned_by_some_ranks() -> None:
    case = Expected(plain_case(2, domain_size=1))

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case], domain_size=1, network_seed=5, **MASKS) as buffer:
            rounds, inner = iter(("tokens", "settled", "epochs")), buffer._rendezvous.allgather

            def allgather(mine: bytes, timeout: float) -> list[bytes]:
                if next(rounds) == "epochs":
                    raise nccl_ep.TimeoutError(f"waited {timeout} s")
                return list(inner(mine, timeout))

            buffer._rendezvous.allgather = allgather  # type: ignore[method-assign]
            clean = deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer
            with pytest.raises(nccl_ep.TimeoutError, match=f"waited {4 * buffer._timeout} s"):
                clean()
            for call in (lambda: case.run(buffer), clean, buffer.check):
                with pytest.raises(nccl_ep.UsageError, match="others may have cleaned theirs: destroy the buffer"):
                    call()

    run_ranks(2, body)


def test_mask_consensus_keeps_healthy_ranks_together() -> None:
    """Rank 3 goes away. Ranks 1 and 2 have masked it before, and are calls ahead of rank 0, which waits for it."""
    plain = plain_case(4, domain_size=2)
    case, rest = Expected(plain), Expected(CaseOf.make(plain, frozenset({0, 1, 2})))

    def body(group: ThreadGroup, deadline: float) -> None:
        rank = group.rank()
        with shared_buffer(group, [case], domain_size=2, network_seed=3, **MASKS) as buffer:
            case.run(buffer)
            group.allgather(b"", PATIENCE)
            if rank in (1, 2):
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(3, True)
            group.allgather(b"", PATIENCE)
            go_on_without(3, buffer, case, rest, calls=3, deadline=deadline, group=group)

    with_more_time(lambda deadline: run_ranks(4, lambda group: body(group, deadline)), (4.0, DEADLINES[-1]))


def test_masks_take_the_mesh() -> None:
    """The mesh is taken. One domain of a rank each is no rail."""

    def body(group: ThreadGroup) -> None:
        case = [Expected(plain_case(4))]
        text = r"cannot be masked over the rail between 2 NVLink domains, .* take the mesh \(ll_network\)"
        with pytest.raises(ValueError, match=text):
            shared_buffer(group, case, domain_size=2, enable_shrink=True, ll_network="rail")
        with shared_buffer(group, case, domain_size=2, **MASKS) as buffer:
            assert buffer.stats()["ll_network"] == "mesh"
        with shared_buffer(group, case, domain_size=1, enable_shrink=True, ll_network="rail") as buffer:
            assert masks_of(buffer) == []

    run_ranks(4, body)


# ---- Planted bugs


def test_a_planted_bug_of_masks_is_found() -> None:
    """Posts are not counted. So cleaning makes up for them once more, and what has not come counts as come."""
    cases = [Parted(case) for case in cases_of((2, 2), 2, first=3000)]
    with delays(bugs=["uncounted_posts"], kinds=DISPATCH | COMBINE), pytest.raises(BaseException) as caught:
        run_parts(cases, run_all, network_seed=SLOW, timeout=4.0)
    print(f"uncounted_posts: {type(caught.value).__name__}: {caught.value}")
