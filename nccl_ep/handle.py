"""What dispatch returns: the rows that came, and a handle that knows the way home."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from . import _C


class Layout(enum.IntEnum):
    """How received rows lie; values as in csrc/layout/common/outputs.h."""

    EXPERT_MAJOR = 0
    PACKED = 1
    RANK_MAJOR = 2
    FLAT = 3

    @property
    def has_expert_rows(self) -> bool:
        """One row for each choice of an expert, rather than one for each token."""
        return self <= Layout.PACKED


class Quant(enum.IntEnum):
    """What dispatch does to rows before they travel; values as in csrc/layout/common/dtype.h."""

    NONE = 0
    FP8 = 1
    FP8_ROUNDED = 2
    FP8_UE8M0 = 3


LAYOUTS = {layout.name.lower(): layout for layout in Layout}
EXACT = -1  # the capacity of a dispatch of exact sizes, as the ops take it
DEFAULT = _C.DEFAULT_CAPACITY  # the same, of as many rows as always suffice
QUANTS = {None: Quant.NONE} | {quant.name.lower(): quant for quant in Quant if quant}


@dataclass(slots=True, eq=False)  # not frozen: a frozen one takes three times as long to make
class Handle:
    """The routing of one dispatch, for any number of combines. Plain data: one or two int32 tensors, and numbers.

    Attributes:
        tensor: tokens of every source [R] | expert ids of the own tokens [T, K] | row of each (source, token, k) here |
            weights of the local choices. mode "ht": rows from each source to each destination [R, R], and of the own
            tokens the ids, and the rows and slots at their owners (csrc/layout/ht/handle.h).
        slots: mode "ht": of every received row its places and weights (expert layouts), and its token at the source.
        buffer: name of the buffer that made it.
        num_tokens, topk, num_experts, max_tokens, num_ranks: T, K, E, M, R of the dispatch.
        layout, capacity: of its rows. mode: "ll" or "ht".
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
    slots: torch.Tensor | None = None

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def routing(self) -> dict[str, int]:
        """The fields that configs of dispatch and combine share."""
        return {
            "num_experts": self.num_experts, "topk": self.topk, "max_tokens": self.max_tokens,
            "layout": int(self.layout),
        }  # fmt: skip


def require_handle(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"handle is a {type(handle).__name__}, must be the handle of a dispatch's output")


@dataclass(slots=True, eq=False)
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
        extra: of extra tensors that were dispatched along, the rows in the places of x's.
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
    extra: tuple[torch.Tensor, ...] = ()
    _info: torch.Tensor = field(init=False, repr=False)  # of which the fields that were not given are views

    @classmethod
    def of_info(
        cls,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        weights: torch.Tensor,
        row_expert: torch.Tensor | None,
        info: torch.Tensor,
        handle: Handle,
        extra: tuple[torch.Tensor, ...] = (),
    ) -> DispatchOutput:
        """Counts, demand, overflow, offsets and total become views of ``info`` when they are first asked for."""
        out = object.__new__(cls)
        out.x = x
        out.scales = scales
        out.topk_idx = topk_idx
        out.weights = weights
        out.row_expert = row_expert
        out.handle = handle
        out.extra = extra
        out._info = info
        return out

    if not TYPE_CHECKING:  # a type checker sees the fields and nothing else

        def __getattr__(self, name: str) -> torch.Tensor | None:
            """Called for an attribute that is not set yet."""
            if name not in ("counts", "demand", "overflow", "total", "offsets"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            view = _part_of_info(name, self._info, self.handle)
            setattr(self, name, view)
            return view


def _part_of_info(name: str, info: torch.Tensor, handle: Handle) -> torch.Tensor | None:
    """A view that torch.compile can trace; a test holds it against OutputShape of csrc/layout/common/outputs.h."""
    layout = handle.layout
    bins = handle.num_local_experts if layout.has_expert_rows else handle.num_ranks
    if name == "counts":
        return info[:bins]
    if name == "demand":
        return info[bins : 2 * bins]
    if name == "overflow":
        return info[2 * bins : 2 * bins + 1]
    if name == "total":
        return info[2 * bins + 1 : 2 * bins + 2] if layout == Layout.FLAT else None
    return info[2 * bins + 2 :] if layout == Layout.PACKED else None
