"""How Python calls the ops, and shapes of what they return, for tracing. Schemas and kernels: csrc/torch/ops/ll_ops.cc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from . import _C
from .buffer import find_buffer
from .handle import HtRouteShape, Layout, Quant, align4

Tensors = tuple[torch.Tensor, ...]
F = TypeVar("F", bound=Callable[..., Any])


def _use_fast_calls(name: str) -> None:
    """Lets torch.ops call the op past torch's parser of arguments, which takes longer than the rest of a call."""
    packet = getattr(torch.ops.nccl_ep, name)
    for op in (packet, packet.default):
        usual = op._op
        op._op = _C.fast_op(name, usual)
        op._op.__module__ = usual.__module__
    torch.jit._builtins._register_builtin(packet._op, f"nccl_ep::{name}")  # as torch does: TorchScript looks there


for _name in _C.op_names():
    _use_fast_calls(_name)


def _row_shape(layout: int, ranks: int, experts: int, max_tokens: int, capacity: int, last: list[int]) -> list[int]:
    if layout == Layout.EXPERT_MAJOR:
        return [experts // ranks, capacity, *last]
    if layout == Layout.RANK_MAJOR:
        return [ranks, max_tokens, *last]
    return [capacity, *last]


def _handle_size(ranks: int, num_tokens: int, max_tokens: int, topk: int, layout: int) -> int:
    """As HandleShape in csrc/layout/common/outputs.h."""
    entries = ranks * max_tokens * (topk if layout <= Layout.PACKED else 1)
    return align4(ranks) + align4(num_tokens * topk) + 2 * align4(entries)


def scales_of(x_scales: torch.Tensor | None) -> tuple[int, torch.dtype]:
    """How many scales a row has, and their dtype, as the ops take them."""
    return (0, torch.float32) if x_scales is None else (x_scales.shape[1], x_scales.dtype)


def _num_ranks(buffer: str) -> int:
    return find_buffer(buffer).num_ranks


def _outputs(
    like: torch.Tensor, buffer: str, dtype: torch.dtype, hidden: int, num_scales: int, scale_dtype: torch.dtype,
    topk: int, idx_dtype: torch.dtype, num_experts: int, max_tokens: int, layout: int, capacity: int, quant: int,
) -> Tensors:  # fmt: skip
    ranks = _num_ranks(buffer)

    def rows(*last: int) -> list[int]:
        return _row_shape(layout, ranks, num_experts, max_tokens, capacity, list(last))

    if quant != Quant.NONE:
        dtype = torch.float8_e4m3fn
        num_scales = (hidden + 511) // 512 if quant == Quant.FP8_UE8M0 else (hidden + 127) // 128
        scale_dtype = torch.int32 if quant == Quant.FP8_UE8M0 else torch.float32
    expert_rows = layout <= Layout.PACKED
    bins = num_experts // ranks if expert_rows else ranks
    num_offsets = bins + 1 if layout == Layout.PACKED else 0
    return (
        like.new_empty(rows(hidden), dtype=dtype),
        like.new_empty(rows(num_scales) if num_scales else [0], dtype=scale_dtype),
        like.new_empty(rows() if expert_rows else rows(topk), dtype=torch.float32),
        like.new_empty([0] if expert_rows else rows(topk), dtype=idx_dtype),
        like.new_empty([capacity if layout == Layout.PACKED else 0], dtype=torch.int32),
        like.new_empty([2 * bins + 2 + num_offsets], dtype=torch.int32),
    )


def _new_handle(x: torch.Tensor, buffer: str, topk_idx: torch.Tensor, max_tokens: int, layout: int) -> torch.Tensor:
    size = _handle_size(_num_ranks(buffer), x.shape[0], max_tokens, topk_idx.shape[1], layout)
    return x.new_empty([size], dtype=torch.int32)


def _fake(op: str) -> Callable[[F], F]:
    """``torch.library.register_fake``, which has no annotations, with some."""
    return cast(Callable[[F], F], torch.library.register_fake(f"nccl_ep::{op}"))


def _nothing(*args: Any) -> None:
    """Of an op that writes into its arguments."""


for _op in (
    "ll_dispatch_out", "ll_combine_out", "ll_combine_send", "ll_floor_flags", "ll_floor_push",
    "ll_dispatch_deepep_recv", "ll_combine_deepep_recv",
    "ht_dispatch_out", "ht_dispatch_cached_out", "ht_combine_out",
):  # fmt: skip
    _fake(_op)(_nothing)


@_fake("ll_dispatch")
def _(
    buffer: str, seq: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, num_experts: int, max_tokens: int, layout: int, capacity: int, alignment: int,
    quant: int, zero_padding: bool, num_sms: int,
) -> Tensors:  # fmt: skip
    num_scales, scale_dtype = scales_of(x_scales)
    outputs = _outputs(
        x, buffer, x.dtype, x.shape[1], num_scales, scale_dtype, topk_idx.shape[1], topk_idx.dtype, num_experts,
        max_tokens, layout, capacity, quant,
    )  # fmt: skip
    return (*outputs, _new_handle(x, buffer, topk_idx, max_tokens, layout))


@_fake("ll_dispatch_send")
def _(
    buffer: str, seq: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, num_experts: int, max_tokens: int, layout: int, *config: Any,
) -> torch.Tensor:  # fmt: skip
    return _new_handle(x, buffer, topk_idx, max_tokens, layout)


@_fake("ll_dispatch_recv")
def _(
    buffer: str, seq: torch.Tensor, handle: torch.Tensor, dtype: torch.dtype, hidden: int, num_scales: int,
    scale_dtype: torch.dtype, num_tokens: int, topk: int, is_idx64: bool, num_experts: int, max_tokens: int,
    layout: int, capacity: int, alignment: int, quant: int, zero_padding: bool, num_sms: int,
) -> Tensors:  # fmt: skip
    return _outputs(
        handle, buffer, dtype, hidden, num_scales, scale_dtype, topk, torch.int64 if is_idx64 else torch.int32,
        num_experts, max_tokens, layout, capacity, quant,
    )  # fmt: skip


@_fake("ll_combine")
def _(
    buffer: str, seq: torch.Tensor, rows: torch.Tensor, handle: torch.Tensor, weights: torch.Tensor | None,
    topk_idx: torch.Tensor | None, biases: list[torch.Tensor], num_tokens: int, topk: int, num_experts: int,
    max_tokens: int, layout: int, capacity: int, weighting: int, out_dtype: torch.dtype, wire_dtype: torch.dtype,
    num_sms: int,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty([num_tokens, rows.shape[-1]], dtype=out_dtype)


@_fake("ll_combine_recv")
def _(
    buffer: str, seq: torch.Tensor, handle: torch.Tensor, biases: list[torch.Tensor], rows_dtype: torch.dtype,
    hidden: int, num_tokens: int, topk: int, num_experts: int, max_tokens: int, layout: int, capacity: int,
    weighting: int, out_dtype: torch.dtype, wire_dtype: torch.dtype, num_sms: int,
) -> torch.Tensor:  # fmt: skip
    return handle.new_empty([num_tokens, hidden], dtype=out_dtype)


@_fake("ll_combine_weights")
def _(
    buffer: str, seq: torch.Tensor, values: torch.Tensor, handle: torch.Tensor, num_tokens: int, topk: int,
    num_experts: int, max_tokens: int, layout: int, capacity: int,
) -> torch.Tensor:  # fmt: skip
    return values.new_empty([num_tokens, topk], dtype=torch.float32)


# ---- DeepEP's convention (csrc/torch/deep_ep/low_latency_ops.cc)


def _deepep_outputs(
    buffer: str, seq: torch.Tensor, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int, max_tokens: int,
    quant: int, *rest: Any,
) -> Tensors:  # fmt: skip
    ranks = _num_ranks(buffer)
    capacity, local = ranks * max_tokens, num_experts // ranks
    rows, scales, weights, _, _, info = _outputs(
        x, buffer, x.dtype, x.shape[1], 0, torch.float32, topk_idx.shape[1], topk_idx.dtype, num_experts, max_tokens,
        Layout.EXPERT_MAJOR, capacity, quant,
    )  # fmt: skip
    if quant != Quant.NONE:
        scales = scales.new_empty([local, scales.shape[2], capacity]).transpose(1, 2)
    # As SourceShape in csrc/layout/common/outputs.h.
    handle = _handle_size(ranks, x.shape[0], max_tokens, topk_idx.shape[1], Layout.EXPERT_MAJOR)
    padding = align4(topk_idx.numel()) - topk_idx.numel()
    size = align4(local * capacity) + handle + padding
    src_info = x.new_empty([size], dtype=torch.int32).as_strided([local, capacity], [capacity, 1])
    layout_range = x.new_empty([local, ranks], dtype=torch.int64)
    return rows, scales, weights, info.as_strided([local], [1]), src_info, layout_range


def _deepep_combined(
    buffer: str, seq: torch.Tensor, rows: torch.Tensor, src_info: torch.Tensor, weights: torch.Tensor,
    topk_idx: torch.Tensor, num_experts: int, max_tokens: int, wait_cost: torch.Tensor | None,
    out: torch.Tensor | None, num_sms: int,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty([topk_idx.shape[0], rows.shape[2]] if out is None else [0])


_fake("ll_dispatch_deepep")(_deepep_outputs)
_fake("ll_dispatch_deepep_send")(_deepep_outputs)
_fake("ll_combine_deepep")(_deepep_combined)
_fake("ll_combine_deepep_send")(_deepep_combined)


# ---- High throughput. Sizes that the ranks tell one another when the op runs are new symbols.


def _ht_route_size(buffer: str, num_tokens: int, max_tokens: int, topk: int, num_experts: int) -> int:
    made = find_buffer(buffer)
    num_domains = made.num_ranks // made.domain_size
    return HtRouteShape(made.num_ranks, num_domains, num_experts, num_tokens, max_tokens, topk).size


def _slot_words(layout: int, topk: int) -> int:
    return 2 * topk + 1 if layout <= Layout.PACKED else 1


def _further(
    xs: list[torch.Tensor], buffer: str, num_experts: int, max_tokens: int, layout: int, rows: int
) -> list[torch.Tensor]:
    """Of the tensors beside x; three in all."""
    if not 1 <= len(xs) <= 4:
        raise ValueError(f"{len(xs)} tensors, must be 1 to 4")
    shapes = [_row_shape(layout, _num_ranks(buffer), num_experts, max_tokens, rows, [each.shape[1]]) for each in xs[1:]]
    further = [each.new_empty(shape) for each, shape in zip(xs[1:], shapes, strict=True)]
    return [*further, *(xs[0].new_empty([0], dtype=torch.uint8) for _ in range(3 - len(further)))]


@_fake("ht_dispatch")
def _(
    buffer: str, seq: torch.Tensor, xs: list[torch.Tensor], x_scales: torch.Tensor | None, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, num_experts: int, max_tokens: int, layout: int, capacity: int, alignment: int,
    quant: int, zero_padding: bool, num_sms: int,
) -> Any:  # fmt: skip
    x, topk = xs[0], topk_idx.shape[1]
    num_slots: Any = _num_ranks(buffer) * max_tokens
    if capacity < 0:
        context = torch.library.get_ctx()
        num_slots = context.new_dynamic_size()
        rows: Any = max_tokens if layout == Layout.RANK_MAJOR else context.new_dynamic_size()
        capacity = rows
    num_scales, scale_dtype = scales_of(x_scales)
    outputs = _outputs(
        x, buffer, x.dtype, x.shape[1], num_scales, scale_dtype, topk, topk_idx.dtype, num_experts, max_tokens, layout,
        capacity, quant,
    )  # fmt: skip
    further = _further(xs, buffer, num_experts, max_tokens, layout, capacity)
    route = x.new_empty([_ht_route_size(buffer, x.shape[0], max_tokens, topk, num_experts)], dtype=torch.int32)
    slots = x.new_empty([num_slots, _slot_words(layout, topk)], dtype=torch.int32)
    return *outputs, route, slots, *further


@_fake("ht_dispatch_deepep")
def _(
    buffer: str, seq: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, num_experts: int, max_tokens: int, capacity: int, num_sms: int,
) -> Any:  # fmt: skip
    is_exact, ranks = capacity < 0, _num_ranks(buffer)
    num_slots: Any = ranks * max_tokens
    if is_exact:
        capacity = num_slots = torch.library.get_ctx().new_dynamic_size()  # type: ignore[assignment]
    num_scales, scale_dtype = scales_of(x_scales)
    rows, scales, weights, ids, _, info = _outputs(
        x, buffer, x.dtype, x.shape[1], num_scales, scale_dtype, topk_idx.shape[1], topk_idx.dtype, num_experts,
        max_tokens, Layout.FLAT, capacity, Quant.NONE,
    )  # fmt: skip
    size = _ht_route_size(buffer, x.shape[0], max_tokens, topk_idx.shape[1], num_experts)
    route, slots = x.new_empty([size], dtype=torch.int32), x.new_empty([num_slots, 1], dtype=torch.int32)
    prefix = x.new_empty([ranks, ranks], dtype=torch.int32)
    counts = torch.empty([1 + num_experts // ranks if is_exact else 0], dtype=torch.int64, device="cpu")
    return rows, scales, ids, weights, info, route, slots, prefix, counts


@_fake("token_layout")
def _(topk_idx: torch.Tensor, num_ranks: int, num_domains: int, num_experts: int) -> Tensors:
    counts = num_ranks + (num_domains if num_domains > 1 else 0) + num_experts
    is_in_rank = topk_idx.new_empty([topk_idx.shape[0], num_ranks], dtype=torch.bool)
    return topk_idx.new_empty([counts], dtype=torch.int32), is_in_rank


@_fake("ht_dispatch_cached")
def _(
    buffer: str, seq: torch.Tensor, xs: list[torch.Tensor], x_scales: torch.Tensor | None, route: torch.Tensor,
    slots: torch.Tensor, num_tokens: int, topk: int, num_experts: int, max_tokens: int, layout: int, capacity: int,
    quant: int, zero_padding: bool, num_sms: int,
) -> Any:  # fmt: skip
    x = xs[0]
    num_scales, scale_dtype = scales_of(x_scales)
    outputs = _outputs(
        x, buffer, x.dtype, x.shape[1], num_scales, scale_dtype, topk, torch.int32, num_experts, max_tokens, layout,
        capacity, quant,
    )  # fmt: skip
    return *outputs[:2], *_further(xs, buffer, num_experts, max_tokens, layout, capacity)


@_fake("ht_combine")
def _(
    buffer: str, seq: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor | None, route: torch.Tensor,
    slots: torch.Tensor, weights: torch.Tensor | None, topk_idx: torch.Tensor | None, biases: list[torch.Tensor],
    num_tokens: int, topk: int, num_experts: int, max_tokens: int, layout: int, capacity: int, weighting: int,
    out_dtype: torch.dtype, wire_dtype: torch.dtype, num_sms: int,
) -> Tensors:  # fmt: skip
    return (
        route.new_empty([0] if rows is None else [num_tokens, rows.shape[-1]], dtype=out_dtype),
        route.new_empty([0] if values is None else [num_tokens, topk], dtype=torch.float32),
    )


@_fake("arena_empty")
def _(buffer: str, seq: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return seq.new_empty(size, dtype=dtype)
