"""Many ranks, between nodes of CPU ranks: counts, places, bits and bytes of 128 and 256 ranks; slow: 144 and 576."""

from __future__ import annotations

import pytest

import nccl_ep
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.ht.harness import HtPlan, check_ht_case
from tests.support.expected import Expected, plain_case, run_case
from tests.support.harness import case_buffer, check_case
from tests.support.patience import PATIENCE, Clock, Late, with_more_time

pytestmark = pytest.mark.skipif(_C.EMULATES_GPU, reason="of CPU ranks")

NODE = 8  # ranks


def _tokens(num_ranks: int, most: int) -> tuple[int, ...]:
    """Ranks without tokens among them, and full ones."""
    return tuple(7 * rank % (most + 1) for rank in range(num_ranks))


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_low_latency_of_128_ranks_gives_the_oracles_bits(layout: str) -> None:
    ranks, most = 128, 3
    case = plain_case(
        ranks, domain_size=NODE, num_experts=ranks, topk=8, max_tokens=most, tokens=_tokens(ranks, most), hidden=32,
        layout=layout,
    )  # fmt: skip
    with Clock(PATIENCE):
        check_case(case, network_seed=3)


def test_high_throughput_of_256_ranks_gives_the_oracles_bits() -> None:
    """Every row where the oracle has it, and every byte that crosses, of rows and beside them."""
    ranks, most = 256, 2
    case = plain_case(
        ranks, seed=3, domain_size=NODE, num_experts=ranks, topk=8, max_tokens=most, tokens=_tokens(ranks, most),
        hidden=16, layout="flat", capacity=ranks * most, capacity_kind="ample",
    )  # fmt: skip
    plan = HtPlan.of(case)
    assert not plan.exact and not plan.cached and not plan.extra  # an oracle for each is what takes long
    outcome = check_ht_case(case, network_seed=3)
    received = [int(result.dispatched.total) for result in outcome.ranks]
    assert sum(received) > ranks * most and len({result.stats["window_bytes"] for result in outcome.ranks}) == 1


@pytest.mark.slow
def test_two_racks_give_the_oracles_bits_in_low_latency() -> None:
    ranks, most = 144, 2
    case = plain_case(
        ranks, domain_size=72, num_experts=2 * ranks, topk=8, max_tokens=most, tokens=_tokens(ranks, most), hidden=32
    )
    check_case(case, network_seed=3)


@pytest.mark.slow
def test_eight_racks_give_the_oracles_bits_in_high_throughput() -> None:
    """576 ranks, each of which has the counts of all."""
    ranks, rack = 576, 72
    expected = Expected(
        plain_case(
            ranks, domain_size=rack, num_experts=ranks, topk=8, max_tokens=1, tokens=_tokens(ranks, 1), hidden=16,
            layout="flat", capacity=ranks, capacity_kind="ample",
        )
    )  # fmt: skip

    def body(group: ThreadGroup) -> int:
        options = {"mode": "ht", "device": "cpu", "network_seed": 3, "arena_bytes": 1 << 16, "timeout": 600.0}
        with case_buffer(expected.case, group, **options) as buffer:
            run_case(expected, buffer, mode="ht")
            return int(buffer.stats()["window_bytes"])

    windows = run_ranks(ranks, body, timeout=1200.0)
    assert len(windows) == ranks and len(set(windows)) == 1


@pytest.mark.parametrize(("ranks", "domain"), [(4, 4), (4, 2), (16, 8)])
def test_the_bytes_of_a_window_are_those_foretold(ranks: int, domain: int) -> None:
    """What docs/network.md says of sizes that no test can have."""
    shape = {"max_tokens": 5, "hidden": 48, "topk": 3, "num_experts": 2 * ranks}
    row, home, arena = 96 + 16, 96, 1 << 16  # scales of 2 groups of 32 take 8 bytes, aligned to 16
    sizes = _C.ht_sizes_for(ranks, domain, shape["num_experts"], shape["topk"], shape["max_tokens"], row, home, arena)

    def body(group: ThreadGroup) -> int:
        with nccl_ep.Buffer.for_shapes(
            group, mode="ht", domain_size=domain, arena_bytes=arena, device="cpu", **shape
        ) as buffer:
            return int(buffer.stats()["window_bytes"])

    assert run_ranks(ranks, body) == [_C.ht_window_bytes(ranks, sizes)] * ranks


def test_more_ranks_than_a_world_has_are_refused() -> None:
    shape = (8, 2056, 1, 1, 128, 128, 0)  # domain size, experts, top-k, tokens, bytes of rows, of sums, of the arena
    with pytest.raises(ValueError, match="2056 ranks, a world has at most 2048"):
        _C.ht_sizes_for(2056, *shape)


def test_a_missing_rank_of_128_is_named() -> None:
    """With its node."""
    ranks, missing = 128, 97
    case = plain_case(ranks, domain_size=NODE, topk=1, tokens=(1,) * ranks, max_tokens=1, hidden=16)
    inputs = case.inputs()

    def body(group: ThreadGroup, deadline: float) -> str:
        with case_buffer(case, group, device="cpu") as buffer:
            buffer.set_timeout(deadline)
            group.allgather(b"", PATIENCE)
            text = ""
            if group.rank() != missing:
                given = inputs[group.rank()]
                with pytest.raises(nccl_ep.TimeoutError) as caught:
                    nccl_ep.dispatch(
                        given.x, given.topk_idx, given.topk_weights, buffer=buffer, **case.dispatch_kwargs()
                    )
                text = str(caught.value)
            group.allgather(b"", PATIENCE)
            return text

    def run(deadline: float) -> None:
        texts = run_ranks(ranks, lambda group: body(group, deadline))
        named = [text for text in texts if f"of rank {missing} in dispatch 1" in text]
        if len(named) <= ranks // 2:
            raise Late(texts[0])
        assert all(f"; rank {missing} is on node {missing // NODE};" in text for text in named), named[0]

    with_more_time(run, (5.0, 30.0))
