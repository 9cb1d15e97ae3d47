"""What wants a gradient, and what must not get one. The gradients themselves: csrc/torch/ops/gradients.cc."""

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


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, leaf: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.what = what
        ctx.mark_dirty(written)
        return written

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"derivative for {ctx.what} is not implemented")


def refuse_backward(what: str, written: torch.Tensor) -> None:
    """A backward pass that comes to ``written``, which torch does not know to be a result of ``what``, raises.

    The tensor keeps nothing of earlier calls, nor of the inputs.
    """
    if written.grad_fn is not None and not written._is_view():
        written.detach_()
    leaf = torch.zeros((), requires_grad=True)
    _Refusing.apply(what, leaf, written)  # type: ignore[no-untyped-call]
