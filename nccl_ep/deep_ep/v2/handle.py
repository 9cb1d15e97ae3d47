"""What DeepEP V2 returns of a dispatch beside tensors: its handle, and its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _C
from ...errors import UsageError
from ...events import EventHandle, EventOverlap
from ...handle import DispatchOutput, Handle

# csrc/layout/ht/handle.h, an entry of slots: for each choice its row, for each its weight, then the token.
_WORDS_OF_A_CHOICE = 2


class EPHandle:
    """The routing of a dispatch of ``ElasticBuffer``, for combines and cached dispatches, any number of times.

    L local experts, R ranks, M ``num_max_tokens_per_rank``, K choices a token, S tokens received (R * M without
    ``do_cpu_sync``).

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: [T, K] of the dispatch, a copy with ``do_handle_copy``.
        num_recv_tokens, num_expanded_tokens: rows of the results, without and with ``do_expand``.
        num_recv_tokens_per_expert_list: L ints, each rounded up to the alignment; empty without ``do_cpu_sync``.
        psum_num_recv_tokens_per_scaleup_rank: int32 [ranks of a domain], tokens from the ranks up to each, in all
            domains; the last one is the number of all.
        psum_num_recv_tokens_per_expert: int32 [L]. Flat: rounded counts of the experts up to each. ``do_expand``: the
            end of each expert's rows, padding left out; the next expert begins at it, rounded up.
        num_unaligned_recv_tokens_per_expert: int32 [L], rows of each expert.
        recv_src_metadata: int32 [S, 2 + K] of each received token: rank * M + token at its source, its number here, and
            with ``do_expand`` the rows of its choices (else -1). Entries past the tokens received are unspecified.

    The tensors from psum_num_recv_tokens_per_scaleup_rank on are made when they are first asked for. In a low-latency
    dispatch without ``do_expand`` those of experts are counted from recv_topk_idx, so it must not have changed by then
    (UsageError where torch can tell).

    Source: DeepEP's ``EPHandle``.
    """

    topk_idx: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor

    def __init__(
        self, out: DispatchOutput, topk_idx: torch.Tensor, *, do_expand: bool, expert_alignment: int, num_sms: int,
        rank: int, domain_size: int,
    ) -> None:  # fmt: skip
        core = out.handle
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, core.num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = core.max_tokens, num_sms, topk_idx
        self.num_recv_tokens_per_expert_list = []
        received = core.num_ranks * core.max_tokens if core.slots is None else core.slots.shape[0]
        self.num_recv_tokens = received if do_expand else out.x.shape[0]
        self.num_expanded_tokens = out.x.shape[0] if do_expand else 0
        self._core, self._rank, self._domain_size = core, rank, domain_size
        self._event: EventHandle | None = None  # behind which the tensors are there
        self._recv_topk_idx, self._version = out.topk_idx, _version_of(out.topk_idx)
        self._counts = out.counts if do_expand else None
        self._offsets = out.offsets

    def __getattr__(self, name: str) -> Any:
        make = _MADE_LATER.get(name)
        if make is None or "_core" not in self.__dict__:
            raise AttributeError(f"the EPHandle of nccl_ep has no {name!r}")
        if self._event is not None:
            self._event.current_stream_wait()
        made = make(self)
        setattr(self, name, made)
        return made

    # ---- The tensors that are made later

    def _per_rank(self) -> torch.Tensor:
        """Tokens received from each rank, int32 [R]."""
        core = self._core
        ranks = core.num_ranks
        if core.mode == "ht":
            return core.tensor[: ranks * ranks].view(ranks, ranks)[:, self._rank]
        return (self._rows_of_tokens() >= 0).any(2).sum(1, dtype=torch.int32)

    def _rows_of_tokens(self) -> torch.Tensor:
        """Low latency: the row map, int32 [R, M, K], or [R, M, 1] for flat rows (csrc/layout/common/outputs.h)."""
        core = self._core
        map_k = core.topk if self.do_expand else 1
        map_at = _C.ll_handle_parts(core.num_ranks, core.num_tokens, core.max_tokens, core.topk, map_k)[1]
        size = core.num_ranks * core.max_tokens * map_k
        rows = core.tensor[map_at : map_at + size].view(core.num_ranks, core.max_tokens, map_k)
        numbers = torch.arange(core.max_tokens, dtype=torch.int32, device=rows.device)
        is_token = numbers < core.tensor[: core.num_ranks].unsqueeze(1)  # beyond its tokens a source has none set
        return torch.where(is_token.unsqueeze(2), rows, -1)

    def _psum_of_ranks(self) -> torch.Tensor:
        return self._per_rank().view(-1, self._domain_size).sum(0).cumsum(0, dtype=torch.int32)

    def _unaligned(self) -> torch.Tensor:
        if self._counts is not None:
            return self._counts
        core, local = self._core, self._core.num_local_experts
        if core.mode == "ht":
            sizes = core.num_ranks, self._domain_size, core.num_experts, core.num_tokens, core.max_tokens, core.topk
            at = _C.ht_route_parts(*sizes)[0]
            return core.tensor[at : at + local]
        ids = self._recv_topk_idx
        if ids is None or _version_of(ids) != self._version:
            raise UsageError(
                "recv_topk_idx was changed in place, from which the handle counts the tokens of experts: ask for "
                "psum_num_recv_tokens_per_expert before"
            )
        experts = torch.arange(local, dtype=ids.dtype, device=ids.device)
        return (ids.unsqueeze(2) == experts).sum((0, 1), dtype=torch.int32)

    def _psum_of_experts(self) -> torch.Tensor:
        counts = self.num_unaligned_recv_tokens_per_expert
        if self._offsets is not None:
            return self._offsets[:-1] + counts
        alignment = self.expert_alignment
        return ((counts + (alignment - 1)) // alignment * alignment).cumsum(0, dtype=torch.int32)

    def _metadata(self) -> torch.Tensor:
        core = self._core
        most, topk = core.max_tokens, core.topk
        if core.slots is not None:
            ends, count = self._per_rank().cumsum(0), core.slots.shape[0]
            numbers = torch.arange(count, dtype=torch.int32, device=core.tensor.device)
            sources = torch.bucketize(numbers, ends, right=True).to(torch.int32)
            tokens = core.slots[:, _WORDS_OF_A_CHOICE * topk if self.do_expand else 0]
            made = core.tensor.new_full((count, 2 + topk), -1)
            made[:, 0], made[:, 1] = sources * most + tokens, numbers
            if self.do_expand:
                made[:, 2:] = core.slots[:, :topk]
            return made
        rows = self._rows_of_tokens().reshape(core.num_ranks * most, -1)
        is_here = (rows >= 0).any(1)
        count = rows.shape[0]
        numbers = torch.where(is_here, is_here.cumsum(0) - 1, count)  # absent ones go to a row that is cut off
        made = core.tensor.new_full((count + 1, 2 + topk), -1)
        tokens = torch.arange(count, dtype=torch.int32, device=rows.device)
        columns = [tokens.unsqueeze(1), numbers.to(torch.int32).unsqueeze(1)]
        made[numbers, : 2 + (topk if self.do_expand else 0)] = torch.cat(
            [*columns, rows] if self.do_expand else columns, 1
        )
        return made[:count]

    def _of(self, buffer: Any) -> Handle:
        """The core's handle. UsageError for a handle of another buffer."""
        if self._core.seq.shape != buffer._seq.shape:
            raise UsageError(f"the handle is of buffer {self._core.buffer}, not of {buffer.name}")
        return self._core


_MADE_LATER: dict[str, Callable[[EPHandle], torch.Tensor]] = {
    "psum_num_recv_tokens_per_scaleup_rank": EPHandle._psum_of_ranks,
    "psum_num_recv_tokens_per_expert": EPHandle._psum_of_experts,
    "num_unaligned_recv_tokens_per_expert": EPHandle._unaligned,
    "recv_src_metadata": EPHandle._metadata,
}


class ElasticEvent(EventOverlap):
    """V2's event, which may hold results until it was waited for.

    Source: DeepEP V2's ``EventOverlap``, and V2.5's with ``defer_epilogue``.
    """

    __slots__ = ("_results",)

    def __init__(self, event: EventOverlap, results: Any = None) -> None:
        super().__init__(event.event, event.extra_tensors)
        self._results = results

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """The current stream waits. Returns the results of a call with ``defer_epilogue``, once; else None.

        release_handle: the event gives up what it holds. AssertionError if there is no event.
        """
        super().current_stream_wait(release_handle)
        results, self._results = self._results, None
        return results

    wait = current_stream_wait


def _version_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version
