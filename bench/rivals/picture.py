"""The table as bars: a panel for each column."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..plot import draw_lengths
from ..records import Record
from . import table


def draw(found: list[Record], path: Path) -> None:
    """As PNG or SVG, by the file's name. Exits without matplotlib."""
    try:
        make: Any = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise SystemExit(f"the picture needs matplotlib ({error}): pip install matplotlib") from error
    shown, rows = table.columns(found), table.rows(found)
    figure = make(figsize=(3.6 * len(shown) + 2.5, 0.45 * len(rows) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    names, owner = [], ""
    for name, mine, _ in rows:
        owner = owner if name.startswith("its ") else name.replace("`", "").removesuffix(", padded")
        names.append(f"{owner}, rank-major rows" if name.startswith("its ") else owner)
        names[-1] += "" if _has_graphs(mine) else ", by events"
    colours = ["tab:blue" if name.startswith("nccl_ep") else "tab:gray" for name in names]
    for column, panel in zip(shown, panels, strict=True):
        values = [_shown(mine, column, layouts) for _, mine, layouts in rows]
        bars = [(i, value, colours[i]) for i, value in enumerate(values) if value is not None]
        if bars:
            draw_lengths(panel, bars, lambda value, digits=column.digits: f"{value:,.{digits}f}")  # type: ignore[misc]
        panel.set_title(column.title, fontsize=9)
        panel.set_xlabel("MB" if column.figure == "memory_total" else "µs", fontsize=8)
    panels[0].set_yticks(range(len(rows)), names, fontsize=9)
    panels[0].invert_yaxis()
    first = found[0]
    figure.suptitle(
        f"Dispatch and combine together on {first['ranks']} x {first['device']}, {first['date']}: less is better. "
        "→: longer than its panel",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _shown(found: list[Record], column: table.Column, layouts: tuple[str, ...]) -> float | None:
    by_events = column.figure == "graph" and not _has_graphs(found)
    return table.value_of(found, column, layouts, "event" if by_events else "")


def _has_graphs(found: list[Record]) -> bool:
    return any(each["figure"] == "graph" for each in found)
