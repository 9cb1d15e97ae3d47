"""Tables, in Markdown, of what train.py and serve.py have written with --report.

python -m examples.moe_lm.table FOLDER [--record FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.records import revision, today

from .load import HEADS, show

Report = dict[str, Any]
_BULKY = ("outputs", "layer", "options", "losses", "first_buffer")  # left out of a record


def read_reports(folder: Path) -> list[Report]:
    """Of the folder's *.json that are reports. SystemExit if there is none."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    reports = [each for each in found if isinstance(each, dict) and each.get("what") in ("training", "serving")]
    if not reports:
        raise SystemExit(f"no report of train.py or serve.py in {folder}")
    return reports


def record_of(reports: list[Report]) -> list[Report]:
    """The reports without what would fill a repository, with date and revision."""

    def thin(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: thin(each) for name, each in value.items() if name not in _BULKY}
        if isinstance(value, list):
            return [thin(each) for each in value]
        return round(value, 3) if isinstance(value, float) else value

    when = {"date": today(), "revision": revision()}
    return [thin(report) | when for report in reports]


def place_of(report: Report) -> str:
    """As "2 H100s" or "2 CPU ranks"."""
    count, device = report["ranks"], report["device"]
    name = "CPU rank" if device == "cpu" else device.removeprefix("NVIDIA ").split()[0]
    return f"{count} {name}{'s' if count > 1 else ''}"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def training_table(reports: list[Report]) -> list[str]:
    """A row a size: both exchanges side by side."""
    names = sorted({each["exchange"] for each in reports}, key=lambda name: name != "nccl_ep")
    by_size: dict[tuple[int, int, int], dict[str, Report]] = {}
    for report in reports:
        sizes = report["sizes"]
        by_size.setdefault((sizes["hidden"], sizes["layers"], sizes["experts"]), {})[report["exchange"]] = report
    head = [name for exchange in names for name in (f"{exchange}, tokens/s", "ms in dispatch and combine, of a step")]
    lines = [_row("training", *head), "|---" * (len(head) + 1) + "|"]
    for (hidden, layers, experts), found in sorted(by_size.items()):
        cells = []
        for name in names:
            report = found.get(name)
            if report is None or not report["tokens_per_s"]:
                cells += ["", ""]
                continue
            cells += [f"{report['tokens_per_s']:,.0f}", _exchange_time(report)]
        layer = "layer" if layers == 1 else "layers"
        lines.append(_row(f"hidden {hidden}, {experts} experts, {layers} {layer}", *cells))
    return lines


def serving_table(report: Report) -> list[str]:
    """A row an exchange and rate."""
    lines = [
        _row("serving", "requests/s", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "ITL p50 / p99, ms", "tokens/s"),
        "|---|---|---|---|---|---|",
    ]
    for each in report["figures"]:
        name = each["exchange"] + (", two batches in turn" if each["overlap"] else "")
        pairs = (_percentiles(each, key) for key in ("ttft", "tpot", "itl"))
        lines.append(_row(name, f"{each['rate']:g}", *pairs, f"{each['tokens_per_s']:,.0f}"))
    return lines


def summary_table(reports: list[Report]) -> list[str]:
    """A column an exchange: training of each size, serving at the lowest and the highest rate."""
    figures = [each for report in reports if report["what"] == "serving" for each in report["figures"]]
    arrives = any(each["exchange"] == "nccl_ep_arrivals" for each in figures)
    names = ("nccl_ep", *(("nccl_ep_arrivals",) if arrives else ()), "all_to_all_single", "deep_ep")
    lines = [_row(place_of(reports[0]), *(HEADS.get(name, name) for name in names)), "|---" * (len(names) + 1) + "|"]
    training = [each for each in reports if each["what"] == "training" and each["tokens_per_s"]]
    for sizes in sorted({tuple(each["sizes"].items()) for each in training}):
        found = {each["exchange"]: each for each in training if tuple(each["sizes"].items()) == sizes}
        model = dict(sizes)
        what = (
            f"hidden {model['hidden']}, {model['layers']} layers"
            if model["layers"] > 1
            else f"hidden {model['hidden']}, 1 layer"
        )
        speeds = [f"{found[name]['tokens_per_s']:,.0f}" if name in found else "" for name in names]
        lines.append(_row(f"training, {what}: tokens/s", *speeds))
        times = [_exchange_time(found[name]) if name in found else "" for name in names]
        lines.append(_row("ms in dispatch and combine, of a step", *times))
    for report in (each for each in reports if each["what"] == "serving"):
        figures = [each for each in report["figures"] if not each["overlap"]]
        rates = sorted({each["rate"] for each in figures})
        for rate in sorted({rates[0], rates[-1]}):
            at = {each["exchange"]: each for each in figures if each["rate"] == rate}
            for key, what in (
                ("ttft", "time to first token"),
                ("tpot", "time per output token"),
                ("itl", "inter-token latency"),
            ):
                cells = [_percentiles(at[name], key) if name in at else "" for name in names]
                lines.append(_row(f"serving {rate:g} requests/s: {what}, p50 / p99, ms", *cells))
            speeds = [f"{at[name]['tokens_per_s']:,.0f}" if name in at else "" for name in names]
            lines.append(_row(f"serving {rate:g} requests/s: tokens/s", *speeds))
    return lines


def _percentiles(figures: dict[str, Any], key: str) -> str:
    return f"{show(figures[f'{key}_p50_ms'], 1)} / {show(figures[f'{key}_p99_ms'], 1)}"


def _exchange_time(report: Report) -> str:
    if report["exchange_ms"] is None:
        return ""
    return f"{report['exchange_ms']:.1f} of {report['tokens_a_step'] / report['tokens_per_s'] * 1e3:.0f}"


def tables(reports: list[Report]) -> list[str]:
    training = [each for each in reports if each["what"] == "training"]
    lines = [*summary_table(reports), ""]
    lines += training_table(training) if training else []
    for report in reports:
        if report["what"] == "serving":
            lines += ["", *serving_table(report)]
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.moe_lm.table", description=(__doc__ or " ").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="of reports, *.json")
    parser.add_argument("--record", type=Path, help="one file of all, without what is bulky")
    options = parser.parse_args(argv)
    reports = read_reports(options.folder)
    print("\n".join(tables(reports)))
    if options.record:
        options.record.write_text(json.dumps(record_of(reports), indent=1) + "\n")


if __name__ == "__main__":
    main()
