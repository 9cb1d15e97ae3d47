"""dispatch and combine: tokens to their experts, and the experts' rows home again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .buffer import Buffer
from .checks import biases_of, error_of, require_bools, require_extras, require_on, require_tensors
from .config import WIRE_FORMATS, DispatchConfig, combine_numbers, config_of, signalled_numbers
from .eager import combine_eager, dispatch_eager
from .events import run_on_comm_stream
from .gradients import wants_gradient
from .handle import DispatchOutput, Handle, Layout, require_handle
from .high_throughput import buffer_of, route_and_send
from .low_latency import dispatch_with_extra
from .ops import scales_of  # and registers the fakes
from .pending import OpenSend, Pending, receive_lost

T = TypeVar("T")
# Options of torch.compile with which work stays between a send and its receive. By itself Inductor moves it to where
# memory is least, past the receive.
KEEP_PROGRAM_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
_ops = torch.ops.nccl_ep
# Look-ups that the hot path is spared.
_ll_dispatch, _ll_combine, _ll_combine_out = (
    _ops.ll_dispatch.default,
    _ops.ll_combine.default,
    _ops.ll_combine_out.default,
)
_ll_dispatch_eager = _C.fast_op("ll_dispatch", _ll_dispatch, packed_results=True)
_ht_combine, _ht_combine_out = _ops.ht_combine.default, _ops.ht_combine_out.default
_ht_combine_eager = _C.fast_op("ht_combine", _ht_combine, packed_results=True)
_on_same_device, _carrier = _C.on_same_device, _ops.carrier.default
_Tensor, _float32, _HALVES = torch.Tensor, torch.float32, (torch.bfloat16, torch.float16)
_EXPERT_MAJOR, _PACKED, _RANK_MAJOR = Layout.EXPERT_MAJOR, Layout.PACKED, Layout.RANK_MAJOR
_NONE, _DISPATCH, _HOME = range(3)  # csrc/runtime/ll/params.h, Weighting


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: Buffer,
    num_experts: int,
    mode: str = "ll",
    layout: str = "expert_major",
    max_tokens: int | None = None,
    capacity: int | str | None = None,
    expert_alignment: int = 1,
    quant: str | None = None,
    scales: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    zero_padding: bool = False,
    out: DispatchOutput | None = None,
    num_sms: int = 0,
) -> DispatchOutput:
    """Sends every token to the ranks of its experts, once a rank. Collective; the same results whatever the timing.

    Args:
        x: [T, H] contiguous, rows a multiple of 16 bytes, T at most ``max_tokens`` (0 is legal). bf16, fp16 and fp32
            are numbers; any other dtype travels bit for bit.
        topk_idx: [T, K] int64 or int32 expert ids; -1 is no choice. An id out of range acts as -1 and is reported by
            ``buffer.check()``.
        topk_weights: [T, K] float32, by default ones. Under autocast bf16 and fp16 are cast.
        mode: "ll" (low latency), "ht" (high throughput) or "auto": by ``max_tokens``, the bytes of a row, K and R
            (``nccl_ep.modes.choose_mode``); the handle says which it was.
        layout: "expert_major", "packed", "rank_major" or "flat": see ``DispatchOutput``.
        max_tokens: equal on all ranks; default: the buffer's.
        capacity: rows of an expert (expert_major; default R * M, HT must be told), or in all (packed, flat; default:
            what always fits). "exact", HT alone: the size of what is received, for which the host waits.
        expert_alignment: packed: the first row of an expert is a multiple of it.
        quant: None, "fp8" (e4m3, a float32 scale for 128 elements), "fp8_rounded" (scales are powers of two) or
            "fp8_ue8m0" (their exponents, four in an int32). x is bf16 or fp16 then, H a multiple of 16.
        scales: [T, S] of any dtype and strides, for rows that the caller has quantised.
        extra: up to three extra tensors [T, n], contiguous, rows a multiple of 16 bytes: moved bit for bit along
            with x. LL: the first travels in the rows of x where these have no scales (``scale_bytes`` of
            ``Buffer.for_shapes`` is its room), each other one in an operation of its own.
        zero_padding: rows of the output that do not exist are zeroed.
        out: HT: an earlier output of the same call, whose tensors (the handle's too) are written again.
        num_sms: CUDA: thread blocks to use, as many on all ranks; 0 chooses.

    Raises:
        ValueError: an argument that cannot be served, with its value; nothing was sent.
        UsageError: the buffer was destroyed, or a dispatch was sent and not received.
        TimeoutError, MismatchError: a rank did not come, or made another call; the buffer has failed.
        OverflowError: rows were dropped, and the buffer was made with ``on_overflow="raise"``.

    Source: NCCL EP's ``ncclEpDispatch`` (arXiv 2603.13606), DeepEP's ``low_latency_dispatch`` and ``dispatch``.
    """
    if not is_dynamo_compiling() and out is None and type(extra) is tuple and not extra:
        try:
            made: DispatchOutput | None = dispatch_eager(
                buffer, x, topk_idx, topk_weights, scales, num_experts, mode, layout, max_tokens, capacity,
                expert_alignment, quant, zero_padding, num_sms,
            )  # fmt: skip
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        if made is not None:
            return made
    if topk_weights is not None:
        topk_weights = _cast_under_autocast(topk_weights)
    config, num_tokens = config_of(
        x, topk_idx, topk_weights, scales, buffer, num_experts, mode, layout, max_tokens, capacity, expert_alignment,
        quant, zero_padding, num_sms,
    )  # fmt: skip
    if type(extra) is not tuple or extra:
        require_extras(buffer._seq, extra)
    if config.mode == "ll" and out is not None:
        raise ValueError("out is for high throughput, and this is a low-latency dispatch")
    try:
        received, moved = _run(buffer, config, x, extra, scales, topk_idx, topk_weights, out)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return _output(buffer, config, num_tokens, x, scales is not None, received, moved)


def dispatch_send(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: Buffer,
    num_experts: int,
    mode: str = "ll",
    layout: str = "expert_major",
    max_tokens: int | None = None,
    capacity: int | str | None = None,
    expert_alignment: int = 1,
    quant: str | None = None,
    scales: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    zero_padding: bool = False,
    num_sms: int = 0,
    async_finish: bool = False,
) -> Pending[DispatchOutput]:
    """The sending half of ``dispatch``, with its arguments but ``out``; ``receive()`` gives the output.

    The caller's work goes between the two; x may be overwritten as soon as this half is done on its stream. At most one
    dispatch of a buffer is open. ``extra`` is for ``async_finish`` alone.

    With ``async_finish`` the whole operation runs at once on the buffer's own stream (``buffer.get_comm_stream()``),
    beside what the caller puts on the current one, and ``receive()`` makes the current stream wait for ``event``. Any
    number may be open; x must not be overwritten before the event. High throughput has this form only.

    Raises: as ``dispatch``, here or in ``receive()``.

    Source: NCCL EP's ``send_only`` and ``ncclEpComplete``, DeepEP's ``return_recv_hook``.
    """
    if topk_weights is not None:
        topk_weights = _cast_under_autocast(topk_weights)
    config, num_tokens = config_of(
        x, topk_idx, topk_weights, scales, buffer, num_experts, mode, layout, max_tokens, capacity, expert_alignment,
        quant, zero_padding, num_sms,
    )  # fmt: skip
    if type(extra) is not tuple or extra:
        require_extras(buffer._seq, extra)
    if type(async_finish) is not bool:
        require_bools(async_finish=async_finish)
    if config.mode == "ht" and not async_finish:
        raise ValueError("a dispatch of high throughput has no halves: pass async_finish=True, or call dispatch")
    if extra and not async_finish:
        raise ValueError(f"{len(extra)} extra tensors, but a dispatch in halves takes none: pass async_finish=True")
    args = (x, scales, topk_idx, topk_weights, config.capacity, config.numbers)
    if not async_finish and wants_gradient(scales):
        raise ValueError("scales want a gradient, but a dispatch in two calls has none for them: call dispatch")
    is_wanted = not async_finish and wants_gradient(x, topk_weights)
    like_x = _carrier(x) if is_wanted else None
    like_weights = _carrier(topk_weights) if is_wanted and topk_weights is not None else None

    def call() -> Any:
        if not async_finish:
            if not is_dynamo_compiling() and buffer._open_sends:
                receive_lost(buffer, "dispatch")
            with torch.no_grad():  # ll_dispatch_recv has the gradient
                return _ops.ll_dispatch_send.default(buffer._seq, *args)
        received, moved = _run(buffer, config, x, extra, scales, topk_idx, topk_weights, None)
        return (*received, *moved)

    try:
        sent, event = run_on_comm_stream(buffer, call, (*args[:4], *extra), async_finish)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    has_scales = scales is not None
    if async_finish:
        end = len(sent) - len(extra)
        # x is the event's to keep. A quantised one that wants a gradient stays for that, too.
        given = x if config.quant and wants_gradient(x) else None
        return Pending(lambda: _output(buffer, config, num_tokens, given, has_scales, sent[:end], sent[end:]), event)
    num_scales, scale_dtype = scales_of(scales)
    # Of x nothing is kept but what stands for it.
    sizes = x.dtype, x.shape[1], num_scales, scale_dtype, num_tokens, topk_idx.dtype == torch.int64
    received_by = (buffer._seq, sent, *sizes, config.capacity, config.numbers, like_x, like_weights)
    open_send = OpenSend("dispatch", _ops.ll_dispatch_recv.default, received_by)

    def receive() -> DispatchOutput:
        try:
            received = open_send.receive(buffer)
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        return _output(buffer, config, num_tokens, like_x, has_scales, (*received, sent))

    return Pending.of_send(buffer, open_send, receive)


def combine(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: str | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | str | None = None,
    out: torch.Tensor | None = None,
    num_sms: int = 0,
) -> torch.Tensor:
    """Adds up the experts' rows of every token at its home rank, and returns [T, H]. Collective.

    Every rank first adds its own experts' rows of a token in the order of k and sends one row; the home rank adds the
    ranks' rows in rank order. Sums are in float32, in a fixed order: the same bits every time.

    Args:
        rows: bf16, fp16 or fp32, of the shape of ``DispatchOutput.x`` (H may differ): expert_major [L, C, H], packed
            and flat [N, H], rank_major [R, M, H]. Contiguous, rows a multiple of 16 bytes.
        handle: of a dispatch on this buffer.
        weights: "dispatch": those of the dispatch; [T, K] float32: given here, at the home rank; None: rows are added
            as they are. flat and rank_major rows are always added as they are.
        topk_idx: [T, K] int64 or int32, with weights given here: an id that names no expert skips that row.
        bias: flat: up to two tensors [T, H] of ``out_dtype``, added first.
        out_dtype: that of rows (default), or float32.
        wire_dtype: of the ranks' sums that travel: ``out_dtype`` (default), float32, or, of rows and outputs that are
            both bf16 or both fp16, H a multiple of 16: "fp8" (half of the bytes of bf16) or "logfmt" (two thirds).
            docs/semantics.md says what these lose. Gradients travel in their own dtype.
        out: [T, H] of ``out_dtype``, written in place.
        num_sms: CUDA: thread blocks to use, as many on all ranks; 0 chooses. High throughput takes all SMs for
            ``wire_dtype`` "fp8" and "logfmt" within one domain.

    Raises: as ``dispatch``; UsageError also for a handle of another buffer.

    Source: NCCL EP's ``ncclEpCombine`` (arXiv 2603.13606), DeepEP's ``low_latency_combine``.
    """
    if not is_dynamo_compiling():
        try:
            combined: torch.Tensor | None = combine_eager(
                rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, out, num_sms
            )
        except RuntimeError as error:
            raise error_of(buffer_of(handle), error) from error
        if combined is not None:
            return combined
    buffer, args = _combine_call(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, num_sms)
    if out is not None:
        require_on(handle.seq, ("out",), (out,))
    try:
        if out is None:
            return _combined(handle, args)
        (_ht_combine_out if handle.mode == "ht" else _ll_combine_out)(handle.seq, *args, out)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return out


def combine_send(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: str | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | str | None = None,
    num_sms: int = 0,
    async_finish: bool = False,
    row_signals: torch.Tensor | None = None,
    rows_per_signal: int = 0,
    signal_threshold: int = 1,
) -> Pending[torch.Tensor]:
    """The sending half of ``combine``, with its arguments but ``out``; ``receive()`` of what it returns gives [T, H].

    ``rows`` may be overwritten as soon as this half is done on its stream. At most one combine of a buffer is open.
    ``async_finish``: as in ``dispatch_send``.

    With ``row_signals`` it begins while a kernel on another stream still writes ``rows``, and sends each row as soon as
    its counter has reached the threshold. For rows of low latency in expert_major, weights given here, and rows, wire
    and outputs of one type; not with ``enable_shrink`` or several domains of GPUs. Other ranks need not give any.

    Args:
        row_signals: int32 (or uint32) [L, ceil(C / rows_per_signal)], or flat with as many elements or more:
            one counter for each block of rows of each local expert. Whoever counts up has written the block's rows
            before, and releases them (``red.release.gpu``, or a fence before an atomic).
        rows_per_signal: rows of a block. C: one counter an expert.
        signal_threshold: of a block that is complete.
        num_sms: positive with ``row_signals``: SMs to wait on. The others are for the kernel that is waited for.

    Raises: as ``combine``, here or in ``receive()``; TimeoutError names the expert and the block whose signal did not
        come before the deadline.
    """
    if type(async_finish) is not bool:
        require_bools(async_finish=async_finish)
    has_signals = row_signals is not None  # the other half waits for none, and has all SMs
    buffer, args = _combine_call(
        rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, 0 if has_signals else num_sms
    )
    numbers = args[-1]
    if has_signals:
        require_tensors(row_signals=row_signals)
        require_on(handle.seq, ("row_signals",), (row_signals,))
        if async_finish or handle.mode == "ht":
            raise ValueError("row_signals are for the halves of a combine of low latency, without async_finish")
        numbers = signalled_numbers(numbers, rows_per_signal, signal_threshold, num_sms)
    elif rows_per_signal != 0:
        raise ValueError(f"rows_per_signal is {rows_per_signal}, but there are no row_signals")
    if handle.mode == "ht" and not async_finish:
        raise ValueError("a combine of high throughput has no halves: pass async_finish=True, or call combine")
    seq, given_weights, biases = handle.seq, args[-6], args[-4]
    carried: tuple[torch.Tensor | None, ...] = (None, None, None, None)  # for gradients
    if not async_finish and wants_gradient(rows, given_weights, biases):
        carried = (_carrier(rows), rows if wants_gradient(given_weights) else None, given_weights, topk_idx)
    dtype, hidden = rows.dtype, rows.shape[-1]

    def call() -> Any:
        if async_finish:
            return _combined(handle, args)
        home_weights = given_weights if isinstance(weights, _Tensor) else None
        with torch.no_grad():  # ll_combine_recv has the gradient
            return _ops.ll_combine_send.default(seq, *args[:-6], home_weights, *args[-5:-1], numbers, row_signals)

    try:
        combined, event = run_on_comm_stream(buffer, call, (*args[:-4], *biases), async_finish)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    if async_finish:
        return Pending(lambda: combined, event)

    open_send = OpenSend(
        "combine", _ops.ll_combine_recv.default, (seq, handle.tensor, biases, dtype, hidden, *args[-3:], *carried)
    )

    def receive() -> torch.Tensor:
        try:
            out: torch.Tensor = open_send.receive(buffer)
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        return out

    return Pending.of_send(buffer, open_send, receive)


def combine_weights(values: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Sends one scalar for each row home and returns [T, K] float32: the way of the weights' gradients. Collective.

    Args:
        values: float32, one for each row ([L, C] or [N]), or, in rank_major and flat, for each choice ([.., K]).

    An entry without a row (no choice, or dropped) is 0.

    Raises: as ``combine``.
    """
    require_handle(handle)
    require_tensors(values=values)
    buffer = buffer_of(handle)
    seq = handle.seq
    require_on(seq, ("values", "handle", "handle"), (values, handle.tensor, handle.slots))
    sizes = handle.num_tokens, handle.capacity, combine_numbers(buffer, handle, _NONE, _float32, _float32, 0)
    if buffer is not None and buffer._open_sends and handle.mode == "ll":
        receive_lost(buffer, "combine")
    if handle.mode == "ht":
        given: Any = (None, values, handle.tensor, handle.slots, None, None, [], *sizes)
        try:
            scalars: torch.Tensor = _ht_combine(seq, *given)[1]
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        return scalars
    try:
        out: torch.Tensor = _ops.ll_combine_weights.default(seq, values, handle.tensor, *sizes)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return out


def _combined(handle: Handle, args: tuple[Any, ...]) -> torch.Tensor:
    if handle.mode == "ll":
        combined: torch.Tensor = _ll_combine(handle.seq, *args)
    else:
        op = _ht_combine if is_dynamo_compiling() else _ht_combine_eager
        combined = op(handle.seq, *args)[0]
    return combined


# ---- From arguments to ops


def _cast_under_autocast(weights: torch.Tensor) -> torch.Tensor:
    """Routers under autocast make bf16 or fp16 weights; they become float32, in which dispatch takes them."""
    if not isinstance(weights, _Tensor) or weights.dtype not in _HALVES:
        return weights
    return weights.float() if torch.is_autocast_enabled(weights.device.type) else weights


def _run(
    buffer: Buffer,
    config: DispatchConfig,
    x: torch.Tensor,
    extra: Sequence[torch.Tensor],
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    out: DispatchOutput | None,
) -> tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]:
    """A whole dispatch: what ``_output`` takes, and the rows of ``extra``."""
    if config.mode == "ht":
        return route_and_send(buffer, config, x, extra, scales, topk_idx, topk_weights, out)
    op = _ll_dispatch if is_dynamo_compiling() else _ll_dispatch_eager
    if not is_dynamo_compiling() and buffer._open_sends:
        receive_lost(buffer, "dispatch")
    if extra:
        return dispatch_with_extra(op, buffer, config, x, extra, scales, topk_idx, topk_weights)
    return op(buffer._seq, x, scales, topk_idx, topk_weights, config.capacity, config.numbers), ()


