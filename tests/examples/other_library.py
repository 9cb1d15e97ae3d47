"""A library for the tests of examples/overlapped_moe/others.py on CPU ranks: every rank has all tokens, and rows go
home by torch. By token its rows are rank-major, as FlashInfer's are, with garbage where there are none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bench.rivals.interface import Received, Rival
from bench.workload import Given, Shape
from bench.world import Skipped, World

ON_CPU = True


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    assert dtype == "bf16"
    return ("rank_major",) if mode == "ht" else ("expert_major", "rank_major", "flat", "packed")


class OtherLibrary(Rival):
    version = "2.5"

    def check(self) -> None:
        self.of_experts = self.every("topk_idx") - self.experts.start  # [R * T, K]
        is_mine = (self.of_experts >= 0) & (self.of_experts < self.shape.num_local)
        self.of_experts = torch.where(is_mine, self.of_experts, -1)
        self.is_row = is_mine.any(1)

    def receive(self) -> Received:
        x, weights = self.every("x"), self.every("weights")
        if self.shape.layout == "rank_major":
            rows = torch.where(self.is_row[:, None], x, torch.nan)
            return Received(rows, ids=self.of_experts, weights=weights)
        if self.shape.layout == "flat":  # the wrong experts
            return Received(x, ids=self.of_experts.roll(1, 1), weights=weights)
        rows = torch.full((self.shape.num_local, len(x), self.shape.hidden), torch.nan, dtype=x.dtype)
        self.tokens = [(self.of_experts == expert).any(1).nonzero()[:, 0] for expert in range(self.shape.num_local)]
        for expert, tokens in enumerate(self.tokens):
            rows[expert, : len(tokens)] = x[tokens]
        return Received(rows, counts=torch.tensor([len(each) for each in self.tokens], dtype=torch.int32))

    def send_home(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        parts = rows.float()
        if received.counts is not None:
            parts = torch.zeros(len(self.of_experts), self.shape.hidden)
            for expert, tokens in enumerate(self.tokens):
                weights = torch.where(self.of_experts == expert, self.every("weights"), 0).sum(1)[tokens]
                parts[tokens] += rows[expert, : len(tokens)].float() * weights[:, None]
        home = torch.empty_like(parts)
        dist.all_to_all_single(home, parts)
        return home.view(self.world.num_ranks, self.shape.tokens, -1).sum(0).bfloat16()


def make(world: World, shape: Shape, inputs: list[Given]) -> Rival:
    if shape.layout == "packed":
        raise ImportError("No module named 'other_library'")
    if shape.tokens == 3:
        raise Skipped("takes no 3 tokens")
    made: Any = OtherLibrary(world, shape, inputs)
    return made
