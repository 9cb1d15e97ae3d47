"""dispatch and combine: tokens to their experts, and the experts' rows home again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from . import ops  # noqa: F401  (registers the fakes)
from .buffer import Buffer, find_buffer
from .errors import OverflowError, UsageError
from .handle import LAYOUTS, QUANTS, DispatchOutput, Handle, Layout, Quant

T = TypeVar("T")
_ops = torch.ops.nccl_ep
_NONE, _DISPATCH, _HOME = range(3)  # csrc/runtime/params.h, Weighting


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
    capacity: int | None = None,
    expert_alignment: int = 1,
    quant: str | None = None,
    scales: torch.Tensor | None = None,
    zero_padding: bool = False,
    num_sms: int = 0,
) -> DispatchOutput:
    """Sends every token to the ranks of its experts, once a rank. Collective; the same results whatever the timing.

    Args:
        x: [T, H] contiguous, rows a multiple of 16 bytes, T at most ``max_tokens`` (0 is legal). bf16, fp16 and fp32
            are numbers; any other dtype travels bit for bit.
        topk_idx: [T, K] int64 or int32 expert ids; -1 is no choice. An id out of range acts as -1 and is reported by
            ``buffer.check()``.
        topk_weights: [T, K] float32, by default ones.
        layout: "expert_major", "packed", "rank_major" or "flat": see ``DispatchOutput``.
        max_tokens: equal on all ranks; default: the buffer's.
        capacity: rows of an expert (expert_major, default R * M), or in all (packed, flat; default: what always fits).
        expert_alignment: packed: the first row of an expert is a multiple of it.
        quant: None, "fp8" (e4m3, a float32 scale for 128 elements), "fp8_rounded" (scales are powers of two) or
            "fp8_ue8m0" (their exponents, four in an int32). x is bf16 or fp16 then, H a multiple of 16.
        scales: [T, S] of any dtype and strides, for rows that the caller has quantised.
        zero_padding: rows of the output that do not exist are zeroed.
        num_sms: CUDA: thread blocks to use; 0 chooses.

    Raises:
        ValueError: an argument that cannot be served, with its value; nothing was sent.
        UsageError: the buffer was destroyed, or a dispatch was sent and not received.
        TimeoutError, MismatchError: a rank did not come, or made another call; the buffer has failed.
        OverflowError: rows were dropped, and the buffer was made with ``on_overflow="raise"``.

    Source: NCCL EP's ``ncclEpDispatch`` (arXiv 2603.13606), DeepEP's ``low_latency_dispatch``.
    """
    call = _dispatch_call(
        x, topk_idx, topk_weights, scales, buffer, num_experts, mode, layout, max_tokens, capacity, expert_alignment,
        quant,
    )  # fmt: skip
    with _errors_of(buffer):
        received = _ops.ll_dispatch.default(
            buffer.name, buffer._seq, x, scales, topk_idx, topk_weights, *call.config, zero_padding, num_sms
        )
    return _output(call, received)


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
    capacity: int | None = None,
    expert_alignment: int = 1,
    quant: str | None = None,
    scales: torch.Tensor | None = None,
    zero_padding: bool = False,
    num_sms: int = 0,
) -> Pending[DispatchOutput]:
    """The sending half of ``dispatch``, with its arguments. ``receive()`` of what it returns is the other half.

    The caller's work goes between the two; x may be overwritten as soon as this half is done on its stream. At most one
    dispatch of a buffer is open.

    Raises: as ``dispatch``, here or in ``receive()``.

    Source: NCCL EP's ``send_only`` and ``ncclEpComplete``, DeepEP's ``return_recv_hook``.
    """
    call = _dispatch_call(
        x, topk_idx, topk_weights, scales, buffer, num_experts, mode, layout, max_tokens, capacity, expert_alignment,
        quant,
    )  # fmt: skip
    with _errors_of(buffer):
        handle = _ops.ll_dispatch_send.default(
            buffer.name, buffer._seq, x, scales, topk_idx, topk_weights, *call.config, zero_padding, num_sms
        )
    num_scales, scale_dtype = (scales.shape[1], scales.dtype) if scales is not None else (0, torch.float32)

    def receive() -> DispatchOutput:
        with _errors_of(buffer):
            received = _ops.ll_dispatch_recv.default(
                buffer.name, buffer._seq, handle, x.dtype, x.shape[1], num_scales, scale_dtype, x.shape[0],
                topk_idx.shape[1], topk_idx.dtype == torch.int64, *call.config, zero_padding, num_sms,
            )  # fmt: skip
        return _output(call, (*received, handle))

    return Pending(receive)


def combine(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: str | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
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
        out_dtype: default: of rows. wire_dtype: of what travels, ``out_dtype`` (default) or float32.
        out: [T, H] of ``out_dtype``, written in place.
        num_sms: CUDA: thread blocks to use; 0 chooses.

    Raises: as ``dispatch``; UsageError also for a handle of another buffer.

    Source: NCCL EP's ``ncclEpCombine`` (arXiv 2603.13606), DeepEP's ``low_latency_combine``.
    """
    buffer, args = _combine_call(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, num_sms)
    with _errors_of(buffer):
        if out is None:
            out = _ops.ll_combine.default(buffer.name, buffer._seq, *args)
        else:
            _ops.ll_combine_out.default(buffer.name, buffer._seq, *args, out)
    return out


