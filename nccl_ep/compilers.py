"""What a program tells torch.compile of the tensors that it gives to a compiled layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import require_integers, require_tensors


def mark_tokens(*tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> None:
    """Tells ``torch.compile`` that a length of these tensors is a number of tokens, which may be any, 0 and 1 too.

    Call it in front of every call of the compiled layer, with the tensors that are given to the layer. The layer is
    then compiled once, at its first call. Without it torch compiles for the first number, for the second, for 0 and
    for 1; a rank that does so in the middle of a run lets the others wait, and their deadline counts.

    Args:
        tensors: those that a token has a row of. The marks stay with a tensor, but not with its views and copies.
        dim: the dimensions that are numbers of tokens: (0, 1) for [batch, sequence, hidden].

    What is computed of an unknown length may not choose between two programs (``if x.shape[0] > 8``): torch refuses it.

    Raises: TypeError for what is no tensor; ValueError for a dimension that a tensor has not.
    """
    if torch.compiler.is_compiling():
        return
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    for one in dims:
        require_integers(dim=one)
    for at, each in enumerate(tensors):
        require_tensors(**{f"tensors[{at}]": each})
        for one in dims:
            if not -each.dim() <= one < each.dim():
                raise ValueError(f"dim is {one}, but tensors[{at}] has shape {list(each.shape)}")
    # Not at the top: it takes longer to import than all of nccl_ep.
    from torch._dynamo.decorators import mark_unbacked

    for each in tensors:
        mark_unbacked(each, [one % each.dim() for one in dims])
