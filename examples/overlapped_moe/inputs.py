"""What the layers of a comparison are given: the same tokens, choices and weights of a rank for each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """mode: "ht" or "ll". tokens: of a rank. experts: of all ranks. block: rows of a block of arrivals."""

    mode: str
    hidden: int
    tokens: int
    inner: int
    topk: int
    experts: int
    block: int = 128
    num_sms: int = 16

    @staticmethod
    def parse(text: str, inner: int, topk: int, experts: int) -> Shape:
        """mode:H:tokens of a rank, then rows of a block and SMs of a dispatch beside a GEMM, where they are given."""
        try:
            mode, *sizes = text.split(":")
            hidden, tokens, *rest = map(int, sizes)
            if mode not in ("ht", "ll") or len(rest) > 2 or min(hidden, tokens, *rest) < 1:
                raise ValueError
        except ValueError:
            raise SystemExit(f"{text}: must be ht or ll, H, tokens, and rows of a block, SMs, with : between") from None
        return Shape(mode, hidden, tokens, inner, topk, experts, *rest)

    def capacity(self, ranks: int) -> int:
        """Rows in the order of experts that a rank has room for: a quarter more than there are on average."""
        local = self.experts // ranks
        most = ranks * self.tokens * min(self.topk, local)
        return min(max(self.tokens * self.topk * 5 // 4, 1), most) + local * self.block


@dataclass(frozen=True)
class Inputs:
    """x: bf16 [T, H]. ids: int64 [T, K]. weights: float32 [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    draw: torch.Generator

    @staticmethod
    def random(shape: Shape, rank: int, device: torch.device | str) -> Inputs:
        draw = torch.Generator(device).manual_seed(100 + rank)
        x = torch.randn(shape.tokens, shape.hidden, generator=draw, device=device, dtype=torch.bfloat16)
        scores = torch.rand(shape.tokens, shape.experts, generator=draw, device=device)
        weights, ids = scores.softmax(-1).topk(shape.topk)
        return Inputs(x, ids, weights, draw)
