"""The counters of this process's buffers as text for Prometheus: docs/report.md says how a server shows them."""

from __future__ import annotations

from typing import Any

from ._version import __version__
from .buffer import Buffer, living
from .errors import EpError

_KINDS = {"dispatch": "dispatches", "combine": "combines"}
# Of Buffer.stats(): name of the metric, its type, what it is, field.
_PLAIN = (
    ("dropped_rows_total", "counter", "Rows that a capacity had no room for.", "dropped_rows"),
    ("invalid_expert_ids", "gauge", "Expert ids out of range since the last check().", "invalid_ids"),
    ("window_bytes", "gauge", "Memory that the ranks share.", "window_bytes"),
    ("scratch_bytes", "gauge", "Memory made later for DeepEP's methods.", "scratch_bytes"),
    ("memory_bytes", "gauge", "CUDA memory that went when the buffer was made.", "memory_total_bytes"),
    ("arena_bytes", "gauge", "The window's part for outputs of high throughput.", "arena_bytes"),
    ("arena_free_bytes", "gauge", "What of it is free.", "arena_free_bytes"),
    ("grown_windows", "gauge", "Windows that DeepEP's normal mode has added.", "grown"),
)
Sample = tuple[dict[str, Any], float]


def metrics() -> str:
    """What the living buffers of this process count, in Prometheus' text format (version 0.0.4).

    Labels: "group" is the buffer's name without its rank, "rank" and "ranks" are those of the buffer's group. Counters
    begin with a buffer and go with it. On CUDA it waits for a copy from each device, not for operations in flight. Any
    thread may call it.
    """
    found = [(buffer, stats) for buffer in living() if (stats := _stats(buffer)) is not None]
    lines = _metric(
        "buffer_info", "gauge", "A buffer, 1: what it was made for, and how it runs.",
        [
            (_labels(buffer) | {name: stats[name] for name in ("mode", "backend", "device", "ll_network")}
             | {"version": __version__}, 1)
            for buffer, stats in found
        ],
    )  # fmt: skip
    lines += _metric(
        "buffer_failed", "gauge", "1: the buffer has failed, and every call raises.",
        [(_labels(buffer), int(_has_failed(buffer))) for buffer, _ in found],
    )  # fmt: skip
    lines += _metric(
        "operations_total", "counter", "Operations that are complete, replays of CUDA graphs among them.",
        [
            (_labels(buffer) | {"mode": mode, "kind": kind}, stats[prefix + field])
            for buffer, stats in found
            for mode, prefix in (("ll", ""), ("ht", "ht_"))
            for kind, field in _KINDS.items()
        ],
    )  # fmt: skip
    lines += _metric(
        "staged_operations_total", "counter", "Those of high throughput that needed a copy.",
        [
            (_labels(buffer) | {"kind": kind}, stats["staged_" + field])
            for buffer, stats in found
            for kind, field in _KINDS.items()
        ],
    )  # fmt: skip
    lines += _metric(
        "calls_total", "counter", "Operations that the host has asked for; split ones are counted once more.",
        [
            (_labels(buffer) | {"kind": kind}, count)
            for buffer, stats in found
            for kind, count in stats["calls"].items()
        ],
    )  # fmt: skip
    lines += _metric(
        "masked_ranks", "gauge", "Ranks that low latency leaves out.",
        [(_labels(buffer), len(stats["masked_ranks"])) for buffer, stats in found],
    )  # fmt: skip
    for name, kind, text, field in _PLAIN:
        samples = [(_labels(buffer), stats[field]) for buffer, stats in found if field in stats]
        lines += _metric(name, kind, text, samples)
    return "".join(f"{line}\n" for line in lines)


def _stats(buffer: Buffer) -> dict[str, Any] | None:
    """None of a buffer that another thread destroys."""
    try:
        stats = buffer.stats()
    except EpError:
        return None
    return stats if "backend" in stats else None


def _has_failed(buffer: Buffer) -> bool:
    try:
        buffer.require_usable()
    except EpError:
        return True
    return False


def _labels(buffer: Buffer) -> dict[str, Any]:
    return {
        "group": buffer.name.removesuffix(f".rank{buffer.rank}"), "rank": buffer.rank, "ranks": buffer.num_ranks,
    }  # fmt: skip


def _metric(name: str, kind: str, text: str, samples: list[Sample]) -> list[str]:
    if not samples:
        return []
    lines = [f"# HELP nccl_ep_{name} {text}", f"# TYPE nccl_ep_{name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(str(each))}"' for label, each in labels.items())
        lines.append(f"nccl_ep_{name}{{{shown}}} {value}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
