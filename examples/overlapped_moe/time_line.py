"""A picture of two traces of measure.py: a layer one step behind the other, and overlapped, over the same microseconds.

    python -m examples.overlapped_moe.time_line ONE_BEHIND.json.gz OVERLAPPED.json.gz time_line.svg

Beside the picture it writes the kernels of both as one trace for Perfetto, which is small: time_line.json.gz. The bars
are kernels as torch's profiler saw them, a lane a stream. A GEMM that waits for rows inside its kernel is a bar, too.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from examples.moe_lm.trace import kind_of

Event = dict[str, Any]
PASSES = ("forward", "backward")
WAYS = ("one step behind the other", "overlapped")
DISPATCH, FIRST, SECOND, COMBINE = "dispatch", "first GEMM, SwiGLU", "second GEMM", "combine"
GRADIENTS, OTHER, WAIT = "weights' gradients", "other", "waits"
KINDS = (DISPATCH, FIRST, SECOND, COMBINE, GRADIENTS, OTHER)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_WEIGHTS_HOME = re.compile(r"\bep::.*scalars")  # combine_weights of low latency
_LEAST_WAIT = 2.0  # us between two bars of a lane
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Bar:
    """Microseconds from the first of its pass on."""

    kind: str
    name: str
    stream: int
    begin: float
    end: float


def load(path: str | Path) -> list[Event]:
    data = Path(path).read_bytes()
    events: list[Event] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    return [each for each in events if each.get("ph") == "X" and "dur" in each]


def _of_pass(events: list[Event], name: str) -> list[Event]:
    """What the GPU does of all that was launched in the range of this name, in the order of launches; without a GPU
    what torch's operators do, the outermost of a thread."""
    ranges = [each for each in events if each.get("cat") == "user_annotation" and each["name"] == name]
    if not ranges:
        return []
    begin, end = ranges[0]["ts"], ranges[0]["ts"] + ranges[0]["dur"]
    inside = [each for each in events if begin <= each["ts"] <= end]
    on_gpu = [each for each in events if each.get("cat") in _ON_GPU]
    if on_gpu:
        # Numbers of calls grow. That of a launch which the profiler has left out lies between those of others.
        calls = [each["args"]["correlation"] for each in inside if each.get("cat") in _CALLS]
        least, most = min(calls, default=0), max(calls, default=-1)
        mine = [each for each in on_gpu if least <= each["args"]["correlation"] <= most]
        return sorted(mine, key=lambda each: int(each["args"]["correlation"]))
    kept, reached = [], dict[Any, float]()
    for each in sorted((each for each in inside if each.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        if each["ts"] >= reached.get(each["tid"], 0.0):
            kept.append(each)
            reached[each["tid"]] = each["ts"] + each["dur"]
    return kept


def _kind(event: Event, last_gemm: Event | None) -> str:
    name = event["name"]
    if "grouped_weight_gradient" in name:
        return GRADIENTS
    if _is_gemm(event):
        return SECOND if event is last_gemm else FIRST
    if _WEIGHTS_HOME.search(name):
        return COMBINE
    kind = kind_of(name)
    if kind == "other" and name.startswith("nccl_ep::"):  # CPU ranks
        kind = next((each for each in (DISPATCH, COMBINE) if each in name), kind)
    return kind if kind in (DISPATCH, COMBINE) else OTHER


def _is_gemm(event: Event) -> bool:
    return "grouped_gemm_kernel" in event["name"]


def passes(events: list[Event]) -> dict[str, list[Bar]]:
    """Those that the trace has, in the order of time. The GEMM that was launched last is the second one: the first may
    be launched twice."""
    found = {}
    for name in PASSES:
        if not (mine := _of_pass(events, name)):
            continue
        last_gemm = next((each for each in reversed(mine) if _is_gemm(each)), None)
        start = min(each["ts"] for each in mine)
        bars = []
        for each in mine:
            begin = each["ts"] - start
            stream = each.get("args", {}).get("stream", each["tid"])
            bars.append(Bar(_kind(each, last_gemm), each["name"], int(stream), begin, begin + each["dur"]))
        found[name] = sorted(bars, key=lambda bar: bar.begin)
    return found


def lanes(bars: list[Bar]) -> list[list[Bar]]:
    """The bars of each stream, with what it waits between them. The stream with the dispatch is the first."""
    by_stream: dict[int, list[Bar]] = {}
    for bar in bars:
        lane = by_stream.setdefault(bar.stream, [])
        reached = max((each.end for each in lane), default=bar.begin)
        if bar.begin - reached >= _LEAST_WAIT:
            lane.append(Bar(WAIT, WAIT, bar.stream, reached, bar.begin))
        lane.append(bar)
    return sorted(by_stream.values(), key=lambda lane: all(bar.kind != DISPATCH for bar in lane))


def small_trace(found: dict[str, dict[str, list[Bar]]]) -> list[Event]:
    """Of passes by way: a process each, which begins at 0."""
    events: list[Event] = []
    for pid, (name, way) in enumerate((name, way) for name in PASSES for way in found if name in found[way]):
        bars = found[way][name]
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{name}, {way}"}})
        for stream in sorted({bar.stream for bar in bars}):
            about = {"ph": "M", "name": "thread_name", "pid": pid, "tid": stream}
            events.append(about | {"args": {"name": f"stream {stream}"}})
        for bar in bars:
            events.append(
                {"ph": "X", "cat": "kernel", "name": bar.kind, "pid": pid, "tid": bar.stream, "ts": round(bar.begin, 3),
                 "dur": round(bar.end - bar.begin, 3), "args": {"kernel": bar.name[:200]}}
            )  # fmt: skip
    return events


# ---- The picture

_LEFT, _RIGHT, _LANE = 190, 66, 22
_LETTER = 7.7  # of the legend, in the widest of the picture's fonts


def _pictures() -> Any:
    """docs/pictures/make_pictures.py, whose pictures look like this one."""
    spec = importlib.util.spec_from_file_location("make_pictures", _ROOT / "docs/pictures/make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(longest: float) -> float:
    """Between two ticks of the axis: 1, 2 or 5 times a power of ten, six to twelve of them."""
    step = 1.0
    while True:
        for each in (step, 2 * step, 5 * step):
            if longest / each <= 12:
                return each
        step *= 10


def draw(found: dict[str, dict[str, list[Bar]]], title: str) -> str:
    """As SVG, of passes by way: the ways of a pass below one another."""
    from_docs = _pictures()
    colours = dict(zip(
        KINDS, (from_docs.BLUE, from_docs.GREEN, from_docs.PURPLE, from_docs.ORANGE, "#9a6700", "#8c959f"), strict=True
    ))  # fmt: skip
    shown = [name for name in PASSES if any(name in each for each in found.values())]
    longest = max(bar.end for each in found.values() for bars in each.values() for bar in bars)
    scale = (from_docs.WIDTH - _LEFT - _RIGHT) / longest
    heights = {
        name: 40 + sum(_LANE * len(lanes(each[name])) + 14 for each in found.values() if name in each) + 26
        for name in shown
    }
    totals = "; ".join(
        f"{name}, {way}: {max(bar.end for bar in each[name]):,.0f} µs"
        for name in shown for way, each in found.items() if name in each
    )  # fmt: skip
    picture = from_docs.Picture(88 + sum(heights.values()), title, totals)
    picture.text(20, 32, title, 15, bold=True)
    x = 20.0
    kinds = [kind for kind in KINDS if any(b.kind == kind for e in found.values() for bars in e.values() for b in bars)]
    for kind in [*kinds, WAIT]:
        fill, stroke = (colours[kind], "none") if kind != WAIT else ("#ffffff", from_docs.REST)
        picture.box(x, 46, 14, 14, fill=fill, stroke=stroke, radius=3, dashed=kind == WAIT)
        picture.text(x + 20, 58, kind, 12, from_docs.MUTED)
        x += 40 + _LETTER * len(kind)
    top = 76.0
    for name in shown:
        picture.text(20, top + 22, name, 14, bold=True)
        picture.text(from_docs.WIDTH - 14, top + 22, "µs", 11, from_docs.MUTED, anchor="end")
        y = top + 34
        bottom = top + heights[name] - 26
        step = step_of(longest)
        for tick in range(int(longest / step) + 1):
            at = _LEFT + tick * step * scale
            picture.box(at, top + 28, 1, bottom - top - 28, fill=from_docs.PANEL, radius=0)
            picture.text(at, bottom + 14, f"{tick * step:,.0f}", 11, from_docs.MUTED, anchor="middle")
        for way, each in found.items():
            if name not in each:
                continue
            mine = lanes(each[name])
            picture.text(20, y + _LANE * len(mine) / 2 + 4, way, 12)
            for lane in mine:
                for bar in lane:
                    _bar(picture, bar, y, scale, colours.get(bar.kind, ""), from_docs)
                y += _LANE
            end = max(bar.end for bar in each[name])
            picture.text(_LEFT + end * scale + 6, y - _LANE * len(mine) / 2 + 4, f"{end:,.0f}", 12, bold=True)
            y += 14
        top += heights[name]
    return str(picture.svg())


def _bar(picture: Any, bar: Bar, y: float, scale: float, colour: str, from_docs: Any) -> None:
    width = max((bar.end - bar.begin) * scale, 0.75)
    x = _LEFT + bar.begin * scale
    picture.elements.append("<g>")
    if bar.kind == WAIT:
        picture.box(x, y + 5, width, _LANE - 12, fill="#ffffff", stroke=from_docs.REST, radius=2, dashed=True)
    else:
        picture.box(x, y, width, _LANE - 3, fill=colour, radius=2 if width > 4 else 0)
    if bar.kind != WAIT and width > 7.5 * len(bar.kind):
        picture.text(x + width / 2, y + 14, bar.kind, 11, "#ffffff", anchor="middle")
    about = f"{bar.kind}: {bar.end - bar.begin:,.1f} µs from {bar.begin:,.1f}" + (
        "" if bar.kind == WAIT else f", {bar.name[:120]}"
    )
    picture.elements.append(f"<title>{escape(about)}</title></g>")


def make(one_behind: str | Path, overlapped: str | Path, picture: str | Path, title: str) -> None:
    """Writes the picture, and the small trace beside it."""
    found = {way: passes(load(path)) for way, path in zip(WAYS, (one_behind, overlapped), strict=True)}
    if not any(found.values()):
        raise ValueError(f"{one_behind}, {overlapped}: no range is named forward or backward, or nothing runs in it")
    Path(picture).write_text(draw(found, title), encoding="utf-8")
    text = json.dumps({"traceEvents": small_trace(found), "displayTimeUnit": "ms"})
    Path(picture).with_suffix(".json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one_behind", metavar="ONE_BEHIND")
    parser.add_argument("overlapped", metavar="OVERLAPPED")
    parser.add_argument("picture", metavar="PICTURE.svg", type=Path)
    parser.add_argument("--title", default="A layer of experts, with and without overlap")
    options = parser.parse_args()
    try:
        make(options.one_behind, options.overlapped, options.picture, options.title)
    except (OSError, ValueError) as error:
        parser.error(str(error))
