"""Low latency (LL) or high throughput (HT): the choice of ``mode="auto"``, the same on all ranks.

csrc/runtime/policy.h has the rule, and says why.
"""

from __future__ import annotations

from typing import get_args

from . import _C
from .checks import MAX_INT32, require_within
from .choices import Exact, Mode

MODES: tuple[Mode, ...] = get_args(Mode)
AUTO_LL_BYTES = _C.AUTO_LL_BYTES


def choose_mode(max_tokens: int, row_bytes: int, topk: int, num_ranks: int, capacity: int | Exact | None) -> Mode:
    """ "ll" or "ht", from what is equal on all ranks of a call: never from the tokens that this rank happens to have.

    ``row_bytes``: of a row of x. Exact sizes are HT's. ValueError for numbers that no call has.
    """
    require_within(0, MAX_INT32, max_tokens=max_tokens, row_bytes=row_bytes)
    require_within(1, MAX_INT32, topk=topk, num_ranks=num_ranks)
    return "ht" if capacity == "exact" or _C.auto_is_ht(max_tokens, row_bytes, topk, num_ranks) else "ll"


def auto_ll_tokens(
    max_tokens: int, row_bytes: int, topk: int, num_ranks: int, num_experts: int, device_type: str
) -> int:
    """The tokens of the largest call up to ``max_tokens`` that "auto" gives to LL: what a buffer reserves for it."""
    return _C.auto_ll_tokens(num_ranks, num_experts, topk, max_tokens, row_bytes, device_type == "cuda")
