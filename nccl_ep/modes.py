"""Low latency (LL) or high throughput (HT): the choice of ``mode="auto"``, the same on all ranks."""

from __future__ import annotations

MODES = ("ll", "ht", "auto")

# Bytes that a rank sends at most in a dispatch of max_tokens, up to which LL is taken. Below it LL's early start counts
# most; above, HT writes rows to their final place, while LL copies each once more and keeps a slot for every token of
# every rank. An estimate from the prototypes (LL is at the link's speed up to 128 tokens of 14 KiB on 4 ranks, 7 MB);
# ``python -m nccl_ep.bench fit`` measures what it should be.
AUTO_LL_BYTES = 16 << 20


def choose_mode(max_tokens: int, row_bytes: int, topk: int, num_ranks: int, capacity: int | str | None) -> str:
    """ "ll" or "ht", from what is equal on all ranks of a call: never from the tokens that this rank happens to have.

    ``row_bytes``: of a row of x. Exact sizes are HT's.
    """
    if capacity == "exact":
        return "ht"
    return "ll" if max_tokens * min(topk, num_ranks) * row_bytes <= AUTO_LL_BYTES else "ht"


def auto_ll_tokens(max_tokens: int, row_bytes: int, topk: int, num_ranks: int) -> int:
    """The tokens of the largest call up to ``max_tokens`` that "auto" gives to LL: what a buffer reserves for it."""
    return max(1, min(max_tokens, AUTO_LL_BYTES // (min(topk, num_ranks) * row_bytes)))
