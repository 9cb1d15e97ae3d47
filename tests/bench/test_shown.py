"""What the benchmark shows of records: its table and its plots; and what it says of files that are none."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import compare, configuration, fit, plot, records, series, table
from tests import ROOT
from tests.bench.test_bench import gpu_record


def sweep() -> list[records.Record]:
    found = []
    for tokens in (1, 128):
        for op in configuration.OPS:
            at = {"op": op, "tokens": tokens, "figure": "graph"}
            for sms in (8, 16, 132):
                found.append(gpu_record(**at, value=900.0 / sms, p99=99.0, num_sms=sms, num_sms_used=sms))
            found.append(gpu_record(**at, value=7.0, num_sms_used=132, p99=7.5))
            found.append(gpu_record(**at, system="floor_wire", api="computed", value=3.25 if tokens == 128 else 1.25))
            found.append(gpu_record(op=op, tokens=tokens, figure="graph_pdl", value=None, skipped="no switch"))
    return found


GRAPH, KERNEL = series.KINDS["graph"], series.KINDS["kernel"]
FLOOR = f"the links alone: {series.KINDS['floor']}"


def shapes(found: list[records.Record]) -> tuple[tuple[Any, ...], list[records.Record]]:
    """The first shape and its records."""
    return next(iter(plot._shapes([record for record in found if table.is_measured(record)]).items()))


def lines(figure: Any, panel: int = 0) -> dict[str, Any]:
    return {line.get_label(): line for line in figure.axes[panel].get_lines()}


def test_plots_draw_what_a_sweep_has(tmp_path: Path) -> None:
    found = sweep()
    names = [file.name for file in plot.draw(found, tmp_path)]
    kinds = ("ll_tokens", "ll_num_sms", "ll_beside_others")
    assert names == [f"{name}.{kind}" for name in kinds for kind in ("png", "svg")]
    key, group = shapes(found)
    drawn = {name: list(line.get_ydata()) for name, line in lines(plot.plot_tokens(key, group)).items()}
    assert drawn[f"nccl_ep: {GRAPH}"] == [7.0, 7.0] and drawn[FLOOR] == [1.25, 3.25]
    assert drawn[f"NCCL EP v0.1.0 expert-major: {KERNEL}"] == [18.3, 21.1, 22.6, 37.3]
    sms = plot.plot_num_sms(key, group).axes[0].get_lines()
    assert list(sms[0].get_xdata()) == [8, 16, 132] and list(sms[0].get_ydata()) == [112.5, 56.25, 900 / 132]


def test_pictures_have_units_and_no_words_of_the_records() -> None:
    found = [*sweep(), gpu_record(op="pair", figure="event", tokens=128, value=50.0)]
    key, group = shapes(found)
    figures = [make(key, group) for make in (plot.plot_tokens, plot.plot_num_sms, plot.plot_bars)]
    for figure in figures:
        texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        texts += [axes.get_title() for axes in figure.axes]
        assert texts and not [text for text in texts if re.search("graph_pdl|floor|num_sms|event|pair", text)], texts
        for axes in figure.axes:
            assert "µs" in axes.get_xlabel() + axes.get_ylabel()
    for line in [line for figure in figures[:2] for axes in figure.axes for line in axes.get_lines()]:
        assert len(line.get_xdata()) > 1, line.get_label()
    told = [text.get_text() for text in figures[2].legends[0].get_texts()]
    assert told == list(series.KINDS.values())


def test_systems_are_bars_beside_one_another() -> None:
    """At the tokens of which others have most figures. A colour is a kind; a bar that is too long says its length."""
    found = [
        gpu_record(op="dispatch", figure="graph_pdl", tokens=tokens, value=9.0, ranks=2) for tokens in (8, 128, 512)
    ]
    for system, figure, value in (("deepep_v1", "graph", 40.0), ("torch_all_to_all", "event", 2000.0)):
        found.append(gpu_record(system=system, op="dispatch", figure=figure, tokens=128, value=value, ranks=2))
    (axes,) = plot.plot_bars(*shapes(found)).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["nccl_ep", "DeepEP V1", "torch's all_to_all_single"]
    widths, colours = [bar.get_width() for bar in axes.patches], [bar.get_facecolor() for bar in axes.patches]
    assert widths[:2] == [9.0, 40.0] and widths[2] < 100 and colours[0] == colours[1] != colours[2]
    assert [text.get_text() for text in axes.texts] == ["9.0", "40.0", "2,000 →"]


def test_launches_that_are_not_the_default_are_left_out() -> None:
    found = [
        gpu_record(op="dispatch", figure=figure, tokens=tokens, value=value, ranks=2)
        for tokens in (1, 8)
        for figure, value in (("graph", 5.0), ("graph_pdl", 4.0))
    ]
    drawn = {name: list(line.get_ydata()) for name, line in lines(plot.plot_tokens(*shapes(found))).items()}
    assert drawn == {f"nccl_ep: {GRAPH}": [4.0, 4.0]}


def test_plots_take_the_last_of_several_and_floors_of_what_was_measured() -> None:
    at = {"op": "dispatch", "figure": "graph"}
    found = [gpu_record(**at, tokens=tokens, value=9.0, revision="old") for tokens in (1, 128)]
    found += [gpu_record(**at, tokens=tokens, value=7.0, revision="new") for tokens in (8, 128)]
    found += [
        gpu_record(**at, system="floor_wire", api="computed", tokens=tokens, value=tokens / 100, layout=layout)
        for tokens in (1, 8, 128, 512)
        for layout in ("expert_major", "flat")
    ]
    figure = plot.plot_tokens(*shapes(found))
    axes = figure.axes[0]
    drawn = {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines(figure).items()}
    assert drawn[f"nccl_ep: {GRAPH}"] == ([1, 8, 128], [9.0, 7.0, 7.0])
    assert set(drawn[FLOOR][0]) == {1, 8, 128}  # a shape's own tokens
    assert axes.get_ylim()[0] == pytest.approx(0.5 * 7.0) and "revision new, old" in figure.get_suptitle()
    # One legend below the panels, of colours and then of names.
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [GRAPH, KERNEL, series.KINDS["floor"], "nccl_ep", "NCCL EP v0.1.0 expert-major"]
    assert not any(each.get_legend() for each in figure.axes)


def test_ops_are_drawn_where_the_public_functions_have_fewer_points() -> None:
    def drawn(*native: int) -> list[str]:
        at = {"op": "dispatch", "figure": "graph", "value": 5.0}
        found = [gpu_record(**at, api="ops", tokens=tokens) for tokens in (1, 8)]
        found += [gpu_record(**at, tokens=tokens) for tokens in native]
        return [name for name in lines(plot.plot_tokens(*shapes(found))) if name.startswith("nccl_ep")]

    assert drawn(1, 8) == [f"nccl_ep: {GRAPH}"] and drawn() == [f"nccl_ep, by torch.ops: {GRAPH}"]
    assert drawn(8) == [f"nccl_ep, by torch.ops: {GRAPH}"], "one point is no line"


def test_ticks_do_not_run_into_one_another() -> None:
    assert plot._shown_ticks([1, 8, 128, 192, 256, 384, 512, 1024]) == [1, 8, 128, 256, 512, 1024]
    assert plot._shown_ticks([8, 16, 24, 32, 48, 64, 96, 132]) == [8, 16, 24, 32, 48, 64, 96, 132]
    assert plot._shown_ticks([4096]) == [4096]


def test_the_table_shows_a_sweep_and_what_was_not_measured() -> None:
    shown = table.render(sweep()).splitlines()
    line = next(line.split() for line in shown if line.startswith("dispatch  128") and "auto" in line)
    assert " ".join(line) == "dispatch 128 bf16 nccl_ep expert_major native auto (132) 7.00 (7.50) 3.25"
    assert any(line.startswith("not measured") and line.endswith("no switch") for line in shown)


def test_buffers_with_masks_have_lines_of_their_own() -> None:
    at = {"op": "dispatch", "figure": "graph"}
    found = [
        gpu_record(**at, value=4.0 + masks, enable_shrink=masks, tokens=tokens)
        for tokens in (1, 8)
        for masks in (False, True)
    ]
    rows = [line.split() for line in table.render(found).splitlines() if line.startswith("dispatch  1 ")]
    assert [row[7:] for row in rows] == [["4.00"], ["masks", "5.00"]]
    drawn = {name: list(line.get_ydata()) for name, line in lines(plot.plot_tokens(*shapes(found))).items()}
    assert drawn[f"nccl_ep: {GRAPH}"] == [4.0, 4.0] and drawn[f"nccl_ep, with masks: {GRAPH}"] == [5.0, 5.0]


def test_plot_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        plot.draw(sweep(), tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit:
        plot.main([str(ROOT / "records/ll_2xh100_2026-11-27.json"), "--out", str(tmp_path / "file")])
    assert exit.value.code == 2 and "file: File exists" in capsys.readouterr().err


def test_lines_of_different_ways_to_call_differ(tmp_path: Path) -> None:
    found = [
        gpu_record(api=api, op="pair", figure="graph", value=1.0, tokens=tokens)
        for api in ("native", "deepep")
        for tokens in (1, 8)
    ]
    drawn = lines(plot.plot_tokens(*shapes(found)))
    ours = {name: line.get_marker() for name, line in drawn.items() if name.startswith("nccl_ep")}
    assert set(ours) == {f"nccl_ep: {GRAPH}", f"nccl_ep, by DeepEP's methods: {GRAPH}"} and len(set(ours.values())) == 2


def test_files_of_another_kind_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('[{"value": 1}]')
    with pytest.raises(ValueError, match=r"other\.json: a record lacks bench"):
        records.load([path])
    broken, missing = tmp_path / "broken.json", tmp_path / "missing.json"
    broken.write_text("[")
    for main in (plot.main, table.main, fit.main, lambda files: compare.main([*files, *files])):
        for file, why in ((broken, "is no JSON"), (missing, "No such file"), (path, "lacks bench")):
            with pytest.raises(SystemExit) as exit:
                main([str(file)])
            assert exit.value.code == 2 and why in capsys.readouterr().err


def test_records_that_are_kept_have_the_form_of_records() -> None:
    """Figures that are quoted stand in them."""
    files = sorted((ROOT / "records").glob("*.json"))
    assert len(files) > 15 and len(records.load(files)) > 2000


@pytest.mark.parametrize("bench", ["ll", "ht"])
def test_a_picture_says_whose_rows_are_not_by_expert(bench: str) -> None:
    """Its title has the layout of our rows."""
    record: Any = {"system": "flashinfer", "bench": bench, "layout": "flat"}
    assert series.who(record) == "FlashInfer MoeAlltoAll, rank-major"
