"""``python -m bench compare``: what has become slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import compare, records
from bench.records import Record


def made(value: float | None, revision: str = "old", **fields: Any) -> Record:
    common = {
        "bench": "ht", "system": "nccl_ep", "api": "ops", "op": "combine", "figure": "graph", "ranks": 2,
        "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "dtype": "bf16", "layout": "flat",
        "routing": "uniform", "num_sms": 0, "seed": 1, "device": "a GPU", "date": "2026-01-01",
    }  # fmt: skip
    return records.make(common, value=value, revision=revision, **fields)


def test_only_equal_calls_are_compared() -> None:
    before = [
        made(100.0),
        made(90.0, "best"),
        made(50.0, dtype="fp8"),
        made(10.0, system="NCCL EP"),
        made(20.0, figure="event"),
        made(30.0, op="pair") | {"change": "an experiment"},
        made(None, op="dispatch"),
    ]
    now = [made(99.0, "new"), made(99.0, "new", ranks=4), made(15.0, system="NCCL EP"), made(25.0, figure="event")]
    now += [made(40.0, op="pair"), made(40.0, op="dispatch"), made(45.0, "new", dtype="fp8")]
    slower, faster = compare.find(before, now)
    assert (slower.before["revision"], slower.now["revision"]) == ("best", "new")
    assert slower.percent == pytest.approx(10.0)
    assert faster.percent == pytest.approx(-10.0)
    assert [each.now["value"] for each in compare.find(before, now, ["event"])] == [25.0]


def test_what_has_grown_is_printed_with_both_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    records.save(old, [made(100.0), made(50.0, op="dispatch")])
    records.save(new, [made(104.0, "new"), made(49.0, "new", op="dispatch")])
    # A file that is among both is compared with the others.
    assert bench.main(["compare", str(new), str(old), str(new)]) == 1
    title, line, summary = capsys.readouterr().out.splitlines()
    assert title.split()[-5:] == ["before", "at", "now", "at", "percent"]
    assert line.split()[:3] == ["ht", "2", "combine"]
    assert line.split()[-5:] == ["100.00", "old", "104.00", "new", "+4.0"]
    assert summary.startswith("2 measurements that were made before: 1 have grown by more than 3 %, 0 have shrunk")
    assert bench.main(["compare", "--percent", "5", str(new), str(old)]) == 0
    assert capsys.readouterr().out.startswith("2 measurements that were made before: 0 have grown by more than 5 %")
    with pytest.raises(SystemExit):
        bench.main(["compare", "--figures", "graph,grahp", str(new), str(old)])
    assert "grahp: must be of graph, graph_pdl, kernel, memory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["compare", str(new), str(new)])
    assert "new.json alone, which is NOW" in capsys.readouterr().err
