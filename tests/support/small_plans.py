"""Plans of few warps, for many ranks on emulated GPUs, where all threads take turns. Builds with NCCL_EP_LAB read them
from the environment (csrc/cuda/launch/launch_util.h: tuned)."""

from __future__ import annotations

import pytest


def use_small_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of low latency: two blocks of three warps and, between domains, one for each kind of work on links."""
    monkeypatch.setenv("EP_PLAN_D", "2,3,1,2,1,0,2,2")
    monkeypatch.setenv("EP_PLAN_C", "2,3,1,2,1,0,2,2")
    monkeypatch.setenv("EP_PLAN_R", "1,1,1,1")
