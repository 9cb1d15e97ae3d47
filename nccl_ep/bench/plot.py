"""``python -m nccl_ep.bench plot FILE... --out DIR``: latency over tokens and over SMs, as PNG and SVG."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import published, records
from .records import Record
from .table import FIGURES, FLOORS, is_measured

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
_FLOOR_STYLES = {"floor_wire": ("black", "-"), "floor_flags": ("grey", ":"), "floor_push": ("grey", "--")}


def _figure_class() -> Callable[..., Any]:
    try:
        figure: Callable[..., Any] = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}): pip install matplotlib") from error
    return figure


def _shapes(found: list[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """The library's records by shape, each with the floors and rivals of that shape, whatever their layout."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in found:
        if record["system"] == "nccl_ep":
            groups.setdefault(tuple(record[name] for name in _SHAPE), [])
    for key, group in groups.items():
        shape = dict(zip(_SHAPE, key, strict=True))
        for record in found:
            like = all(record[name] == value for name, value in shape.items() if name != "layout")
            if like and (record["system"] != "nccl_ep" or record["layout"] == shape["layout"]):
                group.append(record)
    return groups


def _title(key: tuple[Any, ...]) -> str:
    bench, device, ranks, hidden, topk, experts, layout, routing = key
    return f"{bench}, {ranks} x {device}, hidden {hidden}, top-{topk} of {experts}, {layout}, {routing} routing"


def _panels(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    figure = _figure_class()(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _label(axes: Any, title: str, x: str, ticks: list[int]) -> None:
    axes.set(title=title, xlabel=x, ylabel="us")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.set_yscale("log", subs=[2, 5])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _draw_published(axes: Any, shape: dict[str, Any], op: str, dtype: str) -> None:
    if any(shape[name] != value for name, value in published.SHAPE.items()):
        return
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    rivals = [point for point in published.RIVALS if point.bench == shape["bench"]]
    for point in rivals:
        if (point.op, point.dtype) == (op, dtype):
            lines.setdefault((point.system, point.figure), []).append((point.tokens, point.us))
    systems = sorted({point.system for point in rivals})
    for (system, figure), points in lines.items():
        marker, label = _MARKERS[systems.index(system)], f"{system}, {figure}"
        x, y = zip(*points, strict=True)
        axes.plot(x, y, _STYLES[figure], color="tab:red", alpha=0.6, marker=marker, label=label)


def _how(record: Record) -> str:
    """What a line's name says besides."""
    staged = ", staged" if record.get("placement") == "staged" else ""
    return (", cached" if record.get("cached") else "") + staged + (", masks" if record.get("enable_shrink") else "")


def _draw_line(axes: Any, name: tuple[str, ...], points: list[tuple[int, float]], names: Iterable[Any]) -> None:
    """Over the tokens. The ops' lines are drawn only where the public functions have none."""
    system, api, figure, how = name
    x, y = zip(*sorted(points), strict=True)
    if system in FLOORS:
        colour, style = _FLOOR_STYLES[system]
        axes.plot(x, y, style, color=colour, label=system.replace("_", ", "))
    elif figure in _STYLES and (api != "ops" or ("nccl_ep", "native", figure, how) not in names):
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
    figure, panels = _panels(len(ops), len(dtypes), _title(key))
    # A sweep over num_sms is drawn by its default, or by its largest number where it has no default.
    sms = {record["num_sms"] for record in group if record["system"] == "nccl_ep"}
    chosen = 0 if 0 in sms else max(sms)
    for op, row in zip(ops, panels, strict=True):
        for dtype, axes in zip(dtypes, row, strict=True):
            lines: dict[tuple[str, ...], list[tuple[int, float]]] = {}
            for record in group:
                at_default = record["system"] != "nccl_ep" or record["num_sms"] == chosen
                if (record["op"], record["dtype"], record["unit"]) == (op, dtype, "us") and at_default:
                    name = (record["system"], record["api"], record["figure"], _how(record))
                    lines.setdefault(name, []).append((record["tokens"], record["value"]))
            for line, points in lines.items():
                _draw_line(axes, line, points, lines)
            _draw_published(axes, shape, op, dtype)
            _label(axes, f"{op}, {dtype}", "tokens of a rank", ticks)
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
    figure, panels = _panels(1, len(ops), f"{_title(key)}; {measured}")
    for op, axes in zip(ops, panels[0], strict=True):
        lines: dict[tuple[int, str, str], list[tuple[int, float]]] = {}
        for record in mine:
            if (record["op"], record["figure"], record["api"]) == (op, measured, api):
                name = (record["tokens"], record["dtype"], _how(record))
                lines.setdefault(name, []).append((record["num_sms"], record["value"]))
        for (tokens, dtype, how), points in sorted(lines.items()):
            label = f"{tokens} tokens, {dtype}{how}"
            drawn = axes.plot(*zip(*sorted(points), strict=True), marker=".", label=label)
            for record in group:
                where = (record["system"], record["op"], record["tokens"], record["dtype"])
                if where == ("floor_wire", op, tokens, dtype):
                    axes.axhline(record["value"], color=drawn[0].get_color(), linestyle=":", linewidth=1)
        _label(axes, f"{op} (dotted: the wire's floor)", "num_sms", ticks)
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
        suffix = f"_{benches[:number].count(bench) + 1}" if benches.count(bench) > 1 else ""
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
        prog="python -m nccl_ep.bench plot",
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
