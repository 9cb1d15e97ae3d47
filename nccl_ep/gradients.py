"""Backward passes that do not exist: they raise where torch would leave gradients out without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def wants_gradient(*inputs: Any) -> torch.Tensor | None:
    """The first of the tensors, given alone or in sequences, that wants a gradient; None in ``no_grad``."""
    return next(_wanting(inputs), None) if torch.is_grad_enabled() else None


def _wanting(inputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in inputs:
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                yield each
        elif isinstance(each, (tuple, list)):
            yield from _wanting(each)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, in_place: bool, wanting: torch.Tensor, *results: torch.Tensor) -> Any:
        ctx.what = what
        if in_place:
            ctx.mark_dirty(*results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"derivative for {ctx.what} is not implemented")


def refuse_backward(
    what: str, wanting: torch.Tensor | None, results: Sequence[T], in_place: bool = False
) -> tuple[T, ...]:
    """The results of ``what``, which want gradients if an input does (``wants_gradient``); their backward raises.

    in_place: they are the caller's tensors, and stay themselves.
    """
    if wanting is None:
        return tuple(results)
    floats = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in results]
    named = [each for each, is_float in zip(results, floats, strict=True) if is_float]
    refusing = iter(_Refusing.apply(what, in_place, wanting, *named))  # type: ignore[no-untyped-call]
    return tuple(next(refusing) if is_float else each for each, is_float in zip(results, floats, strict=True))
