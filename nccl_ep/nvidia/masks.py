"""Masks of a low-latency group: the five functions that ``nccl_ep.h`` has for them, as methods. 1 is an active rank."""

from __future__ import annotations

from typing import Any

import torch

from ..buffer import Buffer
from ..errors import UsageError
from .streams import on_stream, stream_pointer
from .tensor import Tensor


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

        A masked rank that is 1 counts as active until the next operation, which masks it again without waiting: it
        does not know what it has missed. It comes back by ``mask_clean``.

        Args:
            mask: int32 [R] on the host, or its address; this rank's own must be 1.
        """
        buffer = self._masking()
        wanted = self._words(mask, torch.device("cpu")).tolist()
        for rank, active in enumerate(wanted):
            if active not in (0, 1):
                raise ValueError(f"mask[{rank}] is {active}, must be 0 or 1")
        if not wanted[buffer.rank]:
            raise ValueError(f"mask[{buffer.rank}] is 0: a rank cannot mask itself")
        masked = {rank for rank, active in enumerate(wanted) if not active}
        self.get_async_error()
        buffer.runtime.update_masks(sorted(masked), stream_pointer(stream))
        if self._known - masked and buffer.device.type == "cuda":  # what is masked still must not be taken for news
            with on_stream(buffer.device, stream):
                if not torch.cuda.is_current_stream_capturing():
                    torch.cuda.current_stream(buffer.device).synchronize()
        self._known = masked  # that one which counts as active is masked again is news

    def mask_clean(self, *, stream: Any = None) -> None:
        """All ranks are active again. Collective among the ranks that come.

        Waits and raises as ``nccl_ep.deep_ep.Buffer.low_latency_clean_mask_buffer``. A rank that stays away counts as
        active until the next operation, which masks it again without waiting.
        """
        buffer = self._masking()
        self.get_async_error()
        with on_stream(buffer.device, stream):
            buffer._clean_masks()
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
