"""Masks of a low-latency group: the five functions that ``nccl_ep.h`` has for them, as methods. 1 is an active rank."""

from __future__ import annotations

from typing import Any

import torch

from ..bootstrap import meeting_of
from ..buffer import Buffer
from ..errors import UsageError
from .streams import on_stream, stream_pointer
from .tensor import Tensor

_CLEANING_DEADLINES = 4  # the others may have waited for a rank in their last operation


class Masks:
    """Of a group with ``enable_mask``; UsageError without it."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._is_destroyed = False
        self._known: set[int] = set()  # masked ranks that are no news
        self._has_error = False

    def _valid(self) -> Buffer:
        if self._is_destroyed:
            raise UsageError("the group was destroyed")
        return self.buffer

    def mask_query(self, mask_status: Any, *, stream: Any = None) -> None:
        """Writes 1 for each active rank and 0 for each masked one, int32 [R], in the order of the stream.

        Args:
            mask_status: a tensor on the group's device, or its address.
        """
        buffer = self._masking()
        status = self._words(mask_status, buffer.device)
        with on_stream(buffer.device, stream):
            buffer.runtime.query_masks(status.data_ptr(), stream_pointer(stream))
            status.bitwise_xor_(1)

    def mask_update(self, mask: Any, *, stream: Any = None) -> None:
        """Masks the ranks that are 0 in ``mask``, for the operations on the stream from here on.

        Args:
            mask: int32 [R] on the host, or its address. 1 leaves a rank as it is; this rank's own must be 1.

        Raises: UsageError for a 1 of a masked rank: ranks come back all at once, by ``mask_clean``.
        """
        buffer = self._masking()
        wanted = self._words(mask, torch.device("cpu")).tolist()
        masked = set(buffer.runtime.stats()["masked_ranks"])
        for rank, active in enumerate(wanted):
            if active not in (0, 1):
                raise ValueError(f"mask[{rank}] is {active}, must be 0 or 1")
            if active and rank in masked:
                raise UsageError(f"rank {rank} is masked, and ranks do not come back one by one: all call mask_clean()")
        if not wanted[buffer.rank]:
            raise ValueError(f"mask[{buffer.rank}] is 0: a rank cannot mask itself")
        for rank, active in enumerate(wanted):
            if not active and rank not in masked:
                self._known.add(rank)
                buffer.runtime.mask(rank, stream_pointer(stream))

    def mask_clean(self, *, stream: Any = None) -> None:
        """All ranks are active again. Collective over all ranks, those that were masked too.

        Waits for the operations in flight and for the other ranks, four deadlines at most. Raises as
        ``nccl_ep.deep_ep.Buffer.low_latency_clean_mask_buffer``; the group is of no use any more then.
        """
        buffer = self._masking()
        self.get_async_error()
        with on_stream(buffer.device, stream), meeting_of(buffer._rendezvous) as allgather:
            buffer.runtime.clean_masks(lambda mine: allgather(mine, _CLEANING_DEADLINES * buffer._timeout))
        self._known.clear()

    def get_async_error(self) -> bool:
        """Whether a rank was masked by itself since ``error_clear``."""
        masked = set(self._masking().runtime.stats()["masked_ranks"])
        self._has_error |= bool(masked - self._known)
        self._known |= masked
        return self._has_error

    def error_clear(self) -> None:
        """Forgets what ``get_async_error`` says."""
        self.get_async_error()
        self._has_error = False

    def _masking(self) -> Buffer:
        buffer = self._valid()
        if not buffer.enable_shrink:
            raise UsageError("the group has no masks: they are of LOW_LATENCY with enable_mask")
        return buffer

    def _words(self, given: Any, device: torch.device) -> torch.Tensor:
        ranks = self.buffer.num_ranks
        is_address = isinstance(given, int) and not isinstance(given, bool)
        tensor = Tensor(given, dtype=2, shape=(ranks,)) if is_address else given
        words = (tensor if isinstance(tensor, Tensor) else Tensor(tensor)).on(device)
        if words.dtype != torch.int32 or words.shape != (ranks,) or not words.is_contiguous():
            raise ValueError(f"the mask is {words.dtype} {list(words.shape)}, must be contiguous int32 [{ranks}]")
        return words
