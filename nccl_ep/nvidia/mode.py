"""What both modes need of a group, and do alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import functional
from ..buffer import Buffer
from ..checks import error_of
from ..errors import UsageError
from ..handle import Handle as Routing
from .enums import ExpertIdKind, Layout, member
from .structs import DispatchOutputs, LayoutInfo
from .tensor import tensor_or_none


@dataclass(frozen=True)
class Sizes:
    """Of a group. ``max_received``: rows of a rank in high throughput; 0: as many as the caller's tensors have."""

    num_experts: int
    max_tokens: int
    max_received: int = 0
    num_sms: int = 0
    drops: bool = False


def kind_of(info: LayoutInfo | None) -> ExpertIdKind:
    """Of a dispatch. To be asked before anything is sent."""
    kind = ExpertIdKind.AUTO if info is None else info.recv_topk_idx_kind
    return member(ExpertIdKind, "layout_info.recv_topk_idx_kind", kind)


class Mode:
    """A handle's operations in one mode. Tensors are checked before anything is sent."""

    def __init__(self, buffer: Buffer, sizes: Sizes, layout: Layout) -> None:
        self.buffer, self.sizes, self.layout = buffer, sizes, layout
        self.device, self.local_experts = buffer.device, sizes.num_experts // buffer.num_ranks
        self._topk_idx: torch.Tensor | None = None  # of the next dispatch
        self._sent: Routing | None = None  # of the last one

    @property
    def topk_idx(self) -> torch.Tensor:
        if self._topk_idx is None:
            raise UsageError("the handle has no routing: call update")
        return self._topk_idx

    def drop(self) -> None:
        """What was sent alone is nobody's any more."""

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """An op's error becomes what the buffer says of it."""
        try:
            yield
        except RuntimeError as error:
            raise error_of(self.buffer, error) from error

    def given(self, outputs: DispatchOutputs) -> dict[str, torch.Tensor | None]:
        """The caller's tensors for what comes."""
        given = {
            name: tensor_or_none(getattr(outputs, name), f"outputs.{name}", self.device)
            for name in ("tokens", "scales", "topk_weights", "topk_idx")
        }
        if given["tokens"] is None:
            raise ValueError("outputs.tokens is None, must be a Tensor")
        return given

    def counter(self, info: LayoutInfo | None, name: str, length: int) -> torch.Tensor | None:
        """A counter of ``info``, if it is given. ValueError for one that is too short, or no integers."""
        given = None if info is None else tensor_or_none(getattr(info, name), f"layout_info.{name}", self.device)
        if given is None:
            return None
        if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1 or len(given) < length:
            raise ValueError(
                f"layout_info.{name} is {given.dtype} {list(given.shape)}, must be int32 or int64 [{length}]"
            )
        return given[:length]

    def number_experts(self, topk_idx: torch.Tensor | None, kind: ExpertIdKind) -> None:
        """Within all, where the caller wants that; -1 stays."""
        first = self.buffer.rank * self.local_experts
        if topk_idx is not None and kind is ExpertIdKind.GLOBAL and first:
            topk_idx.add_((topk_idx >= 0).to(topk_idx.dtype), alpha=first)

    def combine_into(
        self, to: torch.Tensor, rows: torch.Tensor, sent: Routing, weights: torch.Tensor | None = None
    ) -> None:
        """The sums, into the caller's tensor [T, H], by the operation itself if it has no gaps."""
        options = {"weights": weights, "out_dtype": to.dtype, "num_sms": self.sizes.num_sms}
        if to.is_contiguous():
            functional.combine(rows, sent, out=to, **options)  # type: ignore[arg-type]
        else:
            to.copy_(functional.combine(rows, sent, **options))  # type: ignore[arg-type]
