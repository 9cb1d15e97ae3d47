"""What a picture shows of records: whose figures they are, of which kind, over the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from . import published
from .records import Record
from .table import FLOOR

# By the figure of a record (docs/benchmarks.md), in words. Figures of the host and of memory are not drawn.
KINDS = {
    "graph": "one operation in a CUDA graph, launch included",
    "kernel": "the kernels alone, without what a launch takes",
    "event": "called from Python, nothing queued before",
    "floor": "what the links alone take (computed)",
}
_FIGURES = {"graph": "graph", "graph_pdl": "graph", "kernel": "kernel", "event": "event"}
OWN = "nccl_ep"
_NAMES = {
    FLOOR: "the links alone", "deepep_v1": "DeepEP V1", "nccl_ep_nvidia": "NVIDIA's NCCL EP",
    "flashinfer": "FlashInfer MoeAlltoAll, rank-major",
    "torch_all_to_all": "torch's all_to_all_single", "torch_symm_mem": "torch's symmetric memory",
}  # fmt: skip
_APIS = {"ops": ", by torch.ops", "deepep": ", by DeepEP's methods"}
PUBLISHED_ON = "H200"


@dataclass
class Series:
    who: str
    kind: str
    points: dict[int, float] = field(default_factory=dict)  # microseconds by tokens of a rank
    is_published: bool = False


def how(record: Record) -> str:
    """What a name says besides."""
    known = ", routes known" if record.get("cached") else ""
    copied = ", tensors copied" if record.get("placement") == "staged" else ""
    return known + copied + (", with masks" if record.get("enable_shrink") else "")


def who(record: Record) -> str:
    system = record["system"]
    name = _NAMES.get(system, system.replace("_", " ") if system != OWN else OWN)
    if system == OWN:
        name += _APIS.get(record["api"] or "", "")
    elif system == "nccl_ep_nvidia" and (record["bench"] == "ll" or record["layout"] != "flat"):
        name += f", {record['layout'].replace('_', '-')}"
    return name + how(record)


def default_sms(group: Iterable[Record]) -> int:
    """A sweep over num_sms is shown by its default, or by its largest number where it has no default."""
    sms = {record["num_sms"] or 0 for record in group if record["system"] == OWN}
    return 0 if 0 in sms else max(sms)


def series_of(group: list[Record], shape: dict[str, Any], op: str, dtype: str) -> list[Series]:
    """Ours first, the floor last. torch.ops are left out where the public functions have as many points, and launches
    that are not the default where there are those that are."""
    sms, by_default = default_sms(group), any(record["figure"] == "graph_pdl" for record in group)
    found: dict[tuple[str, str], Series] = {}
    for record in group:
        own, kind = record["system"] == OWN, _FIGURES.get(record["figure"])
        if (record["op"], record["dtype"], record["unit"]) != (op, dtype, "us") or kind is None:
            continue
        if own and ((record["num_sms"] or 0) != sms or (by_default and record["figure"] == "graph")):
            continue
        kind = "floor" if record["system"] == FLOOR else kind
        found.setdefault((who(record), kind), Series(who(record), kind)).points[record["tokens"]] = record["value"]
    for name, kind in list(found):
        if _APIS["ops"] in name:
            native = found.get((name.replace(_APIS["ops"], ""), kind))
            if native and set(native.points) >= set(found[name, kind].points):
                del found[name, kind]
    for each in _published(shape, op, dtype):
        found.setdefault((each.who, each.kind), each).points.update(each.points)
    return sorted(found.values(), key=lambda each: (each.kind == "floor", not each.who.startswith(OWN)))


def _published(shape: dict[str, Any], op: str, dtype: str) -> list[Series]:
    if PUBLISHED_ON not in shape["device"] or any(shape[name] != value for name, value in published.SHAPE.items()):
        return []
    known = ", routes known" if (shape["bench"], op) == ("ht", "dispatch") else ""
    return [
        Series(point.system.replace(" cached", "") + known, _FIGURES[point.figure], {point.tokens: point.us}, True)
        for point in published.RIVALS
        if (point.bench, point.op, point.dtype) == (shape["bench"], op, dtype)
    ]
