"""Records of the benchmark beside the floor, and estimates of its model."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import charts
from .inputs import Json
from .markup import Html, section, table

_FLOOR = "floor_wire"
_SHAPE = ("bench", "device", "ranks", "hidden", "topk", "experts", "layout", "routing")
# How a time was measured, as a reader calls it.
_FIGURES = {
    "graph": "in a CUDA graph", "graph_pdl": "in a CUDA graph, kernels overlapping", "kernel": "kernel alone",
    "event": "eager, between events", "host": "host's call",
}  # fmt: skip
_BENCHES = {"ll": "low latency", "ht": "high throughput"}


def benchmark(path: Path, records: list[Json]) -> str:
    timed = [each for each in records if each.get("value") is not None and each.get("unit") == "us"]
    others = [each for each in records if each.get("value") is not None and each.get("unit") != "us"]
    dates = sorted({str(each["date"]) for each in records})
    revisions = ", ".join(sorted({str(each["revision"]) for each in records}))
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    text = (
        f"{len(records):,} records, {when}, revision {revisions}. The floor is what the bytes take on the wire at the "
        "measured rate of the links. A bar compares the times of one operation."
    )
    parts = []
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for each in timed:
        if each["system"] != _FLOOR:
            groups.setdefault(tuple(each.get(name) for name in _SHAPE), []).append(each)
    for number, (shape, group) in enumerate(groups.items()):
        parts.append(_group(shape, group, timed, number == 0))
    if others:
        rows = [
            [each["bench"], each["system"], each["op"], each["figure"], each.get("tokens") or "", each["value"],
             each["unit"]]
            for each in others
        ]  # fmt: skip
        shown = table(["benchmark", "system", "of", "figure", "tokens", "value", "unit"], rows, left=4)
        parts.append(f"<details><summary>{len(rows):,} figures that are no times</summary>{shown}</details>")
    return section(f"Measured: {path.name}", text, *parts)


def _group(shape: tuple[Any, ...], group: list[Json], timed: list[Json], is_open: bool) -> str:
    bench, device, ranks, hidden, topk, experts, layout, routing = shape
    given = {"ranks of": f"{ranks} x {device}", "hidden": hidden, "layout": layout, "routing": routing}
    title = f"{_BENCHES.get(bench, bench)}: " + ", ".join(
        f"{value}" if name == "ranks of" else f"{name} {value}" for name, value in given.items() if value is not None
    )
    if topk is not None:
        title += f", top-{topk} of {experts}"
    floors = {
        (each["op"], each["tokens"], each["dtype"]): each["value"]
        for each in timed
        if each["system"] == _FLOOR and tuple(each.get(name) for name in _SHAPE if name != "layout")
        == tuple(value for name, value in zip(_SHAPE, shape, strict=True) if name != "layout")
    }  # fmt: skip
    most: dict[tuple[Any, ...], float] = {}
    for each in group:
        most[_call(each)] = max(most.get(_call(each), 0.0), each["value"])
    rows = []
    for each in sorted(
        group, key=lambda each: (str(each["op"]), each["tokens"] or 0, str(each["dtype"]), each["value"])
    ):
        floor = floors.get(_call(each))
        width = 90 * each["value"] / (most[_call(each)] or 1)
        rows.append(
            [
                each["op"], each["system"], each["api"] or "", _FIGURES.get(each["figure"], each["figure"]),
                each["dtype"] or "", each["tokens"] or "",
                Html(f'<i class="share" style="width:{width:.0f}px"></i>'), f"{each['value']:,.1f}",
                "" if each["p99"] is None else f"{each['p99']:,.1f}", "" if floor is None else f"{floor:,.1f}",
                f"{each['value'] / floor:.2f}" if floor else "",
            ]
        )  # fmt: skip
    header = [
        "operation",
        "system",
        "calls",
        "measured",
        "dtype",
        "tokens",
        "",
        "us",
        "p99 us",
        "floor us",
        "of the floor",
    ]
    pictures = f'<div class="side">{_pictures(group, floors)}</div>'
    shown = f"{pictures}<details><summary>All {len(rows):,} times</summary>{table(header, rows, left=5)}</details>"
    return f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>{shown}</details>"


def _pictures(group: list[Json], floors: dict[tuple[Any, ...], float]) -> str:
    """Time over tokens of each operation that has three numbers of tokens or more: ours as it is called from Python,
    others, the floor. Of several dtypes each has its own."""
    lines: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for each in group:
        is_plain = each["system"] != "nccl_ep" or each["api"] == "native"
        if is_plain and each["tokens"] is not None and each["figure"] in _FIGURES and each["figure"] != "host":
            name = f"{each['system']}, {_FIGURES[each['figure']]}"
            of_call = lines.setdefault((str(each["op"]), str(each["dtype"])), {})
            of_call.setdefault(name, {}).setdefault(each["tokens"], each["value"])
    pictures = []
    for (op, dtype), of_call in sorted(lines.items()):
        found = {name: values for name, values in of_call.items() if len(values) >= 3}
        tokens = sorted({at for values in found.values() for at in values})
        if not found:
            continue
        series: list[charts.Series] = [
            (name, colour, [found[name].get(at) for at in tokens])
            for name, colour in zip(sorted(found), ("s1", "s2", "s3", "s4", "host"), strict=False)
        ]
        floor = [floors.get((op, at, dtype)) for at in tokens]
        if any(each is not None for each in floor):
            series.append(("floor: the wire alone", "late", floor))
        chart = charts.line_chart(series, "us", "tokens of a rank", name=f"{op}, {dtype}", at=tokens)
        pictures.append(f"<div><h3>{html.escape(f'{op}, {dtype}')}</h3>{chart}</div>")
    return "".join(pictures)


def _call(record: Json) -> tuple[Any, ...]:
    return record["op"], record["tokens"], record["dtype"]


def model(path: Path, estimates: Iterable[Json]) -> str:
    rows = [
        [each["op"], each["mode"], each["path"], each["dtype"], each["nodes"], each["tokens"], f"{each['us']:,.1f}",
         f"{each['wire_us']:,.1f}", f"{each['nic_mb']:,.2f}", each["bound"]]
        for each in estimates
    ]  # fmt: skip
    header = [
        "operation",
        "mode",
        "path",
        "dtype",
        "nodes",
        "tokens",
        "model us",
        "floor us (wire)",
        "MB a NIC",
        "bound by",
    ]
    return section(
        f"Model: {path.name}", "Several nodes, by arithmetic (docs/benchmarks.md): nothing here was measured.",
        table(header, rows, left=4),
    )  # fmt: skip
