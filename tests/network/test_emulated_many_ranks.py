"""More ranks than two words have bits, on emulated GPUs of one domain, in low latency of two, too, and as many domains
in high throughput: run by tests/support/emulated.py.

Masks of as many: tests/ll/test_masks.py.
"""

from __future__ import annotations

import pytest
import torch

import nccl_ep
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


def test_a_domain_past_64_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of domains 32 and 64. Either one's sum may be late; what an earlier combine has left there is another."""
    ranks, hidden, homes, turns = 65, 16, 8, 2
    use_small_ht_plans(monkeypatch, ranks)

    def body(group: ThreadGroup) -> list[float]:
        tokens = 1 if group.rank() < homes else 0
        x, ids = torch.ones(tokens, hidden), torch.tensor([32, 64]).expand(tokens, 2).contiguous()
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=1, hidden=hidden, topk=2, num_experts=ranks, dtype=x.dtype, device="cpu", mode="ht",
            domain_size=1, network_seed=3, timeout=LIMIT,
        ) as buffer:  # fmt: skip
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=ranks, mode="ht", layout="flat", num_sms=1)
            sums = [nccl_ep.combine(out.x * turn, out.handle, num_sms=1) for turn in range(1, turns + 1)]
            return [float(number) for each in sums for number in each.unique()]

    got = run_ranks(ranks, body, timeout=LIMIT)
    assert got[:homes] == [[2.0 * turn for turn in range(1, turns + 1)]] * homes
