"""DeepEP's normal mode, over high throughput. docs/deepep.md says what is the same and what differs.

The handle that callers hold is DeepEP's tuple, all tensors, in its order. Where DeepEP has the prefix sums of its
channels, which do not exist here, it holds our route, and the numbers of the dispatch as the shape of an empty tensor:
so that no number has to be read back from a GPU, and a copy of every tensor is as good as the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ... import _C
from ...checks import MAX_TOPK, biases_of, error_of, require_bools, require_int32, require_on, require_tensors
from ...config import cached_args, combine_args
from ...errors import EpError, OverflowError, TimeoutError, UsageError
from ...events import EventHandle, EventOverlap, run_on_comm_stream
from ...handle import EXACT, Handle, Layout
from ...room import HtSizes
from .config import Config, bytes_for_tokens, sizes_for_bytes, tokens_that_fit
from .handle import NormalHandle, NormalPayload, Route, Rows
from .view import View

Previous: TypeAlias = "EventOverlap | EventHandle | None"
TokenLayout: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]"
Dispatched: TypeAlias = (
    "tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]"
)
Combined: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, EventOverlap]"

_ops = torch.ops.nccl_ep


class NormalMethods(View):
    """What ``deep_ep.Buffer`` has of DeepEP's normal mode."""

    # ---- Operations

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> TokenLayout:
        """Who gets what of this rank's tokens. Not collective; T tokens, R ranks, E ``num_experts``.

        Args:
            topk_idx: [T, K] int64 or int32; -1, or any id that is no expert, is no choice.
            previous_event, async_finish, allocate_on_comm_stream: as in ``dispatch``.

        Returns:
            num_tokens_per_rank: int32 [R] tokens with an expert of each rank.
            num_tokens_per_rdma_rank: the same of each domain of ranks that share memory; None if all share it.
            num_tokens_per_expert: int32 [E] choices of each expert.
            is_token_in_rank: bool [T, R].
            event: with ``async_finish`` something to wait for, else ``event.event`` is None.

        Raises: ValueError for tensors or sizes that cannot be served.

        Source: DeepEP's method of that name.
        """
        if previous_event is None and async_finish is False and allocate_on_comm_stream is False:
            try:
                eager: TokenLayout | None = _C.get_dispatch_layout_eager(self._seq, topk_idx, num_experts)
            except RuntimeError as error:
                raise error_of(self, error) from error
            if eager is not None:
                return eager
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        require_on(self._seq, ("topk_idx",), (topk_idx,))
        _check_idx(topk_idx)
        self._check_experts(num_experts)
        (counts, is_in_rank), event = self._run(
            lambda: self._layout_of(topk_idx, num_experts), (topk_idx,), async_finish, previous_event
        )
        domains = self.num_ranks // self.domain_size
        sizes = (self.num_ranks, domains if domains > 1 else 0, num_experts)
        per_rank, per_domain, per_expert = counts.split_with_sizes(sizes)
        return per_rank, per_domain if domains > 1 else None, per_expert, is_in_rank, event

    def dispatch(
        self,
        x: Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Sends every token to the ranks of its experts, once a rank. Collective.

        Args:
            x: [T, H] contiguous, rows a multiple of 16 bytes; or a pair of it and the scales [T, S] (or [T]), of any
                dtype and strides. bf16, fp16 and fp32 are numbers, any other dtype travels bit for bit.
            handle: of an earlier dispatch, whose routes the rows take again (cached mode); neither top-k nor counts
                are given then.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of ``get_dispatch_layout``. Their shapes give
                R and E; ``is_token_in_rank`` routes where there is no ``topk_idx`` (up to 32 ranks).
            num_tokens_per_rdma_rank: accepted.
            topk_idx: [T, K] int64 or int32, -1 for no choice. topk_weights: [T, K] float32. Both or neither.
            expert_alignment: the list's counts are rounded up to a multiple of it; rows are not padded.
            num_worst_tokens: the rows of the results, however many come: no wait of the host, and capturable. More
                than that are dropped and counted in ``buffer.stats()`` (or raise, as ``on_overflow`` says).
            config: of its ``num_sms``; by default ``Buffer.num_sms``.
            previous_event: the operation waits for it on the buffer's own stream, instead of for the current stream.
            async_finish: the operation runs on ``get_comm_stream()``, and the event says when it is done. (The host
                waits for the sizes all the same, without ``num_worst_tokens``.)
            allocate_on_comm_stream: accepted with the other two; what such an operation returns belongs to that stream
                in any case.

        Returns:
            recv_x: [N, H], by (source rank, token), or the pair of it and the scales [N, S], contiguous.
            recv_topk_idx: [N, K] of topk_idx's dtype: local ids, -1 for experts of other ranks. recv_topk_weights:
                [N, K] float32, 0 there. Both None without ``topk_idx``.
            num_recv_tokens_per_expert_list: L ints, rounded up; empty with ``num_worst_tokens``.
            handle: for ``combine`` and cached dispatches; all tensors, rank_prefix_matrix int32 [R, R] the first: rows
                from ranks up to the first index at the second.
            event: with ``async_finish`` something to wait for, else ``event.event`` is None.
            Cached: (recv_x, None, None, None, None, event).

        Where the window has no room for the tokens of a rank, all ranks together add another window, which
        ``buffer.stats()`` counts. With ``num_worst_tokens`` the ranks exchange no counts first: then it is a ValueError
        with the bytes that suffice.

        Raises: ValueError, UsageError, TimeoutError, MismatchError as ``nccl_ep.dispatch``; SystemError if there is no
        memory to grow.

        Source: DeepEP's method of that name.
        """
        if previous_event is None and async_finish is False and allocate_on_comm_stream is False:
            eager: Dispatched | None = self._dispatch_eager(
                x, handle, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
                expert_alignment, num_worst_tokens, config,
            )  # fmt: skip
            if eager is not None:
                return eager
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        payload = NormalPayload.of(self, x)
        num_sms = self._num_sms_of(config)
        require_int32(expert_alignment=expert_alignment, num_worst_tokens=num_worst_tokens)
        if expert_alignment < 1:
            raise ValueError(f"expert_alignment is {expert_alignment}, must be at least 1")
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("topk_idx or topk_weights given with a handle: a cached dispatch moves x alone")
            rows, event = self._dispatch_cached(payload, Route.of(self, handle), num_sms, async_finish, previous_event)
            return rows, None, None, None, None, event
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError(
                "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert must be given without a handle: "
                "get_dispatch_layout returns them"
            )
        if num_worst_tokens < 0 or (num_worst_tokens > 0 and topk_idx is None):
            raise ValueError(f"num_worst_tokens is {num_worst_tokens}: not negative, and with topk_idx only")
        num_experts = self._check_layout(
            payload.rows.shape[0], num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        )
        self._check_topk(payload.rows.shape[0], topk_idx, topk_weights, is_token_in_rank, num_experts)

        def call() -> tuple[Any, ...]:
            return self._dispatch_new(
                payload, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, num_experts,
                num_worst_tokens or EXACT, num_sms,
            )  # fmt: skip

        given = (payload.rows, payload.scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        received, event = self._run(call, given, async_finish, previous_event)
        rows, scales, recv_idx, recv_weights, info, counts, *made = received
        if self.on_overflow == "raise" and num_worst_tokens:
            self._require_all_fitted(info, num_worst_tokens, event)
        per_expert = [-(-count // expert_alignment) * expert_alignment for count in counts.tolist()]
        recv_x = payload.as_given(rows, scales)
        if topk_idx is None:
            return recv_x, None, None, per_expert, tuple(made), event
        return recv_x, recv_idx, recv_weights, per_expert, tuple(made), event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Adds up the ranks' rows of every token, as they are, and returns them home. Collective.

        Args:
            x: [N, H] bf16 (or fp16, fp32), for the rows of the dispatch.
            handle: of ``dispatch``, or a tuple of the same elements, or of copies of them.
            topk_weights: [N, K] float32, added up over the ranks likewise, each of the K by itself.
            bias: one or two tensors [T, H] of x's dtype, added first.
            config, previous_event, async_finish, allocate_on_comm_stream: as in ``dispatch``.

        Returns: combined_x [T, H] of x's dtype; combined_topk_weights [T, K] float32 or None; event as in ``dispatch``.
        Sums are in float32, the ranks in order.

        Raises: as ``dispatch``.

        Source: DeepEP's method of that name.
        """
        if previous_event is None and async_finish is False and allocate_on_comm_stream is False and bias is None:
            try:
                eager: Combined | None = _C.normal_combine_eager(
                    self.core._newest_seq, self._fitting, x, handle, topk_weights, self._eager_sms(config)
                )
            except RuntimeError as error:
                raise error_of(self, error) from error
            if eager is not None:
                return eager
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        route = Route.of(self, handle)
        num_sms = self._num_sms_of(config)
        biases = [each for each in biases_of(bias) if each is not None]
        require_on(self._seq, ("x", "topk_weights"), (x, topk_weights))
        require_on(self._seq, [f"bias {i}" for i in range(len(biases))], biases)
        num_rows = route.src_idx.shape[0]
        if x is None or x.dim() != 2 or x.shape[0] != num_rows:
            shape = "None" if x is None else list(x.shape)
            raise ValueError(f"x has shape {shape}, must be [{num_rows}, hidden] for the rows of the handle")
        if topk_weights is not None and (
            topk_weights.shape != (num_rows, route.topk) or topk_weights.dtype != torch.float32
        ):
            raise ValueError(
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}, must be torch.float32 "
                f"[{num_rows}, {route.topk}]"
            )

        def call() -> tuple[torch.Tensor, ...]:
            combined = self._combine_rows(x, route, biases, num_sms)
            if topk_weights is None:
                return (combined,)
            # Rows of their own: a combine of scalars would take those of the experts' owners only.
            padded = torch.nn.functional.pad(topk_weights, (0, -route.topk % 4)).contiguous()
            return combined, self._combine_rows(padded, route, [], num_sms)[:, : route.topk].contiguous()

        made, event = self._run(call, (x, topk_weights, *biases, *handle), async_finish, previous_event)
        return made[0], made[1] if topk_weights is not None else None, event

    # ---- From arguments to ops

    def _dispatch_eager(
        self, x: Any, handle: Any, per_rank: Any, is_token_in_rank: Any, per_expert: Any, topk_idx: Any,
        topk_weights: Any, alignment: Any, num_worst_tokens: Any, config: Any,
    ) -> Any:  # fmt: skip
        """The operation in one call, or None (``nccl_ep.eager``)."""
        if self.on_overflow == "raise":
            return None
        num_sms = self._eager_sms(config)
        seq = self.core._newest_seq
        try:
            if handle is not None:
                if topk_idx is not None or topk_weights is not None or alignment != 1 or num_worst_tokens != 0:
                    return None
                return _C.normal_dispatch_cached_eager(seq, self._fitting, x, handle, num_sms)
            made = _C.normal_dispatch_eager(
                seq, self._fitting, x, per_rank, is_token_in_rank, per_expert, topk_idx, topk_weights, alignment,
                num_worst_tokens, num_sms,
            )  # fmt: skip
        except RuntimeError as error:
            raise error_of(self, error) from error
        if type(made) is not int:
            return made
        payload = NormalPayload.of(self, x)
        topk, row_bytes = topk_idx.shape[1], payload.row_bytes
        self._grow_for(made, self._max_tokens(per_expert.shape[0], topk, row_bytes), topk, row_bytes)
        return None

    def _eager_sms(self, config: Any) -> int | None:
        return self.num_sms if config is None else config.num_sms if type(config) is Config else None

    def _num_sms_of(self, config: Config | None) -> int:
        if config is None:
            return self.num_sms
        if not isinstance(config, Config):
            raise TypeError(f"config is a {type(config).__name__}, must be a Config")
        return config.num_sms

    def _run(
        self, call: Callable[[], tuple[Any, ...]], given: tuple[Any, ...], is_async: bool, previous: Previous
    ) -> tuple[tuple[Any, ...], EventOverlap]:
        # A compiler's CUDA graph trees want all that a capture returns in their own pool.
        in_arena = call if torch.compiler.is_compiling() else functools.partial(_C.call_with_graph_outputs, call)
        try:
            return run_on_comm_stream(self, in_arena, given, is_async, previous)
        except EpError:  # of growing
            raise
        except RuntimeError as error:
            raise error_of(self, error) from error

    def _layout_of(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of the ranks, of the domains if there are several, and of the experts; and is_token_in_rank."""
        domains = self.num_ranks // self.domain_size
        made: tuple[torch.Tensor, torch.Tensor] = _ops.token_layout.default(
            topk_idx, self.num_ranks, domains, num_experts
        )
        return made

    def _dispatch_new(
        self, payload: NormalPayload, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None,
        is_token_in_rank: torch.Tensor, per_expert: torch.Tensor, num_experts: int, capacity: int, num_sms: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Rows, scales, ids, weights, info, the experts' counts on the host, and the tensors of the handle.

        With all that looks at the op's results: the caller's stream does not wait for the operation's.
        """
        if topk_idx is None:
            topk = num_experts = self.num_ranks
            received = self._route_by_ranks(payload, is_token_in_rank, per_expert, num_sms)
        else:
            topk = topk_idx.shape[1]
            received = self._route(payload, topk_idx, topk_weights, num_experts, capacity, num_sms)
        rows, scales, recv_idx, recv_weights, info, route, slots, rank_prefix, counts = received
        src_idx = slots[: rows.shape[0], 0]
        if len(src_idx) < len(rows):  # num_worst_tokens is more than can ever come
            src_idx = torch.nn.functional.pad(src_idx, (0, len(rows) - len(src_idx)))
        max_tokens = self._max_tokens(num_experts, topk, payload.row_bytes)
        made = Route(route, src_idx, is_token_in_rank, topk, num_experts, max_tokens).as_handle(self, rank_prefix)
        return rows, scales, recv_idx, recv_weights, info, counts.cpu(), *made

    def _require_all_fitted(self, info: torch.Tensor, num_worst_tokens: int, event: EventOverlap) -> None:
        if event.event is not None:
            event.current_stream_wait()
        if (dropped := int(info[2 * self.num_ranks])) > 0:
            raise OverflowError(
                f"{dropped} rows did not fit into num_worst_tokens {num_worst_tokens}: "
                f"{info[self.num_ranks : 2 * self.num_ranks].tolist()} came from the ranks"
            )

    def _route(
        self, payload: NormalPayload, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_experts: int,
        capacity: int, num_sms: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Results as the op's; the last is the counts of the experts alone."""
        topk = topk_idx.shape[1]
        while True:
            tokens = self._max_tokens(num_experts, topk, payload.row_bytes)
            if capacity != EXACT and payload.rows.shape[0] > tokens:
                raise ValueError(self._too_many_tokens(payload, topk, tokens))
            made: tuple[torch.Tensor, ...] = _ops.ht_dispatch_deepep.default(
                self.core._newest_seq, payload.rows, payload.scales, topk_idx, topk_weights, num_experts,
                tokens, capacity, num_sms,
            )  # fmt: skip
            host_counts = made[-1]
            if capacity != EXACT or int(host_counts[0]) <= tokens:
                return *made[:-1], host_counts[1:]
            # All ranks have seen the same numbers, and nothing was sent.
            self._grow_for(int(host_counts[0]), tokens, topk, payload.row_bytes)

    def _route_by_ranks(
        self, payload: NormalPayload, is_token_in_rank: torch.Tensor, per_expert: torch.Tensor, num_sms: int
    ) -> tuple[torch.Tensor, ...]:
        """Without top-k: a rank is one expert, and the experts' counts travel as a row for each rank."""
        ranks = torch.arange(self.num_ranks, dtype=torch.int32, device=self.device)
        made = self._route(payload, torch.where(is_token_in_rank, ranks, -1), None, self.num_ranks, EXACT, num_sms)
        local = per_expert.view(self.num_ranks, -1)
        counts = NormalPayload(torch.nn.functional.pad(local, (0, -local.shape[1] % 4)).contiguous(), None)
        told = self._route(counts, ranks.unsqueeze(1), None, self.num_ranks, self.num_ranks, num_sms)
        return *made[:-1], told[0][:, : local.shape[1]].sum(0)

    def _dispatch_cached(
        self, payload: NormalPayload, route: Route, num_sms: int, is_async: bool, previous: Previous
    ) -> tuple[Rows, EventOverlap]:
        def call() -> tuple[torch.Tensor, ...]:
            made: tuple[torch.Tensor, ...] = _ops.ht_dispatch_cached.default(
                self.core._newest_seq, [payload.rows], payload.scales,
                *self._args(route, payload.row_bytes, cached_args, num_sms=num_sms),
            )  # fmt: skip
            return made

        given = (payload.rows, payload.scales, route.route, route.src_idx)
        moved, event = self._run(call, given, is_async, previous)
        return payload.as_given(moved[0], moved[1]), event

    def _combine_rows(self, rows: torch.Tensor, route: Route, biases: list[torch.Tensor], num_sms: int) -> torch.Tensor:
        route_tensor, slots, *numbers = self._args(
            route, rows.shape[1] * rows.element_size(), combine_args, out_dtype=rows.dtype, num_sms=num_sms
        )
        out: torch.Tensor = _ops.ht_combine.default(
            self.core._newest_seq, rows, None, route_tensor, slots, None, None, biases, *numbers
        )[0]
        return out

    def _args(self, route: Route, row_bytes: int, numbers_of: Callable[..., Any], **how: Any) -> tuple[Any, ...]:
        """Of a handle, as the ops take them: its tensors and what ``numbers_of`` (of ``nccl_ep.config``) gives."""
        tokens, own = route.max_tokens, route.is_token_in_rank.shape[0]
        if self.domain_size == self.num_ranks:  # else it is a size of the route
            tokens = min(tokens, self._max_tokens(route.num_experts, route.topk, row_bytes))
            if tokens < max(own, 1):
                raise ValueError(
                    f"rows of {row_bytes} bytes for {own} tokens, but the window of {self.name} has room for {tokens} "
                    "of them: those of the dispatch were narrower, so that it did not grow for these"
                )
        slots = route.src_idx[: self.num_ranks * tokens].contiguous().view(-1, 1)
        handle = Handle(
            route.route, self.core._newest_seq, own, route.topk, route.num_experts, tokens, Layout.FLAT,
            route.src_idx.shape[0], self.num_ranks, "ht", slots,
        )  # fmt: skip
        return (route.route, slots, *numbers_of(handle, **how))

    # ---- Checks

    def _max_tokens(self, num_experts: int, topk: int, row_bytes: int) -> int:
        """Tokens for which the window has room: the max_tokens of a call, the same on all ranks."""
        ht_sizes = self.core._room.ht
        if ht_sizes is None:
            self.require_usable()
            raise ValueError(
                f"{self.name} was made without room for the normal mode: give num_nvl_bytes, or make it with "
                'nccl_ep.Buffer.for_shapes(mode="ht") or "auto"'
            )
        key = (num_experts, topk, row_bytes)  # topk_weights on their way home are a row of the least size there is
        if key not in self._fitting:
            fitting = tokens_that_fit(ht_sizes, self.num_ranks, self.domain_size, *key)
            self._fitting[key] = min(fitting, (2**31 - 1) // self.num_ranks)
        return self._fitting[key]

    def _grow_for(self, tokens: int, fitting: int, topk: int, row_bytes: int) -> None:
        """Room for so many tokens of a rank, and at least for twice those that fit now: windows add up."""
        tokens = max(tokens, 2 * fitting)
        num_bytes = bytes_for_tokens(tokens, self.num_ranks, self.domain_size, row_bytes, topk)
        self._grow(sizes_for_bytes(num_bytes, self.num_ranks, self.domain_size))

    def _grow(self, ht_sizes: HtSizes) -> None:
        """Adds a window, where the tokens do not fit the existing ones. Collective."""
        core = self.core
        core.require_usable()
        if self._state.has_missed_cleaning:
            raise UsageError(
                "a rank did not come when masks were to be cleaned: the buffer cannot grow, make a new one"
            )
        try:
            core._add_window(ht_sizes)
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {self.rank} was growing {self.name} in a dispatch of DeepEP's normal mode, for which all ranks "
                f"have to add a window: {error}"
            ) from error
        self._fitting.clear()

    def _too_many_tokens(self, payload: NormalPayload, topk: int, fitting: int) -> str:
        tokens = payload.rows.shape[0]
        need = bytes_for_tokens(tokens, self.num_ranks, self.domain_size, payload.row_bytes, topk)
        return (
            f"{tokens} tokens of {payload.row_bytes} bytes, top-{topk}, but the window of {self.name} has room for "
            f"{fitting} of each of {self.num_ranks} ranks: it takes num_nvl_bytes={need} (the size hints give them "
            f"with NCCL_EP_HINT_TOKENS={tokens} in the environment)"
        )

    def _check_experts(self, num_experts: int) -> None:
        require_int32(num_experts=num_experts)
        if num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts do not divide over {self.num_ranks} ranks")

    def _check_layout(
        self, num_tokens: int, per_rank: torch.Tensor, is_in_rank: torch.Tensor, per_expert: torch.Tensor
    ) -> int:
        """The number of experts."""
        require_on(
            self._seq,
            ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"),
            (per_rank, is_in_rank, per_expert),
        )
        num_experts = per_expert.shape[0] if per_expert.dim() == 1 else 0
        for name, tensor, dtype, shape in (
            ("num_tokens_per_rank", per_rank, torch.int32, (self.num_ranks,)),
            ("is_token_in_rank", is_in_rank, torch.bool, (num_tokens, self.num_ranks)),
            ("num_tokens_per_expert", per_expert, torch.int32, (num_experts,)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, must be {dtype} {list(shape)}")
        self._check_experts(num_experts)
        return num_experts

    def _check_topk(
        self, num_tokens: int, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None,
        is_in_rank: torch.Tensor, num_experts: int,
    ) -> None:  # fmt: skip
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights are given together, or neither is")
        if topk_idx is None:
            if self.num_ranks > MAX_TOPK:
                raise ValueError(f"without topk_idx at most {MAX_TOPK} ranks, these are {self.num_ranks}")
            return
        require_on(self._seq, ("topk_idx", "topk_weights"), (topk_idx, topk_weights))
        _check_idx(topk_idx)
        if self.device.type != "cpu":  # comparing would wait for the device
            return
        if topk_idx.shape[0] == num_tokens:
            wrong = (self._layout_of(topk_idx, num_experts)[1] != is_in_rank).nonzero()
            if len(wrong):
                token, rank = wrong[0].tolist()
                raise ValueError(
                    f"is_token_in_rank[{token}, {rank}] is {bool(is_in_rank[token, rank])}, but token {token} chose "
                    f"experts {topk_idx[token].tolist()} of {num_experts}: topk_idx is what routes"
                )


def _check_streams(previous: Previous, is_async: bool, allocate_on_comm_stream: bool) -> None:
    if previous is not None and not hasattr(previous, "current_stream_wait"):
        raise TypeError(
            f"previous_event is a {type(previous).__name__}, must be what an operation returned, or capture()"
        )
    require_bools(async_finish=is_async, allocate_on_comm_stream=allocate_on_comm_stream)
    if allocate_on_comm_stream and (previous is None or not is_async):
        raise ValueError("allocate_on_comm_stream needs previous_event and async_finish")


def _check_idx(topk_idx: torch.Tensor) -> None:
    require_tensors(topk_idx=topk_idx)
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_idx is {topk_idx.dtype} {list(topk_idx.shape)}, must be int64 or int32 [tokens, top-k]")