def _output(
    buffer: Buffer,
    config: DispatchConfig,
    num_tokens: int,
    given: torch.Tensor | None,
    has_scales: bool,
    received: Sequence[torch.Tensor],
    extra: tuple[torch.Tensor, ...] = (),
) -> DispatchOutput:
    slots, layout, capacity = None, config.layout, config.capacity
    if config.mode == "ll":
        x, scales, weights, topk_idx, row_expert, info, handle_tensor = received
    else:
        x, scales, weights, topk_idx, row_expert, info, handle_tensor, slots = received
    if capacity < 0:  # exact sizes, or the default: those of the tensors
        capacity = config.max_tokens if layout is _RANK_MAJOR else x.shape[1 if layout is _EXPERT_MAJOR else 0]
    handle = Handle(
        handle_tensor, buffer._seq, num_tokens, config.topk, config.num_experts, config.max_tokens, layout, capacity,
        buffer.num_ranks, config.mode, slots, config.alignment, weights,
    )  # fmt: skip
    out = DispatchOutput.of_info(
        x,
        scales if has_scales or config.quant else None,
        None if config.has_expert_rows else topk_idx,
        weights,
        row_expert if layout is _PACKED else None,
        info,
        handle,
        extra,
    )
    if config.quant and wants_gradient(given):
        out.carrier = _ops.row_carrier.default(buffer._seq, given, handle_tensor, slots, list(x.shape), config.numbers)
    if buffer.on_overflow == "raise":
        _ops.require_no_overflow.default(buffer._seq, info, capacity, config.numbers)
    return out


