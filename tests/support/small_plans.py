"""Plans of few warps, for many ranks on emulated GPUs, where all threads take turns. Builds with NCCL_EP_LAB read them
from the environment (csrc/cuda/launch/launch_util.h: tuned)."""

from __future__ import annotations

import pytest


def use_small_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of low latency: two blocks of three warps and, between domains, one for each kind of work on links."""
    monkeypatch.setenv("EP_PLAN_D", "2,3,1,2,1,0,2,2")
    monkeypatch.setenv("EP_PLAN_C", "2,3,1,2,1,0,2,2")
    monkeypatch.setenv("EP_PLAN_R", "1,1,1,1")


def use_small_ht_plans(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Of high throughput: one block, which has six warps that route, two that move rows and four that help, and in a
    combine three."""
    chunks = max(1, min(16, 1024 // num_ranks))  # csrc/layout/ht/offsets.h: ht_chunks, which all ranks have in common
    monkeypatch.setenv("EP_PLAN_HR", "1,6,6,1,0,0")
    monkeypatch.setenv("EP_PLAN_HD", f"1,6,2,{chunks},0,0")
    monkeypatch.setenv("EP_PLAN_HC", f"1,3,1,{chunks},0,0")
