"""Arguments of ``ElasticBuffer``: sizes, rows with scales, what is checked; and what a dispatch has made."""

from __future__ import annotations

from typing import Any

import torch

from ... import _C
from ...checks import MAX_TOPK, require_integers, require_tensors, row_bytes_of
from ...handle import DispatchOutput
from ...modes import auto_ll_tokens
from ...room import HtSizes, default_arena_bytes
from .handle import EPHandle

_EXPERTS = 1024  # for which a buffer has room: its constructor is not told their number
_GRANULE = 2 << 20
_TMA_BYTES = 16  # of which columns of scales begin at multiples


class Received:
    """What a dispatch returns, before it is given names."""

    __slots__ = ("handle", "rows", "scales", "topk_idx", "weights")

    def __init__(
        self, rows: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor | None,
        weights: torch.Tensor | None, handle: EPHandle,
    ) -> None:  # fmt: skip
        self.rows, self.scales, self.topk_idx, self.weights, self.handle = rows, scales, topk_idx, weights, handle

    @staticmethod
    def of(out: DispatchOutput, handle: EPHandle, has_weights: bool) -> Received:
        return Received(out.x, out.scales, out.topk_idx, out.weights if has_weights else None, handle)

    def tensors(self) -> tuple[Any, ...]:
        core = self.handle._core
        return self.rows, self.scales, self.topk_idx, self.weights, core.tensor, core.slots, self.handle.topk_idx


class Shapes:
    """What ``nccl_ep.Buffer.for_shapes`` is asked for, and the bytes that it takes."""

    def __init__(
        self, ranks: int, max_tokens: int, hidden: int, topk: int, rounds_twice: bool, device_type: str
    ) -> None:  # fmt: skip
        self.ranks, self.max_tokens, self.hidden, self.device_type = ranks, max_tokens, hidden, device_type
        self.topk = topk or MAX_TOPK
        self.experts = -(-_EXPERTS // ranks) * ranks
        self.wire_dtype = torch.bfloat16 if rounds_twice else torch.float32
        self.row_bytes = row_bytes_of(hidden, torch.bfloat16)
        self.scale_bytes = (hidden + 31) // 32 * 4
        sent = self.row_bytes + (self.scale_bytes + 15) // 16 * 16
        self.arena_bytes = default_arena_bytes(ranks, max_tokens, sent, device_type)

    def arguments(self, spare_bytes: int) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens, "hidden": self.hidden, "topk": self.topk, "num_experts": self.experts,
            "mode": "auto", "wire_dtype": self.wire_dtype, "scale_bytes": self.scale_bytes,
        } | ({"arena_bytes": self.arena_bytes + spare_bytes} if spare_bytes else {})  # fmt: skip

    def num_bytes(self) -> int:
        row = self.row_bytes + (self.scale_bytes + 15) // 16 * 16
        home = self.hidden * self.wire_dtype.itemsize
        ll_tokens = auto_ll_tokens(
            self.max_tokens, self.row_bytes, self.topk, self.ranks, self.experts, self.device_type
        )
        bank = _C.sizes_for(self.ranks, self.experts, self.topk, ll_tokens, row, home)
        ll = _C.window_for(self.ranks, (*bank[:3], 0))  # without late_weights
        ht = HtSizes(
            *_C.ht_sizes_for(
                self.ranks, self.ranks, self.experts, self.topk, self.max_tokens, row, home, self.arena_bytes
            )
        )
        total = ll + 8 * ht.message_words + ht.staged_bytes + ht.arena_bytes
        return -(-total // _GRANULE) * _GRANULE


def taken_apart(x: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise ValueError(f"x has {len(x)} elements, must be a tensor, or a pair of rows and scales")
        require_tensors(x=x[0], scales=x[1])
        return x[0], x[1]
    require_tensors(x=x)
    assert isinstance(x, torch.Tensor)
    return x, None


def column_major(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape
    unit = _TMA_BYTES // scales.element_size()
    apart = -(-rows // unit) * unit
    made = torch.empty_strided((rows, columns), (1, apart), dtype=scales.dtype, device=scales.device)
    return made.copy_(scales)


def with_biases(summed: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    for i, each in enumerate(biases):
        if each.dtype != summed.dtype or each.shape != summed.shape:
            raise ValueError(
                f"bias {i} is {each.dtype} {list(each.shape)}, must be {summed.dtype} {list(summed.shape)}"
            )
    added = biases[0].float() if len(biases) == 1 else biases[0].float() + biases[1].float()
    return (added + summed.float()).to(summed.dtype)


def require_event(**events: object) -> None:
    for name, event in events.items():
        if event is not None and not hasattr(event, "current_stream_wait"):
            raise TypeError(f"{name} is a {type(event).__name__}, must be what an operation returned, or capture()")


def require_handle(handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle is a {type(handle).__name__}, must be the EPHandle of a dispatch")


def require_same(
    handle: EPHandle, topk_idx: object, num_experts: int | None, max_tokens: int | None,
    alignment: int | None, do_cpu_sync: bool | None, do_expand: bool,
) -> None:  # fmt: skip
    """What is given beside a handle must be the handle's."""
    require_handle(handle)
    if topk_idx is not None:
        raise ValueError("topk_idx is given with a handle, which has its own")
    if do_cpu_sync:
        raise ValueError("do_cpu_sync is set with a handle, whose sizes are known")
    for name, given, own in (
        ("num_experts", num_experts, handle.num_experts),
        ("num_max_tokens_per_rank", max_tokens, handle.num_max_tokens_per_rank),
        ("expert_alignment", alignment, handle.expert_alignment),
        ("do_expand", do_expand, handle.do_expand),
    ):
        if given is not None:
            require_integers(**{name: given})
        if given is not None and given != own:
            raise ValueError(f"{name} is {given}, but the handle's is {own}")
