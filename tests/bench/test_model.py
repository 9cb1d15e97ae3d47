"""The model of several nodes: its arithmetic against counting, and its constants against where they are from."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from statistics import mean

import pytest

from bench import model, records
from bench.__main__ import main
from bench.model import low_latency
from bench.model_ht import high_throughput
from bench.model_numbers import CONSTANTS, Cluster, constant
from bench.published_nodes import LATENCIES
from tests import ROOT

RECORDS = ROOT / "records"


@pytest.mark.parametrize(
    ("nodes", "gpus", "topk", "experts"), [(2, 8, 8, 256), (4, 8, 8, 256), (3, 2, 4, 24), (8, 1, 1, 8)]
)
def test_rows_are_those_of_random_routing(nodes: int, gpus: int, topk: int, experts: int) -> None:
    cluster, draw, trials = Cluster(nodes, gpus, topk=topk, experts=experts), random.Random(1), 20000
    counted: dict[str, int] = {"expert": 0, "mesh": 0, "rail": 0}
    on_a_hit_node = []
    for _ in range(trials):
        ranks = [expert // (experts // cluster.ranks) for expert in draw.sample(range(experts), topk)]
        remote = [rank for rank in ranks if rank >= gpus]  # of a token of rank 0
        counted["expert"] += len(remote)
        counted["mesh"] += len(set(remote))
        counted["rail"] += len({rank // gpus for rank in remote})
        if there := {rank for rank in ranks if rank // gpus == nodes - 1}:
            on_a_hit_node.append(len(there))
    for path, count in counted.items():
        assert cluster.rows(path) == pytest.approx(count / trials, rel=0.02), path
    assert cluster.fan_out() == pytest.approx(mean(on_a_hit_node), rel=0.02)


def test_the_rail_sends_fewer_rows_than_the_mesh() -> None:
    for nodes in (2, 4, 8):
        rows = [Cluster(nodes).rows(path) for path in ("rail", "mesh", "expert")]
        assert rows == sorted(rows) and rows[0] < rows[1] < rows[2]
    assert Cluster(2).rows("rail") == pytest.approx(1.0, abs=0.01)
    assert Cluster(2).rows("expert") == 4.0


def test_the_document_has_these_rows() -> None:
    text = (ROOT / "docs" / "network.md").read_text()
    for nodes in (2, 4, 8):
        rows = [f"{Cluster(nodes).rows(path):.2f}" for path in ("expert", "mesh", "rail")]
        assert f"| {nodes} | {' | '.join(rows)} |" in text


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_latencies_of_one_token_are_in_the_record(op: str) -> None:
    found = [
        each["value"] for each in records.load([RECORDS / "ll_4xh200_2026-11-22d.json"])
        if (each["system"], each["op"], each["tokens"], each["figure"], each["dtype"], each["layout"], each["api"])
        == ("nccl_ep", op, 1, "graph_pdl", "bf16", "expert_major", "native")
    ]  # fmt: skip
    assert min(found) - 0.05 <= CONSTANTS[op].value <= max(found) + 0.05


def test_high_throughput_over_nvlink_is_in_the_record() -> None:
    by_system: dict[str, list[float]] = {"nccl_ep": [], "floor_wire": []}
    for each in records.load([RECORDS / "ht_4xh200_2026-11-22d.json"]):
        kind = (each["tokens"], each["dtype"], each["layout"], each["figure"])
        if each["op"] in ("dispatch", "combine") and kind == (4096, "bf16", "flat", "graph"):
            by_system[each["system"]].append(each["value"])
    reached = mean(by_system["floor_wire"]) / mean(by_system["nccl_ep"])
    assert CONSTANTS["ht over nvlink"].value == pytest.approx(reached, abs=0.01)


def test_the_wire_explains_what_deepep_published() -> None:
    """At 48 GB/s, what is left is about the same on 16, 32 and 64 ranks; at another rate it is not."""

    def spread(rate: float) -> float:
        left = [model.fit(each, rate) for each in LATENCIES if each.system == "DeepEP V1"]
        assert len(left) == 3
        return max(left) - min(left)

    assert spread(CONSTANTS["nic"].value) < 8
    assert spread(30.0) > 30 and spread(90.0) > 30
    assert 30 < model.fit(LATENCIES[0]) < 60


def test_estimates_grow_with_bytes_and_never_beat_the_wire() -> None:
    for nodes in (2, 4, 8):
        for path in ("rail", "mesh"):
            last = 0.0
            for tokens in (1, 8, 32, 128):
                found = low_latency(Cluster(nodes), tokens, "dispatch", path, "fp8")
                assert found.us > last and found.us > found.wire_us
                assert low_latency(Cluster(nodes), tokens, "dispatch", path, "bf16").us > last
                last = found.us
        assert low_latency(Cluster(nodes), 128, "dispatch", "rail", "fp8").bound == "wire"
        ht = high_throughput(Cluster(nodes), 4096, "combine", "bf16")
        assert ht.us > ht.wire_us and ht.nic_mb == pytest.approx(
            4096 * Cluster(nodes).rows("rail") * (14336 + 72) / 1e6
        )


def test_a_proxy_wants_few_messages() -> None:
    by_gpu = low_latency(Cluster(8), 128, "dispatch", "mesh", "fp8")
    by_proxy = low_latency(Cluster(8), 128, "dispatch", "mesh", "fp8", proxy=True)
    assert (by_gpu.bound, by_proxy.bound) == ("wire", "posting")
    assert low_latency(Cluster(8), 128, "dispatch", "rail", "fp8", proxy=True).bound == "wire"


def test_where_a_buffer_takes_the_mesh_by_itself() -> None:
    """The rule of csrc/layout/ll/rail_regions.h: ll_link_size. What it takes is never a tenth slower than the other."""
    for nodes, gpus, tokens in itertools.product((2, 4, 8), (2, 4, 8), (1, 2, 4, 5, 8, 16, 128)):
        us = {
            path: sum(low_latency(Cluster(nodes, gpus), tokens, op, path, "fp8").us for op in ("dispatch", "combine"))
            for path in ("rail", "mesh")
        }
        is_mesh = tokens * 7168 * 2 <= 64 << 10 and (nodes - 1) * gpus <= 8
        assert us["mesh" if is_mesh else "rail"] < 1.1 * min(us.values()), (nodes, gpus, tokens, us)


def test_assumptions_can_be_scaled() -> None:
    once, twice = (low_latency(Cluster(2), 1, "dispatch", "rail", "bf16", scale=scale).us for scale in (1.0, 2.0))
    assert CONSTANTS["hop"].value <= twice - once < 4 * CONSTANTS["hop"].value
    assert constant("put", 2.0) == CONSTANTS["put"].value


def test_the_command_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    assert main(["model", "--nodes", "2", "--tokens", "1,128", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("MODEL, not measured")
    for each in LATENCIES:
        assert each.system in shown and each.source in shown
    for name, each in CONSTANTS.items():
        assert name in shown and each.source in shown and each.kind in ("measured", "published", "assumed")
    written = json.loads(file.read_text())
    assert written["kind"] == "model"
    assert {each["mode"] for each in written["estimates"]} == {"ll", "ht"}
    assert len(written["estimates"]) == 2 * 2 * 3 + 3
    with pytest.raises(ValueError, match="not a list of records"):
        records.load([file])  # a model is no measurement


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "1"], "--nodes 1: must be 2 or more"),
        (["--nodes", "5"], "256 experts must divide over 5 x 8 ranks"),
        (["--tokens", "0"], "sizes must be positive"),
        (["--topk", "300"], "--topk at most --experts"),
        (["--scale", "0"], "sizes must be positive"),
    ],
)
def test_arguments_without_sense_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        model.parse(arguments)
    assert text in capsys.readouterr().err
