"""What callers of DeepEP's normal mode hold: x with its scales, and the handle as a tuple of tensors.

The tuple has DeepEP's elements in DeepEP's order: ours are the route (csrc/layout/ht/handle.h), the numbers of the
dispatch as lengths of an empty tensor, src_idx [N] (of flat rows all that the slots have), is_token_in_rank [T, R] and
the rows of own choices [T, K] (csrc/torch/deep_ep/normal_call.cc).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ...checks import require_on, require_tensors

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
NormalHandle: TypeAlias = tuple[torch.Tensor, ...]

_INTRANODE, _INTERNODE = 6, 10  # elements of a handle: of one domain, of several


def require_payload(buffer: Any, x: Rows) -> None:
    """ValueError, TypeError for what is neither rows nor a pair of rows and scales."""
    if isinstance(x, (tuple, list)) and len(x) != 2:
        raise ValueError(f"x has {len(x)} elements, must be a tensor, or a pair of rows and scales")
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    require_on(buffer._seq, ("x", "scales"), (rows, scales))
    if rows is None or rows.dim() != 2:
        raise ValueError(f"x has shape {None if rows is None else list(rows.shape)}, must be [tokens, hidden]")


def require_route(buffer: Any, handle: NormalHandle) -> None:
    """ValueError, TypeError for what is no handle of a dispatch."""
    size = _INTRANODE if buffer.domain_size == buffer.num_ranks else _INTERNODE
    if not isinstance(handle, (tuple, list)) or len(handle) != size:
        what = f"{len(handle)} elements" if isinstance(handle, (tuple, list)) else type(handle).__name__
        raise ValueError(f"the handle is {what}, must be the {size} tensors that dispatch returned")
    names = [f"handle[{i}]" for i in range(size)]
    require_on(buffer._seq, names, handle)
    require_tensors(**dict(zip(names, handle, strict=True)))
    if size == _INTRANODE:
        _, _, numbers, src_idx, is_in_rank, head = handle
    else:
        is_in_rank, _, numbers, _, _, _, _, src_idx, head, _ = handle
    if numbers.dim() != 3 or src_idx.dim() != 1 or is_in_rank.dim() != 2 or head.dim() != 2:
        shapes = [list(each.shape) for each in handle]
        raise ValueError(f"the handle has tensors of shapes {shapes}: it is not what dispatch returned")
