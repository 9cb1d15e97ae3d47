"""More ranks than two words have bits, on emulated GPUs of one domain, in low latency of two, too: run by
tests/support/emulated.py.

Masks of as many: tests/ll/test_masks.py.
"""

from __future__ import annotations

import pytest

from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case, run_case
from tests.support.harness import case_buffer
from tests.support.small_plans import use_small_ht_plans, use_small_plans

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

RACK = 72
DOMAIN = 40  # of two domains: the second one's last ranks have bits in a third word
LIMIT = 3000.0


def _case(ranks: int, domain: int | None = None, layout: str = "expert_major") -> Case:
    """A token of up to three ranks, in all domains; a third of the ranks have none."""
    tokens = tuple(min(rank % 3, 1) for rank in range(ranks))
    return plain_case(
        ranks, domain_size=domain, num_experts=ranks, topk=3, max_tokens=1, tokens=tokens, hidden=16, layout=layout
    )


def _check(case: Case, monkeypatch: pytest.MonkeyPatch, mode: str = "ll", **options: object) -> None:
    use_small_plans(monkeypatch)
    use_small_ht_plans(monkeypatch, case.num_ranks)
    expected = Expected(case)

    def body(group: ThreadGroup) -> None:
        how = {"device": "cpu", "mode": mode, "network_seed": 3, "timeout": LIMIT, **options}
        with case_buffer(case, group, **how) as buffer:
            run_case(expected, buffer, mode=mode, num_sms=1)

    run_ranks(case.num_ranks, body, timeout=LIMIT)


def test_low_latency_of_a_rack_gives_the_oracles_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(_case(RACK), monkeypatch)


def test_low_latency_of_two_domains_gives_the_oracles_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(_case(2 * DOMAIN, DOMAIN), monkeypatch, ll_network="rail")


def test_high_throughput_of_more_than_64_ranks_gives_the_oracles_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(_case(66, layout="flat"), monkeypatch, mode="ht")
