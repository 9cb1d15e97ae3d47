"""Where a step's time goes, from torch's profiler: the time in dispatch and combine, and what runs beside them."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]
# Host-side events in which rows are exchanged: the library's ops, and the ranges that the baselines draw by hand.
_OPS = re.compile(r"^nccl_ep::\w*(route|dispatch|combine)|^(baseline|deep_ep)\.")
_COMBINES = re.compile(r"combine")
_KINDS = (  # of what a GPU does, first match
    ("dispatch", re.compile(r"\bep::(ll|ht)::.*::dispatch")),
    ("combine", re.compile(r"\bep::(ll|ht)::.*::combine")),
    ("all_to_all", re.compile(r"ncclDev|c10d::alltoall")),
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    ("GEMM", re.compile(r"gemm|cutlass|nvjet|cublas|grouped|aten::(linear|mm|bmm|matmul|_grouped)", re.IGNORECASE)),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


@dataclass
class Segment:
    """One exchange of rows, in us: on the GPU from its first kernel's start to its last one's end, else on the host."""

    name: str
    begin: float
    end: float


class Trace:
    def __init__(self, events: list[Event]) -> None:
        timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
        self.kernels = sorted(
            (each for each in timed if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"]
        )
        self.on_gpu = bool(self.kernels)
        self._launches = [each for each in timed if each.get("cat") in ("cuda_runtime", "cuda_driver")]
        ops = [each for each in timed if each.get("cat") in ("cpu_op", "user_annotation") and _OPS.search(each["name"])]
        self._ops = _outermost(ops)
        if not self.on_gpu:  # CPU ranks: what torch's operators do
            self.kernels = _outermost([each for each in timed if each.get("cat") == "cpu_op"])

    def exchanges(self) -> list[Segment]:
        """In the order of time. What a graph replays has no op on the host: such kernels are known by their names."""
        if not self.on_gpu:
            return [Segment(op["name"], op["ts"], op["ts"] + op["dur"]) for op in self._ops]
        by_launch = {each["args"].get("correlation"): each for each in self.kernels if "args" in each}
        found, taken, is_routed = [], set(), False
        for op in self._ops:
            end = op["ts"] + op["dur"]
            mine = [
                by_launch[each["args"]["correlation"]]
                for each in self._launches
                if each["tid"] == op["tid"] and op["ts"] <= each["ts"] <= end
                and each.get("args", {}).get("correlation") in by_launch
            ]  # fmt: skip
            if not mine:
                continue
            taken |= {id(each) for each in mine}
            segment = Segment(op["name"], mine[0]["ts"], max(each["ts"] + each["dur"] for each in mine))
            if is_routed:  # the counts have been on the host between the two
                segment.begin = found.pop().begin
            is_routed = op["name"].endswith("ht_route")
            found.append(segment)
        for each in self.kernels:
            if kind_of(each["name"]) in ("dispatch", "combine") and id(each) not in taken:
                found.append(Segment(each["name"], each["ts"], each["ts"] + each["dur"]))
        return sorted(found, key=lambda segment: segment.begin)

    def exchange_ms(self) -> float:
        """Time in dispatch and combine, forward and backward; what overlaps is counted once."""
        total, reached = 0.0, 0.0
        for segment in self.exchanges():
            total += max(0.0, segment.end - max(segment.begin, reached))
            reached = max(reached, segment.end)
        return total / 1e3

    def layer(self, layers: int, is_forward: bool) -> list[Event]:
        """What runs from the end of the first layer's combine to the end of the second one's, for a picture.

        ``layers``: of the model; of one alone from the beginning of the trace. ``is_forward``: the trace has no
        backward pass, so that its combines are shared out among the layers, which may have several each.
        """
        ends = [segment.end for segment in self.exchanges() if _COMBINES.search(segment.name)]
        if not ends:
            return []
        count = max(len(ends) // layers, 1) if is_forward else 1  # of a layer
        begin, end = self.kernels[0]["ts"], ends[count - 1]
        if layers > 1 and len(ends) >= 2 * count:
            begin, end = end, ends[2 * count - 1]
        exchanged = [each for each in self.exchanges() if begin < each.end and each.begin < end]
        shown = []
        for each in self.kernels:
            if begin <= each["ts"] + each["dur"] / 2 <= end:
                inside = next(
                    (s for s in exchanged if s.begin <= each["ts"] and each["ts"] + each["dur"] <= s.end), None
                )
                kind = kind_of(each["name"])
                if inside is not None and kind not in ("dispatch", "combine", "all_to_all"):
                    kind = "sort and copy"  # of the exchange
                shown.append(
                    {"name": each["name"][:80], "kind": kind, "begin_us": round(each["ts"] - begin, 2),
                     "us": round(each["dur"], 2), "stream": each.get("args", {}).get("stream", 0)}
                )  # fmt: skip
        return shown


def _outermost(ops: list[Event]) -> list[Event]:
    kept: list[Event] = []
    reached: dict[Any, float] = {}
    for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
        if op["ts"] >= reached.get(op["tid"], 0.0):
            kept.append(op)
            reached[op["tid"]] = op["ts"] + op["dur"]
    return kept


def traced(body: Callable[[], Any]) -> Trace:
    """Runs ``body`` under the profiler."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # or the profiler complains that there is no GPU
    with profile(activities=activities, acc_events=True) as profiler:  # without it torch warns, of cycles
        body()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Trace(json.loads(path.read_text())["traceEvents"])
