"""The page: one HTML file, with its pictures, its style, its script and its figures in it."""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import charts, measured
from .figures import percentile
from .inputs import Inputs, Json
from .markup import Html, section, table

MOST_SPANS = 20_000  # of the page's time line; the trace has all
_HERE = Path(__file__).parent
_COLOURS = {"LL dispatch": "s1", "LL combine": "s2", "HT dispatch": "s3", "HT combine": "s4"}
_KINDS = {"dispatch": "tokens to the ranks of their experts", "combine": "sums home"}


def page(inputs: Inputs, recorded: Json | None) -> str:
    """recorded: ``figures.figures`` of the recorded files, if there are any."""
    shown = recorded
    if recorded is not None and len(recorded["spans"]) > MOST_SPANS:  # they are rank after rank
        first = sorted(recorded["spans"], key=lambda span: float(span["begin_us"]))[:MOST_SPANS]
        shown = recorded | {"spans": first}
    parts = [] if recorded is None else [_recorded(recorded)]
    parts += [measured.benchmark(path, records) for path, records in inputs.records]
    parts += [measured.model(path, estimates) for path, estimates in inputs.models]
    stats = [] if recorded is None else recorded["stats"]
    if stats or inputs.stats:
        parts.append(_counters([*stats, *({"name": path.name, **each} for path, each in inputs.stats)]))
    parts += [_doctor(path, found) for path, found in inputs.doctors]
    data = json.dumps({"recorded": shown}, separators=(",", ":")).replace("</", "<\\/")
    title = "nccl_ep report"
    if recorded is not None:
        title = f"nccl_ep: {recorded['num_ranks']} ranks on {', '.join(recorded['hosts'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>\n{_file('page.css')}</style></head><body><main>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n<footer>Written by python -m nccl_ep.report. What the figures mean: docs/report.md.</footer></main>"
        f'<div id="tip"></div>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{_file('page.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _recorded(found: Json) -> str:
    when = datetime.datetime.fromtimestamp(found["unix_ns"] / 1e9, datetime.timezone.utc)
    devices = " and ".join("CPU ranks" if each == "cpu" else "GPUs" for each in found["devices"]) or "nothing"
    about = f"{devices}, nccl_ep {found['version']}, torch {found['torch']}, {when:%Y-%m-%d %H:%M} UTC"
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in found["notes"])
    parts = [f"<p>{html.escape(about)}</p>", f'<div class="notes">{notes}</div>' if notes else "", _tiles(found)]
    parts.append(_traffic(found))
    if found["load"]:
        parts.append(_load(found))
    if found["times"]:
        parts += [_times(found), _waits(found), _time_line(found)]
    return "\n".join(parts)


def _tiles(found: Json) -> str:
    tiles = []
    for name, times in found["times"].items():
        where = _where(times)
        slowest = [max(each for each in step[where] if each is not None) for step in times]
        place = "GPU" if where == "device_us" else "host"
        text = f"{name}, median of {len(times)} ({place}, slowest rank)"
        tiles.append((charts.si(percentile(slowest, 50), "us"), text))
    for kind in _KINDS:
        remote = sum(
            size
            for i, row in enumerate(found["sent"][kind]["bytes"])
            for j, size in enumerate(row)
            if i != j
        )  # fmt: skip
        tiles.append((charts.si(remote, "B"), f"{kind}, between ranks"))
    if found["load"]:
        ratios = [each["max_over_mean"] for each in found["load"]]
        tiles.append((f"{percentile(ratios, 50):.2f}", "fullest expert over the mean, median"))
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>' for value, text in tiles
    ) + "</div>"  # fmt: skip


def _where(times: list[Json]) -> str:
    """Times of GPUs where all steps have one."""
    known = all(any(each is not None for each in step["device_us"]) for step in times)
    return "device_us" if known else "host_us"


