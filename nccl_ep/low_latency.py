"""Further tensors of a low-latency dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .config import Numbers, replace_field
from .gradients import wants_gradient
from .handle import Quant
from .marks import constant

_WORD = torch.int32
MAX_EXTRA = 3


def dispatch_with_extra(op: Callable[..., Any], call: Any) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What ``op`` (``ll_dispatch``) returns for x of a ``calls.DispatchCall``, and the rows of its ``extra`` in the
    places of x's.

    The first tensor travels in the rows of x, as scales do, where x has none; each other one in an operation of its
    own, of the same routing. Places follow from the routing alone, so that they are the same. An extra that wants a
    gradient travels as the numbers that it is; the ranks must agree on that.
    """
    x, extra, shape = call.x, call.extra, call.shape
    buffer = shape.buffer
    _check(x, extra)
    words = [each if wants_gradient(each) else each.resolve_conj().resolve_neg().view(_WORD) for each in extra]

    def run(rows: torch.Tensor, row_scales: torch.Tensor | None, numbers: Numbers) -> Any:
        return op(buffer._seq, rows, row_scales, call.topk_idx, call.topk_weights, shape.capacity, numbers)

    has_room = _carries_extra(shape.quantises, call.scales is not None)
    alone = words[1:] if has_room else words
    if alone and buffer.enable_shrink:
        raise ValueError(
            f"{len(extra)} extra tensors take {1 + len(alone)} operations, which may leave out different ranks with "
            "enable_shrink: one beside rows without scales takes none of its own"
        )
    for each in () if is_dynamo_compiling() else alone:  # nothing is sent where one of them would be refused
        row_bytes = each.shape[1] * each.element_size()
        buffer.runtime.check_opaque_rows(shape.num_experts, shape.topk, shape.max_tokens, row_bytes)
    received = run(x, words[0] if has_room else call.scales, shape.numbers)
    further = replace_field(replace_field(shape.numbers, "quant", int(Quant.NONE)), "reports_ids", 0)
    moved = [received[1]] if has_room else []
    moved += [run(each, None, further)[0] for each in alone]
    rows = [
        each if each.dtype == given.dtype else each.view(given.dtype) for each, given in zip(moved, extra, strict=True)
    ]
    return received, tuple(rows)


@constant
def _carries_extra(quantises: bool, has_scales: bool) -> bool:
    return _C.carries_extra(int(Quant.FP8 if quantises else Quant.NONE), has_scales)


def _check(x: torch.Tensor, extra: Sequence[torch.Tensor]) -> None:
    if len(extra) > MAX_EXTRA:
        raise ValueError(f"{len(extra)} extra tensors, at most {MAX_EXTRA}")
    for i, each in enumerate(extra):
        if each.dim() != 2 or each.shape[0] != x.shape[0]:
            raise ValueError(f"extra {i} has shape {list(each.shape)}, must be [{x.shape[0]}, elements of a row]")
        row_bytes = each.shape[1] * each.element_size()
        if row_bytes == 0 or row_bytes % 16:
            raise ValueError(f"extra {i} has rows of {row_bytes} bytes, must be a multiple of 16")
        if not each.is_contiguous():
            raise ValueError(f"extra {i} of shape {list(each.shape)} is not contiguous")
        if each.is_quantized:
            raise ValueError(
                f"extra {i} is a quantized tensor, {each.dtype}: give its int_repr() and what belongs to it"
            )
        if not is_dynamo_compiling() and each.data_ptr() % 16:
            raise ValueError(f"extra {i} begins at address {each.data_ptr():#x}, must be a multiple of 16 bytes")
