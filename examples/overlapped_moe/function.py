"""The layer as one node of torch's graph of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from examples.overlapped_moe.experts import Experts, Kept

if TYPE_CHECKING:
    from examples.overlapped_moe.layer import MoeLayer


class MoeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: MoeLayer, overlaps: bool, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        w13: torch.Tensor, w2: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        combined, kept, ctx.handle = layer.forward(x, ids, weights, overlaps=overlaps, keeps=True)
        assert kept is not None
        ctx.layer, ctx.overlaps = layer, overlaps
        ctx.save_for_backward(ids, weights, w13, w2, kept.x, kept.gates, kept.weights, kept.firsts, kept.counts)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ids, weights, w13, w2, *kept = ctx.saved_tensors
        of_x, of_weights, of_w13, of_w2 = ctx.layer.backward(
            gradient.contiguous(), ids, weights, Kept(*kept), ctx.handle, Experts(w13, w2), overlaps=ctx.overlaps
        )
        return None, None, of_x, None, of_weights, of_w13, of_w2
