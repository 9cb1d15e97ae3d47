"""A layer of experts in float32 that torch differentiates, of all ranks' tokens at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """x [T, H], ids and weights [T, K], of all experts w13 [E, 2 * I, H] and w2 [E, H, I]. An id of -1 is no choice."""
    y = torch.zeros_like(x)
    for expert in range(len(w13)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w13[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, w2[expert])
        y = y.index_add(0, token, rows * weights[token, choice, None])
    return y


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest value that is wanted."""
    assert got.shape == want.shape and got.isfinite().all()
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
