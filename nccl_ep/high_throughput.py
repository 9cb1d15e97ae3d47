"""Calls of high throughput (HT), and cached dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .arrivals import Arrivals, announced, require_arrivals
from .buffer import Buffer, find_buffer
from .checks import error_of, require_extras, require_on, require_tensors
from .choices import QuantName
from .config import Numbers, cached_numbers
from .devices import empty_on
from .errors import UsageError
from .events import run_on_comm_stream
from .handle import EXACT, DispatchOutput, Handle, require_handle, tensor_told
from .pending import Pending

_ops = torch.ops.nccl_ep
_ht_dispatch, _ht_dispatch_out = _ops.ht_dispatch.default, _ops.ht_dispatch_out.default  # look-ups spared
_ht_dispatch_packed = _C.fast_op("ht_dispatch", _ht_dispatch, packed_results=True)
_ht_cached, _ht_cached_out = _ops.ht_dispatch_cached.default, _ops.ht_dispatch_cached_out.default
_ht_cached_packed = _C.fast_op("ht_dispatch_cached", _ht_cached, packed_results=True)
_GIVEN = tuple(
    f"out's {name}" for name in ("x", "scales", "weights", "topk_idx", "row_expert", "counts", "handle", "handle")
)


@dataclass(slots=True, eq=False, repr=False)
class Payload:
    """What a cached dispatch moved: x, scales and extra as in ``DispatchOutput``."""

    x: torch.Tensor
    scales: torch.Tensor | None
    extra: tuple[torch.Tensor, ...] = ()

    def __repr__(self) -> str:
        extra = ", ".join(map(tensor_told, self.extra))
        return f"Payload(x={tensor_told(self.x)}, scales={tensor_told(self.scales)}, extra=({extra}))"


def route_and_send(call: Any, out: DispatchOutput | None) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Runs the op of a ``calls.DispatchCall``. Returns what ``ll_dispatch`` returns, with two tensors of the handle at
    the end; and the extras."""
    shape = call.shape
    given = (
        shape.buffer._seq, [call.x, *call.extra], call.scales, call.topk_idx, call.topk_weights, shape.capacity,
        shape.numbers,
    )  # fmt: skip
    if out is None and shape.capacity == EXACT and is_dynamo_compiling():
        return _in_two_ops(*given, shape.max_tokens)
    if out is None:
        received = (_ht_dispatch if is_dynamo_compiling() else _ht_dispatch_packed)(*given)
        return received[:8], received[8 : 8 + len(call.extra)]
    return _into(shape.buffer, out, given, call.topk_idx.dtype)


