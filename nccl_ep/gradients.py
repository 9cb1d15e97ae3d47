"""What wants a gradient. The gradients themselves: csrc/torch/ops/gradients.cc."""

from __future__ import annotations

from typing import Any

import torch

_Tensor, _SEQUENCES = torch.Tensor, (tuple, list)  # look-ups that the hot path is spared


def wants_gradient(*inputs: Any) -> bool:
    """Whether one of the tensors, given alone or in sequences, wants a gradient; not in ``no_grad``."""
    if not torch.is_grad_enabled():
        return False
    for each in inputs:
        if isinstance(each, _Tensor):
            if each.requires_grad:
                return True
        elif isinstance(each, _SEQUENCES) and each and wants_gradient(*each):
            return True
    return False