def _combine_call(
    rows: torch.Tensor,
    handle: Handle,
    weights: str | torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | str | None,
    num_sms: int,
) -> tuple[Buffer | None, tuple[Any, ...]]:
    """The buffer (None where a compiler traces), and what the op takes behind ``seq``."""
    require_handle(handle)
    if not isinstance(rows, _Tensor):
        require_tensors(rows=rows)
    given_weights = None
    if weights is None:
        weighting = _NONE
    elif isinstance(weights, _Tensor):
        given_weights, weighting = weights, _HOME
    elif isinstance(weights, str):
        if weights != "dispatch":
            raise ValueError(f'weights is {weights!r}, must be "dispatch", a tensor [T, K] or None')
        weighting = _DISPATCH if handle.layout <= _PACKED else _NONE
        if weighting == _DISPATCH and wants_gradient(rows, handle.weights):
            given_weights = handle.weights  # the gradient needs them; the operation finds them in the handle
    else:
        raise TypeError(f'weights is a {type(weights).__name__}, must be "dispatch", a tensor [T, K] or None')
    out_dtype = out_dtype or rows.dtype
    if wire_dtype is None:
        wire_dtype = out_dtype
    is_format = isinstance(wire_dtype, str) and wire_dtype in WIRE_FORMATS
    if wire_dtype is not out_dtype and wire_dtype is not _float32 and not is_format:
        others = "" if out_dtype is _float32 else ', torch.float32, "fp8" or "logfmt"'
        raise ValueError(f"wire_dtype is {wire_dtype!r}, must be {out_dtype}{others}")
    biases = biases_of(bias)
    buffer = buffer_of(handle)
    if buffer is not None and buffer._open_sends and handle.mode == "ll":
        receive_lost(buffer, "combine")
    seq, tensor, slots = handle.seq, handle.tensor, handle.slots
    if buffer is None or not _on_same_device(seq, rows, tensor, slots, given_weights, topk_idx):
        names = ("rows", "handle", "handle", "weights", "topk_idx")
        require_on(seq, names, (rows, tensor, slots, given_weights, topk_idx))
    if biases:
        require_on(seq, [f"bias {i}" for i in range(len(biases))], biases)
    tensors = (rows, None, tensor, slots) if handle.mode == "ht" else (rows, tensor)
    numbers = combine_numbers(buffer, handle, weighting, out_dtype, wire_dtype, num_sms)
    return buffer, (*tensors, given_weights, topk_idx, biases, handle.num_tokens, handle.capacity, numbers)
