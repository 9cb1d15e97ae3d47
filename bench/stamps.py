"""What ``nccl_ep._C.time_line(kernel)`` returns, in builds with -DNCCL_EP_LAB=ON, made into what can be read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from . import records
from .records import Record

STAMPS = (  # csrc/cuda/testing/stamps.cuh: Stamp
    "kStart", "kEpochKnown", "kSent", "kRoutingKnown", "kOwnDone", "kEnd",
    "kFirstPut", "kLastPut", "kLastMade", "kFirstUsed", "kLastArrival",
)  # fmt: skip
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "ll": {"dispatch": ("ll_dispatch",), "combine": ("ll_combine", "ll_streamed_combine")},
    "ht": {
        "dispatch": ("ht_route", "ht_dispatch"),
        "cached": ("ht_dispatch",),
        "combine": ("ht_combine", "ht_signalled_combine"),
    },
}
_MISSED = 2**64 - 1  # of a warp that did not come there
Stamps = list[list[int]]
Summary = tuple[float, float, float]  # first, median and last warp


def summary(warps: Sequence[int]) -> Summary | None:
    """None: no warp came there."""
    passed = [at for at in warps if at != _MISSED]
    return (min(passed), median(passed), max(passed)) if passed else None


def _medians(calls: list[Summary]) -> Summary:
    first, middle, last = (median(each) for each in zip(*calls, strict=True))
    return first, middle, last


def over_calls(calls: Sequence[Stamps]) -> dict[str, Summary]:
    """Medians over the calls of each stamp that any warp passed, in the order of time."""
    found: dict[str, list[Summary]] = {}
    for stamps in calls:
        for name, warps in zip(STAMPS, stamps, strict=True):
            if passed := summary(warps):
                found.setdefault(name, []).append(passed)
    medians = {name: _medians(each) for name, each in found.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1][1]))


def render(found: Sequence[Record]) -> str:
    """A table for each call."""
    calls: dict[tuple[Any, ...], list[list[str]]] = {}
    for record in found:
        names = (
            "mode", "ranks", "domain_size", "device", "tokens", "hidden", "topk", "experts", "dtype", "layout",
            "revision",
        )  # fmt: skip
        line = [record[name] for name in ("op", "kernel", "stamp")]
        line += [f"{record[name]:,.0f}" for name in ("first", "value", "last")]
        calls.setdefault(tuple(record.get(name) for name in names), []).append(line)
    text = []
    for (mode, ranks, domain, device, tokens, hidden, topk, experts, dtype, layout, revision), lines in calls.items():
        domains = "" if domain is None else f" in domains of {domain}"
        text.append(
            f"{mode}: {ranks} ranks{domains}, {device}; {tokens} tokens, hidden {hidden}, top-{topk} of {experts} "
            f"experts, {dtype}, {layout}; revision {revision}; warps of rank 0, ns"
        )
        text += records.columns([["op", "kernel", "stamp", "first", "median", "last"], *lines])
    return "\n".join(text) or "nothing was measured"
