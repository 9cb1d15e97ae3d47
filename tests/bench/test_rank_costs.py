"""What grows with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rank_costs import ROWS, World, table
from nccl_ep import _C
from nccl_ep.modes import auto_ll_tokens

ROOT = Path(__file__).resolve().parents[2]
# Counts of all ranks go to all ranks. docs/network.md says so.
QUADRATIC = {"ht_counts", "ht_polled"}


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs" / "network.md").read_text()
    assert "\n".join(table()) in text and len(ROWS) == 13


@pytest.mark.parametrize(
    "cost", ["ll_window", "ll_polled", "ll_messages", "message_words", "ht_rest", "ht_messages", *sorted(QUADRATIC)]
)
def test_only_counts_of_all_ranks_grow_faster_than_the_ranks(cost: str) -> None:
    small, large = (getattr(World(ranks), cost) for ranks in (288, 1152))
    # 16 racks have 5 times the other racks of 4.
    assert (large > 6 * small) == (cost in QUADRATIC), (small, large)


def test_low_latency_is_refused_before_memory_is_taken() -> None:
    most = World(1152).ll_most_tokens
    _C.sizes_for(1152, 2304, 8, most, 256, 256, on_gpu=True)
    with pytest.raises(ValueError, match=f"max_tokens is {most + 1}, low latency of 1152 ranks .* serves {most} on"):
        _C.sizes_for(1152, 2304, 8, most + 1, 256, 256, on_gpu=True)
    # In "auto", high throughput has the larger calls.
    assert [auto_ll_tokens(4096, 14336, 8, 1152, 2304, device) for device in ("cuda", "cpu")] == [most, 128]
