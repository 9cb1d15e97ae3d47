"""One table of all that measure.py has found: python -m examples.overlapped_moe.table layer.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.rivals.table import TITLES

FUSED = {
    "flashinfer_fused": "FlashInfer {} `MoEEpLayer`, fused, BF16",
    "liger_fused": "liger-cute-kernels {}, one kernel, BF16",
    "deep_gemm_fused": "sgl-deep-gemm {} `fp8_mega_moe`, FP8",
}
_SORTED = ("rank_major", "flat")
Found = dict[str, Any]
Point = tuple[str, int, int]
Values = dict[Point, tuple[float, str]]  # ms, and what of it a cell says behind


def point_of(found: Found) -> Point:
    return found["mode"], found["hidden"], found["tokens"]


def title(point: Point) -> str:
    mode, hidden, tokens = point
    return f"{mode.upper()}, {tokens:,} tokens, hidden {hidden}"


def is_fp8(name: str) -> bool:
    return "fp8" in name.lower()


def own_rows(points: list[Found]) -> dict[str, Values]:
    rows: dict[str, Values] = {}
    for each in points:
        variant = "" if each["variant"] == "plain" else f", {each['variant']}"
        point = point_of(each)
        for name, key in (
            (f"nccl_ep, overlapped{variant}", "overlapped_ms"),
            (f"nccl_ep, one step behind the other{variant}", "one_behind_ms"),
            ("nccl_ep, one step behind the other, torch's GEMM", "one_behind_by_torch_ms"),
            ("torch `all_to_all_single`, torch's GEMM", "torch_layer_ms"),
        ):
            if key in each:
                rows.setdefault(name, {})[point] = each[key], ""
    return rows


def other_rows(others: list[Found]) -> dict[str, Values]:
    """Of several GEMMs the faster, which is named."""
    rows: dict[str, Values] = {}
    for each in others:
        if "layer_ms" not in each:
            continue
        system, layout = each["system"], each["layout"]
        if system in FUSED:
            name, gemm = FUSED[system].format(each["version"]), ""
        else:
            form = f"{layout.replace('_', '-')} rows" + (", sorted by the caller" if layout in _SORTED else "")
            name = TITLES.get(system, system + " {}").format(each["version"]).split(", rank-major")[0] + f", {form}"
            gemm = f" ({each['gemm']})"
        values, point = rows.setdefault(name, {}), point_of(each)
        if point not in values or each["layer_ms"] < values[point][0]:
            values[point] = each["layer_ms"], gemm
    return rows


def lines(results: Found) -> list[str]:
    """In Markdown; ms. The least of a column is bold, of FP8 by itself."""
    others = results.get("others", [])
    rows = own_rows(results["points"]) | other_rows(others)
    points = list(dict.fromkeys(point for values in rows.values() for point in values))
    least: dict[tuple[Point, bool], float] = {}
    for name, values in rows.items():
        for point, (ms, _) in values.items():
            least[point, is_fp8(name)] = min(ms, least.get((point, is_fp8(name)), ms))
    made = ["| ms | " + " | ".join(map(title, points)) + " |", "|---|" + "---|" * len(points)]
    for name, values in rows.items():
        cells = []
        for point in points:
            if point not in values:
                cells.append("")
                continue
            ms, behind = values[point]
            cells.append((f"**{ms:.2f}**" if ms == least[point, is_fp8(name)] else f"{ms:.2f}") + behind)
        made.append(("| " + " | ".join([name, *cells]) + " |").replace("|  ", "| "))
    reasons: dict[str, list[str]] = {}
    for each in others:
        if "skipped" in each:
            where = f"{title(point_of(each))}, {each['layout']}" if "mode" in each else ""
            where += f", GEMM {each['gemm']}" if "gemm" in each else ""
            reasons.setdefault(f"{each['system']}: {each['skipped']}", []).append(where)
    made.append("")
    for reason, places in reasons.items():
        whole = "; ".join(filter(None, places))
        made.append(f"not measured: {reason}" + (f" ({whole})" if whole else ""))
    return made


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))
