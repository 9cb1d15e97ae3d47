"""torch's ``TokenSwitch`` (torch 2.15, ``torch.distributed._token_switch``) over nccl_ep, with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._token_switch import Routing, TokenSwitch  # type: ignore[import-not-found,unused-ignore]

from .. import nvidia as ep
from ..nvidia.communicator import get_nccl_comm_from_group

_LAYOUTS = {"flat": ep.Layout.FLAT, "expert_major": ep.Layout.EXPERT_MAJOR}


class NcclEpTokenSwitch(TokenSwitch):  # type: ignore[misc,unused-ignore]
    """With the arguments of torch's ``TokenSwitchNCCL``, on GPUs and on CPU ranks.

    Args:
        process_group: as ``nccl_ep.Buffer`` takes it. device: as ``nccl_ep.Buffer`` takes it.
        max_recv_tokens_per_rank: rows of the gradient of ``combine``. What a dispatch has room for is the caller's
            ``max_recv_tokens``, or the rows of ``out``; ``nccl_ep.OverflowError`` if more come.

    Raises: as ``nccl_ep.Buffer``.
    """

    def __init__(
        self, process_group: Any, num_experts: int, max_dispatch_tokens_per_rank: int, max_recv_tokens_per_rank: int,
        max_token_bytes: int, *, device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        self._max_recv_tokens_per_rank = max_recv_tokens_per_rank
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=num_experts, max_token_bytes=max_token_bytes,
            max_dispatch_tokens_per_rank=max_dispatch_tokens_per_rank,
        )  # fmt: skip
        self._group = ep.Group.create(get_nccl_comm_from_group(process_group), config, device=device)

    def create_routing(
        self, topk_idx: torch.Tensor, per_expert_token_counts: torch.Tensor | None = None, *, layout: str
    ) -> Any:
        """Collective where counts are given, by all ranks then. ValueError for a layout that is none of the two."""
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is {layout!r}, must be one of {', '.join(_LAYOUTS)}")
        info = None
        if per_expert_token_counts is not None:
            info = ep.LayoutInfo(expert_counters=ep.Tensor(per_expert_token_counts))
        handle = self._group.create_handle(
            _LAYOUTS[layout], ep.Tensor(topk_idx), layout_info=info, stream=self._stream()
        )
        return Routing(handle=handle, topk_idx=topk_idx, layout=layout)

    def _alloc_dispatch_outputs(
        self, routing: Any, tokens: torch.Tensor, topk_weights: torch.Tensor, max_recv_tokens: int, H: int, K: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows, flat = max_recv_tokens, routing.layout == "flat"
        weights = topk_weights.new_zeros((rows, K) if flat else rows, dtype=torch.float32)
        ids = tokens.new_full((rows, K), -1, dtype=torch.int64) if flat else None
        return tokens.new_zeros(rows, H), weights, ids

    def _dispatch(
        self, routing: Any, tokens: torch.Tensor, topk_weights: torch.Tensor, out_tokens: torch.Tensor,
        out_topk_weights: torch.Tensor | None, out_topk_idx: torch.Tensor | None,
    ) -> None:  # fmt: skip
        received = (out_tokens, out_topk_weights, out_topk_idx)
        rows, weights, ids = (None if each is None else ep.Tensor(each) for each in received)
        routing.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(tokens), topk_weights=ep.Tensor(topk_weights.float())),
            ep.DispatchOutputs(tokens=rows, topk_weights=weights, topk_idx=ids),
            stream=self._stream(),
        )

    def _combine(self, routing: Any, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        inputs = ep.CombineInputs(tokens=ep.Tensor(expert_tokens))
        routing.handle.combine(inputs, ep.CombineOutputs(tokens=ep.Tensor(out_tokens)), stream=self._stream())

    def destroy(self) -> None:
        """May be called twice."""
        self._group.destroy()

    def _stream(self) -> Any:
        device = self._group.buffer.device
        return None if device.type == "cpu" else torch.cuda.current_stream(device)
