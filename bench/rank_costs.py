"""What grows with the number of ranks, by arithmetic and the layout's own sizes: ``python -m bench.rank_costs`` prints
the table of docs/network.md.

Domains of 72 ranks over the rail, or one of 8. Rows of 7168 in bf16, top-8 of two experts a rank (256 on 8 ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nccl_ep import _C

HIDDEN, TOPK, LL_TOKENS, HT_TOKENS = 7168, 8, 16, 256
RANKS = (8, 72, 144, 576, 1152)
DOMAIN = 72
_ROW_BYTES, _BANKS, _ID_WORDS = 2 * HIDDEN, 2, 2
_HEADER_WORDS, _FIXED_WORDS, _COMBINE_WORDS = 8, 32, 32  # of op messages: csrc/layout/ht/offsets.h: HtMessage
_LL_CHANNELS, _HT_CHANNELS = (
    9,
    18,
)  # csrc/layout/ll/rail_regions.h: kRowChannels, csrc/layout/ht/rail.h: kHtRailChannels


@dataclass(frozen=True)
class World:
    ranks: int

    @property
    def domain(self) -> int:
        return min(self.ranks, DOMAIN)

    @property
    def other_domains(self) -> int:
        return self.ranks // self.domain - 1

    @property
    def experts(self) -> int:
        return self.ranks * max(2, -(-256 // self.ranks))

    # ---- Low latency

    @property
    def ll_window(self) -> int:
        sizes = _C.sizes_for(self.ranks, self.experts, TOPK, LL_TOKENS, _ROW_BYTES, _ROW_BYTES)
        return _C.ll_window_bytes(self.ranks, self.domain if self.other_domains else 0, sizes)

    @property
    def ll_polled(self) -> int:
        """Tagged words that a rank waits for in a dispatch: op headers, and the ids of all tokens."""
        return self.ranks * (_HEADER_WORDS + LL_TOKENS * _ID_WORDS)

    @property
    def ll_messages(self) -> int:
        """To the network, of an operation."""
        return _LL_CHANNELS * self.other_domains

    @property
    def ll_most_tokens(self) -> int:
        return _C.most_ll_tokens_on_gpus(self.ranks, self.experts, TOPK)

    # ---- High throughput

    def _ht_sizes(self, tokens: int) -> tuple[int, int, int, int, int, int]:
        shape = (self.ranks, self.domain, self.experts, TOPK, tokens)
        return _C.ht_sizes_for(*shape, _ROW_BYTES, _ROW_BYTES, 0)

    @property
    def message_words(self) -> int:
        return self._ht_sizes(HT_TOKENS)[0]

    @property
    def ht_counts(self) -> int:
        """Bytes of the window for op messages, which have the counts of a rank."""
        words = -(-self.message_words // 16) * 16
        return _BANKS * self.ranks * 8 * (words + _COMBINE_WORDS)

    @property
    def ht_rest(self) -> int:
        return _C.ht_window_bytes(self.ranks, self._ht_sizes(HT_TOKENS)) - self.ht_counts

    @property
    def ht_polled(self) -> int:
        """Tagged words that a rank reads of the op messages of a dispatch."""
        return self.ranks * self.message_words

    @property
    def ht_messages(self) -> int:
        return _HT_CHANNELS * self.other_domains


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f}"


ROWS: tuple[tuple[str, Callable[[World], str]], ...] = (
    ("domains", lambda world: str(world.other_domains + 1)),
    ("experts", lambda world: f"{world.experts:,}"),
    (f"LL, {LL_TOKENS} tokens: window, MB", lambda world: _mb(world.ll_window)),
    ("LL: words that a dispatch waits for", lambda world: f"{world.ll_polled:,}"),
    ("LL: op headers, credits, bytes", lambda world: f"{world.ranks * 8 * (_HEADER_WORDS + 1):,}"),
    ("LL: messages to the network, each operation", lambda world: str(world.ll_messages)),
    ("LL: most tokens a rank on GPUs", lambda world: f"{world.ll_most_tokens:,}"),
    ("HT: an op message, bytes", lambda world: f"{8 * world.message_words:,}"),
    ("HT: op messages of all ranks in the window, MB", lambda world: _mb(world.ht_counts)),
    ("HT: words of them that a dispatch reads", lambda world: f"{world.ht_polled:,}"),
    (f"HT, {HT_TOKENS} tokens: the rest of the window, MB", lambda world: _mb(world.ht_rest)),
    ("HT: messages to the network, each operation", lambda world: str(world.ht_messages)),
    ("HT: counts in a handle, MB", lambda world: _mb(4 * world.ranks**2)),
)


def table() -> list[str]:
    """Lines of Markdown."""
    worlds = [World(ranks) for ranks in RANKS]
    head = f"| of a rank | {' | '.join(f'{ranks:,}' for ranks in RANKS)} |"
    lines = [head, "|" + " --- |" * (1 + len(RANKS))]
    return lines + [f"| {name} | {' | '.join(cell(world) for world in worlds)} |" for name, cell in ROWS]


if __name__ == "__main__":
    print("\n".join(table()))
