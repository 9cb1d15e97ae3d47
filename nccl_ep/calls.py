"""Calls of dispatch and combine that take more than one op, or that a compiler traces.

All others are one call of C++ (csrc/torch/call). Numbers are checked by the library in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from . import _C
from .arrivals import Arrivals, announced, require_arrivals
from .buffer import Buffer, require_buffer
from .checks import (
    error_of,
    require_biases,
    require_bools,
    require_extras,
    require_integers,
    require_on,
    require_tensors,
)
from .choices import Exact, LayoutName, Mode, QuantName, Weighting, WireFormat
from .config import DISPATCH, HOME, Numbers, combine_numbers, dispatch_numbers, signalled_numbers
from .events import EventHandle, EventOverlap, run_on_comm_stream
from .gradients import wants_gradient
from .handle import DispatchOutput, Handle, Layout, require_handle
from .high_throughput import buffer_of, route_and_send
from .log import note_served
from .low_latency import dispatch_with_extra
from .ops import scales_of  # and registers the fakes
from .pending import OpenSend, Pending, receive_lost

_ops = torch.ops.nccl_ep
_ll_dispatch_packed = _C.fast_op("ll_dispatch", _ops.ll_dispatch.default, packed_results=True)
_ht_combine_packed = _C.fast_op("ht_combine", _ops.ht_combine.default, packed_results=True)
_on_same_device = _C.on_same_device  # a look-up that is spared
_HALVES = (torch.bfloat16, torch.float16)

_C.set_types(Handle, DispatchOutput, Layout, EventOverlap, EventHandle, DeviceContext)


@dataclass(slots=True, eq=False)
class DispatchShape:
    """A dispatch but for its tensors, checked. mode: "ll" or "ht"; capacity and numbers: as the op takes them."""

    buffer: Buffer
    num_tokens: int
    topk: int
    num_experts: int
    alignment: int
    quantises: bool
    has_scales: bool
    mode: Mode
    layout: Layout
    capacity: int
    max_tokens: int
    numbers: Numbers

    def output(
        self, given: torch.Tensor | None, received: Sequence[torch.Tensor], extra: tuple[torch.Tensor, ...] = ()
    ) -> DispatchOutput:
        """Of what the op returns. given: x, or what stands for it in the graph of gradients."""
        seq, layout, capacity, slots = self.buffer._seq, self.layout, self.capacity, None
        if self.mode == "ll":
            x, scales, weights, topk_idx, row_expert, info, handle_tensor = received
        else:
            x, scales, weights, topk_idx, row_expert, info, handle_tensor, slots = received
        if capacity < 0:  # exact sizes: those of the tensors
            capacity = self.max_tokens if layout is Layout.RANK_MAJOR else x.shape[0]
        handle = Handle(
            handle_tensor, seq, self.num_tokens, self.topk, self.num_experts, self.max_tokens, layout, capacity,
            self.buffer.num_ranks, self.mode, slots, self.alignment, weights,
        )  # fmt: skip
        out = DispatchOutput.of_info(
            x,
            scales if self.has_scales or self.quantises else None,
            None if layout.has_expert_rows else topk_idx,
            weights,
            row_expert if layout is Layout.PACKED else None,
            info,
            handle,
            extra,
        )
        if self.quantises and given is not None and wants_gradient(given):
            sizes = [*x.shape[:-1], given.shape[1]]  # of NVFP4 x has half of it
            out.carrier = _ops.row_carrier.default(seq, given, handle_tensor, slots, sizes, self.numbers)
        if self.buffer.on_overflow == "raise":
            _ops.require_no_overflow.default(seq, info, capacity, self.numbers)
        return out


@dataclass(slots=True, eq=False)
class DispatchCall:
    """A dispatch, checked: its tensors and the rest."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None
    extra: Sequence[torch.Tensor]
    shape: DispatchShape
    arrivals: Arrivals | None = None

    @staticmethod
    def of(
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        extra: Sequence[torch.Tensor],
        buffer: Buffer,
        num_experts: int,
        mode: Mode,
        layout: LayoutName,
        max_tokens: int | None,
        capacity: int | Exact | None,
        alignment: int,
        quant: QuantName | None,
        zero_padding: bool,
        num_sms: int,
        arrivals: Arrivals | None = None,
    ) -> DispatchCall:
        require_buffer(buffer)
        if arrivals is not None:
            require_arrivals(arrivals, buffer)
        tensors = (x, topk_idx, topk_weights, scales)
        if x is None or topk_idx is None or is_dynamo_compiling() or not _on_same_device(buffer._seq, *tensors):
            require_tensors(x=x, topk_idx=topk_idx)
            require_on(buffer._seq, ("x", "topk_idx", "topk_weights", "scales"), tensors)
        if topk_idx.dtype not in (torch.int64, torch.int32):  # before top-k is read off them
            raise ValueError(f"topk_idx is {topk_idx.dtype}, must be torch.int64 or torch.int32")
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}, must be [tokens, hidden]")
        if topk_idx.dim() != 2:
            raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}, must be [tokens, top-k]")
        if topk_weights is not None:
            topk_weights = _cast_under_autocast(topk_weights)
        if max_tokens is None:
            max_tokens = buffer.max_tokens
        topk, row_bytes = topk_idx.shape[1], x.shape[1] * x.element_size() if mode == "auto" else 0
        checked = dispatch_numbers(
            num_experts, mode, layout, max_tokens, capacity, alignment, quant, zero_padding, num_sms, topk, row_bytes,
            buffer.num_ranks, buffer.ll_max_tokens,
        )  # fmt: skip
        if not is_dynamo_compiling():
            note_served(buffer, checked[0], checked[2], checked[4])
        if type(extra) is not tuple or extra:
            require_extras(buffer._seq, extra)
        shape = DispatchShape(
            buffer, x.shape[0], topk, num_experts, alignment, quant is not None, scales is not None, *checked
        )
        if arrivals is not None and len(extra) > 0 and checked[0] == "ll":
            raise ValueError(f"{len(extra)} extra tensors, but a dispatch of low latency with arrivals takes none")
        return DispatchCall(x, topk_idx, topk_weights, scales, extra, shape, arrivals)

    def args(self) -> tuple[Any, ...]:
        """What ``ll_dispatch`` takes behind ``seq``."""
        return self.x, self.scales, self.topk_idx, self.topk_weights, self.shape.capacity, self.shape.numbers

    def run(self, out: DispatchOutput | None = None) -> DispatchOutput:
        if self.shape.mode == "ll" and out is not None:
            raise ValueError("out is for high throughput, and this is a low-latency dispatch")
        if self.arrivals is not None:
            self.arrivals.begin()
        try:
            received, moved = self._run(out)
        except RuntimeError as error:
            raise error_of(self.shape.buffer, error) from error
        return self.shape.output(self.x, received, moved)

    def _run(self, out: DispatchOutput | None) -> tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]:
        """What ``DispatchShape.output`` takes, and the rows of ``extra``."""
        with announced(self.arrivals):
            return self._run_announced(out)

    def _run_announced(self, out: DispatchOutput | None) -> tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]:
        if self.shape.mode == "ht":
            return route_and_send(self, out)
        op = _ops.ll_dispatch.default if is_dynamo_compiling() else _ll_dispatch_packed
        self._receive_lost()
        if self.extra:
            return dispatch_with_extra(op, self)
        return op(self.shape.buffer._seq, *self.args()), ()

    def _receive_lost(self) -> None:
        if not is_dynamo_compiling() and self.shape.buffer._open_sends:
            receive_lost(self.shape.buffer, "dispatch")

    def send(self, async_finish: bool) -> Pending[DispatchOutput]:
        if type(async_finish) is not bool:
            require_bools(async_finish=async_finish)
        if async_finish:
            return self._send_all()
        if self.shape.mode == "ht":
            raise ValueError("a dispatch of high throughput is not split: pass async_finish=True, or call dispatch")
        if self.extra:
            raise ValueError(
                f"{len(self.extra)} extra tensors, but a split dispatch takes none: pass async_finish=True"
            )
        return self._send_split()

    def _send_all(self) -> Pending[DispatchOutput]:
        """On the buffer's own stream."""
        x, shape, count = self.x, self.shape, len(self.extra)

        def call() -> Any:
            received, moved = self._run(None)
            return (*received, *moved)

        if self.arrivals is not None:
            self.arrivals.begin()
        try:
            inputs = (*self.args()[:4], *self.extra)
            sent, event = run_on_comm_stream(shape.buffer, call, inputs, True, seq=shape.buffer._seq)
        except RuntimeError as error:
            raise error_of(shape.buffer, error) from error
        end = len(sent) - count
        # x is the event's to keep. A quantised one that wants a gradient stays for that, too.
        given = x if shape.quantises and wants_gradient(x) else None
        return Pending(lambda: shape.output(given, sent[:end], sent[end:]), event, is_early=self.arrivals is not None)

    def _send_split(self) -> Pending[DispatchOutput]:
        shape, buffer = self.shape, self.shape.buffer
        if wants_gradient(self.scales):
            raise ValueError("scales want a gradient, but a dispatch in two calls has none for them: call dispatch")
        like_x, like_weights = None, None
        if wants_gradient(self.x, self.topk_weights):
            like_x = _ops.carrier.default(self.x)
            like_weights = None if self.topk_weights is None else _ops.carrier.default(self.topk_weights)
        self._receive_lost()
        if self.arrivals is not None:
            self.arrivals.begin()
        try:
            with torch.no_grad():  # ll_dispatch_recv has the gradient
                sent = _ops.ll_dispatch_send.default(buffer._seq, *self.args())
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        # Of x nothing is kept but what stands for it.
        received_by = (*dispatch_receive_args(sent, buffer._seq, *self.args()), like_x, like_weights)
        open_send = OpenSend("dispatch", _ops.ll_dispatch_recv.default, received_by)

        def receive() -> DispatchOutput:
            try:
                with announced(self.arrivals):
                    received = open_send.receive(buffer)
            except RuntimeError as error:
                raise error_of(buffer, error) from error
            return shape.output(like_x, (*received, sent))

        return Pending.of_send(buffer, open_send, receive)


