"""Hybrid-EP's buffer: dispatch with permutation is the packed layout, combine with its reverse is its combine.

Of what Hybrid-EP is given, the routing map (tokens by experts) is turned into choices, in the order of the experts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ...bootstrap import process_group_of, rendezvous_of
from ...buffer import Buffer as Core
from ...checks import MAX_INT32, MAX_TOPK, require_bools, require_int32, require_tensors, require_within
from ...errors import MismatchError, UsageError
from ...functional import combine, combine_weights, dispatch
from ...handle import Handle
from ...high_throughput import dispatch_cached
from ...room import sizes_told
from ..words import Words

_WORDS = Words(
    x="hidden", rows="hidden", max_tokens="num_of_tokens_per_rank", num_experts="num_of_experts",
    expert_alignment="pad_multiple", scales="scaling_factor", num_local_experts="num_of_experts_per_rank",
)  # fmt: skip

_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Choices as a map: bool [T, E], and float32 weights [T, E] or None. Ids that are no expert are left out.

    Args: topk_idx [T, K], topk_weights [T, K].

    Source: Hybrid-EP's function of that name.
    """
    require_tensors(topk_idx=topk_idx)
    _require_kinds(topk_weights=topk_weights)
    require_within(0, MAX_INT32, num_of_tokens=num_of_tokens, num_of_experts=num_of_experts)
    ids = topk_idx.long()
    at = torch.where((ids >= 0) & (ids < num_of_experts), ids, num_of_experts)  # a column that is cut off
    size = (num_of_tokens, num_of_experts + 1)
    chosen = torch.zeros(size, dtype=torch.bool, device=topk_idx.device).scatter_(1, at, True)
    if topk_weights is None:
        return chosen[:, :num_of_experts], None
    weights = torch.zeros(size, dtype=torch.float32, device=topk_idx.device).scatter(1, at, topk_weights.float())
    return chosen[:, :num_of_experts], weights[:, :num_of_experts]


def _domains_of_the_environment(ranks: int) -> dict[str, int]:
    said = os.environ.get(_DOMAIN)
    if said is None:
        return {}
    if not said.strip().isdecimal() or int(said) < 1 or ranks % int(said):
        raise ValueError(f"{_DOMAIN} is {said!r}, must be a number that divides {ranks} ranks")
    return {"domain_size": int(said)}


class HybridEPHandle:
    """The routing of ``dispatch_with_permute``. Attributes: ``tokens_per_expert`` int64 [L], padding counted;
    ``num_of_tokens_per_rank``; ``overflow_flag`` int32 [1], the rows that were dropped; ``num_permuted_tokens``.

    It may be indexed as Hybrid-EP's tuple of eleven, of which those that are parts of its protocol are None: the others
    are ``handle[7]`` tokens_per_expert, ``handle[8]`` num_of_tokens_per_rank, and ``handle[-1]`` overflow_flag.
    """

    def __init__(
        self, buffer: Core, core: Handle, topk_idx: torch.Tensor, tokens: torch.Tensor, overflow: torch.Tensor
    ) -> None:
        self.tokens_per_expert, self.overflow_flag = tokens, overflow
        self.num_of_tokens_per_rank, self.num_permuted_tokens = core.num_tokens, core.capacity
        self._buffer, self._core, self._topk_idx = buffer, core, topk_idx
        self._row_counts = {core.capacity}  # of what was given out

    def _as_tuple(self) -> tuple[Any, ...]:
        parts_of_the_protocol = (None,) * 7
        return *parts_of_the_protocol, self.tokens_per_expert, self.num_of_tokens_per_rank, None, self.overflow_flag

    def __len__(self) -> int:
        return len(self._as_tuple())

    def __getitem__(self, index: Any) -> Any:
        return self._as_tuple()[index]


