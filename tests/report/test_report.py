"""The page and the trace of ``python -m nccl_ep.report``, beside the files that they are made of."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nccl_ep.report import __main__ as report
from nccl_ep.report import charts
from nccl_ep.report import page as report_page
from nccl_ep.report.figures import figures
from nccl_ep.report.inputs import load
from tests import ROOT
from tests.report import programs
from tests.report.programs import RANKS, ROW_BYTES, STEPS

HEAD = {
    "nccl_ep_record": 1, "version": "0", "host": "a", "machine": "m", "process": 1, "torch": "t", "unix_ns": 0,
    "clock_ns": 0,
}  # fmt: skip


class Page(HTMLParser):
    """Its figures, its text, and all that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.heat: dict[str, dict[tuple[int, int], float]] = {}
        self.bars: list[float] = []
        self.lines: list[dict[str, Any]] = []  # of the charts
        self.text, self.fetched, self.data = "", [], ""
        self._in_heat = self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        self._tag = "data" if attributes.get("id") == "data" else tag
        self.fetched += [attributes[name] for name in ("src", "href") if attributes.get(name, "data:,") != "data:,"]
        if "data-heat" in attributes:
            self._in_heat = attributes["data-heat"]
        if "data-lines" in attributes:
            self.lines.append(json.loads(attributes["data-lines"]))
        if attributes.get("class") == "cell":
            place = int(attributes["data-row"]), int(attributes["data-column"])
            self.heat.setdefault(self._in_heat, {})[place] = float(attributes["data-value"])
        if attributes.get("class") == "bar":
            self.bars.append(float(attributes["data-value"]))

    def handle_data(self, data: str) -> None:
        if self._tag == "data":
            self.data += data
        elif self._tag not in ("style", "script"):
            self.text += data


def made(tmp_path: Path, *files: Path) -> Page:
    out = tmp_path / "page.html"
    assert report.main([*map(str, files), "--out", str(out)]) == 0
    text = out.read_text()
    page = Page(text)
    assert page.fetched == [] and "@import" not in text and "url(" not in text
    return page


def step(operation: str, begin_us: float, us: float, **more: Any) -> dict[str, Any]:
    begin = int(begin_us * 1000)
    given = {
        "in_buffer": 0, "operation": operation, "number": 1, "begin_ns": begin, "end_ns": begin + int(us * 1000),
        "tokens": 4, "hidden": 8, "topk": 1, "experts": 2, "row_bytes": 16, "is_home_bound": "combine" in operation,
    }  # fmt: skip
    return given | more


def write(folder: Path, rank: int, *operations: dict[str, Any], device: str = "cpu", **head: Any) -> Path:
    buffer = {"buffer": 0, "name": f"b.rank{rank}", "rank": rank, "num_ranks": 2, "device": device}
    path = folder / f"rank{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEAD | {"rank": rank} | head, buffer, *operations)))
    return path


def test_the_page_has_the_figures_of_the_files(tmp_path: Path) -> None:
    programs.recorded(tmp_path / "run", "ll", "ht")
    page = made(tmp_path, tmp_path / "run")
    rows = programs.counted_rows()
    assert page.heat["dispatch"] == {
        (i, j): 2 * rows[i][j] * ROW_BYTES for i in range(RANKS) for j in range(RANKS)
    }  # of both modes
    assert page.heat["combine"] == {(j, i): value for (i, j), value in page.heat["dispatch"].items()}
    choices = [programs.counted_choices(step) for step in range(STEPS)]
    assert page.bars == [2 * sum(each) for each in zip(*choices, strict=True)]
    data = json.loads(page.data)["recorded"]
    assert data == figures(load([tmp_path / "run"]).recorded)
    assert page.heat["waits"] == {(i, j): data["waits_us"][i][j] for i in range(RANKS) for j in range(RANKS)}
    assert "These are CPU ranks" in page.text and f"calls, ht_dispatch{STEPS}{STEPS}" in page.text


