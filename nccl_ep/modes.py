"""Low latency (LL) or high throughput (HT): the choice of ``mode="auto"``, the same on all ranks.

The rule is that of csrc/runtime/policy.h, which says why. It stands here once more because torch.compile must trace it;
a test holds the two against each other.
"""

from __future__ import annotations

from . import _C

MODES = ("ll", "ht", "auto")
AUTO_LL_BYTES = _C.AUTO_LL_BYTES
_SLOTS, _TOKENS = _C.AUTO_LL_SLOTS, _C.AUTO_LL_TOKENS


def _most_ll_tokens(row_bytes: int, topk: int, num_ranks: int) -> int:
    by_bytes = AUTO_LL_BYTES // max(1, min(topk, num_ranks) * row_bytes)  # what is 0 is refused later
    return min(by_bytes, max(_SLOTS // num_ranks, _TOKENS))


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
