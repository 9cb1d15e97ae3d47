"""The model without any exchange: all experts in one place, one after the other. What others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import Experts, activate


def one_rank(x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """An exchange (model.Exchange) for a rank that has all experts."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(experts.count):
        tokens, choices = (idx == expert).nonzero(as_tuple=True)
        up, down = experts.up[expert].to(x.dtype), experts.down[expert].to(x.dtype)
        rows = activate(x[tokens] @ up) @ down
        total = total.index_add(0, tokens, weights[tokens, choices].unsqueeze(-1) * rows.float())
    return total.to(x.dtype)
