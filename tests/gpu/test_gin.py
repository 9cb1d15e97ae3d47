"""NCCL's own network (GIN) between GPUs of one host: its device code, its proxy, and a loopback plugin for the NIC.

Two ranks on two GPUs are two domains of one rank, four ranks are two domains of two. Times say nothing about a NIC.
NCCL_EP_TEST_GIN_NCCL names the libnccl.so.2 to preload where torch brings an older one; with several, separated by ":",
each runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nccl_ep import _C
from tests.gin_loopback.worlds import LIBRARIES, Ended, run_world, values, why_not
from tests.gpu.ht_chains import HT_CHAINS
from tests.ht.harness import HT_STEPS
from tests.ll.late_send import SHORT_MS
from tests.ll.mask_ranks import PHASES
from tests.support.gpus import NUM_GPUS, num_cases, num_replays

_reason = why_not() if NUM_GPUS else "no GPU here"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_reason), reason=_reason)]
on_libraries = pytest.mark.parametrize(
    "library", LIBRARIES or [None], ids=lambda each: each.parent.name if each else "loaded"
)
FIRST = LIBRARIES[0] if LIBRARIES else None
of_four_ranks = pytest.mark.skipif(bool(why_not(4)), reason=why_not(4) or "four ranks run here")

# Of the plugin, and what its statistics must show then.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "delayed": ({"delay_us": 300}, ""),
    "reordered": ({"delay_us": 100, "reorder": 1}, "passed"),
    "early": ({"delay_us": 100, "early": 1}, "completed_early"),
    "all": ({"delay_us": 200, "reorder": 1, "early": 1, "seed": 7}, "passed"),
}
TRIALS = 2
MESSAGES_OF_A_TRIAL = 84  # of gin_ranks.MESSAGES, from each peer


def note(name: str, found: Any) -> None:
    """Adds to the file that NCCL_EP_TEST_GIN_JSON names."""
    if file := os.environ.get("NCCL_EP_TEST_GIN_JSON"):
        with open(file, "a") as lines:
            lines.write(json.dumps({"test": name, "found": found}) + "\n")


def statistics(file: Path) -> list[dict[str, int]]:
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["rank"])


@on_libraries
@pytest.mark.parametrize("way", WAYS)
def test_bytes_between_two_ranks_are_right(library: Path | None, way: str, tmp_path: Path) -> None:
    plugin, shown = WAYS[way]
    options = {**plugin, "statistics": tmp_path / "statistics"}
    found = values(run_world(tmp_path, 2, 1, "probe_bytes", ["rail"], TRIALS, library=library, plugin=options))
    note(f"two ranks, {way}", found)
    for each in found:
        assert each["right"] == TRIALS * MESSAGES_OF_A_TRIAL
        assert each["backend"] == "proxy"
    counted = statistics(tmp_path / "statistics")
    assert len(counted) == 2
    for each in counted:
        assert each["requests"] >= TRIALS * MESSAGES_OF_A_TRIAL
        assert not shown or each[shown] > 0, each
    note(f"two ranks, {way}, network", counted)


@of_four_ranks
@pytest.mark.parametrize("way", ["plain", "all"])
def test_bytes_between_two_domains_of_two_are_right(way: str, tmp_path: Path) -> None:
    plugin, shown = WAYS[way]
    options = {**plugin, "statistics": tmp_path / "statistics"}
    ended = run_world(tmp_path, 4, 2, "probe_bytes", ["rail", "mesh"], 1, library=FIRST, plugin=options, seconds=200.0)
    found = values(ended)
    note(f"two domains of two, {way}", found)
    for each in found:
        assert each["right"] == MESSAGES_OF_A_TRIAL * (1 + 2)
    assert not shown or all(each[shown] > 0 for each in statistics(tmp_path / "statistics"))


@on_libraries
def test_bare_puts_are_timed(library: Path | None, tmp_path: Path) -> None:
    found = values(run_world(tmp_path, 2, 1, "probe_times", 40, library=library))
    note("times of bare puts, us", found)
    for each in found:
        assert all(us > 0 for us in each.values())


def test_a_network_that_loses_messages(tmp_path: Path) -> None:
    """Rank 1's end stops taking messages: rank 1 waits for rank 0, which then waits for rank 1."""
    stall = {"stall_after": 100, "faulty_rank": 1}
    found = values(run_world(tmp_path, 2, 1, "probe_late", 2.0, library=FIRST, plugin=stall))
    note("a network that loses messages", found)
    for rank, each in enumerate(found):
        assert each["text"].startswith(f"TimeoutError: rank {rank} waited 2 s for rank {1 - rank} on context"), each
        assert 2.0 <= each["seconds"] < 20.0
        assert each["again"].startswith("UsageError: this probe has failed")