def _traffic(found: Json) -> str:
    pictures = []
    for kind, what in _KINDS.items():
        sent = found["sent"][kind]
        rows, size = (sum(map(sum, sent[name])) for name in ("rows", "bytes"))
        if not rows:
            continue
        picture = charts.heat_map(sent["bytes"], "B", "from rank", "to rank", f"bytes of {kind}")
        pictures.append(
            f'<div data-heat="{kind}"><h3>{kind.capitalize()}, {what}</h3>'
            f"<p>{charts.si(size, 'B')} in {rows:,} rows</p>{picture}"
            f"<details><summary>Rows from rank to rank</summary>{_matrix(sent['rows'], 'from', 'to')}</details></div>"
        )
    if not pictures:
        return section("From rank to rank", "No operation with rows was recorded.")
    return section(
        "From rank to rank",
        "Bytes of rows that the routing sends, those to the own rank (the diagonal) too; ids, weights and counts are "
        "left out. A token goes to a rank once. Several domains: from end to end.",
        f'<div class="side">{"".join(pictures)}</div>',
    )


def _load(found: Json) -> str:
    load = found["load"]
    lines: list[tuple[str, str, Sequence[float | None]]] = [
        ("fullest expert over mean", "s1", [each["max_over_mean"] for each in load]),
        ("fullest rank over mean", "s2", [each["rank_max_over_mean"] for each in load]),
    ]
    over_time = charts.line_chart(lines, "", "dispatch", 1.0, "load of experts over dispatches, max over mean")
    totals = charts.bars(found["experts"], "choices of each expert", "expert")
    worst = max(load, key=lambda each: each["max_over_mean"])
    text = (
        "Choices of the fullest expert, and of the rank with the fullest experts, over the mean: 1 is even. All ranks "
        f"wait for the fullest. The worst dispatch is number {load.index(worst)}: expert {worst['expert']} has "
        f"{worst['max']:,} choices, {worst['max_over_mean']:.2f} times the mean."
    )
    mean = charts.si(sum(found["experts"]) / len(found["experts"]), "")
    return section(
        "Load of experts", text,
        f'<div class="side"><div id="load"><h3>Over dispatches</h3>{over_time}</div>'
        f'<div id="experts"><h3>Choices of each expert, all dispatches; mean {mean}</h3>{totals}</div></div>',
    )  # fmt: skip


def _times(found: Json) -> str:
    pictures, rows = [], []
    for name, times in found["times"].items():
        has_device = _where(times) == "device_us"
        lines: list[tuple[str, str, Sequence[float | None]]] = []
        for where, label in (("device_us", "on the GPU"), ("host_us", "host's call")):
            if where == "device_us" and not has_device:
                continue
            slowest = [max((each for each in step[where] if each is not None), default=None) for step in times]
            lines.append((label, _COLOURS[name] if where == _where(times) else "host", slowest))
            known = [each for each in slowest if each is not None]
            rows.append([name, label, len(known), *(charts.si(percentile(known, p), "us") for p in (50, 90, 99)),
                         charts.si(max(known), "us")])  # fmt: skip
        lines.append(("longest wait for a rank", "late", [step["wait_us"] for step in times]))
        pictures.append(f"<div><h3>{name}</h3>{charts.line_chart(lines, 'us', name, name=f'time of {name}')}</div>")
    header = ["operation", "where", "operations", "median", "p90", "p99", "max"]
    return section(
        "Time of operations",
        "Of the slowest rank in each operation. On CPU ranks the host's call is the operation; on GPUs it only "
        "enqueues it. The wait is how long the rank that waited most did so for the last one to come.",
        f'<div class="side">{"".join(pictures)}</div>',
        table(header, rows, left=2),
    )


