"""DeepEP's low-latency mode. docs/deepep.md says what is the same and what differs.

The handle that callers hold is DeepEP's tuple of five. Its ``src_info`` is the front of an allocation, and our handle
lies behind it (csrc/torch/deep_ep/low_latency_ops.cc). So combine finds all that it needs, also when the tuple was
taken apart and rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from ... import _C
from ...checks import error_of, require_bools, require_on, require_tensors
from ...errors import OverflowError, UsageError
from ...events import EventOverlap, run_on_comm_stream
from ...pending import OpenSend
from . import nvfp4
from .low_latency_memory import WORDS, LowLatencyHandle, LowLatencyMemory
from .newer_keywords import RowSignals, in_order

Received: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Hook: TypeAlias = Callable[[], None]
Dispatched: TypeAlias = "tuple[Received, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]"
Combined: TypeAlias = "tuple[torch.Tensor, EventOverlap, Hook | None]"

_ops = torch.ops.nccl_ep
_dispatch, _combine = _C.low_latency_dispatch, _C.low_latency_combine  # look-ups that the hot path is spared


class LowLatencyMethods(LowLatencyMemory):
    """What ``deep_ep.Buffer`` has of DeepEP's low-latency mode."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        *order: Any,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
        use_ue8m0_for_sf: bool = False,
    ) -> Dispatched:
        """Sends tokens to their experts. Collective. T tokens, M ``num_max_dispatch_tokens_per_rank``, L local experts.

        Args:
            x: [T, H] bf16 (or fp16; without ``use_fp8`` of any dtype), rows a multiple of 16 bytes.
            topk_idx: [T, K] int64 or int32; -1 is no choice.
            cumulative_local_expert_recv_stats: int32 [L], to which the received rows are added.
            dispatch_wait_recv_cost_stats: int64 [R], to which the ns that this rank waited for each other are added.
                On CUDA those until the other's call was heard of.
            order: ``use_fp8`` to ``return_recv_hook`` by position, as DeepEP has them; or, where the first is a tensor
                or None, ``x_global_scale, use_fp8, round_scale, use_ue8m0, use_nvfp4, async_finish,
                return_recv_hook``, as sgl-deep-ep has them.
            use_fp8: rows are quantised to e4m3, with a float32 scale for 128 elements. round_scale: scales are powers
                of two. use_ue8m0: they are packed exponents, four in an int32; needs ``round_scale``. Without
                ``use_fp8`` neither has a meaning.
            async_finish: the operation runs on ``get_comm_stream()``, and the event says when it is done.
            return_recv_hook: sends only; what is returned is filled by calling the hook, once.
            use_nvfp4: rows are quantised to e2m1, with an e4m3 scale for 16 elements (``nvfp4.quantize``). x is bf16 or
                fp16 then, H a multiple of 32, and ``use_fp8`` False.
            x_global_scale: of ``use_nvfp4``: float32, of which the first element counts; None: 1. Otherwise ignored.
                use_ue8m0_for_sf: of ``use_nvfp4``, and refused there.

        Returns:
            recv_x: [L, R * M, H], or with ``use_fp8`` the pair of it and the scales, [L, R * M, ceil(H / 128)]
                (``use_ue8m0``: ceil(H / 512)), contiguous in dimension 1. Of expert e only the first recv_count[e] rows
                are set, in the order of (source rank, token). With ``use_nvfp4`` the pair of uint8 [R * M, H / 2, L]
                and float8_e4m3fn [32, 4, ceil(R * M / 128), 4, ceil(H / 64), L]; memory is in the order
                [L, R * M, H / 2] and [L, ceil(R * M / 128), ceil(H / 64), 32, 4, 4].
            recv_count: int32 [L].
            handle: (src_info, layout_range, M, H, num_experts); src_info: int32 [L, R * M], the token of each row at
                its source; layout_range: int64 [L, R], first row of each source << 32 | their number.
            event: with ``async_finish`` something to wait for, else ``event.event`` is None.
            hook: None without ``return_recv_hook``.

        Raises: ValueError, UsageError, TimeoutError, MismatchError, OverflowError as ``nccl_ep.dispatch``; the last one
        by the hook, where there is one.

        Source: DeepEP's method of that name; its branch hybrid-ep and sgl-deep-ep for ``use_nvfp4`` and what follows.
        """
        if order:
            keywords = {
                "use_fp8": use_fp8, "round_scale": round_scale, "use_ue8m0": use_ue8m0, "async_finish": async_finish,
                "return_recv_hook": return_recv_hook, "use_nvfp4": use_nvfp4, "x_global_scale": x_global_scale,
                "use_ue8m0_for_sf": use_ue8m0_for_sf,
            }  # fmt: skip
            return self.low_latency_dispatch(
                x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats, **in_order(order, keywords),
            )  # fmt: skip
        if use_nvfp4 is not False:
            require_bools(use_nvfp4=use_nvfp4)
        if use_nvfp4:
            return self._dispatch_nvfp4(
                x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                (cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats), async_finish, return_recv_hook,
                nvfp4.global_scale_of(self._seq, x, x_global_scale, use_fp8, use_ue8m0_for_sf),
            )  # fmt: skip
        try:
            made = _dispatch(
                self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook, None,
            )  # fmt: skip
        except RuntimeError as error:
            raise error_of(self, error) from error
        except (TypeError, ValueError) as error:
            raise WORDS.told(error) from None
        return self._dispatched(made) if made[4] is not None or self.on_overflow == "raise" else made

    def _dispatched(self, made: tuple[Any, ...]) -> Dispatched:
        """The results with a hook for what receives them; or those of which nothing was dropped."""
        received, counts, handle, event, receive = made
        if receive is None:
            self._raise_what_was_dropped(counts, event)
            return received, counts, handle, event, None
        self._state.unreceived = handle[0]
        return received, counts, handle, event, RecvHook(self, OpenSend("dispatch", receive), counts)

    def _dispatch_nvfp4(
        self, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int,
        stats: tuple[torch.Tensor | None, torch.Tensor | None], async_finish: bool, return_recv_hook: bool,
        global_scale: torch.Tensor,
    ) -> Dispatched:  # fmt: skip
        """Rows that are quantised here, with scales that travel as a caller's, and are put in order where they come."""
        has_both = async_finish and return_recv_hook  # which is refused

        def send(rows: torch.Tensor, scales: torch.Tensor) -> Any:
            return _dispatch(
                self, rows, topk_idx, max_tokens, num_experts, *stats, False, False, False, has_both,
                return_recv_hook, scales,
            )  # fmt: skip

        try:
            sent, event = run_on_comm_stream(
                self, lambda: nvfp4.send(send, x, global_scale, not return_recv_hook),
                (x, global_scale, topk_idx, *stats), async_finish,
            )  # fmt: skip
        except RuntimeError as error:
            raise error_of(self, error) from error
        except (TypeError, ValueError) as error:
            raise WORDS.told(error) from None
        rows, scales, swizzled, counts, (source, ranges, *_), _, receive = sent
        if receive is not None:
            receive = partial(nvfp4.receive, receive, scales, swizzled)
        handle = source, ranges, max_tokens, x.shape[1], num_experts
        return self._dispatched((nvfp4.received(rows, swizzled), counts, handle, event, receive))

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        *,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int | None = None,
    ) -> Combined:
        """Brings the experts' rows home and adds them up with the weights. Collective.

        Args:
            x: [L, R * M, H] bf16 (or fp16, fp32), contiguous, for the rows of the dispatch.
            topk_idx: [T, K] as at dispatch; a row whose id is -1 here is skipped. topk_weights: [T, K] float32.
            handle: of ``low_latency_dispatch``, or a tuple of the same elements.
            use_logfmt: the ranks' sums travel in 10 bits an element (docs/semantics.md). For bf16 and fp16 rows, H a
                multiple of 16; not with ``zero_copy``.
            zero_copy: the rows are those of ``get_next_low_latency_combine_buffer(handle)``, and x gives their shape.
            async_finish, return_recv_hook: as at dispatch.
            out: [T, H] of x's dtype, by default a new tensor.
            combine_wait_recv_cost_stats: int64 [R], to which the ns that this rank waited for each other are added;
                as at dispatch.
            overlap: SGLang's single-batch overlap. The send begins while a kernel on another stream still
                writes x, and sends a row when its signal has come. Needs ``return_recv_hook``, and ``comp_signal`` or
                ``src_signals``; without it, what follows here is ignored.
            comp_signal: int32, flat, a counter for each ``block_m`` rows of each local expert: [L * ceil(R * M /
                block_m)] or more. Its rows are there when it is at ``threshold``. packed_recv_count: int32 [L], not
                needed.
            src_signals: uint32 [L], a counter for each local expert, at ``src_signal_expect_value`` when its rows are
                there.
            num_sms: SMs that the send waits on; by default 3 with ``comp_signal``, 32 with ``src_signals``. The
                others are for the kernel that is waited for.

        Returns: combined_x [T, H] (``out``), event and hook as at dispatch.

        Raises: as ``low_latency_dispatch``; UsageError also for the handle of a dispatch whose hook was not called yet.
            With ``overlap``, TimeoutError names the expert and the row block whose signal did not come.

        Source: DeepEP's method of that name; its branches for ``overlap`` and what follows.
        """
        row_signals, rows_per_signal, signal_threshold, send_sms = None, 0, 0, 0
        if overlap is not False:
            require_bools(overlap=overlap)
            if overlap:
                row_signals, rows_per_signal, signal_threshold, send_sms = self._signals_of(
                    x, return_recv_hook, use_logfmt, packed_recv_count, comp_signal, block_m, threshold, num_sms,
                    src_signals, src_signal_expect_value,
                )  # fmt: skip
        try:
            combined, event, receive = _combine(
                self, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out,
                combine_wait_recv_cost_stats, row_signals, rows_per_signal, signal_threshold, send_sms,
            )  # fmt: skip
        except RuntimeError as error:
            raise error_of(self, error) from error
        except (TypeError, ValueError) as error:
            raise WORDS.told(error) from None
        return combined, event, None if receive is None else RecvHook(self, OpenSend("combine", receive))

    def _signals_of(self, x: torch.Tensor, *given: Any) -> tuple[Any, ...]:
        """Of ``overlap``: counters, rows of one, threshold, SMs."""
        require_tensors(x=x)
        if x.dim() != 3:  # which is refused
            return None, 0, 0, 0
        signals = RowSignals.of(x, *given)
        packed_recv_count = given[2]
        require_on(self._seq, ("comp_signal", "packed_recv_count"), (signals.row_signals, packed_recv_count))
        return signals.row_signals, signals.rows_per_signal, signals.signal_threshold, signals.num_sms

    # ---- How they run

    def _raise_what_was_dropped(self, counts: torch.Tensor, event: EventOverlap | None = None) -> None:
        """With ``on_overflow="raise"``. ``counts``: the front of the info tensor (csrc/layout/common/outputs.h)."""
        if self.on_overflow != "raise":
            return
        if event is not None and event.event is not None:
            event.current_stream_wait()
        local = len(counts)
        info = counts.as_strided((2 * local + 1,), (1,))
        if int(info[-1]) > 0:
            raise OverflowError(
                f"{int(info[-1])} rows did not fit, as a token names an expert twice: an expert has room for "
                f"R * num_max_dispatch_tokens_per_rank, and demand was {info[local:-1].tolist()}"
            )


