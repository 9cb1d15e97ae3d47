"""DeepEP V2's ``ElasticBuffer``: one dispatch and one combine over both modes.

Rows come flat (a token once a rank), or with ``do_expand`` packed (a row for each choice). ``do_cpu_sync`` gives exact
sizes, in high throughput. Without it sizes are the largest that can be, and small calls take low latency.
docs/migrating_from_deepep.md says what is the same and what differs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ...bootstrap import process_group_of, rendezvous_of
from ...buffer import Buffer as Core
from ...checks import (
    MAX_INT32,
    MAX_TOPK,
    biases_of,
    require_bools,
    require_int32,
    require_integers,
    require_on,
    require_tensors,
    require_timeout,
    require_within,
)
from ...choices import Mode
from ...devices import choose_device
from ...events import EventHandle, EventOverlap, run_on_comm_stream
from ...functional import combine, combine_weights, dispatch
from ...high_throughput import dispatch_cached
from ...modes import choose_mode
from ...room import Room, sizes_told
from ..v1.buffer import Buffer as V1
from ..v1.config import sizes_for_bytes
from ..words import Words
from .arguments import (
    Received,
    Shapes,
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
_SMS_ALONE = 64  # where nothing else computes
_QPS = 129
_NOT_HERE = {
    "engram": "remote memory (Engram)", "pp": "sends between pipeline stages", "agrs": "all-gather sessions",
    "all_gather": "all-gather sessions", "create_agrs": "all-gather sessions", "destroy_agrs": "all-gather sessions",
    "lb": "the exchange of redundant experts", "get_engram": "remote memory (Engram)",
    "get_pp": "sends between pipeline stages", "get_agrs": "all-gather sessions",
}  # fmt: skip


class ElasticBuffer:
    """A buffer with V2's methods over a core buffer (``core``). Making one is collective.

    Args:
        group: as ``nccl_ep.deep_ep.Buffer`` takes it; any backend.
        num_bytes: of window to reserve at least. Without the sizes below it is for high throughput alone.
        num_cpu_bytes: 0; there is no memory on hosts here.
        num_max_tokens_per_rank: tokens of a rank in a call at most, equal on all ranks; the default of ``dispatch``.
        hidden: elements of a row in bf16. num_topk: choices of a token; 0: any number up to 32.
        allow_multiple_reduction: False: with ``do_expand`` partial sums travel in float32, twice the bytes, so that a
            result is rounded once.
        prefer_overlap_with_compute: whether ``get_theoretical_num_sms`` leaves SMs for others.
        num_gpu_timeout_secs: the deadline of all waits.
        use_fp8_dispatch, deterministic, allow_hybrid_mode, sl_idx: accepted; they change nothing here. Results are
            always deterministic.
        num_allocated_qps, num_cpu_timeout_secs, explicitly_destroy: the same.
        options: ``device``, ``on_overflow`` and the other keywords of ``nccl_ep.Buffer``.

    Attributes: those arguments, and ``rank_idx``, ``num_ranks``, ``num_scaleout_ranks``, ``num_scaleup_ranks``,
    ``scaleout_rank_idx``, ``scaleup_rank_idx``, ``num_rdma_ranks``, ``num_nvlink_ranks``, ``runtime``, ``core``.

    Raises: ValueError for arguments that have no meaning here; otherwise as ``nccl_ep.Buffer``.

    Source: DeepEP V2's ``ElasticBuffer``.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **options: Any,
    ) -> None:
        require_bools(
            use_fp8_dispatch=use_fp8_dispatch, deterministic=deterministic, allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction, explicitly_destroy=explicitly_destroy,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
        )  # fmt: skip
        require_int32(
            num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps, num_cpu_timeout_secs=num_cpu_timeout_secs,
        )  # fmt: skip
        require_integers(num_bytes=num_bytes, num_cpu_bytes=num_cpu_bytes)
        require_within(0, MAX_TOPK, num_topk=num_topk)
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes is {num_cpu_bytes}, but a window has no memory on the host here")
        require_timeout(num_gpu_timeout_secs=num_gpu_timeout_secs)
        rendezvous = rendezvous_of(group)
        ranks = rendezvous.size()
        options = {"timeout": float(num_gpu_timeout_secs), **options}
        if num_max_tokens_per_rank > 0 and hidden > 0:
            device_type = choose_device(options.get("device")).type
            shapes = Shapes(
                ranks, num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction, device_type
            )  # fmt: skip
            self.num_bytes = shapes.num_bytes() if num_bytes is None else num_bytes
            spare = max(self.num_bytes - shapes.num_bytes(), 0)
            made_with = sizes_told(
                num_bytes=num_bytes, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk,
                allow_multiple_reduction=allow_multiple_reduction,
            )  # fmt: skip
            core = Core.for_shapes(rendezvous, **(shapes.arguments(spare) | options), _made_with=made_with)
        elif num_bytes is not None and num_bytes > 0:
            self.num_bytes = num_bytes
            domain = options.get("domain_size") or ranks
            ht_sizes = sizes_for_bytes(num_bytes, ranks, domain)
            made_with = sizes_told(num_bytes=num_bytes)
            room = Room(ht=ht_sizes, max_tokens=num_max_tokens_per_rank or None, made_with=made_with)
            core = Core(rendezvous, _room=room, **options)
        else:
            raise ValueError(
                f"num_bytes is {num_bytes}, num_max_tokens_per_rank {num_max_tokens_per_rank}, hidden {hidden}: "
                "give the bytes, or the other two"
            )
        core.group = process_group_of(group)
        self.core, self.group, self.device, self.name, self.runtime = (
            core, core.group, core.device, core.name, core.runtime,
        )  # fmt: skip
        self.rank_idx, self.num_ranks = core.rank, core.num_ranks
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.deterministic = prefer_overlap_with_compute, deterministic
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or _QPS
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(core.rank, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._has_ll = core._mode == "auto"
        self._wire_dtype = None if allow_multiple_reduction else torch.float32

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of the window of a buffer with these arguments on the default device, rounded up to 2 MiB. Not
        collective here.

        Raises: ValueError for sizes that no buffer has.

        Source: DeepEP V2's method of that name.
        """
        require_within(1, MAX_INT32, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden)
        require_within(0, MAX_TOPK, num_topk=num_topk)
        require_bools(
            use_fp8_dispatch=use_fp8_dispatch, allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )  # fmt: skip
        ranks = rendezvous_of(group).size()
        device_type = choose_device(None).type
        return Shapes(
            ranks, num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction, device_type
        ).num_bytes()  # fmt: skip

    # ---- Tuning and state

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs (thread blocks) for calls in high throughput: ``deep_ep.Buffer.num_sms``, or at least 64 without
        ``prefer_overlap_with_compute``. Bandwidths are accepted and change nothing. ValueError for sizes without sense.
        """
        require_int32(num_experts=num_experts, num_topk=num_topk, num_scaleout_topk=num_scaleout_topk)
        if num_experts < 1 or num_topk < 1:
            raise ValueError(f"num_experts is {num_experts}, num_topk {num_topk}, must be at least 1")
        num_sms = V1.num_sms if self.prefer_overlap_with_compute else max(V1.num_sms, _SMS_ALONE)
        if self.device.type == "cuda":
            num_sms = min(num_sms, torch.cuda.get_device_properties(self.device).multi_processor_count)
        return num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """DeepEP's number for callers that pass it on; queue pairs are NCCL's here."""
        require_int32(num_sms=num_sms)
        return min(num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Domains of ranks that share memory, and the ranks of each."""
        return self.num_ranks // self.core.domain_size, self.core.domain_size

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same."""
        return self.get_physical_domain_size()

    def get_comm_stream(self) -> Any:
        """As ``nccl_ep.Buffer.get_comm_stream``."""
        return self.core.get_comm_stream()

    @staticmethod
    def capture() -> EventHandle:
        """The present point of the current stream, for ``previous_event``."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """All ranks' streams come here before any goes on. Collective. It is a dispatch without tokens.

        use_comm_stream: on the buffer's own stream. with_cpu_sync: the host waits for the device before and after.
        """
        require_bools(use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync, sequential=sequential)
        if with_cpu_sync and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        x = torch.empty((0, 8), dtype=torch.bfloat16, device=self.device)
        ids = torch.empty((0, 1), dtype=torch.int64, device=self.device)

        def call() -> tuple[torch.Tensor, ...]:
            mode: Mode = "ll" if self._has_ll else "ht"
            out = dispatch(x, ids, buffer=self.core, num_experts=self.num_ranks, mode=mode, layout="flat", max_tokens=1)
            return out.x, out._info, out.handle.tensor

        with torch.no_grad():
            run_on_comm_stream(self.core, call, (x, ids), use_comm_stream)
        if with_cpu_sync and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """As ``nccl_ep.Buffer.check``."""
        self.core.check()

    def destroy(self) -> None:
        """Gives the window back; also without ``explicitly_destroy``. May be called twice."""
        self.core.destroy()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __getattr__(self, name: str) -> Any:
        what = next((what for start, what in _NOT_HERE.items() if name.startswith(f"{start}_") or name == start), None)
        reason = "" if what is None else f": {what} has no meaning in nccl_ep"
        raise AttributeError(f"{type(self).__name__} of nccl_ep has no {name!r}{reason}")

    # ---- Operations

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
