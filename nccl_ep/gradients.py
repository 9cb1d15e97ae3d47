"""Backward passes that do not exist: they raise where torch would leave gradients out without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
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
    def forward(ctx: Any, what: str, in_place: bool, leaf: torch.Tensor, *results: torch.Tensor) -> Any:
        ctx.what = what
        if in_place:
            ctx.mark_dirty(*results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"derivative for {ctx.what} is not implemented")


def refuse_backward(what: str, wanted: bool, results: Sequence[T], in_place: bool = False) -> tuple[T, ...]:
    """The results of ``what``, which want gradients if an input does (``wants_gradient``); their backward raises.

    in_place: they are the caller's tensors, and stay themselves. They keep nothing of earlier calls, nor of the inputs.
    """
    if not wanted:
        return tuple(results)
    floats = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in results]
    named: list[Any] = [each for each, is_float in zip(results, floats, strict=True) if is_float]
    for each in named if in_place else ():
        if each.grad_fn is not None and not each._is_view():
            each.detach_()
    leaf = torch.zeros((), requires_grad=True)
    refusing = iter(_Refusing.apply(what, in_place, leaf, *named))  # type: ignore[no-untyped-call]
    return tuple(next(refusing) if is_float else each for each, is_float in zip(results, floats, strict=True))
