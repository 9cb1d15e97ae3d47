"""``python -m bench plot FILE... --out DIR``: latency over tokens and over SMs, as PNG and SVG."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import published, records
from .compare import CALL
from .records import Record
from .table import FIGURES, FLOOR, TITLES, is_measured

_OPS = {"ll": ("dispatch", "combine", "pair"), "ht": ("routing", "dispatch", "combine", "pair")}
_SHAPE = ("bench", "device", "ranks", "hidden", "topk", "experts", "layout", "routing")
_STYLES = {"graph": "-", "graph_pdl": "--", "kernel": "-.", "event": ":"}
_COLOURS = {"torch_all_to_all": "tab:orange", "torch_symm_mem": "tab:green"}
# Ours: the public functions as they are called, and how else.
_VARIANTS = {
    "": "tab:blue", ", cached": "tab:cyan", ", staged": "tab:purple", ", cached, staged": "tab:pink",
    ", masks": "tab:cyan",
}  # fmt: skip
_API_COLOURS = {"deepep": "tab:olive"}  # where it is not the native one's, or what stands for it
_MARKERS = "sD^vP*"
Points = list[tuple[int, float]]
_LABELS = 12  # that have room side by side along an axis


def _figure_class() -> Callable[..., Any]:
    try:
        figure: Callable[..., Any] = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}): pip install matplotlib") from error
    return figure


def _shapes(found: list[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """The library's records by shape, each with the floors and rivals of that shape and its tokens, whatever their
    layout. Of a call that was measured several times the last record counts."""
    last = {tuple(record.get(name) for name in CALL): record for record in found}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in last.values():
        if record["system"] == "nccl_ep":
            groups.setdefault(tuple(record[name] for name in _SHAPE), []).append(record)
    for key, group in groups.items():
        tokens = {record["tokens"] for record in group}
        shape = {name: value for name, value in zip(_SHAPE, key, strict=True) if name != "layout"}
        group += [
            record
            for record in last.values()
            if record["system"] != "nccl_ep" and record["tokens"] in tokens
            and all(record[name] == value for name, value in shape.items())
        ]  # fmt: skip
    return groups


def _title(key: tuple[Any, ...], group: list[Record]) -> str:
    bench, device, ranks, hidden, topk, experts, layout, routing = key
    revisions = ", ".join(sorted({record["revision"] for record in group if record["system"] == "nccl_ep"}))
    return (
        f"{TITLES[bench]}, {ranks} x {device}, hidden {hidden}, top-{topk} of {experts}, {layout}, {routing} routing\n"
        f"revision {revisions}"
    )


def _panels(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    figure = _figure_class()(figsize=(5.6 * columns + 2.4, 4.0 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _add_legend(figure: Any) -> None:
    """One for all panels, beside them: a name looks the same in each."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)


def _shown_ticks(ticks: list[int]) -> list[int]:
    """Those that do not run into one another on a logarithmic axis, the largest always."""
    shown: list[int] = []
    for tick in reversed(ticks):
        if not shown or shown[-1] / tick >= (ticks[-1] / ticks[0]) ** (1 / _LABELS):
            shown.append(tick)
    return shown[::-1]


def _label(axes: Any, title: str, x: str, ticks: list[int]) -> None:
    axes.set(title=title, xlabel=x, ylabel="us")
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    shown = _shown_ticks(ticks)
    axes.set_xticks(shown, labels=[str(tick) for tick in shown])
    axes.set_yscale("log", subs=[2, 5])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    # The wire alone takes next to nothing for a few tokens: it may leave the picture.
    lowest = [min(line.get_ydata()) for line in axes.get_lines() if line.get_label() != "floor, wire"]
    if lowest:
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 0.5 * min(lowest)))


def _draw_published(axes: Any, shape: dict[str, Any], op: str, dtype: str) -> None:
    if any(shape[name] != value for name, value in published.SHAPE.items()):
        return
    lines: dict[tuple[str, str], Points] = {}
    rivals = [point for point in published.RIVALS if point.bench == shape["bench"]]
    for point in rivals:
        if (point.op, point.dtype) == (op, dtype):
            lines.setdefault((point.system, point.figure), []).append((point.tokens, point.us))
    systems = sorted({point.system for point in rivals})
    for (system, figure), points in lines.items():
        marker, label = _MARKERS[systems.index(system)], f"{system}, {figure}"
        x, y = zip(*points, strict=True)
        fill = "none" if figure == "event" else "full"
        axes.plot(x, y, _STYLES[figure], color="tab:red", alpha=0.6, marker=marker, fillstyle=fill, label=label)


def _how(record: Record) -> str:
    """What a line's name says besides."""
    staged = ", staged" if record.get("placement") == "staged" else ""
    return (", cached" if record.get("cached") else "") + staged + (", masks" if record.get("enable_shrink") else "")


