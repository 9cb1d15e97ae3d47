"""What every operation checks before its op, and what becomes of an op's error."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .errors import MismatchError, TimeoutError, UsageError
from .log import logger


class Usable(Protocol):
    """What is asked of a ``nccl_ep.Buffer`` here."""

    def require_usable(self) -> None: ...


MAX_ROW_BYTES = 1 << 16  # csrc/runtime/checks.h; as many of scales
MAX_TOPK = 32  # csrc/layout/common/shape.h
MAX_RANKS = 2048  # csrc/layout/common/rank_mask.h
_MAX_SECONDS = 1e9  # csrc/runtime/group.cc
MAX_INT32 = (1 << 31) - 1
INT64 = -(1 << 63), (1 << 63) - 1

_TOLD_BY_BUFFER = (RuntimeError, TimeoutError, MismatchError)
# Look-ups that the hot path is spared.
_Tensor, _strided, _on_same_device = torch.Tensor, torch.strided, _C.on_same_device


def require_on(seq: torch.Tensor, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """``seq``: the buffer's. An op would follow a tensor on another device to that device's kernel, or to the fake one.

    The layout of tensors is left to the op where a compiler traces: it cannot ask for it.
    """
    is_compiling = is_dynamo_compiling()
    if not is_compiling and _on_same_device(seq, *tensors):
        return
    device = seq.device
    for tensor in tensors:
        if tensor is None or (
            isinstance(tensor, _Tensor)
            and tensor.device == device
            and (is_compiling or tensor.layout is _strided)
            and not tensor.is_nested
            and not tensor.is_quantized
            and not hasattr(tensor, "to_local")
        ):
            continue
        name = next(name for name, each in zip(names, tensors, strict=True) if each is tensor)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a tensor")
        if hasattr(tensor, "to_local"):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be this rank's tensor: give {name}.to_local()")
        if tensor.device != device:
            why = f": {_C.why_no_cuda()}" if tensor.device.type == "cuda" and not _C.has_cuda() else ""
            raise ValueError(f"{name} is on {tensor.device}, the buffer on {device}{why}")
        if tensor.is_nested:
            raise ValueError(f"{name} is a nested tensor, must be strided")
        if tensor.is_quantized:
            raise ValueError(f"{name} is {tensor.dtype}, a quantized tensor of torch, whose scale would not travel")
        raise ValueError(f"{name} is {tensor.layout}, must be strided")


def require_tensors(**values: object) -> None:
    """TypeError for what is no tensor, None included."""
    for name, value in values.items():
        if not isinstance(value, _Tensor):
            raise TypeError(f"{name} is {described(value)}, must be a tensor")


def require_extras(seq: torch.Tensor, extra: Sequence[torch.Tensor]) -> None:
    """Extra tensors of a dispatch, or of its output."""
    if not isinstance(extra, tuple | list):
        raise TypeError(f"extra is {described(extra)}, must be a tuple or a list of tensors")
    names = [f"extra {i}" for i in range(len(extra))]
    require_tensors(**dict(zip(names, extra, strict=True)))
    require_on(seq, names, extra)


def require_integers(**values: object) -> None:
    """TypeError for what is no integer; None is left to others."""
    for name, value in values.items():
        if value is not None:
            _integer(name, value)


def require_one_of(known: Sequence[str], **values: object) -> None:
    """ValueError for what is none of these words."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in known:
            *first, last = (f'"{word}"' for word in known)
            raise ValueError(f"{name} is {described(value)}, must be {', '.join(first)} or {last}")


def require_int32(**values: object) -> None:
    """TypeError for what is no integer, None included; ValueError for one beyond 32 bits."""
    for name, value in values.items():
        if not ~MAX_INT32 <= _integer(name, value) <= MAX_INT32:
            raise ValueError(f"{name} is {value}, beyond 32 bits")


def require_within(low: int, high: int, /, **values: object) -> None:
    """TypeError for what is no integer, None included; ValueError for one out of bounds."""
    for name, value in values.items():
        if not low <= _integer(name, value) <= high:
            raise ValueError(f"{name} is {value}, must be {low} to {high}")


def require_int64(**values: Any) -> None:
    """``require_within`` 64 bits."""
    require_within(*INT64, **values)


