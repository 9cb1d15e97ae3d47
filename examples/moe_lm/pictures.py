"""Draws what train.py and serve.py have written with --report: PNG and SVG.

python -m examples.moe_lm.pictures FOLDER [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .table import Report, place_of, read_reports

COLOURS = {"nccl_ep": "tab:blue", "all_to_all_single": "tab:orange", "deep_ep": "tab:green"}
KINDS = {
    "dispatch": "tab:blue", "combine": "tab:cyan", "all_to_all": "tab:orange", "sort and copy": "tab:red",
    "GEMM": "tab:green", "attention": "tab:olive", "other": "lightgrey",
}  # fmt: skip


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


def add_legend(figure: Figure) -> None:
    """One for all panels, below them."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def of_training(reports: list[Report]) -> Figure:
    """Loss, tokens/s and time in dispatch and combine, of one size by each exchange."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    loss, speed, where = figure.subplots(1, 3)
    figure.suptitle(f"Training: {title(reports[0])}, {reports[0]['tokens_a_step']} tokens a step")
    for number, report in enumerate(reports):
        name, progress = report["exchange"], report["progress"]
        colour, line = COLOURS[name], "--" if number else "-"
        loss.plot(range(1, len(report["losses"]) + 1), report["losses"], line, color=colour, label=name)
        timed = [entry for entry in progress if entry["tokens_per_s"]]
        steps, speeds = [each["step"] for each in timed], [each["tokens_per_s"] for each in timed]
        speed.plot(steps, speeds, line, color=colour, marker=".", label=name)
        rest = 0.0
        if report["exchange_ms"] is not None and timed:
            step_ms = report["tokens_a_step"] / report["tokens_per_s"] * 1e3
            rest = max(step_ms - report["exchange_ms"], 0.0)
            where.bar(name, report["exchange_ms"], color=colour)
        where.bar(name, rest, bottom=report["exchange_ms"] or 0.0, color="lightgrey")
    tidy(loss, "step", "loss (nats a byte)", "loss")
    tidy(speed, "step", "tokens/s, all ranks", "speed")
    where.set(ylabel="ms a step", title="in dispatch and combine (grey: the rest)")
    add_legend(figure)
    return figure


def of_serving(report: Report) -> Figure:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"Serving: {title(report)}. Lines: p50, dotted: p99")
    panels = figure.subplots(1, 3)
    figures = report["figures"]
    ways = sorted({(each["exchange"], each["overlap"]) for each in figures}, key=lambda way: (way[0] != "nccl_ep", way))
    for axes, (key, name) in zip(
        panels, (("ttft", "time to first token"), ("tpot", "time per output token"), ("itl", "inter-token latency")),
        strict=True,
    ):  # fmt: skip
        for exchange, overlap in ways:
            points = [each for each in figures if (each["exchange"], each["overlap"]) == (exchange, overlap)]
            rates = [each["rate"] for each in points]
            colour = "tab:purple" if overlap else COLOURS[exchange]
            label = exchange + (", two batches in turn" if overlap else "")
            axes.plot(rates, [each[f"{key}_p50_ms"] for each in points], color=colour, marker="o", label=label)
            axes.plot(rates, [each[f"{key}_p99_ms"] for each in points], ":", color=colour, marker=".")
        if key == "ttft":  # its p99 is far from its p50 where requests queue
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        tidy(axes, "requests/s", "ms", name)
    add_legend(figure)
    return figure


def of_layer(rows: list[tuple[str, list[dict[str, Any]]]], name: str) -> Figure:
    """A row a kind of work, so that what overlaps is seen; one panel for each way."""
    figure = Figure(figsize=(13, 0.6 + 2.6 * len(rows)), layout="constrained")
    figure.suptitle(name)
    longest = max(each["begin_us"] + each["us"] for _, events in rows for each in events)
    for axes, (way, events) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        kinds = [kind for kind in KINDS if any(each["kind"] == kind for each in events)]
        for place, kind in enumerate(reversed(kinds)):
            bars = [(each["begin_us"], each["us"]) for each in events if each["kind"] == kind]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=KINDS[kind])
        axes.set_yticks(range(len(kinds)), labels=list(reversed(kinds)))
        axes.set(xlim=(0, longest * 1.02), title=way, xlabel="us from the end of the layer before")
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
        rows = [(each["exchange"], each["layer"]) for each in group if each["layer"]]
        if rows:
            name = f"A layer's forward pass in training: {title(group[0])}"
            made[f"training_layer_{size}"] = lambda rows=rows, name=name: of_layer(rows, name)
    for report in reports:
        if report["what"] == "serving":
            size = f"h{report['sizes']['hidden']}"
            made[f"serving_{size}"] = lambda report=report: of_serving(report)
            rows = [
                (each["exchange"] + (", two batches in turn" if each["overlap"] else ""), each["layer"])
                for each in report["profiles"] if each["layer"]
            ]  # fmt: skip
            if rows:
                name = f"A layer of a decode step: {title(report)}"
                made[f"serving_layer_{size}"] = lambda rows=rows, name=name: of_layer(rows, name)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.moe_lm.pictures", description=__doc__.splitlines()[0])
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
