"""Low latency (LL) or high throughput (HT): the choice of ``mode="auto"``, the same on all ranks."""

from __future__ import annotations

MODES = ("ll", "ht", "auto")

# Bytes that a rank sends at most in a dispatch of max_tokens, up to which LL is taken. On 4 H200s it is the faster mode
# at all that was measured, up to 1,024 tokens of 14 KiB (docs/performance.md; ``python -m nccl_ep.bench fit``). But it
# takes all SMs, where HT takes 12 to 32, and its window grows with the tokens of all ranks.
AUTO_LL_BYTES = 56 << 20

# LL keeps a slot for every token of every rank, in the SMs' shared memory too. Small rows go to HT beyond so many, but
# not the tokens that decoding has.
AUTO_LL_SLOTS, AUTO_LL_TOKENS = 4096, 128


def _most_ll_tokens(row_bytes: int, topk: int, num_ranks: int) -> int:
    by_bytes = AUTO_LL_BYTES // max(1, min(topk, num_ranks) * row_bytes)  # what is 0 is refused later
    return min(by_bytes, max(AUTO_LL_SLOTS // num_ranks, AUTO_LL_TOKENS))


def choose_mode(max_tokens: int, row_bytes: int, topk: int, num_ranks: int, capacity: int | str | None) -> str:
    """ "ll" or "ht", from what is equal on all ranks of a call: never from the tokens that this rank happens to have.

    ``row_bytes``: of a row of x. Exact sizes are HT's.
    """
    if capacity == "exact":
        return "ht"
    return "ll" if max_tokens <= _most_ll_tokens(row_bytes, topk, num_ranks) else "ht"


def auto_ll_tokens(max_tokens: int, row_bytes: int, topk: int, num_ranks: int) -> int:
    """The tokens of the largest call up to ``max_tokens`` that "auto" gives to LL: what a buffer reserves for it."""
    return max(1, min(max_tokens, _most_ll_tokens(row_bytes, topk, num_ranks)))
