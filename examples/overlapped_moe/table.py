"""One table of all that measure.py has found, and records of it: python -m examples.overlapped_moe.table layer.json
more.json --records records.json"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import records
from bench.rivals.table import TITLES

FUSED = {
    "flashinfer_fused": "FlashInfer {} `MoEEpLayer`, fused, BF16",
    "liger_fused": "liger-cute-kernels {}, one kernel, BF16",
    "deep_gemm_fused": "sgl-deep-gemm {} `fp8_mega_moe`, FP8",
}
BY_TORCH = ("torch_gemms", "one_behind_by_torch", "torch_layer")
GRAPH, COMPILED = ", in a CUDA graph", ", compiled"
ENDS = {"": "_ms", GRAPH: "_graph_ms", COMPILED: "_compiled_ms"}  # of a figure's name, by how it was called
_SORTED = ("rank_major", "flat")
Found = dict[str, Any]
Point = tuple[str, int, int]
Values = dict[Point, tuple[float, str]]  # ms, and what of it a cell says behind


def point_of(found: Found) -> Point:
    return found["mode"], found["hidden"], found["tokens"]


def title_of(point: Point) -> str:
    mode, hidden, tokens = point
    return f"{mode.upper()}, {tokens:,} tokens, hidden {hidden}"


def is_fp8(name: str) -> bool:
    return "fp8" in name.lower()


def kind_of(name: str) -> tuple[bool, bool]:
    """Figures that are held against one another are of one kind."""
    return is_fp8(name), name.endswith(GRAPH)


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
            for title, here in ((name + way, key.replace("_ms", end)) for way, end in ENDS.items()):
                if here in each:
                    rows.setdefault(title, {})[point] = each[here], ""
    return rows


def other_rows(others: list[Found]) -> dict[str, Values]:
    """Of several GEMMs the faster, which is named."""
    rows: dict[str, Values] = {}
    for each in others:
        if "layer_ms" not in each:
            continue
        values, point = rows.setdefault(named(each), {}), point_of(each)
        gemm = "" if each["system"] in FUSED else f" ({each['gemm']})"
        if point not in values or each["layer_ms"] < values[point][0]:
            values[point] = each["layer_ms"], gemm
    return rows


def named(other: Found) -> str:
    system, layout, version = other["system"], other["layout"], other.get("version", "")
    if system in FUSED:
        return FUSED[system].format(version)
    form = f"{layout.replace('_', '-')} rows" + (", sorted by the caller" if layout in _SORTED else "")
    title: str = TITLES.get(system, system + " {}").format(version)
    return title.split(", rank-major")[0] + f", {form}"


def lines(results: Found) -> list[str]:
    """In Markdown; ms. The least of a column is bold, of FP8 and of CUDA graphs by themselves."""
    others = results.get("others", [])
    rows = own_rows(results["points"]) | other_rows(others)
    points = list(dict.fromkeys(point for values in rows.values() for point in values))
    least: dict[tuple[Point, tuple[bool, bool]], float] = {}
    for name, values in rows.items():
        for point, (ms, _) in values.items():
            least[point, kind_of(name)] = min(ms, least.get((point, kind_of(name)), ms))
    made = ["| ms | " + " | ".join(map(title_of, points)) + " |", "|---|" + "---|" * len(points)]
    for name, values in rows.items():
        cells = []
        for point in points:
            if point not in values:
                cells.append("")
                continue
            ms, behind = values[point]
            cells.append((f"**{ms:.2f}**" if ms == least[point, kind_of(name)] else f"{ms:.2f}") + behind)
        made.append(("| " + " | ".join([name, *cells]) + " |").replace("|  ", "| "))
    reasons: dict[str, list[str]] = {}
    for each in others:
        if "skipped" in each:
            where = f"{title_of(point_of(each))}, {each['layout']}" if "mode" in each else ""
            where += f", GEMM {each['gemm']}" if "gemm" in each else ""
            reasons.setdefault(f"{each['system']}: {each['skipped']}", []).append(where)
    made.append("")
    for reason, places in reasons.items():
        whole = "; ".join(filter(None, places))
        made.append(f"not measured: {reason}" + (f" ({whole})" if whole else ""))
    return made


def merged(measured: list[Found]) -> Found:
    """Of several calls. ValueError where these had not the same GPUs and experts."""
    first = measured[0]
    for name in ("gpu", "torch", "ranks", "topk", "experts"):
        if len({each[name] for each in measured}) > 1:
            raise ValueError(f"{name} is {', '.join(str(each[name]) for each in measured)}: must be the same in all")
    lists = {name: [found for each in measured for found in each[name]] for name in ("points", "others")}
    return first | lists


def records_of(results: Found, revision: str, date: str) -> Iterator[records.Record]:
    """As docs/benchmarks.md has them, in microseconds. A note tells the variant, or the GEMM of another library."""
    whole = {"bench": "overlapped_moe", "figure": "event", "routing": None, "seed": None, "device": results["gpu"]}
    whole |= {"revision": revision, "date": date} | {each: results[each] for each in ("ranks", "topk", "experts")}
    by_torch: set[tuple[Point, str]] = set()
    for each in results["points"]:
        common = whole | {name: each[name] for name in ("mode", "tokens", "hidden", "num_sms")} | {
            "api": "native", "dtype": "fp8" if is_fp8(each["variant"]) else "bf16", "alignment": each["rows_per_block"],
            "layout": "packed" if each["mode"] == "ht" else "expert_major",
        } | ({} if each["variant"] == "plain" else {"note": each["variant"]})  # fmt: skip
        for key, ms in each.items():
            if not key.endswith("_ms"):
                continue
            op, figure, of_all = key.removesuffix("_ms"), "event", common
            if op.endswith("_graph"):
                op, figure = op.removesuffix("_graph"), "graph"
            if op.endswith("_compiled"):
                op, note = op.removesuffix("_compiled"), common.get("note", "") + COMPILED
                of_all = common | {"note": note.removeprefix(", ")}
            if op in BY_TORCH:  # in BF16, and the same for all variants
                if (point_of(each), key) in by_torch:
                    continue
                by_torch.add((point_of(each), key))
                of_all = {name: value for name, value in common.items() if name != "note"} | {"dtype": "bf16"}
            system = "torch" if op.startswith("torch_") else "nccl_ep"
            yield records.make(of_all, system=system, op=op, figure=figure, value=round(ms * 1e3, 1))
    for each in results["others"]:
        if "mode" not in each:  # not one point of it was begun
            continue
        common = whole | {name: each[name] for name in ("system", "mode", "tokens", "hidden", "layout")}
        common |= {"api": None, "op": "layer", "num_sms": 0, "dtype": "fp8" if is_fp8(named(each)) else "bf16"}
        common |= {"note": each["gemm"]} if "gemm" in each else {}
        common |= {"version": each["version"]} if "version" in each else {}
        ms = each.get("layer_ms")
        more = {"value": round(ms * 1e3, 1)} if ms is not None else {"value": None, "skipped": each["skipped"]}
        yield records.make(common, **more)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of measure.py --json, on one machine")
    parser.add_argument("--records", type=Path, metavar="FILE", help="for records")
    options = parser.parse_args()
    measured = merged([json.loads(each.read_text()) for each in options.files])
    print("\n".join(lines(measured)))
    if options.records is not None:
        records.save(options.records, list(records_of(measured, records.revision(), records.today())))