class HybridEPBuffer:
    """Hybrid-EP's two calls over high throughput. Making one is collective.

    Args:
        group: as ``nccl_ep.deep_ep.Buffer`` takes it.
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts: sizes of a call at most, equal on all ranks. A call
            with larger ones makes a larger buffer, on all ranks together or on none: MismatchError at once where only
            some ranks need one. Where ranks have unequal numbers of tokens, ``num_of_tokens_per_rank`` decides.
        num_sms_dispatch_api, num_sms_combine_api: SMs; None or 0 chooses.
        use_fp8, num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute: accepted; they change nothing
            here.
        load_cached_kernels, use_shared_buffer, enable_custom_allgather, use_mnnvl: the same.
        num_of_hybrid_ep_ranks_per_nvlink_domain: the same.
        options: ``device``, ``timeout`` and the other keywords of ``nccl_ep.Buffer``. ``domain_size`` is by default
            ``NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN`` of the environment, where it is set.

    Attributes: ``group``, ``rank``, ``group_size``; ``configurer.buffer_config`` with ``hidden_dim``,
    ``max_num_of_tokens_per_rank`` and ``num_of_experts_per_rank``, the sizes of the buffer: the next dispatch obeys
    larger ones that all ranks write there; ``core``, the buffer of the next call.

    Raises: as ``nccl_ep.Buffer``; ValueError for that variable, where it is no number that divides the ranks.

    Source: Hybrid-EP's ``HybridEPBuffer``.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        **options: Any,
    ) -> None:
        require_bools(use_fp8=use_fp8)
        self.num_sms_dispatch_api = 0 if num_sms_dispatch_api is None else num_sms_dispatch_api
        self.num_sms_combine_api = 0 if num_sms_combine_api is None else num_sms_combine_api
        require_int32(num_sms_dispatch_api=self.num_sms_dispatch_api, num_sms_combine_api=self.num_sms_combine_api)
        self._rendezvous = rendezvous_of(group)
        self._options = _domains_of_the_environment(self._rendezvous.size()) | options
        self.group = process_group_of(group)
        self.rank, self.group_size = self._rendezvous.rank(), self._rendezvous.size()
        self.configurer = SimpleNamespace(buffer_config=SimpleNamespace())
        self._older: list[Core] = []
        self._make(hidden_dim, max_num_of_tokens_per_rank, num_local_experts)

    def _make(self, hidden: int, tokens: int, local_experts: int) -> None:
        """Collective."""
        require_within(
            1, MAX_INT32, hidden_dim=hidden, max_num_of_tokens_per_rank=tokens, num_local_experts=local_experts
        )
        experts = local_experts * self.group_size
        made_with = sizes_told(hidden_dim=hidden, max_num_of_tokens_per_rank=tokens, num_local_experts=local_experts)
        try:
            self.core = Core.for_shapes(
                self._rendezvous, max_tokens=tokens, hidden=hidden, topk=min(experts, MAX_TOPK), num_experts=experts,
                mode="ht", **self._options, _made_with=made_with,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise Words(hidden="hidden_dim").told(error) from None
        self.core.group = self.group
        self._sizes = hidden, tokens, local_experts
        config = self.configurer.buffer_config
        config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank = self._sizes

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: HybridEPHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, HybridEPHandle]:
        """Sends every token to its experts: a row for each choice, those of an expert together. Collective.

        Args:
            hidden: [T, H]. T may differ between the ranks up to the buffer's size, or with num_of_tokens_per_rank.
            routing_map: bool [T, E], at most 32 experts of a token. probs: float32 [T, E].
            topk_idx: int64, int32 or int16 [T, K] instead, with topk_weights [T, K] (or probs).
            num_of_experts_per_rank: L; by default the buffer's. num_of_experts: L times the ranks, if given.
            scaling_factor: [T, S], travels along with the rows.
            num_permuted_tokens: with ``non_blocking`` the rows of the results; more are dropped. With a handle the rows
                of the results, too, zeros past those of the handle; fewer only where these are no tokens' (a handle
                of a ``non_blocking`` call). A tensor on a GPU is not read, and the rows are the handle's. Otherwise the
                number is known.
            pad_multiple: the experts' rows begin at multiples of it, and padding is zeroed.
            handle: of an earlier call, whose routes the rows take again.
            non_blocking: the host does not wait, and a CUDA graph may hold the call.
            num_of_tokens_per_rank: tokens of a rank at most, equal on all ranks, in place of the buffer's size.
            use_fp8, fuse_permute_dispatch, num_dispatched_tokens, use_host_meta: accepted (the last: not
                ``non_blocking``).

        Returns: rows [N, H], probs [N] or None, scaling_factor [N, S] or None, tokens_per_expert int64 [L] with padding
        (on the host unless ``non_blocking``), handle.

        Raises: as ``nccl_ep.dispatch``; ValueError for a token with more than 32 experts (without ``non_blocking``);
        MismatchError where only some ranks need a larger buffer.

        Source: Hybrid-EP's method of that name.
        """
        require_tensors(hidden=hidden)
        require_bools(non_blocking=non_blocking, use_host_meta=use_host_meta)
        _require_kinds(
            topk_idx=topk_idx, topk_weights=topk_weights, routing_map=routing_map, probs=probs,
            scaling_factor=scaling_factor,
        )  # fmt: skip
        _require_numbers(
            num_of_experts_per_rank=num_of_experts_per_rank, num_of_experts=num_of_experts,
            num_of_tokens_per_rank=num_of_tokens_per_rank, pad_multiple=pad_multiple,
            num_permuted_tokens=num_permuted_tokens,
        )  # fmt: skip
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        if handle is not None:
            return self._dispatch_again(
                hidden, topk_idx, topk_weights, probs, scaling_factor, num_permuted_tokens, handle
            )
        local = num_of_experts_per_rank or self.configurer.buffer_config.num_of_experts_per_rank
        experts = local * self.group_size
        if num_of_experts is not None and num_of_experts != experts:
            raise ValueError(f"num_of_experts is {num_of_experts}, must be {local} on each of {self.group_size} ranks")
        self._grow_for(hidden, num_of_tokens_per_rank, local)
        if routing_map is not None:
            topk_idx, topk_weights = _choices_of(routing_map, probs, hidden.shape[0], experts, not non_blocking)
        elif topk_idx is None:
            raise ValueError("routing_map and topk_idx are both None: one of them routes")
        elif probs is not None:
            topk_weights = _weights_of(probs, topk_idx, experts)
        if topk_idx.dtype == torch.int16:
            topk_idx = topk_idx.int()
        if non_blocking and num_permuted_tokens is None:
            raise ValueError("non_blocking is set, and num_permuted_tokens is not: results have as many rows")
        alignment = pad_multiple or 1
        with self._explaining(hidden.shape[0]):
            out = dispatch(
                hidden, topk_idx, None if topk_weights is None else topk_weights.float(), buffer=self.core,
                num_experts=experts, mode="ht", layout="packed", expert_alignment=alignment, scales=scaling_factor,
                max_tokens=None if num_of_tokens_per_rank is None else max(num_of_tokens_per_rank, 1),
                capacity=int(num_permuted_tokens) if non_blocking and num_permuted_tokens is not None else "exact",
                zero_padding=alignment > 1 or non_blocking, num_sms=self.num_sms_dispatch_api,
            )  # fmt: skip
        assert out.offsets is not None
        tokens = (out.counts + (alignment - 1)) // alignment * alignment
        tokens = tokens.to(torch.int64) if non_blocking else tokens.to("cpu", torch.int64)
        made = HybridEPHandle(self.core, out.handle, topk_idx, tokens, out.overflow)
        return out.x, None if topk_weights is None else out.weights, out.scales, tokens, made

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridEPHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adds up the rows of every token, as they are, and returns them home. Collective.

        Args: hidden [N, H] and probs [N] for the rows of ``handle``, or for as many as a replayed dispatch has given;
            the others are accepted.

        Returns: tokens [T, H], and float32 [T, E], the probs of each token's experts, or None.

        Raises: as ``nccl_ep.combine``.

        Source: Hybrid-EP's method of that name.
        """
        core = self._of(handle)
        assert handle is not None
        require_tensors(hidden=hidden)
        _require_kinds(probs=probs)
        if hidden.dim() == 2 and hidden.shape[0] in handle._row_counts:
            hidden = _with_rows(hidden, core.capacity)
        try:
            tokens = combine(hidden, core, weights=None, num_sms=self.num_sms_combine_api)
        except (TypeError, ValueError) as error:
            raise _WORDS.told(error) from None
        if probs is None:
            return tokens, None
        if probs.dim() == 1 and probs.shape[0] in handle._row_counts:
            probs = _with_rows(probs, core.capacity)
        home = combine_weights(probs.float(), core)
        return tokens, indices_to_map(handle._topk_idx, home, core.num_tokens, core.num_experts)[1]

    def destroy(self) -> None:
        """Gives the windows back. May be called twice."""
        for buffer in (*self._older, self.core):
            buffer.destroy()

    def __enter__(self) -> HybridEPBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # ---- From arguments to the core's

    def _grow_for(self, hidden: torch.Tensor, tokens: int | None, local_experts: int) -> None:
        """A larger buffer where the sizes of a call, or those asked for, do not fit. Handles keep the old."""
        if hidden.dim() != 2:
            raise ValueError(f"hidden has shape {list(hidden.shape)}, must be [tokens, hidden]")
        own = hidden.shape[0]
        if tokens is not None:
            require_within(own, MAX_INT32, num_of_tokens_per_rank=tokens)
        bf16_hidden = -(-hidden.shape[1] * hidden.element_size() // 2)
        config = self.configurer.buffer_config
        asked = config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank
        need = bf16_hidden, own if tokens is None else tokens, local_experts
        sizes = [max(each) for each in zip(need, asked, self._sizes, strict=True)]
        if sizes != list(self._sizes):
            with self._explaining(own):
                self._tell_that_it_grows()
            everyones = self._rendezvous.allgather(json.dumps(sizes).encode(), self.core._timeout)
            self._older.append(self.core)
            self._make(*(max(each) for each in zip(*map(json.loads, everyones), strict=True)))

    def _tell_that_it_grows(self) -> None:
        """Says so in the buffer that there is: an operation of sizes that no other has. MismatchError at once where a
        rank is in another, there as here."""
        none, ids = torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(0, 1, dtype=torch.int64)
        scales = torch.empty(0, 1, dtype=torch.uint8)
        none, ids, scales = (each.to(self.core.device) for each in (none, ids, scales))
        dispatch(
            none, ids, buffer=self.core, num_experts=self.group_size, mode="ht", layout="packed", scales=scales,
            max_tokens=1, capacity="exact",
        )  # fmt: skip

    @contextlib.contextmanager
    def _explaining(self, tokens: int) -> Iterator[None]:
        try:
            yield
        except MismatchError as error:
            most = self._sizes[1]
            raise MismatchError(
                f"{error}. Rank {self.rank} has {tokens} tokens, and the buffer is for {most}. A larger one is made by "
                "all ranks or by none: where they have unequal numbers of tokens, give num_of_tokens_per_rank, equal "
                "on all of them"
            ) from error
        except (TypeError, ValueError) as error:
            raise _WORDS.told(error) from None

    def _dispatch_again(
        self, hidden: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None,
        probs: torch.Tensor | None, scales: torch.Tensor | None, rows: int | torch.Tensor | None,
        handle: HybridEPHandle,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, HybridEPHandle]:  # fmt: skip
        core = self._of(handle)
        count = _rows_asked_for(rows, handle)
        handle._row_counts.add(count)
        if probs is not None:
            topk_weights = _weights_of(probs, handle._topk_idx, core.num_experts)
        made: tuple[torch.Tensor | None, ...]
        if topk_weights is None:
            moved = dispatch_cached(hidden, core, scales=scales, zero_padding=True, num_sms=self.num_sms_dispatch_api)
            made = moved.x, None, moved.scales
        else:
            out = dispatch(
                hidden, handle._topk_idx, topk_weights.float(), buffer=handle._buffer, num_experts=core.num_experts,
                mode="ht", layout="packed", max_tokens=core.max_tokens, capacity=core.capacity,
                expert_alignment=core.alignment, scales=scales, zero_padding=True, num_sms=self.num_sms_dispatch_api,
            )  # fmt: skip
            made = out.x, out.weights, out.scales
        given = (None if each is None else _with_rows(each, count) for each in made)
        return *given, handle.tokens_per_expert, handle  # type: ignore[return-value]

    def _of(self, handle: HybridEPHandle | None) -> Handle:
        if not isinstance(handle, HybridEPHandle):
            raise TypeError(f"handle is a {type(handle).__name__}, must be what dispatch_with_permute returned")
        if handle._buffer is not self.core and all(handle._buffer is not each for each in self._older):
            raise UsageError(f"the handle is of buffer {handle._buffer.name}, not of this one")
        return handle._core


def _require_kinds(**tensors: object) -> None:
    require_tensors(**{name: each for name, each in tensors.items() if each is not None})


def _require_numbers(**numbers: object) -> None:
    """Of 32 bits; one on a GPU is not read."""
    for name, each in numbers.items():
        if each is not None and not (isinstance(each, torch.Tensor) and each.is_cuda):
            require_int32(**{name: each})


def _rows_asked_for(rows: int | torch.Tensor | None, handle: HybridEPHandle) -> int:
    """Of a replayed dispatch: num_permuted_tokens. A number on a GPU is not waited for: the handle's."""
    own = handle._core.capacity
    if rows is None or (isinstance(rows, torch.Tensor) and rows.is_cuda):
        return own
    count, tokens = int(rows), handle.tokens_per_expert
    least = 0 if tokens.is_cuda else min(int(tokens.sum()), own)
    if count < least:
        raise ValueError(f"num_permuted_tokens is {count}, but the rows of the handle are {least}")
    return count


def _with_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows, or all of them and zeros."""
    missing = count - tensor.shape[0]
    if missing > 0:
        return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
    return tensor[:count] if missing < 0 else tensor


def _choices_of(
    routing_map: torch.Tensor, probs: torch.Tensor | None, tokens: int, experts: int, may_wait: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T, min(E, 32)]: the experts of each token in their order, then -1; and their weights."""
    require_tensors(routing_map=routing_map)
    if routing_map.dtype != torch.bool or routing_map.shape != (tokens, experts):
        raise ValueError(
            f"routing_map is {routing_map.dtype} {list(routing_map.shape)}, must be torch.bool {[tokens, experts]}"
        )
    topk = min(experts, MAX_TOPK)
    if may_wait and experts > topk and tokens:
        most = int(routing_map.sum(1).max())
        if most > topk:
            raise ValueError(f"a token has {most} experts in routing_map, at most {topk}")
    order = torch.arange(experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    found, ids = torch.where(routing_map, order, 0).topk(topk, dim=1)
    ids = torch.where(found > 0, ids, -1)
    return ids, None if probs is None else _weights_of(probs, ids, experts)


def _weights_of(probs: torch.Tensor, topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    require_tensors(probs=probs)
    if probs.shape != (topk_idx.shape[0], experts):
        raise ValueError(f"probs has shape {list(probs.shape)}, must be {[topk_idx.shape[0], experts]}")
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}, must be [tokens, topk]")
    at = topk_idx.long().clamp(0, experts - 1)  # of an id out of range dispatch tells
    return torch.where(topk_idx >= 0, probs.float().gather(1, at), 0)