def _in_two_ops(
    seq: torch.Tensor,
    xs: list[torch.Tensor],
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    _: int,
    numbers: Numbers,
    max_tokens: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """A dispatch of exact sizes, whose sizes are lengths that a compiler knows of before it sees tensors of them.

    (Inductor of torch 2.11 and 2.15 loses lengths that an op with several results makes up by itself.)
    """
    info, route, sizes = _ops.ht_route.default(seq, xs, scales, topk_idx, topk_weights, numbers)
    num_rows, num_slots = _ops.size_at.default(sizes, 0), _ops.size_at.default(sizes, 1)
    most = seq.shape[1] * max_tokens
    torch._check(num_slots <= most)  # type: ignore[no-untyped-call]
    torch._check(num_rows >= 0)  # type: ignore[no-untyped-call]
    x, row_scales, weights, ids, row_expert, slots, *extra = _ops.ht_dispatch_routed.default(
        seq, xs, scales, topk_idx, topk_weights, info, route, num_rows, num_slots, numbers
    )
    return (x, row_scales, weights, ids, row_expert, info, route, slots), tuple(extra[: len(xs) - 1])


def _given(seq: torch.Tensor, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Also of a tensor that there is not."""
    if tensor is not None:
        return tensor
    return seq.new_empty(0, dtype=dtype) if is_dynamo_compiling() else empty_on(seq.device, dtype)


def _given_scales(seq: torch.Tensor, out: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor:
    return _given(seq, out, torch.float32 if scales is None else scales.dtype)


def _into(
    buffer: Buffer, out: DispatchOutput, call: tuple[Any, ...], idx_dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The same into the tensors of an earlier output of the same sizes."""
    if not isinstance(out, DispatchOutput):
        raise TypeError(f"out is a {type(out).__name__}, must be the output of a dispatch")
    if out.handle.mode != "ht" or out.handle.slots is None:
        raise UsageError("out is of a low-latency dispatch")
    if not hasattr(out, "_info"):
        raise UsageError("out is a copy of an output (dataclasses.replace): give what the dispatch returned")
    rest = (
        _given_scales(buffer._seq, out.scales, call[2]), out.weights, _given(buffer._seq, out.topk_idx, idx_dtype),
        _given(buffer._seq, out.row_expert, torch.int32), out._info, out.handle.tensor, out.handle.slots,
    )  # fmt: skip
    require_on(buffer._seq, _GIVEN, (out.x, *rest))
    if out.extra:
        require_on(buffer._seq, [f"out's extra {i}" for i in range(len(out.extra))], out.extra)
    _ht_dispatch_out(*call, [out.x, *out.extra], *rest)
    return (out.x, *rest), out.extra


def dispatch_cached(
    x: torch.Tensor,
    handle: Handle,
    *,
    extra: Sequence[torch.Tensor] = (),
    scales: torch.Tensor | None = None,
    quant: QuantName | None = None,
    zero_padding: bool = False,
    out: Payload | None = None,
    num_sms: int = 0,
    arrivals: Arrivals | None = None,
) -> Payload:
    """Sends another payload along the routes of a high-throughput dispatch, any number of times. Collective.

    It is the backward of ``combine``: gradients of the sums go where the rows came from.

    Args:
        x: [T, H] for the T tokens of that dispatch; any H and dtype. extra, scales, quant, zero_padding, num_sms,
            arrivals: as in ``dispatch``.
        handle: of a dispatch in mode "ht". Its rows go to the same places; rows that were dropped are dropped again.
        out: of an earlier call with the same sizes, whose tensors are written again.

    Raises: as ``dispatch``; UsageError for a handle of another buffer, or of mode "ll".

    Source: DeepEP's ``dispatch(handle=)``, NCCL EP's dispatch with ``pass_direction`` BWD.
    """
    buffer, args = _cached_args(x, handle, extra, scales, quant, zero_padding, num_sms, arrivals)
    try:
        if arrivals is not None:
            arrivals.begin()
            with announced(arrivals):
                return _run_cached(args, out, quant)
        return _run_cached(args, out, quant)
    except RuntimeError as error:
        raise error_of(buffer, error) from error


def dispatch_cached_send(
    x: torch.Tensor,
    handle: Handle,
    *,
    extra: Sequence[torch.Tensor] = (),
    scales: torch.Tensor | None = None,
    quant: QuantName | None = None,
    zero_padding: bool = False,
    num_sms: int = 0,
    arrivals: Arrivals | None = None,
) -> Pending[Payload]:
    """``dispatch_cached`` on the buffer's own stream, as ``dispatch_send(async_finish=True)`` runs a dispatch.

    ``receive()`` gives the payload. With ``arrivals``, ``early_output`` is the payload whose rows are still coming.

    Raises: as ``dispatch_cached``.
    """
    buffer, args = _cached_args(x, handle, extra, scales, quant, zero_padding, num_sms, arrivals)

    def send() -> tuple[torch.Tensor, ...]:
        with announced(arrivals):
            made: tuple[torch.Tensor, ...] = (_ht_cached if is_dynamo_compiling() else _ht_cached_packed)(*args)
            return made

    if arrivals is not None:
        arrivals.begin()
    inputs = (x, scales, handle.tensor, handle.slots, *extra)
    try:
        received, event = run_on_comm_stream(buffer, send, inputs, True, seq=handle.seq)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return Pending(lambda: _payload(received, args, quant), event, is_early=arrivals is not None)


def _cached_args(
    x: torch.Tensor,
    handle: Handle,
    extra: Sequence[torch.Tensor],
    scales: torch.Tensor | None,
    quant: QuantName | None,
    zero_padding: bool,
    num_sms: int,
    arrivals: Arrivals | None,
) -> tuple[Buffer | None, tuple[Any, ...]]:
    """A cached dispatch, checked: the buffer, None where a compiler traces, and the arguments of the op."""
    require_handle(handle)
    if x is None:
        require_tensors(x=x)
    buffer, slots = ht_handle(handle)
    seq = handle.seq
    if arrivals is not None and buffer is not None:
        require_arrivals(arrivals, buffer)
    require_on(seq, ("x", "scales", "handle", "handle"), (x, scales, handle.tensor, slots))
    if type(extra) is not tuple or extra:
        require_extras(seq, extra)
    numbers = cached_numbers(handle, quant, zero_padding, num_sms)
    return buffer, (seq, [x, *extra], scales, handle.tensor, slots, handle.num_tokens, handle.capacity, numbers)


def _run_cached(args: tuple[Any, ...], out: Payload | None, quant: QuantName | None) -> Payload:
    if out is not None:
        return _cached_into(args[0], out, args)
    return _payload((_ht_cached if is_dynamo_compiling() else _ht_cached_packed)(*args), args, quant)


def _payload(received: tuple[torch.Tensor, ...], args: tuple[Any, ...], quant: QuantName | None) -> Payload:
    """What the op returns, without tensors that nobody asked for."""
    moved, scales, *extra = received
    has_scales = args[2] is not None or quant is not None
    return Payload(moved, scales if has_scales else None, tuple(extra[: len(args[1]) - 1]))


def _cached_into(seq: torch.Tensor, out: Payload, call: tuple[Any, ...]) -> Payload:
    if not isinstance(out, Payload):
        raise TypeError(f"out is a {type(out).__name__}, must be what dispatch_cached returned")
    require_on(seq, ("out's x", "out's scales"), (out.x, out.scales))
    if out.extra:
        require_on(seq, [f"out's extra {i}" for i in range(len(out.extra))], out.extra)
    _ht_cached_out(*call, [out.x, *out.extra], _given_scales(seq, out.scales, call[2]))
    return out


def buffer_of(handle: Handle) -> Buffer | None:
    """The buffer that a handle, of either mode, belongs to. None where a compiler traces, for which it is ``seq``."""
    if is_dynamo_compiling():
        return None
    return find_buffer(handle.seq, handle.num_ranks)


def ht_handle(handle: Handle) -> tuple[Buffer | None, torch.Tensor]:
    """The buffer of a handle of this mode, and the tensor that the other mode's has not got."""
    if handle.mode != "ht" or handle.slots is None:
        raise UsageError(f'the handle is of mode "{handle.mode}", a cached dispatch needs one of mode "ht"')
    return buffer_of(handle), handle.slots
