"""Draws what train.py and serve.py have written with --report: PNG and SVG.

python -m examples.moe_lm.pictures FOLDER [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from .load import HEADS
from .table import Report, place_of, read_reports

# A colour is an exchange of tokens, or a kind of work.
COLOURS = {
    "nccl_ep": "tab:blue", "nccl_ep_arrivals": "tab:red", "all_to_all_single": "tab:orange", "deep_ep": "tab:green",
}  # fmt: skip
NAMES = {"all_to_all_single": "torch's all_to_all_single"} | HEADS
OVERLAP = "tab:purple"
KINDS = {
    "dispatch": "tab:blue", "combine": "tab:cyan", "all_to_all": "tab:orange", "sort and copy": "tab:red",
    "GEMM": "tab:green", "attention": "tab:olive", "other": "lightgrey",
}  # fmt: skip
EXCHANGE = ("dispatch", "combine", "all_to_all", "sort and copy")  # of KINDS


def title(report: Report) -> str:
    sizes = report["sizes"]
    return (
        f"{place_of(report)}, hidden {sizes['hidden']}, {sizes['layers']} layer{'s' if sizes['layers'] > 1 else ''}, "
        f"top-{sizes['topk']} of {sizes['experts']} experts, {report['dtype'].removeprefix('torch.')}"
    )


def tidy(axes: Any, x: str, y: str, name: str) -> None:
    axes.set(xlabel=x, ylabel=y, title=name)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")


def name_of(exchange: str, overlap: bool = False) -> str:
    return NAMES.get(exchange, exchange) + (", two batches in turn" if overlap else "")


def add_legend(figure: Figure, *more: Line2D) -> None:
    """One for all panels, below them."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles |= {str(line.get_label()): line for line in more}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(len(handles), 4))


def draw_curves(axes: Any, curves: list[tuple[str, str, str, list[float], list[float]]]) -> None:
    """Lines of (label, colour, dashes, x, y); where none has two points, bars beside one another."""
    if any(len(x) > 1 for *_, x, _ in curves):
        for label, colour, dashes, x, y in curves:
            if len(x) > 1:
                axes.plot(x, y, dashes, color=colour, marker=".", label=label)
        return
    for place, (label, colour, _, _, y) in enumerate(curves):
        axes.bar(place, y[0] if y else 0.0, color=colour, label=label)
    axes.set_xticks([])


def of_training(reports: list[Report]) -> Figure:
    """Loss, tokens/s and time in dispatch and combine, of one size by each exchange."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    loss, speed, where = figure.subplots(1, 3)
    figure.suptitle(f"Training: {title(reports[0])}, {reports[0]['tokens_a_step']} tokens a step")
    losses, speeds = [], []
    for number, report in enumerate(reports):
        name, progress = report["exchange"], report["progress"]
        how = name_of(name), COLOURS[name], "--" if number else "-"
        timed = [entry for entry in progress if entry["tokens_per_s"]]
        losses.append((*how, list(range(1, len(report["losses"]) + 1)), report["losses"]))
        speeds.append((*how, [each["step"] for each in timed], [each["tokens_per_s"] for each in timed]))
        exchanged, rest = report["exchange_ms"] or 0.0, 0.0
        if exchanged and timed:
            rest = max(report["tokens_a_step"] / report["tokens_per_s"] * 1e3 - exchanged, 0.0)
        where.bar(how[0], exchanged, color=how[1])
        where.bar(how[0], rest, bottom=exchanged, color="lightgrey", label="" if number else "all else of a step")
    draw_curves(loss, losses)
    draw_curves(speed, speeds)
    for axes in (loss, speed):
        if axes.lines:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.yaxis.set_major_formatter("{x:,.0f}")
    tidy(loss, "step", "loss in nats a byte", "loss")
    tidy(speed, "step" if speed.lines else "", "tokens/s of all ranks", "speed")
    where.set(ylabel="time of a step in ms", title="dispatch and combine in a step")
    add_legend(figure)
    return figure


LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency"}
SHARES = {"p50": ("median", "-"), "p99": ("99th percentile", ":")}


def of_serving(report: Report) -> Figure:
    """Over the rate of requests; bars, where there is one rate."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    figures = report["figures"]
    rates = sorted({each["rate"] for each in figures})
    at = "" if len(rates) > 1 else f", {rates[0]:g} requests/s" if rates[0] else ", all requests at once"
    figure.suptitle(f"Serving: {title(report)}{at}")
    ways = sorted({(each["exchange"], each["overlap"]) for each in figures}, key=lambda way: (way[0] != "nccl_ep", way))
    for axes, (key, name) in zip(figure.subplots(1, 3), LATENCIES.items(), strict=True):
        for place, (exchange, overlap) in enumerate(ways):
            points = [each for each in figures if (each["exchange"], each["overlap"]) == (exchange, overlap)]
            colour, label = OVERLAP if overlap else COLOURS[exchange], name_of(exchange, overlap)
            for share, (_, dashes) in SHARES.items():
                values = [each[f"{key}_{share}_ms"] for each in points]
                if len(rates) > 1:
                    axes.plot([each["rate"] for each in points], values, dashes, color=colour, marker=".",
                              label=label if share == "p50" else "")  # fmt: skip
                else:
                    axes.bar(place, values[0] or 0.0, color=colour, label=label if share == "p50" else "",
                             alpha=1.0 if share == "p50" else 0.35, zorder=3 if share == "p50" else 2)  # fmt: skip
        if len(rates) > 1 and key == "ttft":  # its p99 is far from its p50 where requests queue
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        if len(rates) == 1:
            axes.set_xticks([])
        tidy(axes, "requests/s" if len(rates) > 1 else "", "time in ms", name)
    shares = [
        Line2D([], [], color="dimgrey", linestyle=dashes if len(rates) > 1 else "-", label=text,
               linewidth=1.5 if len(rates) > 1 else 6,
               alpha=1.0 if share == "p50" or len(rates) > 1 else 0.35)
        for share, (text, dashes) in SHARES.items()
    ]  # fmt: skip
    add_legend(figure, *shares)
    return figure