def _draw_line(axes: Any, name: tuple[str, ...], points: Points, lines: Mapping[tuple[str, ...], Points]) -> None:
    """Over the tokens. The ops' lines are drawn only if the public functions' have not as many points."""
    system, api, figure, how = name
    x, y = zip(*sorted(points), strict=True)
    native = lines.get(("nccl_ep", "native", figure, how), [])
    if system == FLOOR:
        marker = "" if len(set(x)) > 1 else "_"  # or a lone point would not be seen
        axes.plot(x, y, "-", color="black", marker=marker, label=system.replace("_", ", "))
    elif figure in _STYLES and (api != "ops" or not {at for at, _ in native}.issuperset(x)):
        colour = _VARIANTS[how] if system == "nccl_ep" else _COLOURS.get(system, "tab:brown")
        called = "" if system != "nccl_ep" or api == "native" else f", {api}"
        label = f"{system}{called}, {figure}{how}"
        axes.plot(x, y, _STYLES[figure], color=_API_COLOURS.get(api, colour), marker=".", label=label)


def plot_tokens(key: tuple[Any, ...], group: list[Record]) -> Any:
    """Panels of operation and dtype; lines of system, api and figure over the tokens."""
    shape = dict(zip(_SHAPE, key, strict=True))
    ops = _OPS[shape["bench"]]
    dtypes = sorted({record["dtype"] for record in group})
    ticks = sorted({record["tokens"] for record in group})
    figure, panels = _panels(len(ops), len(dtypes), _title(key, group))
    # A sweep over num_sms is drawn by its default, or by its largest number where it has no default.
    sms = {record["num_sms"] for record in group if record["system"] == "nccl_ep"}
    chosen = 0 if 0 in sms else max(sms)
    for op, row in zip(ops, panels, strict=True):
        for dtype, axes in zip(dtypes, row, strict=True):
            lines: dict[tuple[str, ...], Points] = {}
            for record in group:
                at_default = record["system"] != "nccl_ep" or record["num_sms"] == chosen
                if (record["op"], record["dtype"], record["unit"]) == (op, dtype, "us") and at_default:
                    name = (record["system"], record["api"], record["figure"], _how(record))
                    lines.setdefault(name, []).append((record["tokens"], record["value"]))
            for line, points in lines.items():
                _draw_line(axes, line, points, lines)
            _draw_published(axes, shape, op, dtype)
            _label(axes, f"{op}, {dtype}", "tokens of a rank", ticks)
    _add_legend(figure)
    return figure


def plot_num_sms(key: tuple[Any, ...], group: list[Record]) -> Any | None:
    """A panel an operation; lines of tokens and dtype over num_sms, the floors flat. None without a sweep."""
    mine = [
        record for record in group if record["system"] == "nccl_ep" and record["unit"] == "us" and record["num_sms"]
    ]
    ticks = sorted({record["num_sms"] for record in mine})
    if len(ticks) < 2:
        return None
    measured = next(figure for figure in FIGURES if any(record["figure"] == figure for record in mine))
    api = "native" if any(record["api"] == "native" for record in mine) else "ops"
    ops = _OPS[key[0]]
    mine = [record for record in mine if (record["figure"], record["api"]) == (measured, api)]
    names = sorted({(record["tokens"], record["dtype"], _how(record)) for record in mine})
    figure, panels = _panels(1, len(ops), f"{_title(key, mine)}; {measured}; dotted: the wire's floor")
    for op, axes in zip(ops, panels[0], strict=True):
        lines: dict[tuple[int, str, str], Points] = {}
        for record in mine:
            if record["op"] == op:
                name = (record["tokens"], record["dtype"], _how(record))
                lines.setdefault(name, []).append((record["num_sms"], record["value"]))
        for (tokens, dtype, how), points in sorted(lines.items()):
            colour = f"C{names.index((tokens, dtype, how)) % 10}"
            label = f"{tokens} tokens, {dtype}{how}"
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker=".", label=label)
            for record in group:
                where = (record["system"], record["op"], record["tokens"], record["dtype"])
                if where == (FLOOR, op, tokens, dtype):
                    axes.axhline(record["value"], color=colour, linestyle=":", linewidth=1)
        _label(axes, op, "num_sms", ticks)
    _add_legend(figure)
    return figure


def draw(found: list[Record], folder: Path) -> list[Path]:
    """Files written."""
    found = [record for record in found if is_measured(record)]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    shapes = _shapes(found)
    benches = [key[0] for key in shapes]
    for number, (key, group) in enumerate(shapes.items()):
        bench = key[0]
        before = benches[:number].count(bench)
        suffix = f"_{before + 1}" if before else ""
        for name, figure in (("tokens", plot_tokens(key, group)), ("num_sms", plot_num_sms(key, group))):
            if figure is None:
                continue
            for kind in ("png", "svg"):
                path = folder / f"{bench}_{name}{suffix}.{kind}"
                figure.savefig(path, dpi=120)
                written.append(path)
    return written


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench plot",
        description="Draws latency over tokens and over num_sms, against the floors and the published rivals.",
        epilog=f"Published figures: {published.SOURCE}.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of --json")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    options = parser.parse_args(argv)
    found = records.given(parser, options.files)
    written = draw([record for record in found if record["bench"] in _OPS], options.out)
    if not written:
        print("nothing of the library's was measured there", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0