def dispatch_receive_args(
    sent: torch.Tensor, seq: torch.Tensor, x: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, capacity: int, numbers: Numbers,
) -> tuple[Any, ...]:  # fmt: skip
    """What ``ll_dispatch_recv`` takes but for gradients. sent: what ``ll_dispatch_send`` returned, of the others."""
    sizes = x.dtype, x.shape[1], *scales_of(scales), x.shape[0], topk_idx.dtype == torch.int64
    return seq, sent, *sizes, capacity, numbers


def _cast_under_autocast(weights: torch.Tensor) -> torch.Tensor:
    """Routers under autocast make bf16 or fp16 weights; they become float32, in which dispatch takes them."""
    if weights.dtype not in _HALVES:
        return weights
    return weights.float() if torch.is_autocast_enabled(weights.device.type) else weights


@dataclass(slots=True, eq=False)
class CombineCall:
    """A combine, checked. buffer: None where a compiler traces."""

    buffer: Buffer | None
    rows: torch.Tensor
    handle: Handle
    weights: torch.Tensor | None  # those that the op applies, or that the gradient needs
    topk_idx: torch.Tensor | None
    biases: list[torch.Tensor]
    is_home: bool  # the weights are given here
    numbers: Numbers

    @staticmethod
    def of(
        rows: torch.Tensor,
        handle: Handle,
        weights: Weighting | torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None,
        out_dtype: torch.dtype | None,
        wire_dtype: torch.dtype | WireFormat | None,
        *options: float,
    ) -> CombineCall:
        """options: those that are plain numbers, as csrc/torch/call/combine.cc has them."""
        require_handle(handle)
        if not isinstance(rows, torch.Tensor):
            require_tensors(rows=rows)
        given = weights if isinstance(weights, torch.Tensor) else None
        if isinstance(out_dtype, torch.dtype) and not out_dtype.is_floating_point:
            raise ValueError(f"out_dtype is {out_dtype}, must be that of rows, or torch.float32")
        weighting, numbers = combine_numbers(
            handle,
            weights if given is None else True,
            rows.dtype if out_dtype is None else out_dtype,
            wire_dtype,
            *options,
        )
        if weighting == DISPATCH and wants_gradient(rows, handle.weights):
            given = handle.weights  # the gradient needs them; the operation finds them in the handle
        buffer = buffer_of(handle)
        require_on(
            handle.seq,
            ("rows", "handle", "handle", "weights", "topk_idx"),
            (rows, handle.tensor, handle.slots, given, topk_idx),
        )
        biases = [] if bias is None else require_biases(handle.seq, bias)
        return CombineCall(buffer, rows, handle, given, topk_idx, biases, weighting == HOME, numbers)

    def _args(self) -> tuple[Any, ...]:
        """What the op takes behind ``seq``."""
        handle = self.handle
        tensors = (self.rows, None, handle.tensor, handle.slots) if handle.mode == "ht" else (self.rows, handle.tensor)
        return (*tensors, self.weights, self.topk_idx, self.biases, handle.num_tokens, handle.capacity, self.numbers)

    def _receive_lost(self) -> None:
        if self.buffer is not None and self.buffer._open_sends and self.handle.mode == "ll":
            receive_lost(self.buffer, "combine")

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            require_on(self.handle.seq, ("out",), (out,))
        try:
            if out is None:
                return self._run()
            op = _ops.ht_combine_out if self.handle.mode == "ht" else _ops.ll_combine_out
            self._receive_lost()
            op.default(self.handle.seq, *self._args(), out)
        except RuntimeError as error:
            raise error_of(self.buffer, error) from error
        return out

    def _run(self) -> torch.Tensor:
        self._receive_lost()
        if self.handle.mode == "ll":
            combined: torch.Tensor = _ops.ll_combine.default(self.handle.seq, *self._args())
            return combined
        op = _ops.ht_combine.default if is_dynamo_compiling() else _ht_combine_packed
        combined = op(self.handle.seq, *self._args())[0]
        return combined

    def send(
        self,
        async_finish: bool,
        row_signals: torch.Tensor | None,
        rows_per_signal: int,
        signal_threshold: int,
        num_sms: int,
        out: torch.Tensor | None = None,
    ) -> Pending[torch.Tensor]:
        """num_sms: of the send where there are ``row_signals``. out: of a split call, what the receive writes."""
        numbers = self.numbers
        if row_signals is not None:
            require_tensors(row_signals=row_signals)
            require_on(self.handle.seq, ("row_signals",), (row_signals,))
            numbers = signalled_numbers(numbers, rows_per_signal, signal_threshold, num_sms)
            if self.handle.mode == "ht":
                return self._send_signalled(numbers, row_signals, async_finish)
            if async_finish:
                raise ValueError("row_signals are for a split combine of low latency, without async_finish")
        else:
            require_integers(rows_per_signal=rows_per_signal)
            if rows_per_signal != 0:
                raise ValueError(f"rows_per_signal is {rows_per_signal}, but there are no row_signals")
        if async_finish:
            return self._send_all()
        if self.handle.mode == "ht":
            raise ValueError("a combine of high throughput is not split: pass async_finish=True, or call combine")
        return self._send_split(numbers, row_signals, out)

    def _send_all(self) -> Pending[torch.Tensor]:
        """On the buffer's own stream."""
        try:
            inputs = (*self._args()[:-4], *self.biases)
            combined, event = run_on_comm_stream(self.buffer, self._run, inputs, True, seq=self.handle.seq)
        except RuntimeError as error:
            raise error_of(self.buffer, error) from error
        return Pending(lambda: combined, event)

    def _send_signalled(self, numbers: Numbers, row_signals: torch.Tensor, is_async: bool) -> Pending[torch.Tensor]:
        """All of it, in high throughput."""
        handle, weights = self.handle, self.weights if self.is_home else None
        if wants_gradient(self.rows, weights, self.biases):
            raise ValueError("a combine of high throughput with row_signals has no gradient: call it under no_grad")
        tensors = (self.rows, handle.tensor, handle.slots, weights, self.topk_idx)
        args = (*tensors, self.biases, handle.num_tokens, handle.capacity, numbers, row_signals)

        def call() -> torch.Tensor:
            combined: torch.Tensor = _ops.ht_combine_signalled.default(handle.seq, *args)
            return combined

        try:
            combined, event = run_on_comm_stream(self.buffer, call, (*tensors, *self.biases, row_signals), is_async)
        except RuntimeError as error:
            raise error_of(self.buffer, error) from error
        return Pending(lambda: combined, event)

    def _send_split(
        self, numbers: Numbers, row_signals: torch.Tensor | None, given: torch.Tensor | None
    ) -> Pending[torch.Tensor]:
        buffer, handle, rows, weights = self.buffer, self.handle, self.rows, self.weights
        carried: tuple[torch.Tensor | None, ...] = (None, None, None, None)  # for gradients
        if wants_gradient(rows, weights, self.biases):
            like_rows = _ops.carrier.default(rows)
            carried = (like_rows, rows if wants_gradient(weights) else None, weights, self.topk_idx)
        self._receive_lost()
        sent = (rows, handle.tensor, weights if self.is_home else None, self.topk_idx, self.biases)
        sizes = handle.num_tokens, handle.capacity
        try:
            with torch.no_grad():  # ll_combine_recv has the gradient
                _ops.ll_combine_send.default(handle.seq, *sent, *sizes, numbers, row_signals)
        except RuntimeError as error:
            raise error_of(buffer, error) from error
        received_by = (handle.seq, handle.tensor, self.biases, rows.dtype, rows.shape[-1], *sizes, self.numbers)
        open_send = OpenSend("combine", _ops.ll_combine_recv.default, (*received_by, *carried))
        into = None if given is None else partial(_ops.ll_combine_recv_out.default, *received_by, given)

        def receive() -> torch.Tensor:
            try:
                out: torch.Tensor = open_send.receive(buffer, into)
            except RuntimeError as error:
                raise error_of(buffer, error) from error
            return out if given is None else given

        return Pending.of_send(buffer, open_send, receive)
