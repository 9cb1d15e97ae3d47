"""High throughput between domains of emulated GPUs, over a simulated network: run by tests/support/emulated.py.

What is sent lands late, in pieces and in any order, by the buffer's ``network_seed``; a signal says nothing of puts but
its own.

A signal before its data is not among the planted bugs: these kernels read a message that is not there, and the process
ends with it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import nccl_ep
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu import handles, ht_ranks
from tests.gpu.delays import COMBINE, DISPATCH, delays, meet
from tests.gpu.ht_chains import HT_CHAINS, HtChain, ht_chain_buffer
from tests.ht.harness import HT_STEPS, HtCoverage, check_ht_case, ht_step
from tests.network.test_emulated_network import OF_SEVERAL, PERCENT, TOPOLOGIES, name_of, search
from tests.support.cases import cases_of
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer
from tests.support.patience import Late, with_more_time

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

NUM_CASES = 16  # of each topology


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
def test_generated_cases_give_the_oracles_bits(topology: tuple[int, int]) -> None:
    """Every result to the bit, and every byte that crosses (``check_ht_network``)."""
    coverage = HtCoverage()
    for number, case in enumerate(cases_of(topology, NUM_CASES)):
        coverage.add(check_ht_case(case, network_seed=number % 4 * 31, num_sms=(0, 1, 3)[number % 3]))
    print("\n" + coverage.report())


def wide_cases(domains: int, size: int) -> list[ht_ranks.Case]:
    return [dataclasses.replace(case, domain_size=size) for case in ht_ranks.wide_cases(domains * size)]


@pytest.mark.parametrize("topology", [(2, 2), (4, 1)], ids=name_of)
def test_wide_cases_give_the_oracles_bits(topology: tuple[int, int]) -> None:
    """More tokens than chunks, rows of several pieces, every layout."""
    for number, case in enumerate(wide_cases(*topology)):
        check_ht_case(case, network_seed=7 + number, num_sms=number % 3)


@pytest.mark.parametrize("topology", OF_SEVERAL, ids=name_of)
def test_one_buffer_serves_many_cases(topology: tuple[int, int]) -> None:
    """Ranks may be a call ahead of others, and what their calls leave behind lies in the way of the next."""
    cases = [ht_ranks.ExpectedHt(case) for case in cases_of(topology, 5, first=500)]

    def body(group: ThreadGroup) -> None:
        with ht_ranks.shared_ht_buffer(
            group, [each.case for each in cases], device="cpu", domain_size=topology[1], network_seed=5
        ) as buffer:
            for number, case in enumerate([*cases, *reversed(cases)]):
                case.run(buffer, num_sms=number % 4)

    run_ranks(topology[0] * topology[1], body)


@pytest.mark.parametrize("topology", [(2, 1), (2, 2)], ids=name_of)
@pytest.mark.parametrize("seed", [0, 3], ids=["plain", "delays"])
def test_chains_are_right_under_delays(topology: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_SMS", "3")  # of which each rank's waiting warps take less from the others

    def body(group: ThreadGroup) -> int:
        wrong = 0
        with ht_chain_buffer(group, "cpu", domain_size=topology[1], network_seed=9) as buffer:
            for letters in HT_CHAINS:
                chain = HtChain(letters, buffer, given=False, seed=1)
                for _ in range(2):
                    chain.run()
                    chain.renew()
                wrong += chain.finish()
        return wrong

    with delays(seed=seed, percent=PERCENT):
        assert not any(run_ranks(topology[0] * topology[1], body))


# ---- A node that is gone


@pytest.mark.parametrize("phase", HT_STEPS)
def test_a_dead_node_is_named(phase: str) -> None:
    """All survivors, of its rail peers and of the others; a new buffer works in the same process."""
    layout = "packed" if phase == "weighted combine" else "flat"
    case = Expected(plain_case(4, layout=layout, domain_size=2))

    def run(deadline: float) -> None:
        def body(group: ThreadGroup) -> str:
            text = ""
            with case_buffer(case.case, group, mode="ht", device="cpu") as buffer:
                out = case.send(buffer)
                call = ht_step(phase, case, buffer, out)
                meet(group)
                if group.rank() < 2:
                    buffer.set_timeout(deadline)
                    with pytest.raises(nccl_ep.TimeoutError) as caught:
                        call()
                        buffer.check()
                    text = str(caught.value)
                meet(group)
            with case_buffer(case.case, group, mode="ht", device="cpu") as buffer:
                case.check_dispatch(case.send(buffer), group.rank())
            return text

        for rank, text in enumerate(run_ranks(4, body)[:2]):
            kind = "dispatch 2" if phase in ("dispatch", "exact", "cached") else "combine 1"
            pattern = rf"rank {rank} waited {deadline:g} s for .* of rank (\d) .*in high-throughput {kind} "
            named = re.search(pattern, text)
            assert named, text
            if int(named[1]) < 2:  # a living rank was slow
                raise Late(text)
            assert f"rank {named[1]} is on node 1" in text, text

    with_more_time(run)


# ---- Planted bugs

# One staging bank of op messages shows nothing here: a peer sends its chunks when it has read the message, so whoever
# has them may write the next.
BUGS = {
    "one_parity": DISPATCH | COMBINE,
    "skipped_wait": DISPATCH | COMBINE,
    "early_source": DISPATCH | COMBINE,
    "skipped_chunk": DISPATCH,
}
HOW: dict[str, Any] = {
    "seed": 11, "runs": 24, "make_buffer": ht_chain_buffer, "kind_of_chain": HtChain, "letters": HT_CHAINS[-1],
    "how": {"given": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "kind"), [(bug, kind) for bug, kinds in BUGS.items() for kind in (DISPATCH, COMBINE) if kinds & kind]
)
def test_planted_bugs_are_found(bug: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_SMS", "3")
    found = search([bug], kind, **HOW)
    print(f"{bug}: {found}")
    assert found, f"{bug}: not noticed"


def test_the_search_finds_nothing_without_a_bug() -> None:
    assert not search([], DISPATCH | COMBINE, **HOW)


# ---- The rest of the interface


def test_a_changed_handle_fails_without_touching_memory() -> None:
    run_ranks(2, lambda group: handles.changed_handles(group, "cpu", domain_size=1))


def test_changed_places_fail_without_touching_memory() -> None:
    run_ranks(4, lambda group: handles.changed_places(group, "cpu", domain_size=2))
