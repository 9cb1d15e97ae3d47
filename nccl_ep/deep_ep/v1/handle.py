"""What callers of DeepEP's normal mode hold: x with its scales, and the handle as a tuple of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from ... import _C
from ...checks import require_on, require_tensors

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
NormalHandle: TypeAlias = tuple[torch.Tensor, ...]

_INTRANODE, _INTERNODE = 6, 10  # elements of a handle: of one domain, of several


class NormalPayload(NamedTuple):
    """x, taken apart."""

    rows: torch.Tensor
    scales: torch.Tensor | None  # [T, S]
    has_flat_scales: bool = False  # they were [T]

    @staticmethod
    def of(buffer: Any, x: Rows) -> NormalPayload:
        if isinstance(x, (tuple, list)) and len(x) != 2:
            raise ValueError(f"x has {len(x)} elements, must be a tensor, or a pair of rows and scales")
        rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
        require_on(buffer._seq, ("x", "scales"), (rows, scales))
        if rows is None or rows.dim() != 2:
            raise ValueError(f"x has shape {None if rows is None else list(rows.shape)}, must be [tokens, hidden]")
        is_flat = scales is not None and scales.dim() == 1
        return NormalPayload(rows, scales.unsqueeze(1) if scales is not None and is_flat else scales, is_flat)

    @property
    def row_bytes(self) -> int:
        """Of a row on its way there, or home in bf16."""
        scale_bytes = 0 if self.scales is None else self.scales.shape[-1] * self.scales.element_size()
        return _C.normal_row_bytes(self.rows.shape[1], self.rows.element_size(), scale_bytes)

    def as_given(self, rows: torch.Tensor, scales: torch.Tensor) -> Rows:
        if self.scales is None:
            return rows
        return rows, scales.squeeze(1) if self.has_flat_scales else scales


class Route(NamedTuple):
    """What combine and cached dispatches need of a handle."""

    route: torch.Tensor  # csrc/layout/ht/handle.h
    src_idx: torch.Tensor  # [N]: of flat rows, all that the slots have
    is_token_in_rank: torch.Tensor  # [T, R]
    topk: int
    num_experts: int
    max_tokens: int

    def as_handle(self, buffer: Any, rank_prefix: torch.Tensor) -> NormalHandle:
        """DeepEP's elements, in its order, for one domain or several."""
        numbers = self.route.new_empty((0, self.num_experts, self.max_tokens))
        head = self._send_head(buffer.num_ranks, buffer.domain_size)
        if buffer.domain_size == buffer.num_ranks:
            return rank_prefix, self.route, numbers, self.src_idx, self.is_token_in_rank, head
        here = rank_prefix[:, buffer.rank].contiguous()
        none = self.route.new_empty((0,))
        by_domain = here[buffer.domain_size - 1 :: buffer.domain_size].contiguous()
        return self.is_token_in_rank, self.route, numbers, none, by_domain, none, here, self.src_idx, head, none

    def _send_head(self, num_ranks: int, domain_size: int) -> torch.Tensor:
        """[T, K]: the row of each choice at its owner, -1 for none; flat rows are in the order of the route's slots."""
        tokens = self.is_token_in_rank.shape[0]
        *_, slots_at, _ = _C.ht_route_parts(
            num_ranks, domain_size, self.num_experts, tokens, self.max_tokens, self.topk
        )  # fmt: skip
        return self.route[slots_at:][: tokens * self.topk].view(tokens, self.topk)

    @staticmethod
    def of(buffer: Any, handle: NormalHandle) -> Route:
        size = _INTRANODE if buffer.domain_size == buffer.num_ranks else _INTERNODE
        if not isinstance(handle, (tuple, list)) or len(handle) != size:
            what = f"{len(handle)} elements" if isinstance(handle, (tuple, list)) else type(handle).__name__
            raise ValueError(f"the handle is {what}, must be the {size} tensors that dispatch returned")
        names = [f"handle[{i}]" for i in range(size)]
        require_on(buffer._seq, names, handle)
        require_tensors(**dict(zip(names, handle, strict=True)))
        if size == _INTRANODE:
            _, route, numbers, src_idx, is_in_rank, head = handle
        else:
            is_in_rank, route, numbers, _, _, _, _, src_idx, head, _ = handle
        if numbers.dim() != 3 or src_idx.dim() != 1 or is_in_rank.dim() != 2 or head.dim() != 2:
            shapes = [list(each.shape) for each in handle]
            raise ValueError(f"the handle has tensors of shapes {shapes}: it is not what dispatch returned")
        return Route(route, src_idx, is_in_rank, head.shape[1], numbers.shape[1], numbers.shape[2])
