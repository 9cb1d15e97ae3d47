"""The tutorial's table of the example model is that of its record; tables leave out what was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.moe_lm.table import place_of, read_reports, record_of, summary_table, tables
from tests import ROOT

RECORD = "reports/model_2xh200_2026-11-27.json"


def test_the_tutorial_has_the_figures_of_its_record() -> None:
    page = (ROOT / "docs/tutorial.md").read_text()
    assert f"records/{RECORD}" in page
    records = json.loads((ROOT / "records" / RECORD).read_text())
    assert "\n".join(summary_table(records)) in page, "print it with examples/moe_lm/table.py"
    assert all(record["date"] and record["revision"] for record in records)


def report(exchange: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden": 64, "layers": 1, "experts": 8, "topk": 2}
    common = {"what": "training", "exchange": exchange, "ranks": 2, "device": "cpu", "sizes": sizes}
    return common | {"tokens_a_step": 100, "tokens_per_s": 1000.0, "exchange_ms": 12.34, "losses": [1.0]} | more


def test_tables_and_records_leave_out_what_failed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(report("nccl_ep")))
    (tmp_path / "b.json").write_text(json.dumps(report("all_to_all_single", exchange_ms=None)))
    (tmp_path / "c_failure.json").write_text('{"what": "failure"}')
    (tmp_path / "record.json").write_text("[]")
    reports = read_reports(tmp_path)
    assert len(reports) == 2
    assert "| training, hidden 64, 1 layer: tokens/s | 1,000 | 1,000 |  |" in summary_table(reports)
    assert "| hidden 64, 8 experts, 1 layer | 1,000 | 12.3 of 100 | 1,000 |  |" in tables(reports)
    assert "losses" not in record_of(reports)[0]
    with pytest.raises(SystemExit, match="no report"):
        read_reports(tmp_path / "nothing")


def test_a_place_is_ranks_and_device() -> None:
    assert place_of({"ranks": 2, "device": "cpu"}) == "2 CPU ranks"
    assert place_of({"ranks": 1, "device": "NVIDIA H100 80GB HBM3"}) == "1 H100"
