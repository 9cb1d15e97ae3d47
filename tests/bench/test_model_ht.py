"""High throughput in the model of several nodes: arithmetic, the table of docs/network.md, and what others reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import model_ht, records
from bench.__main__ import main
from bench.model_ht import enough_sms, high_throughput, logical_gbps, moved_rows, window_bytes, window_row
from bench.model_numbers import CONSTANTS, Cluster
from bench.published_nodes import THROUGHPUTS

ROOT = Path(__file__).parent.parent.parent
NODES = (2, 4, 8, 16, 32)


def test_what_an_sm_moves_is_in_the_record() -> None:
    """Of two ranks, each token has an expert on both but for one in 256 or so: two rows a token."""
    cluster, found = Cluster(1, 2), []
    for each in records.load([ROOT / "records/ht_2xh100_2026-11-24d.json"]):
        kind = (each["system"], each["api"], each["op"], each["figure"], each["tokens"], each["dtype"], each["layout"])
        if kind == ("nccl_ep", "native", "dispatch", "graph", 4096, "bf16", "flat") and each["num_sms"] in (4, 8):
            moved = 4096 * cluster.own_rows() * cluster.row_bytes("bf16")
            found.append(moved / (each["value"] * each["num_sms"]) / 1e3)
    assert len(found) == 2
    assert CONSTANTS["ht of an sm"].value == pytest.approx(sum(found) / 2, rel=0.03)


@pytest.mark.parametrize("nodes", NODES)
def test_few_sms_are_what_it_waits_for_and_more_are_not(nodes: int) -> None:
    cluster = Cluster(nodes)
    enough = enough_sms(cluster)
    assert 1 < enough <= 16
    few, many, most = (high_throughput(cluster, 4096, "dispatch", "fp8", sms) for sms in (enough - 1, enough, 132))
    assert few.bound == "SMs" and few.us > many.us == most.us and many.bound == most.bound == "wire"
    assert (few.num_sms, many.num_sms) == (enough - 1, enough)
    assert (
        few.nic_mb
        == many.nic_mb
        == pytest.approx(4096 * cluster.rows("rail") * (cluster.row_bytes("fp8") + cluster.routing_bytes()) / 1e6)
    )


def test_a_row_is_moved_once_for_each_node_and_handed_out_there() -> None:
    """Of one node, what its own ranks get. Of several, a row is stored once for each node, and handed out there."""
    assert moved_rows(Cluster(1)) == pytest.approx(Cluster(1).own_rows())
    assert moved_rows(Cluster(2)) == pytest.approx(2 * Cluster(2).own_rows() + 1.0, abs=0.02)


def test_times_grow_with_tokens_and_nodes() -> None:
    times = [[high_throughput(Cluster(nodes), tokens, "combine", "bf16").us for tokens in (1024, 4096, 8192)]
             for nodes in NODES]  # fmt: skip
    assert all(row == sorted(row) for row in times) and all(
        list(column) == sorted(column) for column in zip(*times, strict=True)
    )


def test_others_stay_below_what_the_wire_allows() -> None:
    """GB/s with the own node's rows: of n nodes that all get every token, n / (n - 1) of the NIC's."""
    for each in THROUGHPUTS:
        nodes = each.ranks // 8
        assert each.dispatch <= CONSTANTS["nic at most"].value * nodes / (nodes - 1), each
        assert each.source and each.tokens in (4096, 8192)
    two = Cluster(2)
    assert logical_gbps(two, high_throughput(two, 4096, "dispatch", "fp8")) == pytest.approx(2 * 47, rel=0.04)


@pytest.mark.parametrize("nodes", NODES)
def test_the_bytes_of_a_window_are_in_the_document(nodes: int) -> None:
    """tests/network/test_many_ranks.py holds the sum against windows that were made."""
    found = window_bytes(Cluster(nodes))
    assert found["counts"] + found["rail"] + found["staged"] == found["window"] and min(found.values()) > 0
    text = (ROOT / "docs" / "network.md").read_text()
    assert f"| {' | '.join(window_row(Cluster(nodes)))} |" in text


def test_the_model_prints_every_node_count_size_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--nodes", "2,4", "--tokens", "8", "--ht-tokens", "1024,4096", "--ht-sms", "2,16"]) == 0
    shown = capsys.readouterr().out
    for tokens, sms in ((1024, 2), (4096, 2), (1024, 16), (4096, 16)):
        assert any(line.split()[:3] == ["4", "ht", str(tokens)] and f" {sms} " in line for line in shown.splitlines())
    for each in THROUGHPUTS:
        assert f"{each.dispatch:g}" in shown and each.source in shown
    assert "with 8 SMs or more" in shown and "The window of high throughput for 4096 tokens" in shown
    assert main(["model", "--nodes", "2", "--tokens", "8", "--ht-tokens", "0"]) == 0
    assert " ht " not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--ht-sms", "0"], ["--ht-tokens", "-1"]])
def test_sizes_that_are_not_positive_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", *arguments])
    assert "sizes must be positive" in capsys.readouterr().err


def test_the_default_is_what_the_model_says() -> None:
    assert high_throughput(Cluster(2), model_ht.MAX_TOKENS, "combine", "bf16").num_sms == model_ht.NUM_SMS
