"""What dispatch returns: the rows that came, and a handle that knows the way home."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Layout(enum.IntEnum):
    """How received rows lie; values as in csrc/layout/outputs.h."""

    EXPERT_MAJOR = 0
    PACKED = 1
    RANK_MAJOR = 2
    FLAT = 3

    @property
    def has_expert_rows(self) -> bool:
        """One row for each choice of an expert, rather than one for each token."""
        return self <= Layout.PACKED


class Quant(enum.IntEnum):
    """What dispatch does to rows before they travel; values as in csrc/layout/dtype.h."""

    NONE = 0
    FP8 = 1
    FP8_ROUNDED = 2
    FP8_UE8M0 = 3


LAYOUTS = {layout.name.lower(): layout for layout in Layout}
QUANTS = {None: Quant.NONE} | {quant.name.lower(): quant for quant in Quant if quant}


@dataclass(frozen=True, slots=True)
class Handle:
    """The routing of one dispatch, for any number of combines. Plain data: an int32 tensor of static size, and numbers.

    Attributes:
        tensor: tokens of every source [R] | expert ids of the own tokens [T, K] | row of each (source, token, k) here |
            weights of the local choices.
        buffer: name of the buffer that made it.
        num_tokens, topk, num_experts, max_tokens, num_ranks: T, K, E, M, R of the dispatch.
        layout, capacity: of its rows. mode: "ll".
    """

    tensor: torch.Tensor
    buffer: str
    num_tokens: int
    topk: int
    num_experts: int
    max_tokens: int
    layout: Layout
    capacity: int
    num_ranks: int
    mode: str = "ll"

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def args(self) -> tuple[int, int, int, int, int, int]:
        """The numbers that every combine op takes with the tensor."""
        return self.num_tokens, self.topk, self.num_experts, self.max_tokens, int(self.layout), self.capacity


@dataclass(frozen=True, slots=True)
class DispatchOutput:
    """Rows received for the experts of this rank. L local experts, R ranks, M max_tokens, N rows, K top-k, H hidden.

    Attributes:
        x: expert_major [L, C, H], packed and flat [N, H], rank_major [R, M, H].
        scales: [.., S] in place of [.., H], or None. The caller's, in their dtype; with ``quant`` float32
            [.., ceil(H/128)], or for "fp8_ue8m0" int32 [.., ceil(H/512)], group g in byte g % 4 of word g // 4.
        weights: float32; expert_major [L, C], packed [N], else [.., K]; 0 where there is no row or choice.
        topk_idx: rank_major, flat: local expert ids [.., K], -1 where there is none; else None.
        counts: int32 rows in the tensor: of each local expert [L], or (rank_major, flat) of each source rank [R].
        demand: int32, the same without the capacity's limit.
        overflow: int32 [1] rows that were dropped.
        offsets: packed: int32 [L + 1] first row of each expert; offsets[1:] are the aligned ends.
        row_expert: packed: int32 [N] local expert of each row, -1 for padding.
        total: flat: int32 [1] rows in the tensor.
        handle: for combine.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    weights: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor | None
    row_expert: torch.Tensor | None
    total: torch.Tensor | None
    overflow: torch.Tensor
    demand: torch.Tensor
    handle: Handle
