"""How Python calls the ops, and what their fakes return for tracing. Schemas and kernels: csrc/torch/ops.

Shapes of outputs come from the library itself (csrc/runtime/policy.h), with symbols where sizes are not known yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from . import _C
from .config import Numbers, dispatch_fields, pack_dispatch, replace_field
from .handle import DEFAULT, EXACT, Layout

Tensors = tuple[torch.Tensor, ...]
Scales = torch.Tensor | None
F = TypeVar("F", bound=Callable[..., Any])


def _use_fast_calls(name: str) -> None:
    """Lets torch.ops call the op past torch's parser of arguments, which takes longer than the rest of a call."""
    packet = getattr(torch.ops.nccl_ep, name)
    for op in (packet, packet.default):
        usual = op._op
        op._op = _C.fast_op(name, usual)
        op._op.__module__ = usual.__module__
    torch.jit._builtins._register_builtin(packet._op, f"nccl_ep::{name}")  # as torch does: TorchScript looks there


def _keep_version_of_seq(name: str) -> None:
    """Lets compiled passes save `seq` for backward, whatever other compiled passes call on the buffer in between.

    Ops mark `seq` as changed so that a compiler keeps their order. It has no elements, so autograd need not know.
    """

    def functionalize(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = mode.__torch_dispatch__(op, types, args, kwargs)
        args[0].mark_mutation_hidden_from_autograd()
        return result

    first = getattr(torch.ops.nccl_ep, name).default._schema.arguments[0]
    if first.name != "seq" or first.alias_info is None:
        return
    torch.library.register_torch_dispatch(f"nccl_ep::{name}", FunctionalTensorMode, functionalize)


for _name in _C.op_names():
    _use_fast_calls(_name)
    _keep_version_of_seq(_name)


def scales_of(x_scales: torch.Tensor | None) -> tuple[int, torch.dtype]:
    """How many scales a row has, and their dtype, as the ops take them."""
    return (0, torch.float32) if x_scales is None or x_scales.dim() != 2 else (x_scales.shape[1], x_scales.dtype)


def _num_ranks(seq: torch.Tensor) -> int:
    """Of the buffer whose tensor it is (csrc/torch/ops/registry.h)."""
    return int(seq.shape[1])


def _domain_size(seq: torch.Tensor) -> int:
    return int(seq.shape[2])


# ---- Shapes. Each fake asks for the tensors of its op; the device is that of `like`.


def _outputs(
    like: torch.Tensor, seq: torch.Tensor, dtype: torch.dtype, hidden: int, num_scales: int, scale_dtype: torch.dtype,
    is_idx64: bool, capacity: int, config: Numbers,
) -> list[torch.Tensor]:  # fmt: skip
    """x, scales, weights, topk_idx, row_expert, info."""
    if isinstance(capacity, int) and capacity == DEFAULT:
        capacity = _C.default_capacity(config, _num_ranks(seq))
    outputs = _C.dispatch_outputs(config, _num_ranks(seq), capacity, dtype, hidden, num_scales, scale_dtype, is_idx64)
    return [like.new_empty(shape, dtype=each) for shape, each in outputs]


def _outputs_of(x: torch.Tensor, x_scales: Scales, topk_idx: torch.Tensor, seq: torch.Tensor, capacity: int,
                config: Numbers) -> list[torch.Tensor]:  # fmt: skip
    is_idx64 = topk_idx.dtype == torch.int64
    return _outputs(x, seq, x.dtype, x.shape[1], *scales_of(x_scales), is_idx64, capacity, config)


def _new_handle(x: torch.Tensor, seq: torch.Tensor, config: Numbers) -> torch.Tensor:
    return x.new_empty([_C.handle_size(config, _num_ranks(seq), x.shape[0])], dtype=torch.int32)


def _ht_handle(like: torch.Tensor, seq: torch.Tensor, num_tokens: int, num_slots: int, config: Numbers) -> Tensors:
    """route and slots."""
    size, words = _C.ht_handle_sizes(config, _num_ranks(seq), _domain_size(seq), num_tokens)
    return like.new_empty([size], dtype=torch.int32), like.new_empty([num_slots, words], dtype=torch.int32)


def _extra_outputs(xs: list[torch.Tensor], seq: torch.Tensor, capacity: int, config: Numbers) -> list[torch.Tensor]:
    """Of the tensors beside x; three in all."""
    if not 1 <= len(xs) <= 4:
        raise ValueError(f"{len(xs)} tensors, must be 1 to 4")
    config = replace_field(config, "quant", 0)
    extra = [_outputs(x, seq, x.dtype, x.shape[1], 0, torch.float32, True, capacity, config)[0] for x in xs[1:]]
    return [*extra, *(xs[0].new_empty([0], dtype=torch.uint8) for _ in range(3 - len(extra)))]


def _combined(like: torch.Tensor, num_tokens: int, hidden: int, config: Numbers) -> torch.Tensor:
    return like.new_empty([num_tokens, hidden], dtype=_C.combine_out_dtype(config))


# ---- Fakes


def _fake(op: str) -> Callable[[F], F]:
    """``torch.library.register_fake``, which has no annotations, with some."""
    return cast(Callable[[F], F], torch.library.register_fake(f"nccl_ep::{op}"))


def _nothing(*args: Any) -> None:
    """Of an op that writes into its arguments."""


for _op in (
    "ll_dispatch_out", "ll_dispatch_recv_out", "ll_combine_out", "ll_combine_send", "ll_combine_recv_out",
    "ll_dispatch_deepep_recv", "ll_combine_deepep_recv",
    "ht_dispatch_out", "ht_dispatch_cached_out", "ht_combine_out", "require_no_overflow",
    "begin_arrivals", "announce_rows", "run_beside", "await_beside",
):  # fmt: skip
    _fake(_op)(_nothing)


@_fake("ll_dispatch")
def _(
    seq: torch.Tensor, x: torch.Tensor, x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, capacity: int, config: Numbers,
) -> Tensors:  # fmt: skip
    return *_outputs_of(x, x_scales, topk_idx, seq, capacity, config), _new_handle(x, seq, config)


@_fake("ll_dispatch_send")
def _(
    seq: torch.Tensor, x: torch.Tensor, x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, capacity: int, config: Numbers,
) -> torch.Tensor:  # fmt: skip
    return _new_handle(x, seq, config)


@_fake("ll_dispatch_recv")
def _(
    seq: torch.Tensor, handle: torch.Tensor, dtype: torch.dtype, hidden: int, num_scales: int,
    scale_dtype: torch.dtype, num_tokens: int, is_idx64: bool, capacity: int, config: Numbers,
    x: torch.Tensor | None, topk_weights: torch.Tensor | None,
) -> Tensors:  # fmt: skip
    return tuple(_outputs(handle, seq, dtype, hidden, num_scales, scale_dtype, is_idx64, capacity, config))


@_fake("ll_combine")
def _(
    seq: torch.Tensor, rows: torch.Tensor, handle: torch.Tensor, weights: torch.Tensor | None,
    topk_idx: torch.Tensor | None, biases: list[torch.Tensor], num_tokens: int, capacity: int, config: Numbers,
) -> torch.Tensor:  # fmt: skip
    return _combined(rows, num_tokens, rows.shape[-1], config)


@_fake("ll_combine_recv")
def _(
    seq: torch.Tensor, handle: torch.Tensor, biases: list[torch.Tensor], rows_dtype: torch.dtype,
    hidden: int, num_tokens: int, capacity: int, config: Numbers, carrier: torch.Tensor | None,
    rows: torch.Tensor | None, weights: torch.Tensor | None, topk_idx: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return _combined(handle, num_tokens, hidden, config)


@_fake("ll_combine_weights")
def _(
    seq: torch.Tensor, values: torch.Tensor, handle: torch.Tensor, num_tokens: int, capacity: int,
    config: Numbers,
) -> torch.Tensor:  # fmt: skip
    return values.new_empty([num_tokens, _C.combine_topk(config)], dtype=torch.float32)


# ---- Carriers (csrc/torch/ops/gradients.cc)


@_fake("carrier")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([]).expand(x.shape)


@_fake("row_carrier")
def _(
    seq: torch.Tensor, x: torch.Tensor, handle: torch.Tensor, slots: torch.Tensor | None, sizes: list[int],
    config: Numbers,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty([]).expand(sizes)


@_fake("carried")
def _(carrier: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


# ---- DeepEP's convention (csrc/torch/deep_ep)


def _deepep_outputs(
    seq: torch.Tensor, x: torch.Tensor, x_scales: Scales, topk_idx: torch.Tensor, num_experts: int, max_tokens: int,
    quant: int, *rest: Any,
) -> Tensors:  # fmt: skip
    capacity, local = _num_ranks(seq) * max_tokens, num_experts // _num_ranks(seq)
    config = pack_dispatch(
        {"num_experts": num_experts, "topk": topk_idx.shape[1], "max_tokens": max_tokens, "quant": quant}
    )
    rows, scales, weights, _, _, info = _outputs_of(x, x_scales, topk_idx, seq, capacity, config)
    if quant:
        scales = scales.new_empty([local, scales.shape[2], capacity]).transpose(1, 2)
    src_info = x.new_empty([_C.source_size(config, _num_ranks(seq), x.shape[0])], dtype=torch.int32)
    src_info = src_info.as_strided([local, capacity], [capacity, 1])
    layout_range = x.new_empty([local, _num_ranks(seq)], dtype=torch.int64)
    return rows, scales, weights, info.as_strided([local], [1]), src_info, layout_range


def _deepep_combined(
    seq: torch.Tensor, rows: torch.Tensor, src_info: torch.Tensor, weights: torch.Tensor,
    topk_idx: torch.Tensor, num_experts: int, max_tokens: int, wait_cost: torch.Tensor | None,
    out: torch.Tensor | None, num_sms: int, use_logfmt: bool, *signals: Any,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty([topk_idx.shape[0], rows.shape[2]] if out is None else [0])


_fake("ll_dispatch_deepep")(_deepep_outputs)
_fake("ll_dispatch_deepep_send")(_deepep_outputs)
_fake("ll_combine_deepep")(_deepep_combined)
_fake("ll_combine_deepep_send")(_deepep_combined)


# ---- High throughput. Sizes that the ranks tell one another when the op runs are new symbols.


@_fake("ht_dispatch")
def _(
    seq: torch.Tensor, xs: list[torch.Tensor], x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, capacity: int, config: Numbers,
) -> Any:  # fmt: skip
    x = xs[0]
    fields = dispatch_fields(config)
    num_slots: Any = _num_ranks(seq) * fields["max_tokens"]
    if capacity == EXACT:
        context = torch.library.get_ctx()
        num_slots = context.new_dynamic_size()
        is_fixed = fields["layout"] == Layout.RANK_MAJOR
        capacity = fields["max_tokens"] if is_fixed else context.new_dynamic_size()  # type: ignore[assignment]
    outputs = _outputs_of(x, x_scales, topk_idx, seq, capacity, config)
    extra = _extra_outputs(xs, seq, capacity, config)
    return *outputs, *_ht_handle(x, seq, x.shape[0], num_slots, config), *extra


# Exact sizes in two ops: the sizes between them are what a compiler keeps as symbols.


@_fake("ht_route")
def _(
    seq: torch.Tensor, xs: list[torch.Tensor], x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, config: Numbers,
) -> Tensors:  # fmt: skip
    info = _outputs_of(xs[0], x_scales, topk_idx, seq, 1, config)[5]
    route, _ = _ht_handle(xs[0], seq, xs[0].shape[0], 1, config)
    return info, route, torch.empty([2], dtype=torch.int64, device="cpu")


@_fake("size_at")
def _(sizes: torch.Tensor, index: int) -> Any:
    return torch.library.get_ctx().new_dynamic_size()


@_fake("ht_dispatch_routed")
def _(
    seq: torch.Tensor, xs: list[torch.Tensor], x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, info: torch.Tensor, route: torch.Tensor, num_rows: int, num_slots: int,
    config: Numbers,
) -> Any:  # fmt: skip
    fields = dispatch_fields(config)
    capacity = fields["max_tokens"] if fields["layout"] == Layout.RANK_MAJOR else num_rows
    outputs = _outputs_of(xs[0], x_scales, topk_idx, seq, capacity, config)
    slots = _ht_handle(xs[0], seq, xs[0].shape[0], num_slots, config)[1]
    return *outputs[:5], slots, *_extra_outputs(xs, seq, capacity, config)


@_fake("ht_dispatch_deepep")
def _(
    seq: torch.Tensor, x: torch.Tensor, x_scales: Scales, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, num_experts: int, max_tokens: int, capacity: int, num_sms: int,
) -> Any:  # fmt: skip
    is_exact, ranks = capacity < 0, _num_ranks(seq)
    num_slots: Any = ranks * max_tokens
    if is_exact:
        capacity = num_slots = torch.library.get_ctx().new_dynamic_size()  # type: ignore[assignment]
    config = pack_dispatch(
        {
            "num_experts": num_experts, "topk": topk_idx.shape[1], "max_tokens": max_tokens, "layout": Layout.FLAT,
        }
    )  # fmt: skip
    rows, scales, weights, ids, _, info = _outputs_of(x, x_scales, topk_idx, seq, capacity, config)
    route, slots = _ht_handle(x, seq, x.shape[0], num_slots, config)
    prefix = x.new_empty([ranks, ranks], dtype=torch.int32)
    counts = torch.empty([1 + num_experts // ranks if is_exact else 0], dtype=torch.int64, device="cpu")
    return rows, scales, ids, weights, info, route, slots, prefix, counts


@_fake("token_layout")
def _(topk_idx: torch.Tensor, num_ranks: int, num_domains: int, num_experts: int) -> Tensors:
    counts = num_ranks + (num_domains if num_domains > 1 else 0) + num_experts
    is_in_rank = topk_idx.new_empty([topk_idx.shape[0], num_ranks], dtype=torch.bool)
    return topk_idx.new_empty([counts], dtype=torch.int32), is_in_rank


@_fake("map_experts")
def _(
    topk_idx: torch.Tensor, logical_to_physical_map: torch.Tensor, logical_count: torch.Tensor, rank: int,
    load: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return topk_idx.new_empty(topk_idx.shape)


@_fake("ht_dispatch_cached")
def _(
    seq: torch.Tensor, xs: list[torch.Tensor], x_scales: Scales, route: torch.Tensor,
    slots: torch.Tensor, num_tokens: int, capacity: int, config: Numbers,
) -> Any:  # fmt: skip
    x = xs[0]
    outputs = _outputs(x, seq, x.dtype, x.shape[1], *scales_of(x_scales), True, capacity, config)
    return *outputs[:2], *_extra_outputs(xs, seq, capacity, config)


@_fake("ht_combine")
def _(
    seq: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor | None, route: torch.Tensor,
    slots: torch.Tensor, weights: torch.Tensor | None, topk_idx: torch.Tensor | None, biases: list[torch.Tensor],
    num_tokens: int, capacity: int, config: Numbers,
) -> Tensors:  # fmt: skip
    dtype = _C.combine_out_dtype(config)
    return (
        route.new_empty([0], dtype=dtype) if rows is None else _combined(route, num_tokens, rows.shape[-1], config),
        route.new_empty([0] if values is None else [num_tokens, _C.combine_topk(config)], dtype=torch.float32),
    )


@_fake("ht_combine_signalled")
def _(
    seq: torch.Tensor, rows: torch.Tensor, route: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None,
    topk_idx: torch.Tensor | None, biases: list[torch.Tensor], num_tokens: int, capacity: int, config: Numbers,
    row_signals: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return _combined(rows, num_tokens, rows.shape[-1], config)


@_fake("arena_empty")
def _(seq: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return seq.new_empty(size, dtype=dtype)
