"""DeepEP's ``Config``, its tables, and what bytes given by its callers are worth in tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from ... import _C
from ...checks import MAX_INT32, require_int32, require_within
from ...room import HtSizes

# Tokens a rank of the size hints: those of DeepEP's own tests and figures. A program that only asks for
# hints can get another number from its environment.
_HINT_TOKENS = "NCCL_EP_HINT_TOKENS"
_DEFAULT_HINT_TOKENS = 4096
# Eighths of the bytes for staging rows, slots and routes; the rest is the arena of outputs.
_STAGED_EIGHTHS = 5
# How that part is divided into rows and metadata, before either's size is known: metadata for top-32 with rows of
# 4 KiB, so that rows run out first for these and for smaller top-k with smaller rows (top-8: 1200 bytes).
_ROW_BYTES, _TOPK = 4096, 32
_EXPERTS = 1024
_RANKS_OF_A_NODE = 8  # DeepEP's
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Config:
    """DeepEP's tuning of its normal mode. ``num_sms`` is used (CUDA: thread blocks); chunks do not exist here.

    Raises: ValueError for numbers that DeepEP refuses.

    Source: DeepEP's ``Config``.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        nvl = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        rdma = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        require_int32(**{field.name: getattr(self, field.name) for field in fields(self)})
        if self.num_sms < 0:
            raise ValueError(f"num_sms is {self.num_sms}, must not be negative")
        if not 0 < nvl[0] < nvl[1]:
            raise ValueError(f"NVLink chunks: sends of {nvl[0]} tokens must be fewer than receives of {nvl[1]}, not 0")
        if not 0 < rdma[0] <= rdma[1] // 2:
            raise ValueError(
                f"RDMA chunks: sends of {rdma[0]} tokens must be at most half of receives of {rdma[1]}, not 0"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for ``num_nvl_bytes`` with which dispatches of 4096 tokens a rank fit, whatever their routing.

        Args:
            hidden_bytes: of a bf16 row. num_ranks: that share memory.

        The environment's NCCL_EP_HINT_TOKENS stands for another number of tokens; ValueError if it is no number.

        Source: DeepEP's method of that name.
        """
        _require_hint(hidden_bytes, num_ranks)
        return bytes_for_tokens(_hint_tokens(), num_ranks, num_ranks, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """What has to be added in ``num_rdma_bytes`` for nodes of 8 ranks; 0 for up to 8 ranks.

        Source: DeepEP's method of that name.
        """
        _require_hint(hidden_bytes, num_ranks)
        if num_ranks <= _RANKS_OF_A_NODE or num_ranks % _RANKS_OF_A_NODE:
            return 0
        whole = bytes_for_tokens(_hint_tokens(), num_ranks, _RANKS_OF_A_NODE, hidden_bytes)
        return max(whole - self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks), 0)


# ---- Tables, by ranks: chunks of NVLink (send, receive) and RDMA: DeepEP's, for callers that print or compare them.

_Chunks = tuple[int, int, int, int]
_SMALL: dict[int, _Chunks] = {2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128)}
_DISPATCH: dict[int, _Chunks] = _SMALL | {
    16: (36, 288, 20, 128), **dict.fromkeys((24, 32, 48, 64), (32, 288, 8, 128)), 96: (20, 480, 12, 128),
    128: (20, 560, 12, 128), 144: (32, 720, 12, 128), 160: (28, 720, 12, 128),
}  # fmt: skip
_COMBINE: dict[int, _Chunks] = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128),
    **dict.fromkeys((24, 32, 48, 64), (1, 288, 8, 128)), 96: (1, 480, 8, 128), 128: (1, 560, 8, 128),
    **dict.fromkeys((144, 160), (2, 720, 8, 128)),
}  # fmt: skip


def config_of(num_ranks: int, num_sms: int, is_combine: bool) -> Config:
    """DeepEP's entry for so many ranks; where it has none, the defaults, as chunks are not used."""
    require_int32(num_ranks=num_ranks)
    chunks = (_COMBINE if is_combine else _DISPATCH).get(num_ranks)
    return Config(num_sms) if chunks is None else Config(num_sms, *chunks)


# ---- Bytes and tokens. All that grows with them grows in proportion.


def _hint_tokens() -> int:
    text = os.environ.get(_HINT_TOKENS, str(_DEFAULT_HINT_TOKENS))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{_HINT_TOKENS} is {text!r}, must be a number of tokens")
    return int(text)


def _require_hint(hidden_bytes: int, num_ranks: int) -> None:
    require_within(1, MAX_INT32, hidden_bytes=hidden_bytes, num_ranks=num_ranks)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _of_one_token(num_ranks: int, domain_size: int, num_experts: int, topk: int, row_bytes: int) -> HtSizes:
    return HtSizes(*_C.ht_sizes_for(num_ranks, domain_size, num_experts, topk, 1, row_bytes, 0, 0))


def _of_one_reference_token(num_ranks: int, domain_size: int) -> HtSizes:
    experts = _ceil_div(_EXPERTS, num_ranks) * num_ranks
    return _of_one_token(num_ranks, domain_size, experts, _TOPK, _ROW_BYTES)


def sizes_for_bytes(num_bytes: int, num_ranks: int, domain_size: int) -> HtSizes:
    """What a window has for high throughput where only bytes are known: they cover all but the words of calls."""
    unit = _of_one_reference_token(num_ranks, domain_size)
    staged = num_bytes * _STAGED_EIGHTHS // 8
    tokens = max(staged // unit.staged_bytes, 1)
    slots, rows, routes, rail = (tokens * each for each in unit.by_token)
    return HtSizes(unit.message_words, slots, rows, routes, rail, num_bytes - staged)


def tokens_that_fit(
    sizes: HtSizes, num_ranks: int, domain_size: int, num_experts: int, topk: int, row_bytes: int
) -> int:
    """Tokens that a rank can send in one operation through a window of these sizes, whatever the routing."""
    need = _of_one_token(num_ranks, domain_size, num_experts, topk, row_bytes)
    return min(have // each for have, each in zip(sizes.by_token, need.by_token, strict=True) if each > 0)


def bytes_for_tokens(tokens: int, num_ranks: int, domain_size: int, row_bytes: int, topk: int = 8) -> int:
    """Bytes for which ``sizes_for_bytes`` gives room to so many tokens; a multiple of 128."""
    need = _of_one_token(num_ranks, domain_size, num_ranks, topk, row_bytes)
    unit = _of_one_reference_token(num_ranks, domain_size)
    parts = zip(need.by_token, unit.by_token, strict=True)
    units = max(_ceil_div(tokens * each, have) for each, have in parts if have > 0)
    return _ceil_div(_ceil_div(units * unit.staged_bytes * 8, _STAGED_EIGHTHS), _ALIGNMENT) * _ALIGNMENT
