"""Experts go where the load is, while requests are served."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from nccl_ep.placement import ExpertMap, imbalance, move_experts, plan_moves, rebalance_experts

from .model import Model
from .ranks import Ranks


@dataclass
class Rebalanced:
    """One time. ``before``, ``after``: load of the fullest rank over the mean, of the fullest layer, of the choices
    since the time before. ``moves``: of experts, in all layers."""

    step: int
    before: float
    after: float
    moves: int


class Rebalancer:
    """Gives each rank room for ``copies`` experts more, and every ``every`` steps a new placement by load.

    Choices are counted where they are mapped to copies, on the device. A sum of a token's experts is made rank by rank,
    so with top-k above 2, or rounded sums, other bits come of another placement; each is right.
    """

    def __init__(self, world: Ranks, model: Model, copies: int, every: int) -> None:
        self.world, self.model, self.every = world, model, every
        own = model.sizes.experts // world.size
        self.physical_sizes = replace(model.sizes, experts=model.sizes.experts + copies * world.size)
        placed = torch.full((world.size, own + copies), -1)
        placed[:, :own] = torch.arange(model.sizes.experts).view(world.size, own)
        self.experts = [block.moe.experts for block in model.blocks]
        for each in self.experts:
            each.make_room(copies)
            each.places = ExpertMap(placed.flatten(), model.sizes.experts, rank=world.rank, device=world.device)
        self.steps, self.told = 0, list[Rebalanced]()

    def step(self) -> None:
        """Collective, of the same step of all ranks."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.rebalance()

    def rebalance(self) -> None:
        """Collective. Nothing changes if nothing was chosen, and no layer whose placement is as good as a new one."""
        places = [each.places for each in self.experts if each.places is not None]
        load = torch.stack([each.load for each in places]).cpu()
        dist.all_reduce(load)
        if not load.any():
            return
        old = torch.stack([each.physical_to_logical_map for each in places])
        ranks, moved = self.world.size, 0
        new, _, _ = rebalance_experts(load, self.physical_sizes.experts, 1, 1, ranks, previous=old)
        is_better = imbalance(load, new, ranks) < imbalance(load, old, ranks)
        new = torch.where(is_better.unsqueeze(-1), new, old)
        for layer, (experts, own) in enumerate(zip(self.experts, places, strict=True)):
            moves = plan_moves(old[layer], new[layer], ranks)
            move_experts(moves, [experts.up, experts.down])
            own.set(new[layer])
            own.clear_load()
            moved += len(moves)
        before, after = (float(imbalance(load, each, ranks).max()) for each in (old, new))
        self.told.append(Rebalanced(self.steps, before, after, moved))

    def report(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.told]