class RecvHook:
    """The receive part, on the stream that was current when it was made, as in DeepEP. ``counts``: of a dispatch.

    One that has failed may be called again, and says what keeps it from receiving.
    """

    __slots__ = ("__weakref__", "_counts", "_open_send", "_stream", "_view")

    def __init__(self, view: LowLatencyMethods, open_send: OpenSend, counts: torch.Tensor | None = None) -> None:
        self._view, self._counts = view, counts
        self._stream = _C.current_stream_id(view._seq)
        self._open_send: OpenSend | None = open_send
        open_send.open(view.core, self)

    def __call__(self) -> None:
        if self._to_receive().is_lost:
            raise UsageError("what this hook receives was dropped")
        try:
            _C.call_on_stream(self._view._seq, self._stream, self._receive)
        except RuntimeError as error:
            raise error_of(self._view, error) from error

    def __copy__(self) -> RecvHook:
        return self  # there is one operation to receive

    def __deepcopy__(self, memo: dict[int, Any]) -> RecvHook:
        return self

    def _to_receive(self) -> OpenSend:
        if self._open_send is None:
            raise UsageError("this hook was called already, and what it receives has been received")
        return self._open_send

    def _receive(self) -> None:
        view, counts = self._view, self._counts
        self._to_receive().receive(view.core)
        self._open_send = None
        if counts is not None:
            view._state.unreceived = None
            view._raise_what_was_dropped(counts)
