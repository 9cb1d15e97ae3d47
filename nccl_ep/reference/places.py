"""The oracle's routing: which experts a rank has of each token, and where its rows lie there.

Like all of the oracle, whose notation it uses, it is written from the semantics alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import align_up


@dataclass
class Placement:
    """Where every choice goes at one rank; row_of and the shape of the rows decide the rest."""

    row_of: Tensor
    shape: tuple[int, ...]
    counts: Tensor
    demand: Tensor
    offsets: Tensor | None = None
    row_expert: Tensor | None = None
    total: Tensor | None = None


# --- Routing


def stack(tensors: Sequence[Tensor], max_tokens: int, fill: float) -> Tensor:
    """Tensors [T_r, ...] as one [R, M, ...], `fill` past each T_r."""
    first = tensors[0]
    stacked = first.new_full((len(tensors), max_tokens, *first.shape[1:]), fill)
    for rank, tensor in enumerate(tensors):
        stacked[rank, : len(tensor)] = tensor
    return stacked


def routing_of(ids: Sequence[Tensor], num_experts: int, max_tokens: int) -> Tensor:
    """Global expert ids [R, M, K] int64 of all sources; -1 for whatever names no expert."""
    stacked = stack([tensor.to(torch.int64) for tensor in ids], max_tokens, -1)
    return torch.where((stacked >= 0) & (stacked < num_experts), stacked, -1)


def local_ids(routing: Tensor, rank: int, num_local: int) -> Tensor:
    """Local expert ids [R, M, K] at `rank`, -1 for experts of other ranks."""
    return torch.where(routing.div(num_local, rounding_mode="floor") == rank, routing - rank * num_local, -1)


def reached_by(routing: Tensor, num_ranks: int, num_local: int) -> Tensor:
    """bool [R (destination), R (source), M]: the token has an expert at the destination."""
    return torch.stack([(local_ids(routing, rank, num_local) >= 0).any(-1) for rank in range(num_ranks)])


# --- Placement


def place_by_expert(
    local: Tensor,
    num_local: int,
    layout: str,
    capacity: int | None,
    alignment: int,
) -> Placement:
    """Rows of the expert layouts: one a choice, inside an expert by (source, token, k)."""
    num_ranks, max_tokens, topk = local.shape
    flat = local.reshape(-1)
    picks = torch.nonzero(flat >= 0).reshape(-1)
    picks = picks[torch.argsort(flat[picks], stable=True)]
    experts = flat[picks]
    demand = torch.bincount(experts, minlength=num_local)
    index = torch.arange(len(picks)) - (torch.cumsum(demand, 0) - demand)[experts]
    row_of = torch.full_like(flat, -1)

    if layout == "expert_major":
        slots = num_ranks * max_tokens if capacity is None else capacity
        row_of[picks] = torch.where(index < slots, experts * slots + index, -1)
        counts = demand.clamp(max=slots)
        return Placement(row_of.view_as(local), (num_local, slots), counts, demand)

    if capacity is None:
        worst = num_ranks * max_tokens * min(topk, num_local) + num_local * (alignment - 1)
        capacity = align_up(worst, alignment)
    ends = torch.cumsum((demand + alignment - 1).div(alignment, rounding_mode="floor") * alignment, 0)
    start = torch.cat([ends.new_zeros(1), ends])
    position = start[experts] + index
    row_of[picks] = torch.where(position < capacity, position, -1)
    counts = (capacity - start[:-1]).clamp(min=0).minimum(demand)
    row_expert = torch.full((capacity,), -1, dtype=torch.int32)
    kept = position < capacity
    row_expert[position[kept]] = experts[kept].to(torch.int32)
    offsets = start.clamp(max=capacity).to(torch.int32)
    return Placement(row_of.view_as(local), (capacity,), counts, demand, offsets, row_expert)


def place_by_rank(local: Tensor, layout: str, capacity: int | None) -> Placement:
    """Rows of the rank layouts: one a token that has an expert here, by (source, token), without gaps."""
    num_ranks, max_tokens, _ = local.shape
    here = (local >= 0).any(-1)
    demand = here.sum(1)
    if layout == "rank_major":
        rows = torch.cumsum(here, 1) - 1 + torch.arange(num_ranks).unsqueeze(1) * max_tokens
        shape: tuple[int, ...] = (num_ranks, max_tokens)
        kept = here
    else:
        slots = num_ranks * max_tokens if capacity is None else capacity
        rows = (torch.cumsum(here.reshape(-1), 0) - 1).view_as(here)
        shape = (slots,)
        kept = here & (rows < slots)
    row_of = torch.where(kept.unsqueeze(-1) & (local >= 0), rows.unsqueeze(-1), -1)
    counts = kept.sum(1)
    total = counts.sum().reshape(1).to(torch.int32) if layout == "flat" else None
    return Placement(row_of, shape, counts, demand, total=total)
