"""Pictures as inline SVG, whose colours are variables of page.css. A figure can be read in its title or table, too."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence

Series = tuple[str, str, Sequence[float | None]]
MOST_POINTS = 600  # of a line; more are joined, the largest of each stretch is shown
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 240, 64, 34, 12, 12


def si(value: float, unit: str) -> str:
    """1234567, "B" -> "1.23 MB"; of times in us: "1.23 ms"."""
    if unit == "us":
        for limit, scale, name in ((1e3, 1, "us"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
            if abs(value) < limit:
                return f"{value / scale:.3g} {name}"
    for limit, scale, name in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G"), (math.inf, 1e12, "T")):
        if abs(value) < limit:
            shown = f"{value / scale:.3g}"
            return f"{shown} {name}{unit}" if unit else f"{shown}{name}"
    return f"{value} {unit}"


def heat_map(values: Sequence[Sequence[float]], unit: str, rows: str, columns: str, name: str) -> str:
    """A cell for each [row][column]; darker is more. rows, columns: what their numbers are."""
    size = max(16, min(64, 460 // max(len(values), 1)))
    wide = max(size, 46) if len(values) <= 8 else size
    left, top = 88, 40
    most = max((each for row in values for each in row), default=0) or 1
    width, height = left + wide * len(values[0]) + 2, top + size * len(values) + 2
    parts = [_open(width, height, f"{name}, {rows} by {columns}", "heat")]
    parts.append(f'<text class="axis" x="{left}" y="12">{html.escape(columns)} &#8594;</text>')
    parts.append(f'<text class="axis" x="0" y="{top - 8}">{html.escape(rows)} &#8595;</text>')
    step = math.ceil(20 / wide) if len(values) > 8 else 1
    for i in range(len(values[0])):
        if i % step == 0:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{left + wide * (i + 0.5)}" y="{top - 8}">{i}</text>'
            )
    for i, row in enumerate(values):
        if i % step == 0:
            parts.append(
                f'<text class="tick" text-anchor="end" x="{left - 8}" y="{top + size * (i + 0.5) + 4}">{i}</text>'
            )
        for j, value in enumerate(row):
            share = value / most
            x, y = left + wide * j, top + size * i
            shade = f"--share:{share * 100:.1f}%"
            label = f"{rows} {i}, {columns} {j}: {si(value, unit)} ({value:,} {unit})"
            parts.append(
                f'<rect class="cell" style="{shade}" x="{x + 1}" y="{y + 1}" width="{wide - 2}" height="{size - 2}" '
                f'rx="2" data-row="{i}" data-column="{j}" data-value="{value}">{_title(label)}</rect>'
            )
            if wide >= 46 and size >= 20:
                ink = "on-high" if share > 0.605 else "on-low"  # 4.5 to 1, in light and dark
                parts.append(
                    f'<text class="in-cell {ink}" text-anchor="middle" x="{x + wide / 2}" y="{y + size / 2 + 4}">'
                    f"{si(value, unit if unit == 'us' else '')}</text>"
                )
    return "".join(parts) + "</svg>"


def line_chart(
    series: Sequence[Series], unit: str, x_name: str, floor: float = 0.0, name: str = "", at: Sequence[int] = ()
) -> str:
    """Lines over ``at``, by default 0, 1, 2, ...; series: (name, colour's class, values), None is a gap. floor: where
    the y axis begins."""
    count = max(len(values) for _, _, values in series)
    stretch = math.ceil(count / MOST_POINTS)
    shown = [(label, colour, _joined(values, stretch)) for label, colour, values in series]
    known = [each for _, _, values in shown for each in values if each is not None]
    ticks = _ticks(floor, max(known, default=1.0))
    high = max(ticks[-1], max(known, default=1.0))
    points = max(len(values) for _, _, values in shown)

    def x_of(index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (index + 0.5) / points

    def y_of(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - floor) / (high - floor or 1))

    parts = [_open(_WIDTH, _HEIGHT, name, "lines")]
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick(si(tick, unit), _LEFT - 8, y + 4, "end"))
    for index in _indices(points):
        parts.append(_tick(at[index] if at else index * stretch, x_of(index), _HEIGHT - _BOTTOM + 16, "middle"))
    parts.append(_x_name(x_name))
    for label, colour, values in shown:
        for run in _runs(values):
            path = " ".join(f"{x_of(i):.1f},{y_of(value):.1f}" for i, value in run)
            parts.append(
                f'<polyline class="line {colour}" points="{path}"><title>{html.escape(label)}</title></polyline>'
            )
            if points <= 40:
                for i, value in run:
                    parts.append(f'<circle class="dot {colour}" cx="{x_of(i):.1f}" cy="{y_of(value):.1f}" r="3"/>')
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    about = {
        "name": name, "left": _LEFT, "width": _WIDTH - _LEFT - _RIGHT, "stretch": stretch, "unit": unit, "x": x_name,
        "at": list(at),
        "series": [{"name": label, "colour": colour, "values": values} for label, colour, values in shown],
    }  # fmt: skip
    data = html.escape(json.dumps(about), quote=True)
    return f'<div class="chart" data-lines="{data}">{"".join(parts)}</svg>{legend(series)}</div>'


def bars(values: Sequence[float], name: str, label: str) -> str:
    """A bar for each of 0, 1, 2, ... and the mean as a line. label: what the numbers are."""
    most, mean = max(values) or 1, sum(values) / len(values)
    high = _ticks(0, most)[-1]
    high = max(high, most)
    each = (_WIDTH - _LEFT - _RIGHT) / len(values)
    inner = _HEIGHT - _TOP - _BOTTOM
    parts = [_open(_WIDTH, _HEIGHT, name, "bars")]
    for tick in _ticks(0, most):
        y = _TOP + inner * (1 - tick / high)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick(si(tick, ""), _LEFT - 8, y + 4, "end"))
    gap = min(2.0, each / 4)
    for i, value in enumerate(values):
        height = inner * value / high
        parts.append(
            f'<rect class="bar" x="{_LEFT + each * i + gap / 2:.2f}" y="{_TOP + inner - height:.2f}" '
            f'width="{each - gap:.2f}" height="{height:.2f}" data-index="{i}" data-value="{value}">'
            + _title(f"{label} {i}: {value:,} choices, {value / mean if mean else 0:.2f} of the mean")
            + "</rect>"
        )
    for i in _indices(len(values)):
        parts.append(_tick(i, _LEFT + each * (i + 0.5), _HEIGHT - _BOTTOM + 16, "middle"))
    y = _TOP + inner * (1 - mean / high)
    parts.append(f'<line class="mean" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(
        f'<text class="axis" text-anchor="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{html.escape(label)}</text>'
    )
    return "".join(parts) + "</svg>"


def legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = "".join(f'<span><i class="key {colour}"></i>{html.escape(name)}</span>' for name, colour, _ in series)
    return f'<div class="legend">{keys}</div>'


def _open(width: float, height: float, name: str, kind: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-label="{html.escape(name)}">'
    )


def _title(text: str) -> str:
    """Browsers show it under the pointer."""
    return f"<title>{html.escape(text)}</title>"


def _tick(text: object, x: float, y: float, anchor: str) -> str:
    return f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _x_name(name: str) -> str:
    return f'<text class="axis" text-anchor="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{html.escape(name)}</text>'


def _joined(values: Sequence[float | None], stretch: int) -> list[float | None]:
    """The largest of every so many."""
    if stretch == 1:
        return list(values)
    parts = (values[i : i + stretch] for i in range(0, len(values), stretch))
    return [max((each for each in part if each is not None), default=None) for part in parts]


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for i, value in enumerate(values):
        if value is not None:
            runs[-1].append((i, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers that reach past ``high``."""
    span = (high - low) or 1.0
    raw = span / 4
    scale = 10 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw)
    return [low + step * i for i in range(math.ceil(span / step - 1e-9) + 1)]


def _indices(count: int) -> list[int]:
    """About eight, evenly spaced, from 0 on."""
    step = next(s for s in (f * 10**p for p in range(9) for f in (1, 2, 5)) if count / s <= 9)
    return list(range(0, count, step))
