"""Low latency between domains of emulated GPUs, over a simulated network: run by tests/support/emulated.py.

What is sent lands late, in pieces and in any order, by the buffer's ``network_seed``; a signal says nothing of puts but
its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C, reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.chains import CHAINS, HOWS, Chain, How, chain_buffer
from tests.gpu.delays import COMBINE, DISPATCH, delays, meet, set_testing, stress
from tests.gpu.ranks import wide_case
from tests.support.cases import Case, cases_of
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import case_buffer, check_case
from tests.support.patience import Late, with_more_time

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

NUM_CASES = int(os.environ.get("NCCL_EP_EMULATOR_CASES", "24"))
TOPOLOGIES = ((1, 2), (2, 1), (2, 2), (4, 1), (2, 3), (2, 4), (3, 2))  # domains, ranks of each
OF_SEVERAL = TOPOLOGIES[1:]
RUNS = 60  # of a chain, in the search for a planted bug
PERCENT = 2000  # of a delay's usual length
CHAIN_RUNS = 2  # and one to finish; an odd number of operations each, so that both parities come
LIMIT = 1200.0  # seconds for the ranks of a long test: emulated GPUs are slow, and the machine may be busy
LAYOUTS = ("expert_major", "packed", "rank_major", "flat")
# Of a channel, and blocks that send, forward and add up: with few SMs the plan has one of each. None divides another.
SLICES = "3,4,5,4"


def name_of(topology: tuple[int, int]) -> str:
    return f"{topology[0]}x{topology[1]}"


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
def test_generated_cases_give_the_oracles_bits(topology: tuple[int, int]) -> None:
    """Every result to the bit, and every byte that crosses (``check_network``)."""
    for number, case in enumerate(cases_of(topology, NUM_CASES)):
        check_case(case, staged=number % 3 == 1, network_seed=number % 4 * 31, num_sms=(0, 1, 3)[number % 3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_cases_give_the_oracles_bits(layout: str) -> None:
    """More tokens than channels, rows of several pieces."""
    for number, quant in enumerate((None, "fp8", "fp8_ue8m0")):
        case = wide_case(4, layout=layout, quant=quant, domain_size=2, tokens=(96, 41, 0, 9))
        check_case(case, staged=number == 1, network_seed=7 + number)


@pytest.mark.parametrize("topology", [(2, 1), (2, 2), (4, 1)], ids=name_of)
@pytest.mark.parametrize("wire", reference.WIRE_FORMATS)
def test_sums_in_fewer_bytes_have_the_oracles_bits(wire: str, topology: tuple[int, int]) -> None:
    """A domain's sum is rounded as a rank's is, in rows whose last block is short, and crosses in as few bytes."""
    ranks = topology[0] * topology[1]
    how: dict[str, Any] = {"hidden": 640 + 16, "wire_dtype": wire, "domain_size": topology[1]}
    ways: list[dict[str, Any]] = [
        {"layout": "flat", "biases": 1},
        {"layout": "packed", "combine_weights": "masked", "rows_content": "few"},
        {"layout": "expert_major", "rows_content": "special", "rows_dtype": torch.float16},
    ]
    for number, way in enumerate(ways):
        case = plain_case(ranks, **how, **way)
        assert case.home_bytes <= 0.66 * 2 * case.hidden
        check_case(case, staged=number == 1, network_seed=11 + number)


def check_one_buffer(cases: list[Case], **options: Any) -> None:
    """Forth and back. options: of the buffer."""
    expected = [Expected(case) for case in cases]

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, expected, domain_size=cases[0].domain_size, network_seed=5, **options) as buffer:
            for number, case in enumerate([*expected, *reversed(expected)]):
                case.run(buffer, staged=number % 3 == 1)

    run_ranks(cases[0].num_ranks, body, timeout=LIMIT)


@pytest.mark.parametrize("topology", OF_SEVERAL, ids=name_of)
def test_one_buffer_serves_many_cases(topology: tuple[int, int]) -> None:
    """Ranks may be a call ahead of others, and what their calls leave behind lies in the way of the next."""
    check_one_buffer(cases_of(topology, 6, first=500))


def check_chains(seed: int, runs: int, **options: Any) -> None:
    """Of four ranks, each run so many times and once more to finish. seed: of delays; options: of the buffer."""

    def body(group: ThreadGroup) -> int:
        wrong = 0
        with chain_buffer(group, "cpu", network_seed=9, **options) as buffer:
            hows: list[How] = [How()] * len(CHAINS) + ([] if seed else list(HOWS))
            for number, how in enumerate(hows):
                chain = Chain(CHAINS[number % len(CHAINS)], buffer, seed=1, how=how)
                for _ in range(runs):
                    chain.run()
                    chain.renew()
                wrong += chain.finish()
        return wrong

    with delays(seed=seed, percent=PERCENT):
        assert run_ranks(4, body, timeout=LIMIT) == [0] * 4


@pytest.mark.parametrize("topology", [(2, 2), (4, 1)], ids=name_of)
@pytest.mark.parametrize("seed", [0, 3], ids=["plain", "delays"])
def test_chains_are_right_under_delays(topology: tuple[int, int], seed: int) -> None:
    check_chains(seed, CHAIN_RUNS, domain_size=topology[1])


def test_a_call_ends_behind_all_that_is_sent_to_it() -> None:
    """Channels without a token bring a signal alone. The network is so slow that what a call does not wait for is under
    way in later ones, of which the simulated NIC tells."""
    case = Expected(plain_case(2, domain_size=1, layout="packed", tokens=(1, 1), tokens_kind="some"))

    def body(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, network_seed=100_003, device="cpu") as buffer:
            out = case.dispatch(buffer)
            for _ in range(60):
                case.combine_weights(buffer, out.handle)
            buffer.wire_bytes()

    run_ranks(2, body, timeout=LIMIT)


# ---- Blocks share the rows of a channel


@pytest.fixture(name="slices")
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_PLAN_R", SLICES)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("topology", [(2, 1), (2, 2), (3, 2)], ids=name_of)
def test_parts_of_a_channel_give_the_oracles_bits(topology: tuple[int, int]) -> None:
    """Fewer pieces than blocks, more of them, and shares that are empty."""
    check_one_buffer(cases_of(topology, 5, first=900))
    ranks = topology[0] * topology[1]
    case = wide_case(ranks, layout="flat", domain_size=topology[1], tokens=(96, 41, 0, 9, 96, 1)[:ranks])
    check_case(case, network_seed=13)


@pytest.mark.usefixtures("slices")
def test_chains_of_parts_are_right_under_delays() -> None:
    check_chains(3, 1, domain_size=2)


def test_one_domain_has_no_network() -> None:
    def body(group: ThreadGroup) -> tuple[dict[str, Any], int]:
        case = plain_case(2)
        with (
            case_buffer(case, group, device="cpu") as alone,
            case_buffer(case, group, domain_size=1, device="cpu") as two,
        ):
            return alone.wire_bytes(), two.stats()["window_bytes"] - alone.stats()["window_bytes"]

    for wire, more in run_ranks(2, body):
        assert "network" not in wire and more > 0


# ---- A node that is gone


PHASES = ("dispatch", "receive", "combine", "scalars")


@pytest.mark.parametrize("phase", PHASES)
def test_a_dead_node_is_named(phase: str) -> None:
    """All survivors, of its rail peers and of the others; a new buffer works in the same process."""
    check_the_dead_are_named(phase, {2, 3})


def check_the_dead_are_named(phase: str, dead: set[int], **options: Any) -> None:
    """Of two nodes of two ranks. options: of the buffer."""
    case = Expected(plain_case(4, layout="expert_major", domain_size=2))

    def step(buffer: nccl_ep.Buffer) -> Callable[[], Any]:
        out = case.send(buffer, mode="ll")
        given = case.given_on(buffer)
        return {
            "dispatch": lambda: case.send(buffer, given, mode="ll"),
            "receive": lambda: nccl_ep.dispatch_send(
                given.x, given.topk_idx, buffer=buffer, **case.case.dispatch_kwargs()
            ).receive(),
            "combine": lambda: nccl_ep.combine(out.x, out.handle),
            "scalars": lambda: nccl_ep.combine_weights(out.weights, out.handle),
        }[phase]

    def run(deadline: float) -> None:
        def body(group: ThreadGroup) -> str:
            text = ""
            with case_buffer(case.case, group, device="cpu", **options) as buffer:
                call = step(buffer)
                meet(group)
                if group.rank() not in dead:
                    buffer.set_timeout(deadline)
                    with pytest.raises(nccl_ep.TimeoutError) as caught:
                        call()
                        buffer.check()
                    text = str(caught.value)
                meet(group)
            with case_buffer(case.case, group, device="cpu", **options) as buffer:
                case.run(buffer)
            return text

        for rank, text in enumerate(run_ranks(4, body)):
            if rank in dead:
                continue
            kind = "combine 1" if phase in ("combine", "scalars") else "dispatch 2"
            named = re.search(rf"rank {rank} waited {deadline:g} s for the [a-z -]+ of rank (\d) .*in {kind} ", text)
            assert named, text
            if int(named[1]) not in dead:  # a living rank was slow
                raise Late(text)
            assert f"rank {named[1]} is on node 1" in text, text

    with_more_time(run)


def test_weights_for_fewer_tokens_do_not_come() -> None:
    """The home rank combines with the handle of a shorter dispatch than the rank of the rows."""

    def run(deadline: float) -> None:
        def body(group: ThreadGroup) -> str:
            x, ids = torch.ones(8, 64), torch.full((8, 1), 1 - group.rank())
            with nccl_ep.Buffer.for_shapes(
                group, max_tokens=8, hidden=64, topk=1, num_experts=2, dtype=x.dtype, device="cpu", domain_size=1
            ) as buffer:
                whole = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2)
                count = 3 if group.rank() == 0 else 8
                shorter = nccl_ep.dispatch(x[:count], ids[:count], buffer=buffer, num_experts=2)
                out = shorter if group.rank() == 0 else whole
                meet(group)
                buffer.set_timeout(deadline)
                with pytest.raises(nccl_ep.TimeoutError) as caught:
                    nccl_ep.combine(out.x, out.handle, weights=torch.ones(count, 1))
                    buffer.check()
                meet(group)
            return str(caught.value)

        text = run_ranks(2, body)[1]
        if "for the weights of" not in text:  # rank 0 was slow
            raise Late(text)
        assert re.search(rf"rank 1 waited {deadline:g} s for the weights of rank 0 .*in combine 1 .*8.*3", text), text

    with_more_time(run)


# ---- Planted bugs

BUGS = {
    "signal_before_data": DISPATCH,  # of the network, which knows no kinds: of both
    "one_parity": DISPATCH | COMBINE,
    "one_staging_bank": DISPATCH | COMBINE,
    "skipped_wait": DISPATCH | COMBINE,
    "early_source": DISPATCH | COMBINE,
    "skipped_chunk": DISPATCH | COMBINE,
    "early_slice": DISPATCH | COMBINE,
}


def search(
    bugs: list[str], kinds: int, seed: int, ranks: int = 2, *, runs: int = RUNS, make_buffer: Any = chain_buffer,
    kind_of_chain: type[Chain] = Chain, letters: str = "dddcccc", how: dict[str, Any] | None = None, **options: Any,
) -> str:  # fmt: skip
    """What went wrong in a chain, on any rank; empty: nothing. how: of the chain, options: of the buffer."""

    def body(group: ThreadGroup) -> str:
        # So slow a network that a rank may end a call before what it has sent in it has landed.
        with make_buffer(group, "cpu", **{"domain_size": 1, "network_seed": 100_000 + seed, **options}) as buffer:
            chain = kind_of_chain(letters, buffer, seed=seed, **(how or {}))
            chain.run()
            if bugs:
                buffer.set_timeout(4.0)
            meet(group)
            if group.rank() == 0:
                set_testing(seed=seed, bugs=bugs, kinds=kinds, percent=PERCENT)
            meet(group)
            return stress(chain, chain.run, runs if bugs else runs // 8, group, batch=1)

    try:
        return run_ranks(ranks, body, timeout=LIMIT)[0]
    finally:
        set_testing()


@pytest.mark.parametrize(
    ("bug", "kind"), [(bug, kind) for bug, kinds in BUGS.items() for kind in (DISPATCH, COMBINE) if kinds & kind]
)
def test_planted_bugs_are_found(bug: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_SMS", "3")
    if bug == "early_slice":
        monkeypatch.setenv("EP_PLAN_R", SLICES)
    found = search([bug], kind, seed=11)
    print(f"{bug}: {found}")
    assert found, f"{bug}: not noticed in {RUNS} runs"


def test_the_search_finds_nothing_without_a_bug() -> None:
    assert not search([], DISPATCH | COMBINE, seed=11)


@pytest.mark.usefixtures("slices")
def test_the_search_of_parts_finds_nothing_without_a_bug() -> None:
    assert not search([], DISPATCH | COMBINE, seed=11)
