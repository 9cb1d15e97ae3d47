"""What a window has room for: its bytes, worked out from the shapes of the calls that must fit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _C
from .checks import (
    MAX_ROW_BYTES,
    MAX_TOPK,
    described,
    require_bools,
    require_dtypes,
    require_int32,
    require_within,
    row_bytes_of,
)
from .choices import Mode
from .modes import MODES, auto_ll_tokens

MIN_LL_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 1 << 48  # csrc/layout/common/region.h
# Blocks are multiples of 512 bytes, and an output may be several. On a GPU torch asks for 20 MiB to cut them from, for
# each stream.
_MIN_ARENA_BYTES = {"cpu": 1 << 16, "cuda": 64 << 20}


class LlSizes(NamedTuple):
    """Bytes of a bank, for low latency: LlSizes of csrc/layout/ll/offsets.h, as ``_C.sizes_for`` returns it."""

    routing: int = 0
    dispatched: int = 0
    combined: int = 0
    unweighted: int = 0  # rows of a split combine, beside the combined ones


class HtSizes(NamedTuple):
    """What a window has for high throughput: HtSizes of csrc/layout/ht/offsets.h, as ``_C.ht_sizes_for`` returns it."""

    message_words: int
    slot_bytes: int
    row_bytes: int
    route_bytes: int  # with several domains, of one direction
    rail_bytes: int  # likewise
    arena_bytes: int

    @property
    def by_token(self) -> tuple[int, int, int, int]:
        """The parts that grow with the tokens of a rank."""
        return self.slot_bytes, self.row_bytes, self.route_bytes, self.rail_bytes

    @property
    def staged_bytes(self) -> int:
        """Of these parts."""
        return self.slot_bytes + self.row_bytes + 2 * (self.route_bytes + self.rail_bytes)


class Room(NamedTuple):
    """Of a buffer's window, and of what calls it was made for."""

    ll: LlSizes = LlSizes()
    ht: HtSizes | None = None
    max_tokens: int | None = None  # default of dispatch
    ll_max_tokens: int | None = None  # mode="auto" takes low latency up to here; None: where it always may
    max_experts: int = 0  # that a call may have; 0: as many as there is room for
    made_with: str = ""  # the sizes that the caller gave, as "name=value, name=value": errors tell them

    @property
    def mode(self) -> Mode:
        return "ll" if self.ht is None else "auto" if any(self.ll) else "ht"


def ll_sizes_for_bytes(num_ranks: int, num_bytes: int = 0) -> LlSizes:
    """Where only bytes are known: of a window of so many, and of ``MIN_LL_BYTES`` at least."""
    return LlSizes(*_C.sizes_for_window(num_ranks, max(num_bytes, MIN_LL_BYTES)))


def room_for_shapes(
    num_ranks: int,
    domain_size: int | None,
    *,
    max_tokens: int,
    hidden: int,
    topk: int,
    num_experts: int,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    scale_bytes: int | None,
    mode: Mode,
    arena_bytes: int | None,
    late_weights: bool,
    device_type: str,
) -> Room:
    """For calls up to these sizes, as ``Buffer.for_shapes`` takes them. Raises what is wrong with them."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode is {described(mode)}, must be one of {', '.join(MODES)}")
    domain_size = 0 if domain_size is None else domain_size
    require_int32(max_tokens=max_tokens, topk=topk, num_experts=num_experts, domain_size=domain_size)
    require_within(1, MAX_TOPK, topk=topk)
    wire_dtype = dtype if wire_dtype is None else wire_dtype
    require_dtypes(dtype=dtype, wire_dtype=wire_dtype)
    require_bools(late_weights=late_weights)
    bytes_of_x = row_bytes_of(hidden, dtype)
    if scale_bytes is None:
        scale_bytes = (hidden + 31) // 32 * 4
    require_within(0, MAX_ROW_BYTES, scale_bytes=scale_bytes)
    row_bytes = bytes_of_x + (scale_bytes + 15) // 16 * 16
    home_bytes = hidden * max(wire_dtype.itemsize, 2)
    require_within(0, _MAX_WINDOW_BYTES, arena_bytes=0 if arena_bytes is None else arena_bytes)
    ll, ht, ll_tokens = LlSizes(), None, max_tokens
    if mode == "auto":
        ll_tokens = auto_ll_tokens(max_tokens, bytes_of_x, topk, num_ranks, num_experts, device_type)
    if mode != "ht":
        shape = (num_ranks, num_experts, topk, ll_tokens)
        ll = LlSizes(*_C.sizes_for(*shape, row_bytes, home_bytes, on_gpu=device_type == "cuda"))
        if not late_weights:
            ll = ll._replace(unweighted=0)
    if mode != "ll":
        if arena_bytes is None:
            arena_bytes = default_arena_bytes(num_ranks, max_tokens, row_bytes, device_type)
        ht_shape = (num_ranks, domain_size or num_ranks, num_experts, topk, max_tokens)
        ht = HtSizes(*_C.ht_sizes_for(*ht_shape, row_bytes, home_bytes, arena_bytes))
    made_with = sizes_told(
        max_tokens=max_tokens, hidden=hidden, topk=topk, num_experts=num_experts, dtype=dtype,
        wire_dtype=wire_dtype, scale_bytes=scale_bytes, mode=mode,
        arena_bytes=0 if arena_bytes is None else arena_bytes, late_weights=late_weights,
    )  # fmt: skip
    return Room(ll, ht, max_tokens, ll_tokens if mode == "auto" else None, num_experts, made_with)


def default_arena_bytes(num_ranks: int, max_tokens: int, row_bytes: int, device_type: str) -> int:
    """Two outputs of the largest size, or what an allocator needs to begin with."""
    return max(2 * num_ranks * max_tokens * row_bytes, _MIN_ARENA_BYTES[device_type])


def sizes_told(**sizes: object) -> str:
    """Sizes as ``Room.made_with`` has them."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
