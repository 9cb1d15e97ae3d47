"""The same as on_gpu.py by torch, for CPU ranks: ``block`` does one block of rows that has arrived."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from examples.overlapped_moe.experts import Experts, Kept
from nccl_ep.arrivals import Block


def flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, rows.shape[-1])


class Forward:
    def __init__(self, x: torch.Tensor, experts: Experts, keeps: bool, blocks: int) -> None:
        self.x, self.experts = flat(x), experts
        self.gates = x.new_empty(len(self.x), experts.w13.shape[1]) if keeps else None
        self.rows = torch.empty_like(x)
        self.signals, self.tiles = torch.zeros(blocks, dtype=torch.int32), 1

    def block(self, block: Block) -> None:
        here = slice(block.first, block.first + block.rows)
        gates = F.linear(self.x[here], self.experts.w13[block.expert])
        if self.gates is not None:
            self.gates[here] = gates
        gate, up = gates.chunk(2, -1)
        flat(self.rows)[here] = F.linear(F.silu(gate) * up, self.experts.w2[block.expert])
        self.signals[block.number] += 1

    def beside(self) -> None:
        pass


class Backward:
    def __init__(self, gradient: torch.Tensor, kept: Kept, experts: Experts, blocks: int) -> None:
        self.gradient, self.kept, self.experts = flat(gradient), kept, experts
        self.of_gates = torch.empty_like(kept.gates)
        self.weighted = kept.gates.new_empty(len(kept.gates), experts.w2.shape[2])
        self.dots = torch.empty_like(kept.weights)
        self.rows = torch.empty_like(kept.x)
        self.signals, self.tiles = torch.zeros(blocks, dtype=torch.int32), 1

    def block(self, block: Block) -> None:
        here, kept = slice(block.first, block.first + block.rows), self.kept
        gate, up = kept.gates[here].float().chunk(2, -1)
        hidden = (self.gradient[here] @ self.experts.w2[block.expert]).float()
        silu, weight = F.silu(gate), kept.weights.view(-1, 1)[here]
        self.dots.view(-1)[here] = (hidden * silu * up).sum(-1)
        self.weighted[here] = (silu * up * weight).to(self.weighted.dtype)
        hidden *= weight
        sigmoid = gate.sigmoid()
        of_gate = hidden * up * (sigmoid + silu * (1 - sigmoid))
        self.of_gates[here] = torch.cat([of_gate, hidden * silu], -1).to(self.of_gates.dtype)
        flat(self.rows)[here] = self.of_gates[here] @ self.experts.w13[block.expert]
        self.signals[block.number] += 1

    def beside(self) -> None:
        x = flat(self.kept.x)
        self.of_w13, self.of_w2 = torch.empty_like(self.experts.w13), torch.empty_like(self.experts.w2)
        for expert, (first, count) in enumerate(zip(self.kept.firsts.tolist(), self.kept.counts.tolist(), strict=True)):
            here = slice(first, first + count)
            self.of_w13[expert] = self.of_gates[here].T @ x[here]
            self.of_w2[expert] = self.gradient[here].T @ self.weighted[here]

    def of_weights(self) -> torch.Tensor:
        return self.dots
