"""The benchmark where there is a GPU: every figure is a number, and says on how many SMs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import records
from tests.bench.test_bench import run
from tests.support.gpus import needs_gpu

pytestmark = needs_gpu
FIGURES = {"ll": {"graph", "graph_pdl", "kernel", "event", "host"}, "ht": {"graph", "kernel", "event", "host"}}


@pytest.mark.parametrize("bench", ["ll", "ht"])
def test_every_figure_is_measured_on_one_gpu(bench: str, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    small = ("--tokens", "16", "--hidden", "1024", "--experts", "16", "--dtype", "bf16")
    run("-m", "bench", bench, "--ranks", "1", *small, "--quick", "--no-rivals", "--json", str(path))
    ours = [record for record in records.load([path]) if record["system"] == "nccl_ep"]
    timed = [record for record in ours if record["unit"] == "us"]
    assert {record["figure"] for record in timed} == FIGURES[bench]
    for record in timed:
        assert record["value"] > 0 and 1 <= record["num_sms_used"] <= 132, record
    sizes = {record["figure"]: record["value"] for record in ours if record["unit"] == "MB"}
    assert 0 < sizes["memory"] <= sizes["memory_total"]
