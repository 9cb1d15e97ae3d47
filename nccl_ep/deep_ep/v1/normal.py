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
from ...checks import (
    MAX_INT32,
    MAX_TOPK,
    biases_of,
    error_of,
    require_bools,
    require_int32,
    require_on,
    require_tensors,
)
from ...errors import EpError, OverflowError, TimeoutError, UsageError
from ...events import EventHandle, EventOverlap, run_on_comm_stream
from ...room import HtSizes
from .config import Config, bytes_for_tokens, sizes_for_bytes, tokens_that_fit
from .handle import NormalHandle, Rows, require_payload
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
        made: TokenLayout = self._run(
            _C.get_dispatch_layout, (self, self.core._newest_seq, topk_idx, num_experts),
            (topk_idx,), previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip
        return made

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
        num_sms = self.num_sms if config is None else _num_sms_of(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("topk_idx or topk_weights given with a handle: a cached dispatch moves x alone")
            moved: Dispatched = self._run(
                _C.normal_dispatch_cached,
                (self, self.core._newest_seq, x, handle, expert_alignment, num_worst_tokens, num_sms),
                (x, handle), previous_event, async_finish, allocate_on_comm_stream,
            )  # fmt: skip
            return moved
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights are given together, or neither is")
        arguments = (
            x, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment,
            num_worst_tokens, num_sms,
        )  # fmt: skip
        send = self._dispatch
        if topk_idx is None:
            self._check_by_ranks(*arguments)
            send = self._dispatch_by_ranks
        made: tuple[Any, ...] = self._run(
            send, arguments, arguments, previous_event, async_finish, allocate_on_comm_stream
        )
        if self.on_overflow == "raise" and num_worst_tokens:
            self._require_all_fitted(made[-2], num_worst_tokens, made[-1])
        dispatched: Dispatched = made[:-2] + made[-1:]
        return dispatched

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
        num_sms = self.num_sms if config is None else _num_sms_of(config)
        biases = None if bias is None else [each for each in biases_of(bias) if each is not None]
        made: Combined = self._run(
            _C.normal_combine, (self, self.core._newest_seq, x, handle, topk_weights, biases, num_sms),
            (x, topk_weights, biases, handle), previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip
        return made

    # ---- How they run

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], given: tuple[Any, ...], previous: Previous,
        is_async: bool, allocates: bool,
    ) -> Any:  # fmt: skip
        """What ``function(*arguments)`` returns, of which the last is the event. given: its tensors."""
        try:
            if previous is None and is_async is False and allocates is False:
                return function(*arguments)
            _check_streams(previous, is_async, allocates)
            call = functools.partial(function, *arguments)
            made, event = run_on_comm_stream(self, call, given, is_async, previous)
        except EpError:  # of growing
            raise
        except RuntimeError as error:
            raise error_of(self, error) from error
        return *made[:-1], event

    def _dispatch(self, *arguments: Any) -> tuple[Any, ...]:
        """As ``dispatch`` returns, with the info tensor before the event. arguments: as _C.normal_dispatch has them."""
        made: tuple[Any, ...] | None = None
        while made is None:  # else the window has grown, on all ranks, and nothing was sent
            made = _C.normal_dispatch(self, self.core._newest_seq, *arguments)
        return made

    def _dispatch_by_ranks(
        self, x: Rows, per_rank: torch.Tensor, is_token_in_rank: torch.Tensor, per_expert: torch.Tensor, _ids: object,
        _weights: object, alignment: int, _worst: int, num_sms: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Without top-k: a rank is one expert, and the experts' counts travel as a row for each rank."""
        ranks = torch.arange(self.num_ranks, dtype=torch.int32, device=self.device)
        ids = torch.where(is_token_in_rank, ranks, -1)
        recv_x, _, _, _, handle, info, event = self._dispatch(
            x, per_rank, is_token_in_rank, per_rank, ids, None, 1, 0, num_sms
        )
        local = per_expert.view(self.num_ranks, -1)
        counts = torch.nn.functional.pad(local, (0, -local.shape[1] % 4)).contiguous()
        one, each = torch.ones_like(ranks), torch.eye(self.num_ranks, dtype=torch.bool, device=self.device)
        told = self._dispatch(counts, one, each, one, ranks.unsqueeze(1), None, 1, self.num_ranks, num_sms)[0]
        aligned = [-(-count // alignment) * alignment for count in told[:, : local.shape[1]].sum(0).tolist()]
        return recv_x, None, None, aligned, handle, info, event

    def _require_all_fitted(self, info: torch.Tensor, num_worst_tokens: int, event: EventOverlap) -> None:
        if event.event is not None:
            event.current_stream_wait()
        if (dropped := int(info[2 * self.num_ranks])) > 0:
            raise OverflowError(
                f"{dropped} rows did not fit into num_worst_tokens {num_worst_tokens}: "
                f"{info[self.num_ranks : 2 * self.num_ranks].tolist()} came from the ranks"
            )

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
            self._fitting[key] = min(fitting, MAX_INT32 // self.num_ranks)
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

    def _refuse_tokens(self, tokens: int, row_bytes: int, topk: int, fitting: int) -> None:
        need = bytes_for_tokens(tokens, self.num_ranks, self.domain_size, row_bytes, topk)
        raise ValueError(
            f"{tokens} tokens of {row_bytes} bytes, top-{topk}, but the window of {self.name} has room for {fitting} "
            f"of each of {self.num_ranks} ranks: it takes num_nvl_bytes={need} (the size hints give them with "
            f"NCCL_EP_HINT_TOKENS={tokens} in the environment)"
        )

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
        if num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts do not divide over {self.num_ranks} ranks")
        return num_experts

    def _check_topk(
        self, num_tokens: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, is_in_rank: torch.Tensor,
        num_experts: int,
    ) -> None:  # fmt: skip
        require_on(self._seq, ("topk_idx", "topk_weights"), (topk_idx, topk_weights))
        self._check_idx(topk_idx)
        if self.device.type != "cpu" or topk_idx.shape[0] != num_tokens:  # comparing would wait for a GPU
            return
        domains = self.num_ranks // self.domain_size
        made = _ops.token_layout.default(topk_idx, self.num_ranks, domains, num_experts)[1]
        wrong = (made != is_in_rank).nonzero()
        if len(wrong):
            token, rank = wrong[0].tolist()
            raise ValueError(
                f"is_token_in_rank[{token}, {rank}] is {bool(is_in_rank[token, rank])}, but token {token} chose "
                f"experts {topk_idx[token].tolist()} of {num_experts}: topk_idx is what routes"
            )

    def _check_by_ranks(
        self, x: Rows, per_rank: torch.Tensor | None, is_token_in_rank: torch.Tensor | None,
        per_expert: torch.Tensor | None, _ids: object, _weights: object, alignment: int, num_worst_tokens: int,
        _num_sms: int,
    ) -> None:  # fmt: skip
        """Of a dispatch without top-k."""
        require_payload(self, x)
        _check_sizes(alignment, num_worst_tokens)
        if num_worst_tokens != 0:
            raise ValueError(f"num_worst_tokens is {num_worst_tokens}: not negative, and with topk_idx only")
        if per_rank is None or is_token_in_rank is None or per_expert is None:
            raise ValueError(
                "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert must be given without a handle: "
                "get_dispatch_layout returns them"
            )
        rows = x[0] if isinstance(x, (tuple, list)) else x
        self._check_layout(rows.shape[0], per_rank, is_token_in_rank, per_expert)
        if self.num_ranks > MAX_TOPK:
            raise ValueError(f"without topk_idx at most {MAX_TOPK} ranks, these are {self.num_ranks}")

    @staticmethod
    def _check_idx(topk_idx: torch.Tensor) -> None:
        require_tensors(topk_idx=topk_idx)
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"topk_idx is {topk_idx.dtype} {list(topk_idx.shape)}, must be torch.int64 or torch.int32 "
                "[tokens, top-k]"
            )


def _num_sms_of(config: object) -> int:
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}, must be a Config")
    return config.num_sms


def _check_sizes(alignment: int, num_worst_tokens: int) -> None:
    require_int32(expert_alignment=alignment, num_worst_tokens=num_worst_tokens)
    if alignment < 1:
        raise ValueError(f"expert_alignment is {alignment}, must be at least 1")


def _check_streams(previous: Previous, is_async: bool, allocate_on_comm_stream: bool) -> None:
    if previous is not None and not hasattr(previous, "current_stream_wait"):
        raise TypeError(
            f"previous_event is a {type(previous).__name__}, must be what an operation returned, or capture()"
        )
    require_bools(async_finish=is_async, allocate_on_comm_stream=allocate_on_comm_stream)
    if allocate_on_comm_stream and (previous is None or not is_async):
        raise ValueError("allocate_on_comm_stream needs previous_event and async_finish")
