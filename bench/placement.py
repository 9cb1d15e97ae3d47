"""``python -m bench placement``: how evenly ranks are loaded before and after experts move, by arithmetic.

The routing is the benchmark's. Figures are the load of the fullest rank over the mean, in choices. ``before``: expert e
on rank e // (E / R). ``moved``: without copies; ``copied``: with some more slots a rank; both for the tokens that the
placement was made of. ``fresh``: as ``copied``, for other tokens. ``moves``: of experts, from ``before`` to ``copied``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nccl_ep.placement import ExpertMap, imbalance, plan_moves, rebalance_experts

from .options import ints, words
from .workload import ROUTINGS, Shape, route


@dataclass(frozen=True)
class Balance:
    routing: str
    ranks: int
    copies: int
    before: float
    moved: float
    copied: float
    fresh: float
    moves: int


def choices(shape: Shape, seed: int) -> list[Tensor]:
    """[T, K] of each rank; other tokens of other seeds, of the same popular experts."""
    return [
        route(shape, rank, torch.Generator().manual_seed(seed * 1009 + rank)) for rank in range(shape.num_ranks)
    ]  # fmt: skip


def balance(shape: Shape, copies: int) -> Balance:
    experts, ranks = shape.num_experts, shape.num_ranks
    load = torch.bincount(torch.cat(choices(shape, 0)).flatten(), minlength=experts)[None]
    start = torch.arange(experts)[None]
    moved = rebalance_experts(load, experts, 1, 1, ranks, previous=start)[0]
    room = torch.cat([start.view(ranks, -1), torch.full((ranks, copies), -1)], 1).view(1, -1)
    copied = rebalance_experts(load, experts + copies * ranks, 1, 1, ranks, previous=room)[0]
    physical = torch.zeros(copied.shape[1], dtype=torch.int64)
    for rank, idx in enumerate(choices(shape, 1)):
        mapped = ExpertMap(copied[0], experts, rank=rank)(idx)
        physical += torch.bincount(mapped.flatten(), minlength=len(physical))
    by_rank = physical.view(ranks, -1).sum(1).double()
    before, after_moves, after_copies = (float(imbalance(load, each, ranks)) for each in (start, moved, copied))
    fresh = float(by_rank.max() / by_rank.mean())
    moves = len(plan_moves(room[0], copied[0], ranks))
    return Balance(shape.routing, ranks, copies, before, after_moves, after_copies, fresh, moves)


def render(found: Sequence[Balance]) -> str:
    lines = [
        "| routing | ranks | copies a rank | before | moved | copied | fresh | moves |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        figures = (each.before, each.moved, each.copied, each.fresh)
        shown = " | ".join(f"{figure:.2f}" for figure in figures)
        lines.append(f"| {each.routing} | {each.ranks} | {each.copies} | {shown} | {each.moves} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench placement", description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--ranks", type=ints, default=[8, 16, 64])
    parser.add_argument("--copies", type=ints, default=[1, 2], help="slots more of a rank")
    parser.add_argument("--routing", type=words(*ROUTINGS), default=["skewed"], help=", ".join(ROUTINGS))
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    options = parser.parse_args(argv)
    shape = Shape(1, options.tokens, 64, options.topk, options.experts, "bf16", "packed", "skewed", 0, "ht")
    found = [
        balance(replace(shape, num_ranks=ranks, routing=routing), copies)
        for routing in options.routing
        for ranks in options.ranks
        for copies in options.copies
    ]
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