def require_bools(**values: object) -> None:
    """TypeError for what is neither True nor False. 1 and 0 count as these, and so do bools of numpy and torch, and
    None, which DeepEP takes for no."""
    for name, value in values.items():
        if getattr(value, "ndim", 0) or value not in (0, 1, None):
            raise TypeError(f"{name} is {described(value)}, must be True or False")


def environment_switch(name: str) -> bool:
    """A variable of the environment that is 0 or 1; False where it is not set. ValueError for another value."""
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}, must be 0 or 1")
    return value == "1"


def biases_of(bias: torch.Tensor | Sequence[Any] | None) -> list[Any]:
    """What is given as ``bias=``: none for None, elements unchecked. TypeError for what is no tensor, tuple or list."""
    if bias is None:
        return []
    if isinstance(bias, _Tensor):
        return [bias]
    if not isinstance(bias, tuple | list):
        raise TypeError(f"bias is a {type(bias).__name__}, must be a tensor, or two of them")
    return list(bias)


def require_biases(seq: torch.Tensor, bias: torch.Tensor | Sequence[Any] | None) -> list[Any]:
    """``biases_of``, each a tensor of the buffer's device."""
    biases = biases_of(bias)
    require_on(seq, [f"bias {i}" for i in range(len(biases))], biases)
    require_tensors(**{f"bias {i}": each for i, each in enumerate(biases)})
    return biases


def require_shape(size: object) -> None:
    """TypeError for what is no tuple or list of integers; ValueError for one beyond 64 bits."""
    if not isinstance(size, tuple | list):
        raise wrong_elements("size", size, "a shape, as (rows, hidden)")
    require_within(*INT64, **{f"size[{i}]": length for i, length in enumerate(size)})


def require_seconds(**values: object) -> None:
    """TypeError for what is no number."""
    for name, value in values.items():
        try:
            math.isnan(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError, OverflowError):  # of arrays and tensors, of huge numbers
            raise TypeError(f"{name} is {described(value)}, must be a number of seconds") from None


def require_timeout(**values: Any) -> None:
    """TypeError for what is no number of seconds; ValueError for one that is not positive, or too large."""
    require_seconds(**values)
    for name, value in values.items():
        if not 0 < value <= _MAX_SECONDS:
            raise ValueError(f"{name} is {float(value):g} s, must be positive and at most {_MAX_SECONDS:g}")


def require_dtypes(**values: object) -> None:
    """TypeError for what is no dtype of torch, None included."""
    for name, value in values.items():
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} is {described(value)}, must be a torch.dtype")


def row_bytes_of(hidden: int, dtype: torch.dtype) -> int:
    """ValueError for rows that cannot be sent."""
    num_bytes = _integer("hidden", hidden) * dtype.itemsize
    if num_bytes < 16 or num_bytes % 16 or num_bytes > MAX_ROW_BYTES:
        raise ValueError(
            f"hidden is {hidden}: rows of {hidden} x {dtype} have {num_bytes} bytes, must be a multiple of 16 up to "
            f"{MAX_ROW_BYTES}"
        )
    return num_bytes


def wrong_elements(name: str, value: object, must: str) -> TypeError:
    """For what is no tuple or list, or has another length than it must."""
    what = f"{len(value)} elements" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
    return TypeError(f"{name} is {what}, must be {must}")


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {described(value)}, must be an integer") from None


def described(value: object) -> str:
    return repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"


def error_of(buffer: Usable | None, error: RuntimeError) -> Exception:
    """What to raise for an op's error: what the buffer says of it, if it has failed. No buffer: a compiler traces.

    Raises what says all by itself: a UsageError, what is torch's own (out of memory, an error of the GPU).
    """
    if buffer is None or is_dynamo_compiling():  # torch 2.15 traces handlers: what an op's shapes refuse, dynamo tells
        raise error
    text = str(error).split("\n", 1)[0]
    if type(error) not in _TOLD_BY_BUFFER or "can't allocate memory" in text:
        raise error
    try:
        buffer.require_usable()
    except Exception as reason:
        if not isinstance(reason, UsageError):
            logger.error("%s", str(reason))  # records that are kept must not keep the error, nor through it the buffer
        return reason
    if type(error) is not RuntimeError:
        raise error
    return TypeError(text) if "() Expected a value of type" in text else UsageError(text)