def test_the_trace_has_every_call(tmp_path: Path) -> None:
    programs.recorded(tmp_path / "run", "ll", "ht")
    made(tmp_path, tmp_path / "run")
    events = json.loads((tmp_path / "page.trace.json").read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == RANKS * STEPS * 4 and {event["pid"] for event in spans} == set(range(RANKS))
    files = [json.loads(line) for path in sorted((tmp_path / "run").iterdir()) for line in path.open()]
    host_us = [(line["end_ns"] - line["begin_ns"]) / 1e3 for line in files if "in_buffer" in line]
    assert sorted(event["dur"] for event in spans) == pytest.approx(sorted(host_us))


def test_a_rank_waits_for_the_last_one_but_no_longer_than_its_operation(tmp_path: Path) -> None:
    write(tmp_path, 0, step("dispatch send", 0, 1), step("dispatch receive", 10, 90), step("ht combine", 300, 10))
    write(tmp_path, 1, step("dispatch", 60, 40), step("ht combine", 350, 20))
    found = figures(load([tmp_path]).recorded)
    # Work between send and receive is no wait; rank 0's combine ended before rank 1 came.
    assert found["waits_us"] == [[0, 50 + 10], [0, 0]]
    (dispatch,), (combine,) = found["times"]["LL dispatch"], found["times"]["HT combine"]
    assert (dispatch["host_us"], dispatch["wait_us"], dispatch["late_rank"]) == ([91, 40], 50, 1)
    assert (combine["host_us"], combine["device_us"]) == ([10, 20], [None, None])


def test_times_of_gpus_are_those_on_the_device(tmp_path: Path) -> None:
    for rank, begin in enumerate((100.0, 130.0)):
        on_gpu = {"device_begin_ns": int(begin * 1000), "device_us": 80.5 - rank * 30}
        write(tmp_path, rank, step("dispatch", 0, 5, **on_gpu), device=f"cuda:{rank}")
    found = figures(load([tmp_path]).recorded)
    assert found["waits_us"] == [[0, 30], [0, 0]]
    (dispatch,) = found["times"]["LL dispatch"]
    assert (dispatch["device_us"], dispatch["host_us"]) == ([80.5, 50.5], [5, 5])
    page = made(tmp_path, tmp_path)
    assert "on the GPU" in page.text and "CPU ranks: their" not in page.text
    events = json.loads((tmp_path / "page.trace.json").read_text())["traceEvents"]
    assert sorted(event["tid"] for event in events if event["ph"] == "X") == [0, 0, 1, 1]


def test_machines_are_brought_together_by_their_wall_clocks(tmp_path: Path) -> None:
    write(tmp_path, 0, step("dispatch", 0, 50), machine="m0", unix_ns=1_000_000, clock_ns=0)
    write(tmp_path, 1, step("dispatch", 5020, 30), machine="m1", unix_ns=6_000_000, clock_ns=10_000_000)
    found = figures(load([tmp_path]).recorded)
    assert found["waits_us"] == [[0, 20], [0, 0]] and "2 machines" in found["notes"][0]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, 1, step("dispatch", 0, 5, is_captured=True))
    path.write_text(path.read_text() + '{"in_buffer": 0, "oper')
    notes = " ".join(figures(load([path]).recorded)["notes"])
    assert "No file of rank 0" in notes and "rank1.jsonl has no end" in notes
    assert "1 operations went into CUDA graphs" in notes
    assert "No operation with rows was recorded" in made(tmp_path, path).text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("no JSON", "is no JSON, must be"),
        ('{"some": 1}', "is of a kind that is not known"),
        ("[1]", "is of a kind that is not known"),
        (json.dumps(HEAD | {"rank": 0, "nccl_ep_record": 9}) + "\n", "is a recording of format 9, this report reads 1"),
        (json.dumps(HEAD | {"rank": 0}) + "\nno\n{}\n", "line 2 is no JSON object"),
        (json.dumps(HEAD | {"rank": 0}) + "\n{}\n", "line 2 is of no known kind"),
        (json.dumps(HEAD | {"rank": 0}) + '\n{"stats_of": 3, "stats": {}}\n', "is damaged: IndexError"),
        ('{"nccl_ep_record": 1}\n{"buffer": 0, "name": "b"}\n', "a head lacks version, rank"),
        (json.dumps(HEAD | {"rank": 0}) + '\n{"in_buffer": 0}\n', "an operation lacks operation, number"),
        ('[{"bench": "ll"}]', "a record lacks system, api"),
        ('{"kind": "model"}', "is damaged: KeyError: 'estimates'"),
        ('{"kind": "model", "estimates": [{"op": "dispatch"}]}', "an estimate lacks mode, path"),
        ('{"facts": {}, "findings": [1]}', "1 is no finding"),
        ("\x00\xff", "is no text"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as ended:
        report.main([str(path), "--out", str(tmp_path / "page.html")])
    assert ended.value.code == 2 and str(path) in (said := capsys.readouterr().err) and what in said
    assert not (tmp_path / "page.html").exists()


WRONG = [None, -1, 1.5, "x", [], {}, True, 10**30, float("nan"), [1, "a"], [[1]]]
OPERATION = {
    "in_buffer": 0, "operation": "dispatch", "number": 1, "begin_ns": 1, "end_ns": 2, "tokens": 1, "row_bytes": 16,
    "is_home_bound": False, "rows": [1, 0], "choices": [1, 0], "device_us": 1.5, "device_begin_ns": 1,
}  # fmt: skip
BUFFER = {"buffer": 0, "name": "b", "num_ranks": 2, "device": "cpu"}


@pytest.mark.parametrize("place", range(3))
def test_damage_of_any_field_is_a_page_or_an_error_with_the_files_name(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback, nor numbers that no browser reads."""
    path = tmp_path / "rank0.jsonl"
    whole: list[dict[str, Any]] = [HEAD | {"rank": 0}, BUFFER, OPERATION]
    refused = 0
    for name in whole[place]:
        for value in WRONG:
            lines = [line | {name: value} if at == place else line for at, line in enumerate(whole)]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            try:
                report.main([str(path), "--out", str(tmp_path / "page.html")])
                json.loads((tmp_path / "page.trace.json").read_text(), parse_constant=pytest.fail)
            except SystemExit:
                refused += 1
                assert "rank0.jsonl" in capsys.readouterr().err
    assert refused > len(WRONG) * len(whole[place]) // 3


def test_a_file_to_read_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, 0, step("dispatch", 0, 5))
    before = path.read_text()
    with pytest.raises(SystemExit):
        report.main([str(path), "--out", str(path)])
    assert "--out is" in capsys.readouterr().err and path.read_text() == before
    with pytest.raises(SystemExit):  # it is in the folder that is read
        report.main([str(tmp_path), "--out", str(path)])
    assert "--out is" in capsys.readouterr().err and path.read_text() == before
    trace = path.rename(tmp_path / "page.trace.json")
    with pytest.raises(SystemExit):
        report.main([str(trace), "--out", str(tmp_path / "page.html")])
    assert "page.trace.json is one of the files" in capsys.readouterr().err and trace.read_text() == before


def test_a_page_that_is_no_file_has_no_trace_beside_it(tmp_path: Path) -> None:
    path, link = write(tmp_path, 0, step("dispatch", 0, 5)), tmp_path / "null"
    link.symlink_to("/dev/null")
    assert report.main([str(path), "--out", str(link)]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["null", "rank0.jsonl"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, 0, step("dispatch", 0, 5))
    assert len(load([tmp_path, path]).recorded) == 1


def test_a_long_recording_shows_the_first_calls_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "MOST_SPANS", 6)
    for rank in range(2):
        write(tmp_path, rank, *(step("dispatch", 100 * number, 60, number=number + 1) for number in range(5)))
    page = made(tmp_path, tmp_path)
    shown = [(span["rank"], span["number"]) for span in json.loads(page.data)["recorded"]["spans"]]
    assert sorted(shown) == [(rank, number) for rank in range(2) for number in (1, 2, 3)]
    assert "Here are the first 6 of 10 calls; the trace has all." in page.text


def test_files_of_different_runs_are_told(tmp_path: Path) -> None:
    for late_us, count in ((70e6, 1), (50, 0)):
        write(tmp_path, 0, step("dispatch", 0, 60))
        write(tmp_path, 1, step("dispatch", late_us, 60))
        notes = figures(load([tmp_path]).recorded)["notes"]
        told = "Rank 0 ended LL dispatch 1 70 s before rank 1 began it: the files may be of different runs."
        assert notes.count(told) == count


def test_files_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 0)
    with pytest.raises(ValueError, match=r"a/rank0.jsonl and .*b/rank0.jsonl are both of rank 0"):
        load([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=r"has no \*.jsonl"):
        load([tmp_path])
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        load([tmp_path / "none.json"])
    other = write(tmp_path / "b", 1)
    other.write_text(other.read_text().replace('"num_ranks": 2', '"num_ranks": 4'))
    with pytest.raises(ValueError, match=r"rank0.jsonl of 2 ranks and .*rank1.jsonl of 4 ranks"):
        load([tmp_path / "a", other])


def test_records_stand_beside_the_floor(tmp_path: Path) -> None:
    path = ROOT / "records/ll_2xh100_2026-11-27.json"
    page = made(tmp_path, path)
    records = json.loads(path.read_text())
    call = {"op": "dispatch", "tokens": 128, "dtype": "fp8"}
    mine, floor = (
        next(r["value"] for r in records if r["system"] == system and r["figure"] == "graph"
             and r["api"] == api and all(r[name] == value for name, value in call.items()))
        for system, api in (("nccl_ep", "native"), ("floor_wire", "computed"))
    )  # fmt: skip
    said = f"dispatchnccl_epnativein a CUDA graphfp8128{mine:,.1f}"
    assert re.search(re.escape(said) + rf"[\d.]+{floor:,.1f}{mine / floor:.2f}", page.text)
    chart = next(each for each in page.lines if each["name"] == "dispatch, fp8")
    shown = {each["name"]: dict(zip(chart["at"], each["values"], strict=True)) for each in chart["series"]}
    assert shown["nccl_ep, in a CUDA graph"][128] == mine and shown["floor: the wire alone"][128] == floor


def test_estimates_installations_and_counters_are_shown(tmp_path: Path) -> None:
    estimate = {
        "nodes": 2, "tokens": 128, "mode": "ll", "op": "dispatch", "path": "rail", "dtype": "fp8", "us": 61.24,
        "wire_us": 20.06, "nic_mb": 1.5, "rows": 1.0, "messages": 2, "bound": "posting", "num_sms": 0,
    }  # fmt: skip
    files = {
        "model.json": {"kind": "model", "estimates": [estimate]},
        "doctor.json": {
            "uses": "CPU ranks", "self_test": None, "facts": {"python": "3.11"},
            "findings": [{"level": "warning", "text": "<no NIC>", "remedy": "buy one"}],
        },
        "stats.json": {"calls": {"dispatch": 7}, "window_bytes": 4096, "masked_ranks": [1, 2]},
    }  # fmt: skip
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    text = made(tmp_path, *(tmp_path / name for name in files)).text
    assert "dispatchllrailfp8212861.220.11.50posting" in text
    assert "warning<no NIC>buy one" in text and "CPU ranks will be used" in text
    assert "calls, dispatch7" in text and "window_bytes4,096" in text and "masked_ranks1, 2" in text


def test_long_lines_keep_their_largest_values() -> None:
    values = [float(i % 97) for i in range(2000)]
    shown = charts.line_chart([("a", "s1", values)], "us", "operation")
    (data,) = re.findall(r"&quot;values&quot;: \[(.*?)\]", shown)
    points = [float(each) for each in data.split(", ")]
    assert len(points) == 500 <= charts.MOST_POINTS and max(points) == 96 and points[1] == 7


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "B", "0 B"), (1536, "B", "1.54 kB"), (2.5e9, "", "2.5G"), (12.34, "us", "12.3 us"), (4.5e6, "us", "4.5 s")],
)
def test_figures_have_units(value: float, unit: str, text: str) -> None:
    assert charts.si(value, unit) == text
