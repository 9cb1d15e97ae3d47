"""tools/window_bytes.py, whose table is in docs/wire_format.md."""

from __future__ import annotations

import runpy
from argparse import Namespace
from typing import Any

import pytest

import nccl_ep
from nccl_ep.room import LlSizes
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT

tool = Namespace(**runpy.run_path(str(ROOT / "tools/window_bytes.py")))


def test_the_page_has_the_table_of_the_tool() -> None:
    assert tool.table() in (ROOT / "docs/wire_format.md").read_text()


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_tool_tells_the_bytes_of_a_real_window(ranks: int, masks: bool) -> None:
    sizes: dict[str, Any] = {"max_tokens": 3, "hidden": 48, "topk": 4, "num_experts": 5 * ranks}

    def window(group: ThreadGroup, late_weights: bool) -> tuple[int, LlSizes]:
        with nccl_ep.Buffer.for_shapes(
            group, device="cpu", enable_shrink=masks, late_weights=late_weights, **sizes
        ) as buffer:
            return buffer.stats()["window_bytes"], buffer._room.ll

    def body(group: ThreadGroup) -> list[tuple[int, LlSizes]]:
        return [window(group, late) for late in (False, True)]

    without, with_room = run_ranks(ranks, body)[0]
    assert without[1].unweighted == 0 < with_room[1].unweighted
    for bytes_, room in (without, with_room):
        assert bytes_ == tool.window_bytes(ranks, room, masks)
