"""Records as text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from . import crossover, overlap, records, stamps
from .records import Record

FIGURES = ("graph", "graph_pdl", "kernel", "event", "host")
FLOOR = "floor_wire"
_OPS = ("routing", "dispatch", "combine", "pair")
_SHAPE = ("bench", "device", "ranks", "hidden", "topk", "experts", "routing", "seed", "revision", "date")
_ROW = ("op", "tokens", "dtype", "system", "layout", "api", "num_sms")
_FURTHER = {"ll": ("masks",), "ht": ("placement", "cached")}  # of a line besides, where any has it
TITLES = {"ll": "low latency", "ht": "high throughput"}


def is_measured(record: Record) -> bool:
    return record["value"] is not None


def floor(found: Iterable[Record], op: str, tokens: int, dtype: str) -> float | None:
    """The smallest value of the floor for an operation."""
    values = [
        record["value"]
        for record in found
        if is_measured(record)
        and (record["system"], record["op"], record["tokens"], record["dtype"]) == (FLOOR, op, tokens, dtype)
    ]  # fmt: skip
    return min(values, default=None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _cell(record: Record | None) -> str:
    if record is None or not is_measured(record):
        return "-"
    return _number(record["value"]) + (f" ({_number(record['p99'])})" if record["p99"] is not None else "")


def _how(record: Record) -> tuple[str, ...]:
    """What else distinguishes operations, by the columns of the mode."""
    how = {
        "placement": record.get("placement") or "",
        "cached": "cached" if record.get("cached") else "",
        "masks": "masks" if record.get("enable_shrink") else "",
    }
    return tuple(how[name] for name in _FURTHER[record["bench"]])


def _table(found: list[Record], bench: str) -> list[str]:
    """One line a call (operation, tokens, dtype, system, api, num_sms), figures beside one another."""
    rows: dict[tuple[object, ...], dict[str, Record]] = {}
    for record in found:
        if record["system"] != FLOOR and record["unit"] == "us" and is_measured(record):
            key = (*(record[name] for name in _ROW), *_how(record))
            rows.setdefault(key, {})[record["figure"]] = record
    if not rows:
        return ["nothing was measured"]
    figures = [figure for figure in FIGURES if any(figure in row for row in rows.values())]
    floors = [FLOOR] if any(record["system"] == FLOOR and is_measured(record) for record in found) else []
    names = _FURTHER[bench]
    shown = [i for i in range(len(names)) if bench == "ht" or any(key[len(_ROW) + i] for key in rows)]
    lines = [[*_ROW, *(names[i] for i in shown), *figures, *floors]]
    order = sorted(rows, key=lambda key: (_OPS.index(str(key[0])), key[1], key[2], key[3] != "nccl_ep", *key[3:]))
    for key in order:
        op, tokens, dtype, system, layout, api, num_sms, *how = key
        used = next((r["num_sms_used"] for r in rows[key].values() if r["num_sms_used"]), None)
        sms = (f"{num_sms or 'auto'}" + (f" ({used})" if used else "")) if system == "nccl_ep" else ""
        line = [str(op), str(tokens), str(dtype), str(system), str(layout), str(api), sms]
        line += [str(how[i]) for i in shown]
        line += [_cell(rows[key].get(figure)) for figure in figures]
        line += [_number(floor(found, str(op), int(str(tokens)), str(dtype))) for _ in floors]
        lines.append(line)
    return records.columns(lines)


def render(found: list[Record]) -> str:
    """Everything, one table for each machine and shape."""
    text: list[str] = []
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in found:
        groups.setdefault(tuple(record[name] for name in _SHAPE), []).append(record)
    for key, group in groups.items():
        bench, device, ranks, hidden, topk, experts, routing, seed, revision, date = key
        text.append(
            f"{TITLES[str(bench)]}: {ranks} ranks, {device}; hidden {hidden}, top-{topk} of {experts} experts, "
            f"{routing} routing, seed {seed}; revision {revision}, {date}"
        )
        text.append("us: median of the slowest rank (its 99th percentile); host: of means; floor_wire: computed")
        text += _table(group, str(bench))
        for record in group:
            if record["unit"] == "MB" and is_measured(record):
                how = f", {record['layout']}, {record['placement']}" if bench == "ht" else ""
                what = f"{record['figure']}, {record['tokens']} tokens, {record['dtype']}{how}"
                text.append(f"{what}: {record['value']:.2f} MB")
        skipped: dict[str, set[str]] = {}
        for record in group:
            if reason := record.get("skipped"):
                what = " ".join(record[name] for name in ("system", "api", "op", "figure"))
                skipped.setdefault(reason, set()).add(what)
        text += [f"not measured: {', '.join(sorted(what))}: {reason}" for reason, what in skipped.items()]
        text.append("")
    return "\n".join(text).rstrip() if text else "nothing was measured"


def in_short(found: Iterable[Record]) -> str:
    """One line of progress."""
    done = [r for r in found if is_measured(r) and r["figure"] in ("graph", "event") and r["system"] != FLOOR]
    figure = "graph" if any(record["figure"] == "graph" for record in done) else "event"
    values = {record["op"]: _number(record["value"]) for record in reversed(done) if record["figure"] == figure}
    shown = ", ".join(f"{op} {values[op]}" for op in _OPS if op in values)
    return f"{figure} {shown} us" if shown else "nothing measured"


def show(found: list[Record]) -> list[Record]:
    """Prints them, and returns them."""
    print(render(found), flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench table", description="Prints what was measured.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    found = records.given(parser, parser.parse_args(argv).files)
    for bench, draw in (("overlap", overlap.render), ("fit", crossover.render), ("time_line", stamps.render)):
        if mine := [record for record in found if record["bench"] == bench]:
            print(draw(mine))
    if mine := [record for record in found if record["bench"] in TITLES]:
        show(mine)
    return 0
