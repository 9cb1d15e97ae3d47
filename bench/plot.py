"""``python -m bench plot FILE... --out DIR``: latency over tokens and over SMs, and systems beside one another."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from . import published, records
from .compare import CALL
from .records import Record
from .series import KINDS, OWN, Series, how, series_of
from .table import FIGURES, FLOOR, TITLES, is_measured

_OPS = {"ll": ("dispatch", "combine", "pair"), "ht": ("routing", "dispatch", "combine", "pair")}
_OP_TITLES = {"pair": "dispatch and combine", "routing": "routing alone"}
_SHAPE = ("bench", "device", "ranks", "hidden", "topk", "experts", "layout", "routing")
# A colour says how something was measured, the marker and the dashes of a line whose it is.
_COLOURS = {"graph": "tab:blue", "kernel": "tab:green", "event": "tab:orange", "floor": "black"}
_MARKS = (("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1))), ("P", (0, (1, 1))), ("X", (0, (3, 1, 1, 1))))
_LABELS = 12  # that have room side by side along an axis
_HEIGHT = 3.6  # inches of a panel with lines
_FAR = 10  # times the middle bar: a longer bar leaves the picture, and says how long it is


def _figure_class() -> Callable[..., Any]:
    try:
        figure: Callable[..., Any] = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}): pip install matplotlib") from error
    return figure


def _line(**options: Any) -> Any:
    """An entry of a legend."""
    return importlib.import_module("matplotlib.lines").Line2D([], [], **options)


def _shapes(found: list[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """The library's records by shape, each with the floors and rivals of that shape, whatever their layout, where the
    library has their tokens and dtype. Of a call that was measured several times the last record counts."""
    last = {tuple(record.get(name) for name in CALL): record for record in found}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in last.values():
        if record["system"] == OWN:
            groups.setdefault(tuple(record[name] for name in _SHAPE), []).append(record)
    for key, group in groups.items():
        tokens, dtypes = {record["tokens"] for record in group}, {record["dtype"] for record in group}
        shape = {name: value for name, value in zip(_SHAPE, key, strict=True) if name != "layout"}
        group += [
            record
            for record in last.values()
            if record["system"] != OWN and record["tokens"] in tokens and record["dtype"] in dtypes
            and all(record[name] == value for name, value in shape.items())
        ]  # fmt: skip
    return groups


Shown = dict[tuple[str, str], list[Series]]  # by operation and dtype


def _title(key: tuple[Any, ...], group: list[Record], shown: Shown) -> str:
    shape = dict(zip(_SHAPE, key, strict=True))
    revisions = ", ".join(sorted({record["revision"] for record in group if record["system"] == OWN}))
    has_published = any(each.is_published for series in shown.values() for each in series)
    apart = "; NCCL EP and DeepEP measured apart (bench/published.py)" if has_published else ""
    return (
        "{title} on {ranks} x {device}: hidden {hidden}, top-{topk} of {experts} experts, {layout} rows, "
        "{routing} routing\nnccl_ep at revision {revisions}; medians of the slowest rank{apart}"
    ).format(**shape, title=TITLES[shape["bench"]].capitalize(), revisions=revisions, apart=apart)


def _panels(heights: list[float], columns: int, title: str) -> tuple[Any, Any]:
    """heights: inches of each row."""
    figure = _figure_class()(figsize=(max(5.6 * columns, 10.0), sum(heights) + 1.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)


def _add_legend(figure: Any, handles: dict[str, Any], columns: int = 2) -> None:
    """One for all panels, below them: a name looks the same in each."""
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=9)


def _of_kinds(kinds: set[str]) -> dict[str, Any]:
    """Entries of a legend, by their text: what a colour means."""
    return {text: _line(color=_COLOURS[kind], linewidth=5) for kind, text in KINDS.items() if kind in kinds}


def _shown_ticks(ticks: list[int]) -> list[int]:
    """Those that do not run into one another on a logarithmic axis, the largest always."""
    shown: list[int] = []
    for tick in reversed(ticks):
        if not shown or shown[-1] / tick >= (ticks[-1] / ticks[0]) ** (1 / _LABELS):
            shown.append(tick)
    return shown[::-1]


def _label(axes: Any, title: str, x: str, ticks: list[int]) -> None:
    axes.set(title=title, xlabel=x, ylabel="time in µs")
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    shown = _shown_ticks(ticks)
    axes.set_xticks(shown, labels=[str(tick) for tick in shown])
    axes.set_yscale("log", subs=[2, 5])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    # The wire alone takes next to nothing for a few tokens: it may leave the picture.
    lowest = [min(line.get_ydata()) for line in axes.get_lines() if line.get_color() != _COLOURS["floor"]]
    if lowest:
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 0.5 * min(lowest)))


def _name(op: str, dtype: str) -> str:
    rows = f"{dtype.upper()} rows" if dtype in ("bf16", "fp8") else f"dtype {dtype}"
    return f"{_OP_TITLES.get(op, op)}, {rows}"


def _all_series(key: tuple[Any, ...], group: list[Record]) -> Shown:
    """By operation and dtype."""
    shape = dict(zip(_SHAPE, key, strict=True))
    dtypes = sorted({record["dtype"] for record in group})
    return {(op, dtype): series_of(group, shape, op, dtype) for op in _OPS[shape["bench"]] for dtype in dtypes}


def _grid(shown: Shown) -> tuple[list[str], list[str]]:
    """Operations and dtypes of which there is something to show."""
    some = [where for where, series in shown.items() if series]
    return list(dict.fromkeys(op for op, _ in some)), list(dict.fromkeys(dtype for _, dtype in some))


def plot_tokens(key: tuple[Any, ...], group: list[Record]) -> Any | None:
    """Panels of operation and dtype; lines over the tokens. What has one point is in the bars. None without a line."""
    shown = {}
    for where, series in _all_series(key, group).items():
        lines = [each for each in series if len(each.points) > 1]
        shown[where] = lines if any(each.who.startswith(OWN) for each in lines) else []
    ops, dtypes = _grid(shown)
    if not ops:
        return None
    every = [each for series in shown.values() for each in series]
    others = [name for name in dict.fromkeys(each.who for each in every if each.kind != "floor") if name != OWN]
    marks = {OWN: ("o", "-")} | {name: _MARKS[number % len(_MARKS)] for number, name in enumerate(others)}
    ticks = sorted({tokens for each in every for tokens in each.points})
    figure, panels = _panels([_HEIGHT] * len(ops), len(dtypes), _title(key, group, shown))
    for op, row in zip(ops, panels, strict=True):
        for dtype, axes in zip(dtypes, row, strict=True):
            for each in shown[op, dtype]:
                marker, dashes = marks.get(each.who, ("", "-"))
                x, y = zip(*sorted(each.points.items()), strict=True)
                axes.plot(x, y, color=_COLOURS[each.kind], marker=marker, linestyle=dashes, markersize=5,
                          label=f"{each.who}: {KINDS[each.kind]}")  # fmt: skip
            _label(axes, _name(op, dtype), "tokens of a rank", ticks)
            axes.set_visible(bool(shown[op, dtype]))
    drawn = {
        name: _line(color="dimgrey", marker=marker, linestyle=dashes, markersize=5)
        for name, (marker, dashes) in marks.items()
        if any(each.who == name for each in every)
    }
    _add_legend(figure, _of_kinds({each.kind for each in every}) | drawn)
    return figure


def _tokens_of_bars(shown: Shown) -> int:
    """Of which there are most figures of others; of several such numbers the largest."""
    count: Counter[int] = Counter()
    for series in shown.values():
        for each in series:
            count.update({tokens: each.kind != "floor" and not each.who.startswith(OWN) for tokens in each.points})
    return max(count, key=lambda tokens: (count[tokens], tokens))


def plot_bars(key: tuple[Any, ...], group: list[Record]) -> Any:
    """All systems beside one another, at one number of tokens: a panel for each operation and dtype."""
    shown = _all_series(key, group)
    tokens = _tokens_of_bars(shown)
    shown = {where: [each for each in series if tokens in each.points] for where, series in shown.items()}
    ops, dtypes = _grid(shown)
    most = [max(len(shown[op, dtype]) for dtype in dtypes) for op in ops]
    title = f"{_title(key, group, shown)}\n{tokens} tokens of a rank"
    figure, panels = _panels([0.8 + 0.27 * bars for bars in most], len(dtypes), title)
    for op, room, row in zip(ops, most, panels, strict=True):
        for dtype, axes in zip(dtypes, row, strict=True):
            bars = sorted((each.points[tokens], each.kind, each.who) for each in shown[op, dtype])
            axes.set_visible(bool(bars))
            if bars:
                _draw_bars(axes, bars, room)
                axes.set_title(_name(op, dtype), fontsize=10)
    _add_legend(figure, _of_kinds({each.kind for series in shown.values() for each in series}))
    return figure


def _draw_bars(axes: Any, bars: list[tuple[float, str, str]], room: int) -> None:
    """Short ones first: (microseconds, kind, whose)."""
    lengths = [(place, value, _COLOURS[kind]) for place, (value, kind, _) in enumerate(bars)]
    draw_lengths(axes, lengths, lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}")
    axes.set_yticks(range(len(bars)), labels=[name for *_, name in bars], fontsize=8)
    axes.set(xlabel="time in µs", ylim=(room - 0.5, -0.5))


def draw_lengths(axes: Any, bars: list[tuple[int, float, str]], text_of: Callable[[float], str]) -> None:
    """Bars from 0 on that say how long they are: (place, value, colour)."""
    middle = median(value for _, value, _ in bars)
    end = max(value for _, value, _ in bars if value <= _FAR * middle)
    for place, value, colour in bars:
        axes.barh(place, min(value, 1.18 * end), color=colour, height=0.7)
        if value > end:
            axes.text(1.17 * end, place, f"{text_of(value)} →", va="center", ha="right", fontsize=8, color="white")
        else:
            axes.text(value + 0.01 * end, place, text_of(value), va="center", fontsize=8)
    axes.set_xlim(0, 1.18 * end)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)


def plot_num_sms(key: tuple[Any, ...], group: list[Record]) -> Any | None:
    """A panel an operation; lines of tokens and dtype over num_sms, the floors flat. None without a sweep."""
    mine = [record for record in group if record["system"] == OWN and record["unit"] == "us" and record["num_sms"]]
    ticks = sorted({record["num_sms"] for record in mine})
    if len(ticks) < 2:
        return None
    measured = next(figure for figure in FIGURES if any(record["figure"] == figure for record in mine))
    api = next(api for api in ("native", None, "ops") if any(record["api"] == api for record in mine))
    mine = [record for record in mine if (record["figure"], record["api"]) == (measured, api)]
    swept = {op: {record["num_sms"] for record in mine if record["op"] == op} for op in _OPS[key[0]]}
    ops = [op for op, numbers in swept.items() if len(numbers) > 1]
    if not ops:
        return None
    names = sorted({(record["tokens"], record["dtype"], how(record)) for record in mine})
    kind = KINDS["graph" if measured == "graph_pdl" else measured]
    figure, panels = _panels([_HEIGHT], len(ops), f"{_title(key, mine, {})}; {kind}")
    handles: dict[str, Any] = {}
    for op, axes in zip(ops, panels[0], strict=True):
        lines: dict[tuple[int, str, str], list[tuple[int, float]]] = {}
        for record in mine:
            if record["op"] == op:
                name = (record["tokens"], record["dtype"], how(record))
                lines.setdefault(name, []).append((record["num_sms"], record["value"]))
        for (tokens, dtype, more), points in sorted(lines.items()):
            if len(points) < 2:
                continue
            colour = f"C{names.index((tokens, dtype, more)) % 10}"
            label = f"{tokens} tokens of a rank, {dtype.upper()} rows{more}"
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", markersize=5, label=label)
            handles[label] = _line(color=colour, marker="o", markersize=5)
            for record in group:
                where = (record["system"], record["op"], record["tokens"], record["dtype"])
                if where == (FLOOR, op, tokens, dtype):
                    axes.axhline(record["value"], color=colour, linestyle=":", linewidth=1.5)
                    handles[KINDS["floor"]] = _line(color="dimgrey", linestyle=":", linewidth=1.5)
        _label(axes, _OP_TITLES.get(op, op), "SMs that the operation uses", ticks)
    _add_legend(figure, handles, columns=3)
    return figure


def draw(found: list[Record], folder: Path) -> list[Path]:
    """Files written."""
    found = [record for record in found if is_measured(record)]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    shapes = _shapes(found)
    benches = [key[0] for key in shapes]
    plots = {"tokens": plot_tokens, "num_sms": plot_num_sms, "beside_others": plot_bars}
    for number, (key, group) in enumerate(shapes.items()):
        bench = key[0]
        before = benches[:number].count(bench)
        suffix = f"_{before + 1}" if before else ""
        for name, make in plots.items():
            figure = make(key, group)
            if figure is None:
                continue
            for kind in ("png", "svg"):
                path = folder / f"{bench}_{name}{suffix}.{kind}"
                figure.savefig(path, dpi=110)
                written.append(path)
    return written


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench plot",
        description="Draws latency over tokens and over SMs, and systems beside one another at one number of tokens.",
        epilog=f"Rivals are those of the files, and on 4 H200s those of bench/published.py: {published.SOURCE}.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of --json")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    options = parser.parse_args(argv)
    found = records.given(parser, options.files)
    try:
        written = draw([record for record in found if record["bench"] in _OPS], options.out)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    if not written:
        print("nothing of the library's was measured there", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0
