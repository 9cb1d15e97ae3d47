"""The operations of DeepEP V2's ``ElasticBuffer``, over those of both modes of the core."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ...buffer import Buffer as Core
from ...checks import biases_of, require_bools, require_int32, require_on, require_tensors
from ...choices import Mode
from ...events import EventHandle, EventOverlap, run_on_comm_stream
from ...functional import combine, combine_weights, dispatch
from ...high_throughput import dispatch_cached
from ...modes import choose_mode
from ..words import Words
from .arguments import (
    Received,
    column_major,
    require_event,
    require_handle,
    require_same,
    taken_apart,
    with_biases,
)
from .handle import ElasticEvent, EPHandle

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Dispatched: TypeAlias = "tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, ElasticEvent]"
Combined: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, ElasticEvent]"

_WORDS = Words(rows="x", max_tokens="num_max_tokens_per_rank")


class Operations:
    """What ``ElasticBuffer`` does with tokens. Its constructor sets what is named here."""

    core: Core
    rank_idx: int
    num_ranks: int
    num_scaleup_ranks: int
    num_max_tokens_per_rank: int
    _has_ll: bool
    _wire_dtype: torch.dtype | None

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Sends every token to the ranks of its experts, once a rank. Collective. T tokens, K choices, L local experts.

        Args:
            x: [T, H] contiguous, rows a multiple of 16 bytes; or a pair of it and the scales [T, S], of any dtype and
                strides.
            topk_idx: [T, K] int64 or int32, -1 for no choice. topk_weights: [T, K] float32.
            cumulative_local_expert_recv_stats: int32 [L], to which the rows of each expert are added.
            num_experts: of all ranks. num_max_tokens_per_rank: M, equal on all ranks; by default the buffer's.
            expert_alignment: the experts' rows begin at multiples of it (``do_expand``); counts are rounded up to it.
            num_sms: in high throughput, as many on all ranks; 0 chooses. num_qps: accepted.
            previous_event: the operation waits for it instead of for the current stream.
            previous_event_before_epilogue: the operation waits for it as well.
            async_with_compute_stream: it runs on ``get_comm_stream()``, and the event says when it is done.
            allocate_on_comm_stream: accepted; results belong to the stream that the operation runs on.
            handle: of an earlier dispatch, whose routes x takes again; topk_idx is not given then, topk_weights may be.
            do_handle_copy: the handle has a copy of topk_idx.
            do_cpu_sync: the host waits for the sizes, and results have them. Otherwise they have R * M rows (with
                ``do_expand`` R * M * min(K, L) and padding), and a CUDA graph may hold the call. By default True
                without a handle; not with one.
            do_expand: a row for each choice, those of an expert together.
            do_zero_padding: with ``do_expand``: rows that do not exist are zeroed.
            use_tma_aligned_col_major_sf: scales are column-major, columns multiples of 16 bytes apart.

        Returns:
            recv_x: [N, H] by (source rank, token), inside an expert with ``do_expand``; or a pair with scales [N, S].
            recv_topk_idx: [N, K] local ids, -1 for experts of other ranks; None with ``do_expand``.
            recv_topk_weights: [N, K], or with ``do_expand`` [N]; None without topk_weights.
            handle: for combine and cached dispatches. event: with ``async_with_compute_stream`` something to wait for,
            else ``event.event`` is None.

        Raises: ValueError, UsageError, TimeoutError, MismatchError as ``nccl_ep.dispatch``.

        Source: DeepEP V2's method of that name.
        """
        require_bools(
            async_with_compute_stream=async_with_compute_stream, allocate_on_comm_stream=allocate_on_comm_stream,
            do_handle_copy=do_handle_copy, do_cpu_sync=do_cpu_sync, do_expand=do_expand,
            do_zero_padding=do_zero_padding, use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )  # fmt: skip
        require_int32(num_sms=num_sms, num_qps=num_qps)
        require_event(previous_event=previous_event, previous_event_before_epilogue=previous_event_before_epilogue)
        if do_zero_padding and not do_expand:
            raise ValueError("do_zero_padding is set and do_expand is not: only expanded rows have padding")
        rows, scales = taken_apart(x)
        made: list[Any] = []

        def call() -> tuple[Any, ...]:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            if handle is None:
                received = self._dispatch_new(
                    rows, scales, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, expert_alignment,
                    num_sms, do_handle_copy, do_cpu_sync is None or bool(do_cpu_sync), do_expand, do_zero_padding,
                )  # fmt: skip
            else:
                received = self._dispatch_again(rows, scales, topk_weights, handle, num_sms, do_zero_padding)
            made.append(received)
            stats = cumulative_local_expert_recv_stats
            if stats is not None:
                self._add_counts(stats, received.handle)
            if received.scales is not None and use_tma_aligned_col_major_sf:
                received.scales = column_major(received.scales)
            return received.tensors()

        if handle is not None:
            require_same(
                handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand
            )
        given = (rows, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats)
        try:
            _, event = run_on_comm_stream(self.core, call, given, async_with_compute_stream, previous_event)
        except (TypeError, ValueError) as error:
            raise _WORDS.told(error) from None
        received: Received = made[0]
        if handle is None:
            received.handle._event = event.event
        recv_x = received.rows if received.scales is None else (received.rows, received.scales)
        return recv_x, received.topk_idx, received.weights, received.handle, ElasticEvent(event)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Adds up the rows of every token, as they are, and returns them home. Collective.

        Args:
            x: [N, H] bf16 (or fp16, fp32), contiguous, for the rows of the dispatch.
            handle: of ``dispatch``, of this buffer.
            topk_weights: float32 [N, K], or [N] for expanded rows: they go home as well.
            bias: one or two tensors [T, H] of x's dtype. For flat rows they are added first; for expanded rows to the
                sum, once it was rounded.
            num_sms: 0: that of the dispatch. The others: as in ``dispatch``.

        Returns: combined_x [T, H] of x's dtype; combined_topk_weights [T, K] float32 or None; event.

        Raises: as ``dispatch``; UsageError also for a handle of another buffer.

        Source: DeepEP V2's method of that name.
        """
        require_bools(
            async_with_compute_stream=async_with_compute_stream, allocate_on_comm_stream=allocate_on_comm_stream
        )
        require_int32(num_sms=num_sms, num_qps=num_qps)
        require_event(previous_event=previous_event, previous_event_before_epilogue=previous_event_before_epilogue)
        require_handle(handle)
        core = handle._of(self.core)
        require_tensors(x=x)
        biases = biases_of(bias)
        require_on(self.core._seq, ("x", "topk_weights"), (x, topk_weights))
        require_on(self.core._seq, [f"bias {i}" for i in range(len(biases))], biases)
        if len(biases) > 2:
            raise ValueError(f"{len(biases)} biases, at most 2")
        sms = 0 if core.mode == "ll" else num_sms or handle.num_sms

        def call() -> tuple[torch.Tensor, ...]:
            if previous_event_before_epilogue is not None:
                previous_event_before_epilogue.current_stream_wait()
            if handle.do_expand:
                summed = combine(x, core, weights=None, wire_dtype=self._wire_dtype, num_sms=sms)
                if biases:
                    summed = with_biases(summed, biases)
                return (summed,) if topk_weights is None else (summed, combine_weights(topk_weights, core))
            summed = combine(x, core, bias=biases or None, num_sms=sms)
            if topk_weights is None:
                return (summed,)
            # Rows of their own, of at least 16 bytes.
            padded = torch.nn.functional.pad(topk_weights, (0, -core.topk % 4)).contiguous()
            return summed, combine(padded, core, num_sms=sms)[:, : core.topk].contiguous()

        require_tensors(**{f"bias {i}": each for i, each in enumerate(biases)})
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}, must be [rows, hidden]")
        if topk_weights is not None:
            shape = (x.shape[0],) if handle.do_expand else (x.shape[0], core.topk)
            if topk_weights.dtype != torch.float32 or topk_weights.shape != shape:
                raise ValueError(
                    f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}, must be torch.float32 "
                    f"{list(shape)} for these rows"
                )
        kept = (x, topk_weights, *biases, core.tensor, core.slots)
        try:
            made, event = run_on_comm_stream(self.core, call, kept, async_with_compute_stream, previous_event)
        except (TypeError, ValueError) as error:
            raise _WORDS.told(error) from None
        return made[0], made[1] if topk_weights is not None else None, ElasticEvent(event)

    # ---- From arguments to the core's

    def _dispatch_new(
        self, rows: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None, num_experts: int | None, max_tokens: int | None, alignment: int | None,
        num_sms: int, copies: bool, is_exact: bool, do_expand: bool, zero_padding: bool,
    ) -> Received:  # fmt: skip
        require_tensors(topk_idx=topk_idx)
        assert topk_idx is not None
        require_int32(num_experts=num_experts, expert_alignment=1 if alignment is None else alignment)
        assert num_experts is not None
        alignment = 1 if alignment is None else alignment
        if alignment < 1:
            raise ValueError(f"expert_alignment is {alignment}, must be at least 1")
        mode = "ht" if is_exact else self._mode_of(rows, topk_idx, max_tokens)
        out = dispatch(
            rows, topk_idx, topk_weights, buffer=self.core, num_experts=num_experts, mode=mode,
            layout="packed" if do_expand else "flat", max_tokens=max_tokens, capacity="exact" if is_exact else None,
            expert_alignment=alignment if do_expand else 1, scales=scales, zero_padding=zero_padding,
            num_sms=num_sms if mode == "ht" else 0,
        )  # fmt: skip
        ids = topk_idx.clone() if copies else topk_idx
        handle = EPHandle(
            out, ids, do_expand=do_expand, expert_alignment=alignment, num_sms=num_sms, rank=self.rank_idx,
            domain_size=self.num_scaleup_ranks,
        )  # fmt: skip
        if is_exact:
            counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
            handle.num_recv_tokens_per_expert_list = [-(-count // alignment) * alignment for count in counts]
        return Received.of(out, handle, topk_weights is not None)

    def _mode_of(self, rows: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int | None) -> Mode:
        """As ``mode="auto"`` has it; known beforehand, as num_sms is for high throughput alone."""
        most, row_bytes = max_tokens or self.num_max_tokens_per_rank, rows.shape[-1] * rows.element_size()
        if not self._has_ll or most > (self.core.ll_max_tokens or 0):
            return "ht"
        return choose_mode(most, row_bytes, topk_idx.shape[-1], self.num_ranks, None)

    def _dispatch_again(
        self, rows: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None, handle: EPHandle,
        num_sms: int, zero_padding: bool,
    ) -> Received:  # fmt: skip
        core = handle._of(self.core)
        num_sms = num_sms or handle.num_sms
        if core.mode == "ht" and topk_weights is None:
            moved = dispatch_cached(rows, core, scales=scales, zero_padding=zero_padding, num_sms=num_sms)
            return Received(moved.x, moved.scales, handle._recv_topk_idx, None, handle)
        # The same ids give the same places.
        out = dispatch(
            rows, handle.topk_idx, topk_weights, buffer=self.core, num_experts=handle.num_experts, mode=core.mode,
            layout="packed" if handle.do_expand else "flat", max_tokens=core.max_tokens, capacity=core.capacity,
            expert_alignment=core.alignment, scales=scales, zero_padding=zero_padding,
            num_sms=num_sms if core.mode == "ht" else 0,
        )  # fmt: skip
        return Received.of(out, handle, topk_weights is not None)

    def _add_counts(self, stats: torch.Tensor, handle: EPHandle) -> None:
        require_on(self.core._seq, ("cumulative_local_expert_recv_stats",), (stats,))
        counts = handle.num_unaligned_recv_tokens_per_expert
        if stats.dtype != torch.int32 or stats.shape != counts.shape:
            raise ValueError(
                f"cumulative_local_expert_recv_stats is {stats.dtype} {list(stats.shape)}, must be torch.int32 "
                f"{list(counts.shape)}"
            )
        stats.add_(counts)
