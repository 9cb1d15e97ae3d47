"""The numbers of an operation, packed as the ops take them.

csrc/runtime/options.h lists the fields, csrc/runtime/call.h says what they may be together. docs/adding_an_option.md
shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .checks import INT64, require_within
from .choices import Mode, QuantName, WireFormat
from .handle import Handle, Layout
from .marks import constant

# Name, default, and whether it is a float: a compiler traces no class of C++.
_DISPATCH_OPTIONS = tuple((each.name, each.default, each.kind == "float") for each in _C.dispatch_options())
_COMBINE_OPTIONS = tuple((each.name, each.default, each.kind == "float") for each in _C.combine_options())
WIRE_FORMATS = _C.wire_formats()  # of partial sums alone, and their codes

WEIGHTINGS = NONE, DISPATCH, HOME = range(3)  # csrc/runtime/options.h, Weighting

Numbers = tuple[int, ...]
_LAYOUTS = tuple(Layout)
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


@constant
def _float_number(value: float) -> int:
    return _C.float_number(value)


def dispatch_fields(numbers: Numbers) -> dict[str, int]:
    """The config of a dispatch by the names of its fields."""
    return {name: each for (name, *_), each in zip(_DISPATCH_OPTIONS, numbers, strict=True)}


def combine_args(
    handle: Handle,
    weighting: int = 0,
    out_dtype: torch.dtype = torch.float32,
    wire_dtype: torch.dtype | WireFormat | None = None,
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
    """The config of a combine's send that waits for the signals of its rows, from the receive's."""
    require_within(*INT64, rows_per_signal=rows_per_signal, signal_threshold=signal_threshold, num_sms=num_sms)
    given = {"rows_per_signal": rows_per_signal, "signal_threshold": signal_threshold, "num_sms": num_sms}
    return tuple([given.get(name, each) for (name, *_), each in zip(_COMBINE_OPTIONS, numbers, strict=True)])


def dispatch_numbers(*given: Any) -> tuple[Mode, Layout, int, int, Numbers]:
    """A dispatch, checked by csrc/runtime/call.h: mode, layout, capacity, max_tokens, and the config for the op.

    Args:
        given: num_experts, mode, layout, max_tokens, capacity, expert_alignment, quant, zero_padding, num_sms as in
            ``dispatch``; top-k, the bytes of a row of x where the mode is "auto", and the buffer's ranks and
            ``ll_max_tokens``.
    """
    mode, layout, capacity, max_tokens, numbers = _of_library("dispatch_numbers", given)
    return mode, _LAYOUTS[layout], capacity, max_tokens, numbers


def cached_numbers(handle: Handle, quant: QuantName | None, zero_padding: bool, num_sms: int) -> Numbers:
    """The config of a dispatch along the routes of ``handle``."""
    given = (*_routing(handle), quant, zero_padding, num_sms)
    numbers: Numbers = _of_library("cached_numbers", given) if is_dynamo_compiling() else _C.cached_numbers(*given)
    return numbers


def combine_numbers(
    handle: Handle,
    weights: object,
    out_dtype: torch.dtype,
    wire_dtype: object = None,
    *options: float,
) -> tuple[int, Numbers]:
    """A combine of the rows of ``handle``: how rows are weighted (WEIGHTINGS), and the config for the op.

    Args:
        weights: as in ``combine``; True for a tensor.
        options: those that are plain numbers, as csrc/torch/call/combine.cc has them; the last may be left out.
    """
    made: tuple[int, Numbers] = _of_library(
        "combine_numbers", (*_routing(handle), weights, out_dtype, wire_dtype, *options)
    )
    return made


def _routing(handle: Handle) -> tuple[int, ...]:
    return handle.num_experts, handle.topk, handle.max_tokens, int(handle.layout), handle.alignment


def _of_library(function: str, given: tuple[Any, ...]) -> Any:
    """What the function of ``_C`` returns. To a compiler that traces, it is a constant."""
    if not is_dynamo_compiling():
        return getattr(_C, function)(*given)
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # of which a compiler has need, and only it

    made, refused, is_type = _constant(
        function, *[guard_scalar(each) if isinstance(each, int | float) else each for each in given]
    )
    if refused is not None:
        raise TypeError(refused) if is_type else ValueError(refused)
    return made


@constant
def _constant(function: str, *given: Any) -> tuple[Any, str | None, bool]:
    """What it returns, what it says where it refuses, and whether that is a TypeError. (An exception here would be a
    fault of dynamo's to dynamo.)"""
    try:
        made = getattr(_C, function)(*given)
        # A compiler would compare an object that is a global, too, with this one, which has no name.
        return tuple([int(each) if isinstance(each, Layout) else each for each in made]), None, False
    except (TypeError, ValueError) as error:
        return None, str(error), isinstance(error, TypeError)


@constant
def dtype_code(dtype: torch.dtype) -> int:
    """As configs have it."""
    return _C.dtype_code(dtype)


def wire_code(wire_dtype: torch.dtype | WireFormat) -> int:
    """Of a dtype, or of one of WIRE_FORMATS."""
    return WIRE_FORMATS[wire_dtype] if isinstance(wire_dtype, str) else dtype_code(wire_dtype)