def _waits(found: Json) -> str:
    waits = found["waits_us"]
    late = [sum(row[rank] for row in waits) for rank in range(len(waits))]
    text = (
        "Time between a rank's coming to an operation and that of the last rank, added up. It is the work before the "
        "operation that differs, not the operation."
    )
    if sum(late):
        worst = late.index(max(late))
        counted = [step for times in found["times"].values() for step in times]
        share = sum(step["late_rank"] == worst for step in counted)
        text += (
            f" Most is for rank {worst}, {charts.si(max(late), 'us')}, which was the last in {share:,} of "
            f"{len(counted):,} operations."
        )
    picture = charts.heat_map(waits, "us", "waiting rank", "late rank", "waits")
    times = table(["waiting \\ late", *map(str, range(len(waits)))], [
        [rank, *(charts.si(each, "us") for each in row)] for rank, row in enumerate(waits)
    ])  # fmt: skip
    details = f"<details><summary>Waits as a table</summary>{times}</details>"
    return section("Who waits for whom", text, f'<div data-heat="waits">{picture}</div>', details)


def _time_line(found: Json) -> str:
    count = len(found["spans"])
    text = "Wheel: zoom. Drag, or arrow keys: move. The trace (.trace.json) beside this page opens in ui.perfetto.dev."
    if count > MOST_SPANS:
        text += f" Here are the first {MOST_SPANS:,} of {count:,} calls; the trace has all."
    names = [name for name in _COLOURS if name in found["times"]]
    keys = charts.legend([(name, _COLOURS[name], ()) for name in names])
    buttons = {"in": ("+", "zoom in"), "out": ("&minus;", "zoom out"), "whole": ("Whole", "the whole time line")}
    tools = "".join(
        f'<button type="button" id="{each}" aria-label="{name}">{sign}</button>'
        for each, (sign, name) in buttons.items()
    )
    picture = (
        '<svg id="time-line" role="img" aria-label="time line" tabindex="0"></svg>'
        "<noscript><p>The time line needs JavaScript. The trace has the same.</p></noscript>"
    )
    return section("Time line", text, f'<div class="bar-of-tools">{tools}</div>', picture, keys)


def _counters(stats: list[Json]) -> str:
    names = list(dict.fromkeys(name for each in stats for name in each))
    rows = []
    for name in names:
        if name in ("rank", "name"):
            continue
        values = [each.get(name) for each in stats]
        if name == "calls":
            kinds = dict.fromkeys(kind for value in values if value for kind in value)
            rows += [[f"calls, {kind}", *((value or {}).get(kind, "") for value in values)] for kind in kinds]
        else:
            rows.append([name, *(_value(value) for value in values)])
    return section(
        "Counters of buffers", "What Buffer.stats() said at the end.",
        table(["", *(each["name"] for each in stats)], rows),
    )  # fmt: skip


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    return (
        f"{value:,}"
        if isinstance(value, int)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def _doctor(path: Path, found: Json) -> str:
    facts = found["facts"]
    rows = [[name.replace("_", " "), _flat(value)] for name, value in facts.items() if value not in (None, "", [], {})]
    marks = {"problem": "problem", "warning": "warning"}
    findings = [
        [Html(f'<span class="{marks.get(each["level"], "fine")}">{html.escape(each["level"])}</span>'),
         each["text"], each.get("remedy") or ""]
        for each in found["findings"]
    ]  # fmt: skip
    tested = found.get("self_test")
    text = f"{path.name}: {found.get('uses', '')} will be used."
    if tested:
        text += f" Self-test, {tested['ranks']} ranks on {tested['device']}: {tested['failure'] or 'well'}."
    parts = [table(["level", "finding", "remedy"], findings, left=3, wide=(1, 2))] if findings else []
    parts.append(f"<details><summary>All facts</summary>{table(['fact', ''], rows, left=2, wide=(1,))}</details>")
    return section("Installation", text, *parts)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_flat(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_flat, value))
    return str(value)


def _matrix(values: Sequence[Sequence[int]], rows: str, columns: str) -> str:
    header = [f"{rows} \\ {columns}", *map(str, range(len(values[0])))]
    return table(header, [[i, *(f"{each:,}" for each in row)] for i, row in enumerate(values)])
