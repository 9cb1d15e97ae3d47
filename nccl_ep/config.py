"""The numbers of an operation: checked once, packed as the ops take them, and remembered by the buffer.

csrc/runtime/options.h lists the fields; what they may be together is checked here. docs/adding_an_option.md shows how
to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import assume_constant_result, is_dynamo_compiling

from . import _C
from .buffer import Buffer
from .checks import INT64, require_bools, require_integers, require_on, require_tensors, require_within
from .handle import DEFAULT, EXACT, LAYOUTS, QUANTS, Handle, Layout, Quant
from .log import logger
from .modes import MODES, choose_mode

_sizes_on_same_device = _C.sizes_on_same_device  # a look-up that the hot path is spared
_MAX_CONFIGS = 512  # that a buffer remembers
_CAPACITIES = frozenset((int, str, type(None)))
# Name, default, and whether it is a float: a compiler traces no class of C++.
_DISPATCH_OPTIONS = tuple((each.name, each.default, each.kind == "float") for each in _C.dispatch_options())
_COMBINE_OPTIONS = tuple((each.name, each.default, each.kind == "float") for each in _C.combine_options())
WIRE_FORMATS = _C.wire_formats()  # of partial sums alone, and their codes

Numbers = tuple[int, ...]
_Options = tuple[tuple[str, float, bool], ...]


def pack_dispatch(values: Mapping[str, Any]) -> Numbers:
    """The config of a dispatch op. Options that are not named have their default; a float becomes its bits."""
    return _pack(_DISPATCH_OPTIONS, values)


def pack_combine(values: Mapping[str, Any]) -> Numbers:
    """The config of a combine op."""
    return _pack(_COMBINE_OPTIONS, values)


def _pack(options: _Options, values: Mapping[str, Any]) -> Numbers:
    given = [(values.get(name, default), is_float) for name, default, is_float in options]
    return tuple([_float_number(value) if is_float else value + 0 for value, is_float in given])


@assume_constant_result  # type: ignore[untyped-decorator]
def _float_number(value: float) -> int:
    return _C.float_number(value)


def dispatch_fields(numbers: Numbers) -> dict[str, int]:
    """The config of a dispatch by the names of its fields."""
    return {name: each for (name, *_), each in zip(_DISPATCH_OPTIONS, numbers, strict=True)}


def combine_args(
    handle: Handle,
    weighting: int = 0,
    out_dtype: torch.dtype = torch.float32,
    wire_dtype: torch.dtype | str | None = None,
    num_sms: int = 0,
) -> tuple[int, int, Numbers]:
    """What ``torch.ops.nccl_ep`` take with a handle to combine: tokens, capacity, config."""
    fields = {
        "weighting": weighting, "out_dtype": dtype_code(out_dtype), "wire_dtype": wire_code(wire_dtype or out_dtype),
        "num_sms": num_sms,
    }  # fmt: skip
    return handle.num_tokens, handle.capacity, pack_combine(handle.routing() | fields)


def cached_args(
    handle: Handle, quant: int = 0, zero_padding: bool = False, num_sms: int = 0
) -> tuple[int, int, Numbers]:
    """What ``torch.ops.nccl_ep.ht_dispatch_cached`` takes with a handle: tokens, capacity, config."""
    fields = {"quant": quant, "zero_padding": zero_padding, "num_sms": num_sms}
    return handle.num_tokens, handle.capacity, pack_dispatch(handle.routing() | fields)


def replace_field(numbers: Numbers, field: str, value: int) -> Numbers:
    """The config of a dispatch with one number changed."""
    at = [name for name, *_ in _DISPATCH_OPTIONS].index(field)
    return (*numbers[:at], value, *numbers[at + 1 :])


def signalled_numbers(numbers: Numbers, rows_per_signal: int, signal_threshold: int, num_sms: int) -> Numbers:
    """The config of a combine's sending half that waits for the signals of its rows, from the other half's."""
    require_within(*INT64, rows_per_signal=rows_per_signal, signal_threshold=signal_threshold, num_sms=num_sms)
    given = {"rows_per_signal": rows_per_signal, "signal_threshold": signal_threshold, "num_sms": num_sms}
    return tuple([given.get(name, each) for (name, *_), each in zip(_COMBINE_OPTIONS, numbers, strict=True)])


@dataclass(slots=True, eq=False)
class DispatchConfig:
    """A dispatch but for its tensors, checked: the same for many calls. mode: "ll" or "ht". numbers: for the op."""

    mode: str
    num_experts: int
    topk: int
    max_tokens: int
    layout: Layout
    capacity: int
    alignment: int
    quant: Quant
    has_expert_rows: bool  # of the layout, whose comparisons are slow
    numbers: Numbers

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
        zero_padding: bool,
        num_sms: int,
        topk: int,
        row_bytes: int,
    ) -> DispatchConfig:
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
            capacity = DEFAULT
        elif capacity < 0:
            raise ValueError(f"capacity is {capacity}, must not be negative")
        elif kind == Layout.RANK_MAJOR:
            raise ValueError(f"capacity is {capacity}, but layout rank_major always holds max_tokens rows of a rank")
        numbers = pack_dispatch(
            {
                "num_experts": num_experts, "topk": topk, "max_tokens": max_tokens, "layout": int(kind),
                "alignment": alignment, "quant": int(QUANTS[quant]), "zero_padding": zero_padding, "num_sms": num_sms,
            }
        )  # fmt: skip
        return DispatchConfig(
            mode, num_experts, topk, max_tokens, kind, capacity, alignment, QUANTS[quant], kind.has_expert_rows, numbers
        )


def config_of(
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
    zero_padding: bool,
    num_sms: int,
) -> tuple[DispatchConfig, int]:
    """Checks the arguments of a call: the tensors each time, the numbers when they are new. Also returns T."""
    is_compiling = is_dynamo_compiling()
    if not isinstance(buffer, Buffer):
        raise TypeError(_no_buffer(buffer))
    sizes = None if is_compiling else _sizes_on_same_device(buffer._seq, x, topk_idx, topk_weights, scales)
    if sizes is None:  # what is wrong, if anything
        require_tensors(x=x, topk_idx=topk_idx)
        require_on(buffer._seq, ("x", "topk_idx", "topk_weights", "scales"), (x, topk_idx, topk_weights, scales))
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
        if topk_idx.dim() != 2:
            raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}, must be [tokens, top-k]")
        sizes = x.shape[0], topk_idx.shape[1]
    num_tokens, topk = sizes
    if max_tokens is None:
        max_tokens = buffer.max_tokens
    numbers = (num_experts, mode, layout, max_tokens, capacity, alignment, quant, zero_padding, num_sms, topk)
    row_bytes = x.shape[1] * x.element_size() if mode == "auto" else 0
    if is_compiling:  # sizes may be symbols, which are no keys; and it costs nothing there
        return DispatchConfig.check(buffer.num_ranks, buffer.ll_max_tokens, *numbers, row_bytes), num_tokens
    if not (
        type(num_experts) is type(max_tokens) is type(alignment) is type(num_sms) is int
        and type(capacity) in _CAPACITIES
        and type(zero_padding) is bool
    ):
        require_within(*INT64, num_experts=num_experts, expert_alignment=alignment, num_sms=num_sms)
        require_integers(max_tokens=max_tokens)
        require_bools(zero_padding=zero_padding)
        if not isinstance(capacity, str):
            require_integers(capacity=capacity)
    key = (*numbers, row_bytes) if row_bytes else numbers
    config: DispatchConfig | None = buffer._configs.get(key)
    if config is None:
        config = DispatchConfig.check(buffer.num_ranks, buffer.ll_max_tokens, *numbers, row_bytes)
        if config.capacity == DEFAULT:
            config.capacity = _C.default_capacity(config.numbers, buffer.num_ranks)
        _remember(buffer, key, config)
        _C.remember_dispatch(buffer._eager, key, config)
        logger.debug("%s serves %s for the first time", buffer.name, config)
    return config, num_tokens


def _no_buffer(buffer: object) -> str:
    if isinstance(getattr(buffer, "core", None), Buffer):
        return f"buffer is {buffer!r}, must be a nccl_ep.Buffer: give its core"
    return f"buffer is a {type(buffer).__name__}, must be a nccl_ep.Buffer"


def cached_numbers(buffer: Buffer | None, handle: Handle, quant: Quant, zero_padding: bool, num_sms: int) -> Numbers:
    """The config of a dispatch along the routes of ``handle``. No buffer: a compiler traces."""

    def make() -> Numbers:
        require_bools(zero_padding=zero_padding)
        return cached_args(handle, int(quant), zero_padding, num_sms)[2]

    return _numbers_of(buffer, handle, ("cached", quant._value_, zero_padding), num_sms, make)


def combine_numbers(
    buffer: Buffer | None,
    handle: Handle,
    weighting: int,
    out_dtype: torch.dtype,
    wire_dtype: torch.dtype | str,
    num_sms: int,
) -> Numbers:
    """The config of a combine of the rows of ``handle``. No buffer: a compiler traces."""

    def make() -> Numbers:
        return combine_args(handle, weighting, out_dtype, wire_dtype, num_sms)[2]

    return _numbers_of(buffer, handle, (weighting, out_dtype, wire_dtype), num_sms, make)


def _numbers_of(
    buffer: Buffer | None, handle: Handle, options: tuple[Any, ...], num_sms: int, make: Callable[[], Numbers]
) -> Numbers:
    """What ``make()`` returns, remembered for the routing of ``handle`` with these options."""
    if buffer is None:
        return make()
    key = (
        handle.num_experts, handle.topk, handle.max_tokens, handle.layout._value_, handle.alignment, num_sms, *options,
    )  # fmt: skip
    numbers: Numbers | None = buffer._configs.get(key)
    if numbers is None:
        require_within(*INT64, num_sms=num_sms)
        numbers = make()
        _remember(buffer, key, numbers)
    return numbers


def _remember(buffer: Buffer, key: tuple[Any, ...], value: object) -> None:
    if len(buffer._configs) >= _MAX_CONFIGS:
        buffer._configs.clear()
    buffer._configs[key] = value


@assume_constant_result  # type: ignore[untyped-decorator]
def dtype_code(dtype: torch.dtype) -> int:
    """As configs have it."""
    return _C.dtype_code(dtype)


def wire_code(wire_dtype: torch.dtype | str) -> int:
    """Of a dtype, or of one of WIRE_FORMATS."""
    return WIRE_FORMATS[wire_dtype] if isinstance(wire_dtype, str) else dtype_code(wire_dtype)
