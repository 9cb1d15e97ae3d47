"""The numbers of a dispatch: checked once, and remembered by the buffer for the calls that have the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .buffer import Buffer
from .checks import require_integers, require_on, require_tensors
from .handle import EXACT, LAYOUTS, QUANTS, Layout, Quant
from .log import logger
from .modes import MODES, choose_mode

_sizes_on_same_device = _C.sizes_on_same_device  # a look-up that the hot path is spared
_MAX_FORMS = 256  # that a buffer remembers
_CAPACITIES = frozenset((int, str, type(None)))


@dataclass(slots=True, eq=False)
class Form:
    """The numbers of a dispatch, checked: the same for many calls. mode: "ll" or "ht"."""

    mode: str
    num_experts: int
    topk: int
    max_tokens: int
    layout: Layout
    capacity: int
    quant: Quant
    args: tuple[int, int, int, int, int, int]  # as the ops take them
    has_expert_rows: bool  # of the layout, whose comparisons are slow

    @staticmethod
    def check(
        ranks: int,
        ll_max_tokens: int | None,
        num_experts: int,
        mode: str,
        layout: str,
        max_tokens: int | None,
        capacity: int | str | None,
        alignment: int,
        quant: str | None,
        topk: int,
        row_bytes: int,
    ) -> Form:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, must be one of {', '.join(MODES)}")
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}, must be one of {', '.join(LAYOUTS)}")
        if quant not in QUANTS:
            raise ValueError(f"quant is {quant!r}, must be one of {', '.join(map(str, QUANTS))}")
        if max_tokens is None:
            raise ValueError("max_tokens is not given, and the buffer was made without it")
        if num_experts < 1 or num_experts % ranks:
            raise ValueError(f"{num_experts} experts do not divide over {ranks} ranks")
        kind = LAYOUTS[layout]
        if alignment != 1 and kind != Layout.PACKED:
            raise ValueError(f"expert_alignment is {alignment}, but layout {layout} has no alignment")
        if alignment < 1:
            raise ValueError(f"expert_alignment is {alignment}, must be at least 1")
        if mode == "auto":
            mode = choose_mode(max_tokens, row_bytes, topk, ranks, capacity)
            if ll_max_tokens is not None and max_tokens > ll_max_tokens:
                mode = "ht"  # rows are smaller, or choices fewer, than the buffer was made for
        if isinstance(capacity, str):
            if capacity != "exact":
                raise ValueError(f'capacity is {capacity!r}, must be a number, None or "exact"')
            if mode != "ht" or kind == Layout.EXPERT_MAJOR:
                raise ValueError(f'capacity "exact" is for high throughput and not for expert_major: {mode}, {layout}')
            capacity = EXACT
        elif capacity is None and mode == "ht" and kind == Layout.EXPERT_MAJOR:
            raise ValueError(
                "expert_major needs a capacity in high throughput: R * max_tokens rows an expert are too many"
            )
        elif capacity is None:
            capacity = _default_capacity(kind, ranks, num_experts, max_tokens, topk, alignment)
        elif capacity < 0:
            raise ValueError(f"capacity is {capacity}, must not be negative")
        elif kind == Layout.RANK_MAJOR:
            raise ValueError(f"capacity is {capacity}, but layout rank_major always holds max_tokens rows of a rank")
        args = (num_experts, max_tokens, int(kind), capacity, alignment, int(QUANTS[quant]))
        return Form(mode, num_experts, topk, max_tokens, kind, capacity, QUANTS[quant], args, kind.has_expert_rows)


def form_of(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    buffer: Buffer,
    num_experts: int,
    mode: str,
    layout: str,
    max_tokens: int | None,
    capacity: int | str | None,
    alignment: int,
    quant: str | None,
) -> tuple[Form, int]:
    """Checks the arguments of a call: the tensors each time, the numbers when they are new. Also returns T."""
    is_compiling = is_dynamo_compiling()
    if not isinstance(buffer, Buffer):
        raise TypeError(_no_buffer(buffer))
    sizes = None if is_compiling else _sizes_on_same_device(buffer._seq, x, topk_idx, topk_weights, scales)
    if sizes is None:  # what is wrong, if anything
        require_tensors(x=x, topk_idx=topk_idx)
        require_on(buffer, ("x", "topk_idx", "topk_weights", "scales"), (x, topk_idx, topk_weights, scales))
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
        if topk_idx.dim() != 2:
            raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}, must be [tokens, top-k]")
        sizes = x.shape[0], topk_idx.shape[1]
    num_tokens, topk = sizes
    if max_tokens is None:
        max_tokens = buffer.max_tokens
    numbers = (num_experts, mode, layout, max_tokens, capacity, alignment, quant, topk)
    row_bytes = x.shape[1] * x.element_size() if mode == "auto" else 0
    if is_compiling:  # sizes may be symbols, which are no keys; and it costs nothing there
        return Form.check(buffer.num_ranks, buffer.ll_max_tokens, *numbers, row_bytes), num_tokens
    if not (type(num_experts) is type(max_tokens) is type(alignment) is int and type(capacity) in _CAPACITIES):
        require_integers(num_experts=num_experts, max_tokens=max_tokens, expert_alignment=alignment)
        if not isinstance(capacity, str):
            require_integers(capacity=capacity)
    key = (*numbers, row_bytes) if row_bytes else numbers
    form: Form | None = buffer._forms.get(key)
    if form is None:
        form = Form.check(buffer.num_ranks, buffer.ll_max_tokens, *numbers, row_bytes)
        if len(buffer._forms) >= _MAX_FORMS:
            buffer._forms.clear()
        buffer._forms[key] = form
        logger.debug("%s serves %s for the first time", buffer.name, form)
    return form, num_tokens


def _no_buffer(buffer: object) -> str:
    if isinstance(getattr(buffer, "core", None), Buffer):
        return f"buffer is {buffer!r}, must be a nccl_ep.Buffer: give its core"
    return f"buffer is a {type(buffer).__name__}, must be a nccl_ep.Buffer"


def _default_capacity(layout: Layout, ranks: int, experts: int, max_tokens: int, topk: int, alignment: int) -> int:
    """Rows that suffice for any routing in which no token names an expert twice."""
    local = experts // ranks
    if layout != Layout.PACKED:
        return max_tokens if layout == Layout.RANK_MAJOR else ranks * max_tokens
    rows = ranks * max_tokens * min(topk, local) + local * (alignment - 1)
    return (rows + alignment - 1) // alignment * alignment