def combine_send(
    rows: torch.Tensor,
    handle: Handle,
    *,
    weights: str | torch.Tensor | None = "dispatch",
    topk_idx: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    num_sms: int = 0,
) -> Pending[torch.Tensor]:
    """The sending half of ``combine``, with its arguments; ``receive()`` of what it returns gives [T, H].

    ``rows`` may be overwritten as soon as this half is done on its stream. At most one combine of a buffer is open.

    Raises: as ``combine``, here or in ``receive()``.
    """
    buffer, args = _combine_call(rows, handle, weights, topk_idx, bias, out_dtype, wire_dtype, num_sms)
    biases, how = args[4], args[-4:]
    with _errors_of(buffer):
        _ops.ll_combine_send.default(buffer.name, buffer._seq, *args)

    def receive() -> torch.Tensor:
        with _errors_of(buffer):
            out: torch.Tensor = _ops.ll_combine_recv.default(
                buffer.name, buffer._seq, handle.tensor, biases, rows.dtype, rows.shape[-1], *handle.args(), *how
            )
        return out

    return Pending(receive)


def combine_weights(values: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Sends one scalar for each row home and returns [T, K] float32: the way of the weights' gradients. Collective.

    Args:
        values: float32, one for each row ([L, C] or [N]), or, in rank_major and flat, for each choice ([.., K]).

    An entry without a row (no choice, or dropped) is 0.

    Raises: as ``combine``.
    """
    buffer = _buffer_of(handle)
    _require_on(buffer, values=values, handle=handle.tensor)
    with _errors_of(buffer):
        out: torch.Tensor = _ops.ll_combine_weights.default(
            buffer.name, buffer._seq, values, handle.tensor, *handle.args()
        )
    return out


class Pending(Generic[T]):
    """An operation whose first half is done."""

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive: Callable[[], T] | None = receive

    def receive(self) -> T:
        """The other half: waits for the other ranks and returns the result. UsageError if it was received already."""
        if self._receive is None:
            raise UsageError("this operation was received already")
        receive, self._receive = self._receive, None
        return receive()


# ---- From arguments to ops


@dataclass(frozen=True, slots=True)
class _DispatchCall:
    """What the two halves of a dispatch and its results have in common."""

    buffer: Buffer
    num_tokens: int
    topk: int
    num_experts: int
    max_tokens: int
    layout: Layout
    capacity: int
    alignment: int
    quant: Quant
    has_scales: bool

    @property
    def config(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.num_experts,
            self.max_tokens,
            int(self.layout),
            self.capacity,
            self.alignment,
            int(self.quant),
        )


def _dispatch_call(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    buffer: Buffer,
    num_experts: int,
    mode: str,
    layout: str,
    max_tokens: int | None,
    capacity: int | None,
    alignment: int,
    quant: str | None,
) -> _DispatchCall:
    if mode != "ll":
        raise ValueError(f'mode is {mode!r}, must be "ll"; high throughput ("ht", "auto") is not built yet')
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, must be one of {', '.join(LAYOUTS)}")
    if quant not in QUANTS:
        raise ValueError(f"quant is {quant!r}, must be one of {', '.join(map(str, QUANTS))}")
    if max_tokens is None and (max_tokens := buffer.max_tokens) is None:
        raise ValueError("max_tokens is not given, and the buffer was made without it")
    _require_on(buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights, scales=scales)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}, must be [tokens, top-k]")
    if num_experts < 1 or num_experts % buffer.num_ranks:
        raise ValueError(f"{num_experts} experts do not divide over {buffer.num_ranks} ranks")
    kind, topk = LAYOUTS[layout], topk_idx.shape[1]
    if alignment != 1 and kind != Layout.PACKED:
        raise ValueError(f"expert_alignment is {alignment}, but layout {layout} has no alignment")
    if alignment < 1:
        raise ValueError(f"expert_alignment is {alignment}, must be at least 1")
    if capacity is None:
        capacity = _default_capacity(kind, buffer.num_ranks, num_experts, max_tokens, topk, alignment)
    elif kind == Layout.RANK_MAJOR:
        raise ValueError(f"capacity is {capacity}, but layout rank_major always holds max_tokens rows of a rank")
    return _DispatchCall(
        buffer,
        x.shape[0],
        topk,
        num_experts,
        max_tokens,
        kind,
        capacity,
        alignment,
        QUANTS[quant],
        scales is not None or quant is not None,
    )


def _default_capacity(layout: Layout, ranks: int, experts: int, max_tokens: int, topk: int, alignment: int) -> int:
    """Rows that suffice for any routing in which no token names an expert twice."""
    local = experts // ranks
    if layout != Layout.PACKED:
        return max_tokens if layout == Layout.RANK_MAJOR else ranks * max_tokens
    rows = ranks * max_tokens * min(topk, local) + local * (alignment - 1)
    return (rows + alignment - 1) // alignment * alignment


def _output(call: _DispatchCall, received: Sequence[torch.Tensor]) -> DispatchOutput:
    x, scales, weights, topk_idx, row_expert, info, handle_tensor = received
    layout, ranks = call.layout, call.buffer.num_ranks
    bins = call.num_experts // ranks if layout.has_expert_rows else ranks
    overflow = info[2 * bins : 2 * bins + 1]
    if call.buffer.on_overflow == "raise" and int(overflow) > 0:
        raise OverflowError(
            f"{int(overflow)} rows did not fit into capacity {call.capacity} of layout {layout.name.lower()}: "
            f"demand was {info[bins : 2 * bins].tolist()}"
        )
    handle = Handle(
        handle_tensor,
        call.buffer.name,
        call.num_tokens,
        call.topk,
        call.num_experts,
        call.max_tokens,
        layout,
        call.capacity,
        ranks,
    )
    return DispatchOutput(
        x=x,
        scales=scales if call.has_scales else None,
        topk_idx=None if layout.has_expert_rows else topk_idx,
        weights=weights,
        counts=info[:bins],
        offsets=info[2 * bins + 2 :] if layout == Layout.PACKED else None,
        row_expert=row_expert if layout == Layout.PACKED else None,
        total=info[2 * bins + 1 : 2 * bins + 2] if layout == Layout.FLAT else None,
        overflow=overflow,
        demand=info[bins : 2 * bins],
        handle=handle,
    )


def _combine_call(
    rows: torch.Tensor,
    handle: Handle,
    weights: str | torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    num_sms: int,
) -> tuple[Buffer, tuple[Any, ...]]:
    if isinstance(weights, str) and weights != "dispatch":
        raise ValueError(f'weights is {weights!r}, must be "dispatch", a tensor [T, K] or None')
    if not isinstance(weights, (str, torch.Tensor, type(None))):
        raise TypeError(f'weights is a {type(weights).__name__}, must be "dispatch", a tensor [T, K] or None')
    home_weights = weights if isinstance(weights, torch.Tensor) else None
    if home_weights is not None:
        weighting = _HOME
    else:
        weighting = _DISPATCH if weights is not None and handle.layout.has_expert_rows else _NONE
    out_dtype = out_dtype or rows.dtype
    wire_dtype = wire_dtype or out_dtype
    if wire_dtype not in (out_dtype, torch.float32):
        raise ValueError(f"wire_dtype is {wire_dtype}, must be {out_dtype} or torch.float32")
    biases = [] if bias is None else [bias] if isinstance(bias, torch.Tensor) else list(bias)
    buffer = _buffer_of(handle)
    _require_on(buffer, rows=rows, handle=handle.tensor, weights=home_weights, topk_idx=topk_idx)
    _require_on(buffer, **{f"bias {i}": given for i, given in enumerate(biases)})
    args = (rows, handle.tensor, home_weights, topk_idx, biases, *handle.args(), weighting, out_dtype, wire_dtype, num_sms)
    return buffer, args


def _buffer_of(handle: Handle) -> Buffer:
    buffer = find_buffer(handle.buffer)
    if handle.num_ranks != buffer.num_ranks:
        raise UsageError(f"the handle is of {handle.num_ranks} ranks, its buffer {buffer.name} of {buffer.num_ranks}")
    return buffer


def _require_on(buffer: Buffer, **tensors: torch.Tensor | None) -> None:
    """An op would follow a tensor on another device to that device's kernel, or to the fake one."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor is not None and tensor.device != buffer.device:
            raise ValueError(f"{name} is on {tensor.device}, the buffer on {buffer.device}")
        if tensor is not None and tensor.layout != torch.strided:
            raise ValueError(f"{name} is {tensor.layout}, must be strided")


@contextmanager
def _errors_of(buffer: Buffer) -> Iterator[None]:
    """Ops know only ValueError and RuntimeError: the second becomes the buffer's own error where it has one."""
    try:
        yield
    except RuntimeError as error:
        buffer.require_usable()
        raise UsageError(str(error).split("\n", 1)[0]) from error
