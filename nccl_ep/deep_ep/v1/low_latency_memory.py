"""The memory of DeepEP's low-latency mode, and its masks of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ... import _C
from ...checks import (
    INT64,
    MAX_INT32,
    MAX_TOPK,
    require_bools,
    require_dtypes,
    require_int32,
    require_on,
    require_shape,
    require_tensors,
    require_within,
    row_bytes_of,
    wrong_elements,
)
from ...errors import TimeoutError, UsageError
from ..words import Words
from .view import View

# src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts
LowLatencyHandle: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int, int]

_UNWEIGHTED_TOPK = 8  # up to which the size hint has room for a combine whose send waits for nobody
_ROOM = "Buffer.get_low_latency_rdma_size_hint says the num_rdma_bytes that calls need, with low_latency_mode=True"
WORDS = Words(rows="x", weights="topk_weights", max_tokens="num_max_dispatch_tokens_per_rank", room=_ROOM)
_PARTS = ("routing", "dispatched rows", "combined rows")  # of a bank


class LowLatencyMemory(View):
    """What ``deep_ep.Buffer`` has of DeepEP's low-latency mode, but for the operations."""

    # ---- Sizes and memory

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for ``num_rdma_bytes`` with which bf16 operations of these sizes fit, whatever the top-k (up to 32).

        Raises: ValueError for sizes that no operation has.

        Source: DeepEP's method of that name.
        """
        require_within(1, MAX_INT32, num_ranks=num_ranks)
        sizes = num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        routing = _bank_sizes(*sizes, MAX_TOPK)[0]
        return _C.window_for(num_ranks, (routing, *_bank_sizes(*sizes, _UNWEIGHTED_TOPK)[1:]))

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing has to be cleaned here, before or between operations: checks that such operations fit the window.

        Raises: ValueError with the bytes if they do not, and for sizes that no operation has; otherwise as
            ``Buffer.require_usable``.
        """
        self.require_usable()
        self._require_room(num_max_dispatch_tokens_per_rank, hidden, num_experts, _PARTS)

    def _require_room(self, max_tokens: int, hidden: int, num_experts: int, parts: tuple[str, ...]) -> None:
        """For these parts of a bank, in bf16 operations of these sizes."""
        needed = _bank_sizes(max_tokens, hidden, self.num_ranks, num_experts, topk=1)[:3]  # no unweighted rows
        ll = self.core._room.ll
        for need, have, what in zip(
            needed, (ll.routing, ll.dispatched, ll.combined + ll.unweighted), _PARTS, strict=True
        ):
            if need > have and what in parts:
                raise ValueError(
                    f"the window of {self.name} is too small for {max_tokens} tokens a rank, hidden {hidden}, "
                    f"{num_experts} experts: a bank needs {need} bytes of {what}, it has {have}; {_ROOM}"
                )

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A bf16 tensor [L, R * M, H] for the rows of ``low_latency_combine(zero_copy=True)``; the same at every call.

        Made when first asked for: an ordinary, contiguous tensor of this rank, no part of the window.

        Raises: ValueError for sizes in the handle with which no such combine fits the window.
        """
        _, _, max_tokens, hidden, num_experts = elements_of(handle)
        if not (type(max_tokens) is type(hidden) is type(num_experts) is int):
            require_int32(num_max_dispatch_tokens_per_rank=max_tokens, hidden=hidden, num_experts=num_experts)
            max_tokens, hidden, num_experts = int(max_tokens), int(hidden), int(num_experts)
        key = ("combine", max_tokens, hidden, num_experts)
        rows = self._state.scratch.get(key)
        if rows is None:
            self.require_usable()
            self._require_room(max_tokens, hidden, num_experts, ("combined rows",))
            sizes = (num_experts // self.num_ranks, self.num_ranks * max_tokens, hidden)
            with torch.inference_mode(False):  # it may be written in any mode
                rows = self._state.scratch[key] = torch.empty(sizes, dtype=torch.bfloat16, device=self.device)
        return rows

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Sequence[int] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Scratch of ``num_rdma_bytes`` (or ``num_nvl_bytes``), made when first asked for, the same at every call.

        It is no part of the window: whatever is written there changes no operation.

        Args:
            dtype: of the result. size: its shape; by default [all elements]. offset: bytes to leave out first.

        Raises: ValueError for a size or offset beyond the bytes there are.
        """
        require_bools(use_rdma_buffer=use_rdma_buffer)
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        which = "num_rdma_bytes" if use_rdma_buffer else "num_nvl_bytes"
        require_dtypes(dtype=dtype)
        lengths = () if size is None else size
        require_shape(lengths)
        require_within(*INT64, offset=offset)
        count = 0 if size is None else math.prod(lengths)
        if min((offset, *lengths)) < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > num_bytes:
            shape = "" if size is None else f" of shape {list(size)}"
            raise ValueError(f"a {dtype} tensor{shape} at byte {offset}, but {which} is {num_bytes}")
        scratch = self._state.scratch.get(which)
        if scratch is None:
            self.require_usable()
            with torch.inference_mode(False):
                scratch = self._state.scratch[which] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        end = offset + (num_bytes - offset) // dtype.itemsize * dtype.itemsize
        tensor = scratch[offset:end].view(dtype)
        return tensor if size is None else tensor[:count].view(size)

    # ---- Masks, of a buffer with enable_shrink

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank: from here on the low-latency operations on the current stream leave it out.

        Nothing is sent to it, no token of it is received, and its experts count for nothing in combine. It learns of it
        in its next operation, and masks this rank in return. With ``enable_shrink`` a rank that misses a deadline is
        masked by itself. Ranks come back all at once, by ``low_latency_clean_mask_buffer``.

        Args:
            rank_to_mask: another rank than this. mask: False does nothing for a rank that is not masked.

        Raises: ValueError for a rank that is not there, and to mask this rank; UsageError for ``mask=True`` of a buffer
            without ``enable_shrink``, and for ``mask=False`` of a masked rank.

        Source: DeepEP, which unmasks single ranks, too: what such a rank has missed would be taken for new.
        """
        self.require_usable()
        require_within(0, self.num_ranks - 1, rank_to_mask=rank_to_mask)
        require_bools(mask=mask)
        if mask:
            self.runtime.mask(rank_to_mask, self._stream())
            return
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()
        if rank_to_mask in self.runtime.stats()["masked_ranks"]:
            raise UsageError(
                f"rank {rank_to_mask} is masked, and ranks do not come back one by one: all call "
                "low_latency_clean_mask_buffer()"
            )

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each masked rank and 0 for the others to ``mask_status``, int32 [R] on the buffer's device.

        In the order of the current stream; a CUDA graph may hold it.
        """
        self.require_usable()
        require_tensors(mask_status=mask_status)
        require_on(self._seq, ("mask_status",), (mask_status,))
        if mask_status.dtype != torch.int32 or mask_status.shape != (self.num_ranks,):
            raise ValueError(
                f"mask_status is {mask_status.dtype} {list(mask_status.shape)}, must be torch.int32 [{self.num_ranks}]"
            )
        if not mask_status.is_contiguous():
            raise ValueError(f"mask_status has strides {list(mask_status.stride())}, must be contiguous")
        self.runtime.query_masks(mask_status.data_ptr(), self._stream())

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks. Collective with ``enable_shrink`` (else nothing) among the ranks that come.

        Waits for the operations in flight; for ranks that are not masked, which may be waiting in their last operation,
        four deadlines at most; for masked ones a deadline at most. Whoever comes is active again. Who stays away counts
        as active until the next operation, which masks it again without waiting. Handles of earlier dispatches must not
        be used afterwards. On GPUs of several domains all ranks must come.

        Raises: UsageError where a split call is open on any rank; TimeoutError for a rank that came too late, whose
            masks stay as they are, and where a rank falls silent meanwhile: then the buffer is of no use any more if
            others may have gone on. On GPUs of several domains a rank that does not come is a TimeoutError, and a new
            buffer is needed.

        Source: DeepEP, where it is each rank's own.
        """
        self.core.require_usable()
        if not self.enable_shrink:
            return
        try:
            self.core._clean_masks()
        except TimeoutError:
            self._state.has_missed_cleaning = self.core.domain_size < self.num_ranks
            raise

    def _stream(self) -> int:
        return 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream


def elements_of(handle: LowLatencyHandle) -> LowLatencyHandle:
    if not isinstance(handle, tuple | list) or len(handle) != 5:
        raise wrong_elements("handle", handle, "the 5 elements that low_latency_dispatch returned")
    return handle


def _bank_sizes(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int, topk: int
) -> tuple[int, int, int, int]:
    """What bf16 operations need, as _PARTS and for unweighted rows. ValueError for sizes that no operation has."""
    require_int32(num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank, num_experts=num_experts)
    row_bytes = row_bytes_of(hidden, torch.bfloat16)
    try:
        sizes: tuple[int, int, int, int] = _C.sizes_for(
            num_ranks, num_experts, topk, num_max_dispatch_tokens_per_rank, row_bytes, row_bytes
        )
    except ValueError as error:
        raise WORDS.told(error) from None
    return sizes