def of_layer(rows: list[tuple[str, list[dict[str, Any]]]], name: str) -> Figure:
    """A row a kind of work, so that what overlaps is seen; one panel for each way."""
    figure = Figure(figsize=(13, 0.6 + 2.6 * len(rows)), layout="constrained")
    figure.suptitle(name)
    longest = max(each["begin_us"] + each["us"] for _, events in rows for each in events)
    for axes, (way, events) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        kinds = [kind for kind in KINDS if any(each["kind"] == kind for each in events)][::-1]
        for place, kind in enumerate(kinds):
            bars = [(each["begin_us"], each["us"]) for each in events if each["kind"] == kind]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=KINDS[kind])
        labels = [f"exchange: {kind}" if kind in EXCHANGE else kind for kind in kinds]
        axes.set_yticks(range(len(kinds)), labels=labels)
        axes.set(xlim=(0, longest * 1.02), xlabel="µs from the end of the layer before")
        end = max(each["begin_us"] + each["us"] for each in events) / 1e3
        axes.set_title(f"exchange of tokens by {way}: the layer takes {end:.1f} ms")
        axes.grid(alpha=0.3, axis="x")
    return figure


def pictures(reports: list[Report]) -> dict[str, Callable[[], Figure]]:
    """By the names of the files."""
    made: dict[str, Callable[[], Figure]] = {}
    by_size: dict[str, list[Report]] = {}
    for report in reports:
        if report["what"] == "training":
            by_size.setdefault(f"h{report['sizes']['hidden']}", []).append(report)
    for size, group in by_size.items():
        group.sort(key=lambda report: report["exchange"] != "nccl_ep")
        made[f"training_{size}"] = lambda group=group: of_training(group)
        rows = [(name_of(each["exchange"]), each["layer"]) for each in group if each["layer"]]
        if rows:
            name = f"A layer's forward pass in training: {title(group[0])}"
            made[f"training_layer_{size}"] = lambda rows=rows, name=name: of_layer(rows, name)
    for report in reports:
        if report["what"] == "serving":
            size = f"h{report['sizes']['hidden']}"
            made[f"serving_{size}"] = lambda report=report: of_serving(report)
            rows = [
                (name_of(each["exchange"], each["overlap"]), each["layer"])
                for each in report["profiles"] if each["layer"]
            ]  # fmt: skip
            if rows:
                name = f"A layer of a decode step: {title(report)}"
                made[f"serving_layer_{size}"] = lambda rows=rows, name=name: of_layer(rows, name)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.moe_lm.pictures", description=(__doc__ or " ").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="of reports, *.json")
    parser.add_argument("--out", type=Path, help="the default is the same folder")
    options = parser.parse_args(argv)
    reports = read_reports(options.folder)
    folder = options.out or options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in pictures(reports).items():
        figure = make()
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=110, metadata={"Date": None} if kind == "svg" else None)
            print(path)


if __name__ == "__main__":
    main()