def test_a_dead_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    ended = run_world(tmp_path, 2, 1, "probe_dead", 2.0, library=FIRST, kill=[1])
    note("a dead rank", [each.value for each in ended])
    assert ended[1].exitcode == -9
    assert ended[0].value["text"].startswith("TimeoutError: rank 0 waited 2 s for rank 1 on context"), ended[0]
    assert 2.0 <= ended[0].value["seconds"] < 20.0


def test_a_network_that_does_not_connect(tmp_path: Path) -> None:
    """NCCL waits in the plugin: making it ends at the deadline all the same."""
    stall = {"connect_stall_s": 60}
    found = values(run_world(tmp_path, 2, 1, "make_probe", 10.0, library=FIRST, plugin=stall))
    note("a network that does not connect", found)
    for each in found:
        assert "TimeoutError" in each["text"] and "has not connected the network of 2 ranks within 10 s" in each["text"]
        assert 10.0 <= each["seconds"] < 40.0


def test_without_a_network_the_probe_says_so(tmp_path: Path) -> None:
    ended = run_world(
        tmp_path,
        2,
        1,
        "make_probe",
        30.0,
        library=FIRST,
        environment={"NCCL_RMA_PLUGIN": "none", "NCCL_GIN_ENABLE": "1"},
    )
    found = values(ended)
    note("no network", found)
    for each in found:
        assert "SystemError" in each["text"], each
        assert "offers no GPU-initiated networking (GIN) between all ranks: every GPU needs a NIC" in each["text"], each
        assert "\n" not in each["text"]


def test_a_claim_that_is_not_nccls(tmp_path: Path) -> None:
    found = values(run_world(tmp_path, 2, 1, "make_probe", 30.0, library=FIRST, lsa_size=2))
    note("a claim unlike NCCL's domains", found)
    for each in found:
        assert "the buffer is for NVLink domains of 1 rank, but NCCL finds domains of 2" in each["text"], each
        assert "make it with domain_size=2" in each["text"]


@pytest.mark.skipif(not _C.nccl_info().get("network_problem"), reason="the NCCL loaded has kernels here")
def test_an_nccl_that_is_too_old(tmp_path: Path) -> None:
    found = values(run_world(tmp_path, 2, 1, "make_probe", 30.0))
    note("an NCCL that is too old", found)
    for each in found:
        assert each["text"].startswith("SystemError: ") and "several NVLink domains need NCCL 2.3" in each["text"], each
        assert 'pip install --no-deps "nvidia-nccl-cu13' in each["text"]


# ---- Low latency

TOPOLOGIES = {"2x1": (2, 1), "2x2": (4, 2)}  # ranks, ranks of a domain
in_topologies = pytest.mark.parametrize("topology", ["2x1", pytest.param("2x2", marks=of_four_ranks)])
CASES = num_cases(12)


def run_cases(name: str, topology: str, way: str, body: tuple[Any, ...], tmp_path: Path) -> list[Any]:
    """What every rank found, once its bytes have crossed as the way says."""
    ranks, size = TOPOLOGIES[topology]
    plugin, shown = WAYS[way]
    options = {**plugin, "statistics": tmp_path / "statistics"}
    found = values(run_world(tmp_path, ranks, size, *body, library=FIRST, plugin=options, seconds=200.0))
    counted = statistics(tmp_path / "statistics")
    note(name, {"ranks": found, "network": counted})
    assert len(found) == len(counted) == ranks
    for each in counted:
        assert each["bytes"] > 0 and (not shown or each[shown] > 0)
    return found


def run_chains(name: str, topology: str, way: str, body: str, tmp_path: Path) -> list[int]:
    """How many chains every rank ran without a wrong element."""
    ranks, size = TOPOLOGIES[topology]
    plugin = WAYS[way][0]
    replays = num_replays(60)
    found = values(run_world(tmp_path, ranks, size, body, replays, library=FIRST, plugin=plugin, seconds=200.0))
    note(name, found)
    assert [each["wrong"] for each in found] == [0] * ranks
    return [each["chains"] for each in found]


@pytest.mark.parametrize("way", ["plain", "all"])
@in_topologies
def test_low_latency_has_the_oracles_bits(topology: str, way: str, tmp_path: Path) -> None:
    body = ("ll_cases", CASES, 100)
    for each in run_cases(f"low latency {topology}, {way}", topology, way, body, tmp_path):
        assert each["cases"] == CASES + 4 and each["dispatches"] == 2 * each["cases"]


