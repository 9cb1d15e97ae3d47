"""The mesh of low latency between domains of emulated GPUs (``ll_network="mesh"``), over a simulated network: run by
tests/support/emulated.py. With domains of one GPU it is the rail, which test_emulated_network.py is about.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.delays import COMBINE, DISPATCH
from tests.gpu.ranks import wide_case
from tests.network.test_emulated_network import (
    PHASES,
    SLICES,
    check_chains,
    check_one_buffer,
    check_the_dead_are_named,
    name_of,
    search,
)
from tests.support.cases import cases_of
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer, check_case

pytestmark = pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")

NUM_CASES = int(os.environ.get("NCCL_EP_EMULATOR_CASES", "12"))
TOPOLOGIES = ((2, 2), (4, 1), (2, 3))  # domains, ranks of each
MESH: dict[str, Any] = {"ll_network": "mesh"}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
def test_generated_cases_give_the_oracles_bits(topology: tuple[int, int]) -> None:
    """Every result to the bit, and every byte that crosses: a row for each rank that has an expert of the token."""
    for number, case in enumerate(cases_of(topology, NUM_CASES, first=2000)):
        check_case(case, staged=number % 3 == 1, network_seed=number % 4 * 31, num_sms=(0, 1, 3)[number % 3], **MESH)


def test_wide_cases_give_the_oracles_bits() -> None:
    """More tokens than channels, rows of several pieces."""
    for number, (layout, quant) in enumerate((("packed", None), ("flat", "fp8"), ("expert_major", "fp8_ue8m0"))):
        case = wide_case(4, layout=layout, quant=quant, domain_size=2, tokens=(96, 41, 0, 9))
        check_case(case, staged=number == 1, network_seed=7 + number, **MESH)


@pytest.mark.parametrize("wire", ["fp8", "logfmt", torch.float32])
def test_sums_in_fewer_bytes_have_the_oracles_bits(wire: Any) -> None:
    """A rank's sum is rounded once before it crosses, and the sum of its domain at home."""
    how: dict[str, Any] = {"hidden": 640 + 16, "wire_dtype": wire, "domain_size": 2}
    for number, way in enumerate(({"layout": "flat"}, {"layout": "packed", "combine_weights": "masked"})):
        check_case(plain_case(4, **how, **way), staged=number == 1, network_seed=11 + number, **MESH)


@pytest.mark.parametrize("plan", ["", SLICES], ids=["plain", "slices"])
def test_one_buffer_serves_many_cases(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may be a call ahead of others, and what their calls leave behind lies in the way of the next."""
    if plan:
        monkeypatch.setenv("EP_PLAN_R", plan)
    check_one_buffer(cases_of((2, 2), 5, first=700), **MESH)


@pytest.mark.parametrize("seed", [0, 3], ids=["plain", "delays"])
def test_chains_are_right_under_delays(seed: int) -> None:
    check_chains(seed, 1, domain_size=2, **MESH)


@pytest.mark.parametrize("phase", PHASES)
def test_a_dead_rank_is_named(phase: str) -> None:
    """One rank of a node: its neighbour and the ranks of the other node name it."""
    check_the_dead_are_named(phase, {3}, **MESH)


def test_more_tokens_than_its_channels_hold_are_refused() -> None:
    def body(group: ThreadGroup) -> None:
        case = plain_case(4, tokens=(1,) * 4, max_tokens=4097, hidden=16, domain_size=2)
        text = r"max_tokens is 4097, low latency over several NVLink domains serves 4096 in the mesh: .* \(ll_network\)"
        with case_buffer(case, group, device="cpu", **MESH) as buffer, pytest.raises(ValueError, match=text):
            Expected(case).send(buffer, mode="ll")

    run_ranks(4, body)


def test_the_mesh_takes_more_memory_and_auto_takes_it_for_little() -> None:
    """The mesh has room for a row of every token to each rank, where the rail has it for each domain. Where little is
    sent to few ranks, the mesh is taken."""

    def body(group: ThreadGroup) -> list[tuple[int, str]]:
        found = []
        small, large = plain_case(4), plain_case(4, tokens=(9,) * 4, max_tokens=9, hidden=8192)
        for case, ll_network in ((small, "auto"), (small, "rail"), (small, "mesh"), (large, "auto")):
            with case_buffer(case, group, domain_size=2, device="cpu", ll_network=ll_network) as buffer:
                found.append((buffer.stats()["window_bytes"], buffer.stats()["ll_network"]))
        return found

    for automatic, rail, mesh, large in run_ranks(4, body):
        assert automatic == mesh and rail[0] < mesh[0]
        assert [each[1] for each in (automatic, rail, mesh, large)] == ["mesh", "rail", "mesh", "rail"]


# ---- Planted bugs

BUGS = {
    "signal_before_data": DISPATCH,
    "one_parity": COMBINE,
    "one_staging_bank": DISPATCH,
    "skipped_wait": DISPATCH | COMBINE,
    "early_source": COMBINE,
    "skipped_chunk": DISPATCH | COMBINE,
    "early_slice": DISPATCH | COMBINE,
}
TWO_NODES: dict[str, Any] = {"ranks": 4, "domain_size": 2, **MESH}


@pytest.mark.parametrize(
    ("bug", "kind"), [(bug, kind) for bug, kinds in BUGS.items() for kind in (DISPATCH, COMBINE) if kinds & kind]
)
def test_planted_bugs_are_found(bug: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_EMULATOR_SMS", "3")
    if bug == "early_slice":
        monkeypatch.setenv("EP_PLAN_R", SLICES)
    found = search([bug], kind, seed=11, **TWO_NODES)
    print(f"{bug}: {found}")
    assert found, f"{bug}: not noticed"


def test_the_search_finds_nothing_without_a_bug() -> None:
    assert not search([], DISPATCH | COMBINE, seed=11, **TWO_NODES)
