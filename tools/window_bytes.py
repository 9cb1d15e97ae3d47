"""Prints what a low-latency window takes over the ranks, as the table of docs/wire_format.md: `python
tools/window_bytes.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from nccl_ep.room import LlSizes, room_for_shapes

TOKENS, HIDDEN, TOPK, EXPERTS = 128, 7168, 8, 256
RANKS = (2, 4, 8, 16, 32, 64)
_HEADER_BYTES, _BANKS, _KINDS = 64, 2, 2
_MEETING_WORDS = 7  # and a bit for each rank: MeetingWords of csrc/layout/window.h


def _up(bytes_: int, to: int) -> int:
    return -(-bytes_ // to) * to


def window_bytes(ranks: int, sizes: LlSizes, masks: bool = False) -> int:
    """Of a buffer for low latency alone, in one domain: ``Window.make`` of csrc/layout/window.h."""
    further = sizes.unweighted * (ranks if masks else 1)
    rows = sizes.dispatched, sizes.combined + further
    headers = _up(_BANKS * ranks * _HEADER_BYTES, 128)
    kinds = sum(headers + _BANKS * (_up(sizes.routing, 128) + _up(each, 128)) for each in rows)
    signals, heartbeats = _up(_KINDS * ranks * 8, 128), _up(ranks * 8, 128)
    meeting = ranks * 8 * (_MEETING_WORDS + _up(ranks, 32) // 32) if masks else 0
    return _up(_up(signals + kinds + heartbeats, 4096) + meeting, 4096)


def sizes_of(ranks: int, late_weights: bool) -> LlSizes:
    """For a decode batch of a large model, BF16."""
    return room_for_shapes(
        ranks, ranks, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, dtype=torch.bfloat16,
        wire_dtype=None, scale_bytes=None, mode="ll", arena_bytes=None, late_weights=late_weights, device_type="cpu",
    ).ll  # fmt: skip


def table() -> str:
    """Of Markdown, in MB of 10^6 bytes."""
    columns = [
        ("as it is", False, False),
        ("`late_weights`", True, False),
        ("masks", False, True),
        ("both", True, True),
    ]
    lines = ["| ranks | " + " | ".join(name for name, *_ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for ranks in RANKS:
        sizes = [window_bytes(ranks, sizes_of(ranks, late), masks) for _, late, masks in columns]
        lines.append(f"| {ranks} | " + " | ".join(f"{each / 1e6:,.1f}" for each in sizes) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
