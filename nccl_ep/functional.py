"""dispatch and combine: tokens to their experts, and the experts' rows home again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import _C
from .arrivals import Arrivals
from .buffer import Buffer
from .calls import CombineCall, DispatchCall
from .checks import error_of, require_bools, require_on, require_tensors
from .choices import Exact, LayoutName, Mode, QuantName, Weighting, WireFormat
from .config import combine_numbers
from .handle import DispatchOutput, Handle, require_handle
from .high_throughput import buffer_of
from .pending import Pending, receive_lost

# Options of torch.compile with which work stays between a send and its receive. By itself Inductor moves it to where
# memory is least, past the receive.
KEEP_PROGRAM_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
_ops = torch.ops.nccl_ep
_dispatch, _combine = _C.dispatch, _C.combine  # look-ups that the hot path is spared


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: Buffer,
    num_experts: int,
    mode: Mode = "ll",
    layout: LayoutName = "expert_major",
    max_tokens: int | None = None,
    capacity: int | Exact | None = None,
    expert_alignment: int = 1,
    quant: QuantName | None = None,
    scales: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    zero_padding: bool = False,
    out: DispatchOutput | None = None,
    num_sms: int = 0,
    arrivals: Arrivals | None = None,
) -> DispatchOutput:
    """Sends every token to the ranks of its experts, once a rank. Collective; the same results whatever the timing.

    Args:
        x: [T, H] contiguous, rows a multiple of 16 bytes, T at most ``max_tokens`` (0 is legal). bf16, fp16 and fp32
            are numbers; any other dtype travels bit for bit.
        topk_idx: [T, K] int64 or int32 expert ids; -1 is no choice. An id out of range is refused: on CPU ranks here,
            on GPUs by the next call (``on_invalid_ids`` of ``Buffer``).
        topk_weights: [T, K] float32, by default ones. Under autocast bf16 and fp16 are cast.
        mode: "ll" (low latency), "ht" (high throughput) or "auto": by ``max_tokens``, the bytes of a row, K and R
            (``nccl_ep.modes.choose_mode``); the handle says which it was.
        layout: "expert_major", "packed", "rank_major" or "flat": see ``DispatchOutput``.
        max_tokens: equal on all ranks; default: the buffer's.
        capacity: rows of an expert (expert_major; default R * M, HT must be told), or in all (packed, flat; default:
            what always fits). "exact", HT alone: the size of what is received, for which the host waits.
        expert_alignment: packed: the first row of an expert is a multiple of it.
        quant: None, "fp8" (e4m3, a float32 scale for 128 elements), "fp8_rounded" (scales are powers of two) or
            "fp8_ue8m0" (their exponents, four in an int32). x is bf16 or fp16 then, H a multiple of 16. "mxfp8" (e4m3,
            an e8m0 scale for 32 elements) or "nvfp4" (e2m1, an e4m3 scale for 16), H a multiple of 32; LL has them with
            scales in the order of GEMMs, too: "mxfp8_swizzled", "nvfp4_swizzled".
        scales: [T, S] of any dtype and strides, for rows that the caller has quantised. With "nvfp4" the scale of the
            whole tensor, float32 of one element, positive and finite (docs/semantics.md); default: 1.
        extra: up to three extra tensors [T, n], contiguous, rows a multiple of 16 bytes: moved bit for bit along
            with x. LL: the first travels in the rows of x where these have no scales (``scale_bytes`` of
            ``Buffer.for_shapes`` is its room), each other one in an operation of its own.
        zero_padding: rows of the output that do not exist are zeroed. Otherwise their contents are arbitrary, NaN too:
            what runs over them, as a batched GEMM, then has NaN in the gradient of its weights (0 * NaN).
        out: HT: an earlier output of the same call, whose tensors (the handle's too) are written again.
        num_sms: CUDA: thread blocks to use, as many on all ranks; 0 chooses.
        arrivals: where each block of rows is announced as soon as it lies at its place, for a consumer that runs
            beside the operation. expert_major and packed. Other ranks need not give any.

    Raises:
        ValueError: an argument that cannot be served, with its value; nothing was sent.
        UsageError: the buffer was destroyed, or a dispatch was sent and not received.
        TimeoutError, MismatchError: a rank did not come, or made another call; the buffer has failed.
        OverflowError: rows were dropped, and the buffer was made with ``on_overflow="raise"``.

    Source: NCCL EP's ``ncclEpDispatch`` (arXiv 2603.13606), DeepEP's ``low_latency_dispatch`` and ``dispatch``.
    """
    if is_dynamo_compiling() or out is not None or arrivals is not None or type(extra) is not tuple or extra:
        return DispatchCall.of(
            x, topk_idx, topk_weights, scales, extra, buffer, num_experts, mode, layout, max_tokens, capacity,
            expert_alignment, quant, zero_padding, num_sms, arrivals,
        ).run(out)  # fmt: skip
    try:
        made: DispatchOutput = _dispatch(
            x, topk_idx, topk_weights, scales, buffer, num_experts, mode, layout, max_tokens, capacity,
            expert_alignment, quant, zero_padding, num_sms,
        )  # fmt: skip
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return made


def dispatch_send(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: Buffer,
    num_experts: int,
    mode: Mode = "ll",
    layout: LayoutName = "expert_major",
    max_tokens: int | None = None,
    capacity: int | Exact | None = None,
    expert_alignment: int = 1,
    quant: QuantName | None = None,
    scales: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    zero_padding: bool = False,
    num_sms: int = 0,
    async_finish: bool = False,
    arrivals: Arrivals | None = None,
) -> Pending[DispatchOutput]:
    """The send of ``dispatch``, with its arguments but ``out``; ``receive()`` gives the output.

    The caller's work goes between the two; x may be overwritten as soon as the send is done on its stream. At most one
    dispatch of a buffer is open. ``extra`` is for ``async_finish`` alone.

    With ``async_finish`` the whole operation runs at once on the buffer's own stream (``buffer.get_comm_stream()``),
    beside what the caller puts on the current one, and ``receive()`` makes the current stream wait for ``event``. Any
    number may be open; x must not be overwritten before the event. High throughput has this form only. With
    ``arrivals``, ``early_output`` is the output whose rows are still coming, for kernels on the current stream that
    wait for its blocks.

    Raises: as ``dispatch``, here or in ``receive()``.

    Source: NCCL EP's ``send_only`` and ``ncclEpComplete``, DeepEP's ``return_recv_hook``.
    """
    return DispatchCall.of(
        x, topk_idx, topk_weights, scales, extra, buffer, num_experts, mode, layout, max_tokens, capacity,
        expert_alignment, quant, zero_padding, num_sms, arrivals,
    ).send(async_finish)  # fmt: skip


def combine(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: Weighting | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | WireFormat | None = None,
    out: torch.Tensor | None = None,
    num_sms: int = 0,
    scale: float = 1,  # torch.compile(dynamic=True) compiles twice where a default is a float
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
        scale: a finite number, with which the sum of a token's rows is multiplied, in float32, before biases are added:
            the factor of models for their routed experts.

    Raises: as ``dispatch``; UsageError also for a handle of another buffer.

    Source: NCCL EP's ``ncclEpCombine`` (arXiv 2603.13606), DeepEP's ``low_latency_combine``.
    """
    if is_dynamo_compiling():
        return CombineCall.of(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, num_sms, scale).run(out)
    try:
        return _combine(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, out, num_sms, scale)
    except RuntimeError as error:
        raise error_of(buffer_of(handle), error) from error


def combine_send(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: Weighting | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | WireFormat | None = None,
    num_sms: int = 0,
    scale: float = 1,  # torch.compile(dynamic=True) compiles twice where a default is a float
    async_finish: bool = False,
    row_signals: torch.Tensor | None = None,
    rows_per_signal: int = 0,
    signal_threshold: int = 1,
) -> Pending[torch.Tensor]:
    """The send of ``combine``, with its arguments but ``out``; ``receive()`` of what it returns gives [T, H].

    ``rows`` may be overwritten as soon as the send is done on its stream. At most one combine of a buffer is open.
    ``async_finish``: as in ``dispatch_send``.

    With ``row_signals`` it begins while a kernel on another stream still writes ``rows``, and reads each row as soon as
    its counter has reached the threshold. For expert_major and packed, and rows, wire and outputs of one type; not with
    ``enable_shrink`` or several domains of GPUs. Other ranks need not give any. Low latency: with weights given here.
    High throughput: the whole operation runs at once, on the current stream or, with ``async_finish``, on the buffer's
    own, and has no gradient; launch the kernel that writes the rows behind this call, or on another stream. CUDA must
    have loaded that kernel, by a launch before or with ``CUDA_MODULE_LOADING=EAGER``.

    Args:
        row_signals: int32 (or uint32) [L, ceil(C / rows_per_signal)], packed [ceil(N / rows_per_signal)], or flat with
            as many elements or more: one counter for each row block of each local expert, packed of all rows. Whoever
            counts up has written its rows before, and releases them (``red.release.gpu``, or a fence before an atomic).
        rows_per_signal: rows of a row block. C: one counter an expert.
        signal_threshold: of a row block that is complete.
        num_sms: positive with ``row_signals``: SMs to wait on. The others are for the kernel that is waited for.

    Raises: as ``combine``, here or in ``receive()``; TimeoutError names the expert and the row block whose signal
        did not come before the deadline.
    """
    if type(async_finish) is not bool:
        require_bools(async_finish=async_finish)
    of_both = num_sms if row_signals is None else 0  # the receive waits for no signal, and has all SMs
    call = CombineCall.of(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, of_both, scale)
    return call.send(async_finish, row_signals, rows_per_signal, signal_threshold, num_sms)


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
    sizes = handle.num_tokens, handle.capacity, combine_numbers(handle, None, torch.float32)[1]
    if buffer is not None and buffer._open_sends and handle.mode == "ll":
        receive_lost(buffer, "combine")
    if handle.mode == "ht":
        given: Any = (None, values, handle.tensor, handle.slots, None, None, [], *sizes)
        try:
            scalars: torch.Tensor = _ops.ht_combine.default(seq, *given)[1]
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        return scalars
    try:
        out: torch.Tensor = _ops.ll_combine_weights.default(seq, values, handle.tensor, *sizes)
    except RuntimeError as error:
        raise error_of(buffer, error) from error
    return out