@pytest.mark.parametrize("way", ["plain", "all"])
@in_topologies
def test_low_latency_in_graphs_is_right(topology: str, way: str, tmp_path: Path) -> None:
    ran = run_chains(f"low latency in graphs {topology}, {way}", topology, way, "ll_chains", tmp_path)
    assert all(each > 5 for each in ran)


@pytest.mark.parametrize("network", ["rail", "mesh", "mesh, masks"])
@in_topologies
def test_a_send_ends_while_another_rank_is_late(topology: str, network: str, tmp_path: Path) -> None:
    ranks, size = TOPOLOGIES[topology]
    found = values(run_world(tmp_path, ranks, size, "ll_late_send", network, library=FIRST))
    note(f"sends beside a late rank, {topology}, {network}, ms", found)
    assert max(found[:-1]) < SHORT_MS


def test_low_latency_takes_little_more_than_bare_puts(tmp_path: Path) -> None:
    """Nothing but the network is slow: at most 1.3 times the time of bare puts of the same bytes."""
    found = values(run_world(tmp_path, 2, 1, "ll_times", 40, library=FIRST))
    note("low latency beside bare puts, us", found)
    for op in ("dispatch", "pair"):
        assert max(each[op] for each in found) <= 1.3 * max(each[f"{op} puts"] for each in found), found


def check_survivors(ended: list[Ended], size: int, seconds: float, operation: str) -> None:
    """All ranks but those of the last domain have named whom they waited for, and made a buffer afterwards."""
    for rank, each in enumerate(ended):
        if rank >= len(ended) - size:
            assert each.exitcode == -9
            continue
        assert not each.error, each.output
        text = each.value["text"].replace("the buffer has failed: ", "")  # who asks a second time is told this too
        assert text.startswith(f"TimeoutError: rank {rank} waited {seconds:g} s for "), each.value
        assert f"in {operation}" in text, each.value
        assert each.value["seconds"] < 25 and each.value["destroyed"] < 25 and each.value["again"], each.value


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@in_topologies
def test_a_dead_node_is_named_by_the_survivors(topology: str, phase: str, tmp_path: Path) -> None:
    ranks, size = TOPOLOGIES[topology]
    dead = list(range(ranks - size, ranks))
    ended = run_world(tmp_path, ranks, size, "ll_dead", phase, 3.0, library=FIRST, kill=dead, seconds=150.0)
    note(f"a dead node {topology}, {phase}", [each.value for each in ended])
    check_survivors(ended, size, 3.0, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_late_ranks_are_masked(phase: str, tmp_path: Path) -> None:
    """Over the mesh."""
    found = values(run_world(tmp_path, 2, 1, "ll_masks", phase, 3.0, library=FIRST, seconds=150.0))
    note(f"a late rank, {phase}", found)
    assert found == [2, 2]


# ---- High throughput

HT_CASES = num_cases(24)


@pytest.mark.parametrize("way", ["plain", "all"])
@in_topologies
def test_high_throughput_has_the_oracles_bits(topology: str, way: str, tmp_path: Path) -> None:
    body = ("ht_cases", HT_CASES, 500, 60.0)
    found = run_cases(f"high throughput {topology}, {way}", topology, way, body, tmp_path)
    assert len({each["runs"] for each in found}) == 1
    for each in found:
        assert each["dispatches"] >= each["runs"] >= 2 * each["cases"]


@pytest.mark.parametrize("way", ["plain", "all"])
@in_topologies
def test_high_throughput_in_graphs_is_right(topology: str, way: str, tmp_path: Path) -> None:
    ran = run_chains(f"high throughput in graphs {topology}, {way}", topology, way, "ht_chains", tmp_path)
    assert all(each == 2 * len(HT_CHAINS) for each in ran)


@pytest.mark.parametrize("phase", HT_STEPS)
def test_a_dead_node_in_high_throughput_is_named_by_the_survivors(phase: str, tmp_path: Path) -> None:
    kind = "dispatch" if phase in ("dispatch", "exact", "cached") else "combine"
    ended = run_world(tmp_path, 2, 1, "ht_dead", phase, 3.0, library=FIRST, kill=[1], seconds=150.0)
    note(f"a dead node in high throughput, {phase}", [each.value for each in ended])
    check_survivors(ended, 1, 3.0, f"high-throughput {kind}")
