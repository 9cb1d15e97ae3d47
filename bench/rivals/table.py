"""The table of README: dispatch and combine together, a system a row, in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Record

# A system's first row, with its version, in the order of the rows.
TITLES = {
    "nccl_ep": "nccl_ep, {}",
    "deepep_v1": "DeepEP V1, {}",
    "nccl_ep_nvidia": "NVIDIA's NCCL EP {}",
    "flashinfer": "FlashInfer {} `MoeAlltoAll`, rank-major rows, padded",
    "torch_all_to_all": "torch {} `all_to_all_single`",
}
_SECOND = "its rank-major rows"


@dataclass(frozen=True)
class Column:
    """title: of the table. figure: "graph", or "memory_total". digits: behind the point."""

    title: str
    mode: str
    tokens: int
    figure: str
    digits: int


def columns(found: list[Record]) -> list[Column]:
    """The most tokens and the fewest of low latency, the most of high throughput, and memory."""
    tokens = {mode: sorted({each["tokens"] for each in found if each["bench"] == mode}) for mode in ("ll", "ht")}
    made: list[Column] = []
    if tokens["ll"]:
        most, least = tokens["ll"][-1], tokens["ll"][0]
        made.append(Column(f"low latency, {most} tokens a rank, BF16", "ll", most, "graph", 1))
        if least != most:
            made.append(Column(f"{least} token{'s' if least > 1 else ''}", "ll", least, "graph", 1))
    if tokens["ht"]:
        most = tokens["ht"][-1]
        made.append(Column(f"high throughput, {most:,} tokens, BF16", "ht", most, "graph", 0))
    if any(each["figure"] == "memory_total" for each in found):
        made.append(Column("GPU memory, MB", "ll", tokens["ll"][-1], "memory_total", 0))
    return made


def value_of(found: list[Record], column: Column, layouts: tuple[str, ...], figure: str = "") -> float | None:
    """Of the layout that comes first; layouts: of low latency."""
    for layout in layouts if column.mode == "ll" else ("flat", "rank_major", "packed"):
        for each in found:
            if (
                (each["bench"], each["tokens"], each["layout"]) == (column.mode, column.tokens, layout)
                and (each["op"], each["dtype"], each["figure"]) == ("pair", "bf16", figure or column.figure)
                and each["value"] is not None
            ):
                value: float = each["value"]
                return value
    return None


def rows(found: list[Record]) -> list[tuple[str, list[Record], tuple[str, ...]]]:
    """(name, records, layouts) of each, in order."""
    made = []
    for system in [*TITLES, *sorted({each["system"] for each in found} - TITLES.keys())]:
        mine = [each for each in found if each["system"] == system and each["value"] is not None]
        if not mine:
            continue
        version = next((each["version"] for each in mine if each.get("version")), "")
        name = TITLES.get(system, system + " {}").format(version).replace("  ", " ").rstrip(", ")
        layouts = {each["layout"] for each in mine if each["bench"] == "ll"}
        has_both = {"expert_major", "rank_major"} <= layouts
        made.append((name, mine, ("expert_major", *(() if has_both else ("rank_major", "packed")))))
        if has_both:
            made.append((_SECOND, [each for each in mine if each["bench"] == "ll"], ("rank_major",)))
    return made


def markdown(found: list[Record]) -> list[str]:
    """Lines. The least of a column is bold. Of a system without graphs there are event times, which say so."""
    shown = columns(found)
    on_device = any(each["figure"] == "graph" for each in found)
    values = [[value_of(mine, column, layouts) for column in shown] for _, mine, layouts in rows(found)]
    least = [min((v for v in column if v is not None), default=None) for column in zip(*values, strict=True)]
    lines = ["| | " + " | ".join(column.title for column in shown) + " |", "|---|" + "---|" * len(shown)]
    for (name, mine, layouts), line in zip(rows(found), values, strict=True):
        cells = []
        for column, value, best in zip(shown, line, least, strict=True):
            text = "" if value is None else f"{value:,.{column.digits}f}"
            if value is None and column.figure == "graph" and not any(each["figure"] == "graph" for each in mine):
                event = value_of(mine, column, layouts, "event")
                text = "" if event is None else f"{event:,.{column.digits}f}" + (" (event)" if on_device else "")
            cells.append(f"**{text}**" if value is not None and value == best else text)
        lines.append(("| " + " | ".join([name, *cells]) + " |").replace("|  ", "| "))
    return lines


def render(found: list[Record]) -> list[str]:
    """The table, and what could not be measured."""
    lines = [f"{each['ranks']} x {each['device']}, {each['date']}, revision {each['revision']}" for each in found[:1]]
    lines += ["dispatch and combine together, us; the slowest rank's median", "", *markdown(found), ""]
    reasons: dict[str, list[str]] = {}
    for each in found:
        if each["value"] is None:
            what = f"{each['bench']} {each['tokens']} {each['dtype']} {each['layout']} {each['op']} {each['figure']}"
            reasons.setdefault(f"{each['system']}: {each['skipped']}", []).append(what)
    return lines + [f"not measured: {reason} ({', '.join(what)})" for reason, what in reasons.items()]
