"""What dispatch returns: the rows that came, and a handle that knows the way home."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import _C
from .block_scales import dequantized_rows
from .buffer import find_buffer
from .checks import require_dtypes, require_tensors
from .choices import Mode


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
    MXFP8 = 4
    MXFP8_SWIZZLED = 5
    NVFP4 = 6
    NVFP4_SWIZZLED = 7


LAYOUTS = {layout.name.lower(): layout for layout in Layout}
EXACT = -1  # the capacity of a dispatch of exact sizes, as the ops take it
_MOST_TOLD = 64
DEFAULT = _C.DEFAULT_CAPACITY  # the same, of as many rows as always suffice
QUANTS = {None: Quant.NONE} | {quant.name.lower(): quant for quant in Quant if quant}


def tensor_told(tensor: torch.Tensor | None, has_numbers: bool = False) -> str:
    """A tensor for a ``repr``: dtype and shape, as rows may be uninitialised and many; or the numbers, if few."""
    if tensor is None:
        return "None"
    has_numbers = has_numbers and type(tensor) is torch.Tensor and not tensor.is_meta  # a compiler's has none
    is_waited_for = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if has_numbers and not is_waited_for and tensor.numel() <= _MOST_TOLD:
        return str(tensor.tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(slots=True, eq=False, repr=False)  # not frozen: a frozen one takes three times as long to make
class Handle:
    """The routing of one dispatch, for any number of combines. Plain data: one or two int32 tensors, and numbers.

    Attributes:
        tensor: tokens of every source [R] | expert ids of the own tokens [T, K] | row of each (source, token, k) here |
            weights of the local choices. mode "ht": rows from each source to each destination [R, R], and of the own
            tokens the ids, and the rows and slots at their owners (csrc/layout/ht/handle.h).
        slots: mode "ht": of every received row its places and weights (expert layouts), and its token at the source.
        seq: the tensor by which ops find the buffer that made it. buffer: that buffer's name.
        num_tokens, topk, num_experts, max_tokens, num_ranks: T, K, E, M, R of the dispatch.
        layout, capacity, alignment: of its rows. mode: "ll" or "ht".
        weights: those of the rows, which the gradient of ``combine`` needs.
    """

    tensor: torch.Tensor
    seq: torch.Tensor
    num_tokens: int
    topk: int
    num_experts: int
    max_tokens: int
    layout: Layout
    capacity: int
    num_ranks: int
    mode: Mode = "ll"
    slots: torch.Tensor | None = None
    alignment: int = 1
    weights: torch.Tensor | None = None

    def __repr__(self) -> str:
        sizes = ("num_tokens", "topk", "num_experts", "max_tokens", "num_ranks", "capacity", "alignment")
        numbers = ", ".join(f"{name}={getattr(self, name)}" for name in sizes)
        return f"Handle(mode={self.mode!r}, layout={self.layout.name.lower()!r}, {numbers})"

    @property
    def buffer(self) -> str:
        return find_buffer(self.seq).name

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def routing(self) -> dict[str, int]:
        """The fields that configs of dispatch and combine share."""
        return {
            "num_experts": self.num_experts, "topk": self.topk, "max_tokens": self.max_tokens,
            "layout": int(self.layout), "alignment": self.alignment,
        }  # fmt: skip


def require_handle(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"handle is a {type(handle).__name__}, must be the handle of a dispatch's output")


@dataclass(slots=True, eq=False, repr=False)
class DispatchOutput:
    """Rows received for the experts of this rank. L local experts, R ranks, M max_tokens, N rows, K top-k, H hidden.

    Attributes:
        x: expert_major [L, C, H], packed and flat [N, H], rank_major [R, M, H]; "nvfp4": float4_e2m1fn_x2 with H/2.
        scales: [.., S] in place of [.., H], or None. The caller's, in their dtype; with ``quant`` float32
            [.., ceil(H/128)], or for "fp8_ue8m0" int32 [.., ceil(H/512)], group g in byte g % 4 of word g // 4;
            "mxfp8": float8_e8m0fnu [.., H/32]; "nvfp4": float8_e4m3fn [.., H/16]. "mxfp8_swizzled", "nvfp4_swizzled":
            the same in the order that GEMMs read, [.., ceil(rows/128), ceil(S/4), 512], where expert_major and
            rank_major have tiles of their own for each expert or rank.
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
        carrier: with ``quant``, if the tokens want a gradient: a tensor of x's shape and the tokens' dtype, without
            memory, whose gradient is that of the tokens. ``dequantized`` uses it.
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
    carrier: torch.Tensor | None = None
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
        out.carrier = None
        out._info = info
        return out

    def __repr__(self) -> str:
        """Of rows dtypes and shapes alone. Counts on a GPU are waited for, as in the ``repr`` of a tensor."""
        rows = {"x": self.x, "scales": self.scales, "topk_idx": self.topk_idx, "weights": self.weights}
        fields = [f"{name}={tensor_told(each)}" for name, each in rows.items() if each is not None]
        fields += [f"extra {i}={tensor_told(each)}" for i, each in enumerate(self.extra)]
        fields += [f"{name}={tensor_told(getattr(self, name), True)}" for name in ("counts", "overflow")]
        return f"DispatchOutput({', '.join(fields)}, handle={self.handle!r})"

    def dequantized(
        self, dtype: torch.dtype = torch.bfloat16, tensor_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rows that ``quant`` has quantised, times their scales, in ``dtype``: [.., H].

        Its gradient goes to the tokens as if they had not been quantised (straight through). Rows that do not exist are
        unspecified, as in x. ``tensor_scale``: what "nvfp4" was given as ``scales``, if it was: float32 of one element.
        ValueError for rows that were not quantised here.
        """
        require_dtypes(dtype=dtype)
        if tensor_scale is not None:
            require_tensors(tensor_scale=tensor_scale)
            if tensor_scale.numel() != 1:
                raise ValueError(f"tensor_scale has shape {list(tensor_scale.shape)}, must have one element")
        if self.x.dtype not in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2) or self.scales is None:
            raise ValueError(f"x is {self.x.dtype}: only rows that dispatch has quantised can be dequantized")
        rows = dequantized_rows(self.x, self.scales, tensor_scale).to(dtype)
        if self.carrier is None:
            return rows
        combined: torch.Tensor = torch.ops.nccl_ep.carried.default(self.carrier, rows)
        return combined

    if not TYPE_CHECKING:  # a type checker sees the fields and nothing else

        def __getattr__(self, name: str) -> torch.Tensor | None:
            """Called for an attribute that is not set yet."""
            if name not in ("counts", "demand", "overflow", "total", "offsets"):
                fields = ", ".join(field for field in self.__slots__ if not field.startswith("_"))
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; it has {fields}")
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


# ---- As nodes of pytrees: checkpointing, export and tree_map see their tensors


def _flatten_handle(handle: Handle) -> tuple[list[Any], tuple[Any, ...]]:
    numbers = (
        handle.num_tokens, handle.topk, handle.num_experts, handle.max_tokens, handle.layout, handle.capacity,
        handle.num_ranks, handle.mode, handle.alignment,
    )  # fmt: skip
    return [handle.tensor, handle.seq, handle.slots, handle.weights], numbers


def _unflatten_handle(tensors: Iterable[Any], numbers: tuple[Any, ...]) -> Handle:
    tensor, seq, slots, weights = tensors
    num_tokens, topk, num_experts, max_tokens, layout, capacity, num_ranks, mode, alignment = numbers
    return Handle(
        tensor, seq, num_tokens, topk, num_experts, max_tokens, layout, capacity, num_ranks, mode, slots, alignment,
        weights,
    )  # fmt: skip


def _flatten_output(out: DispatchOutput) -> tuple[list[Any], None]:
    fields = (
        out.x,
        out.scales,
        out.topk_idx,
        out.weights,
        out.row_expert,
        out._info,
        out.handle,
        out.extra,
        out.carrier,
    )
    return list(fields), None


def _unflatten_output(fields: Iterable[Any], _: None) -> DispatchOutput:
    *given, carrier = fields
    out = DispatchOutput.of_info(*given)
    out.carrier = carrier
    return out


pytree.register_pytree_node(Handle, _flatten_handle, _unflatten_handle, serialized_type_name="nccl_ep.Handle")
pytree.register_pytree_node(
    DispatchOutput, _flatten_output, _unflatten_output, serialized_type_name="nccl_ep.DispatchOutput"
)
