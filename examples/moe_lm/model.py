"""A decoder-only language model with Mixture-of-Experts layers, small enough to be read.

Every rank has the dense parts in full and its share of the experts. Parameters are float32; activations and GEMMs have
the model's ``dtype``. The experts of all ranks are reached through ``exchange``, which model.py knows nothing about but
its call: tokens, ids and weights in, sums of experts' results out (exchange.py, baseline.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .experts import Experts, has_grouped_mm
from .sizes import Sizes

# x [T, H], ids [T, K], weights [T, K] float32, this rank's experts -> [T, H]
Exchange = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]


class Linear(nn.Module):
    """Without bias; its float32 weight is used in the dtype of what comes in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding. x: [B, heads, S, D]; positions: [S] or [B, S]."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.unsqueeze(-1).float() * frequencies  # [.., S, D / 2]
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)
    sin, cos = angles.sin(), angles.cos()
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv, self.out = Linear(sizes.hidden, 3 * sizes.hidden), Linear(sizes.hidden, sizes.hidden)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, S, D] of x [B, S, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return rotate(q, positions), rotate(k, positions), v

    def finish(self, attended: Tensor) -> Tensor:
        """[B, heads, S, D] to [B, S, H]."""
        return self.out(attended.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x, torch.arange(x.shape[1], device=x.device))
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Router(nn.Module):
    """Top-k of a softmax over all experts, in float32 throughout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.topk = sizes.topk
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., H]: weights [.., K], which add up to 1, ids [.., K] and probabilities [.., E]."""
        probabilities = F.linear(x.float(), self.weight.float()).softmax(-1)
        weights, idx = probabilities.topk(self.topk, dim=-1)
        return weights / weights.sum(-1, keepdim=True), idx, probabilities


def load_balancing_loss(probabilities: Tensor, idx: Tensor) -> Tensor:
    """1 where the experts are used alike, up to E where one has all tokens; the mean over the sequences.

    [B, S, E] and [B, S, K]. Each sequence counts by itself, so that the loss does not depend on which rank has which.
    """
    experts = probabilities.shape[-1]
    used = F.one_hot(idx, experts).float().mean((1, 2))  # [B, E] share of the choices
    return experts * (used * probabilities.mean(1)).sum(-1).mean()


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = Linear(hidden, 2 * inner), Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self, sizes: Sizes, num_ranks: int) -> None:
        super().__init__()
        self.router = Router(sizes)
        self.experts = Experts(sizes.experts // num_ranks, sizes.hidden, sizes.expert_inner)
        self.shared = SwiGLU(sizes.hidden, sizes.shared_inner)
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H]: the sum of the chosen experts and the shared one, and the load-balancing loss."""
        assert self.exchange is not None, "call Model.use first"
        weights, idx, probabilities = self.router(x)
        routed = self.exchange(x.flatten(0, 1), idx.flatten(0, 1), weights.flatten(0, 1), self.experts)
        return routed.view_as(x) + self.shared(x), load_balancing_loss(probabilities, idx)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, num_ranks: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(sizes.hidden), Attention(sizes)
        self.moe_norm, self.moe = RMSNorm(sizes.hidden), MoE(sizes, num_ranks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.moe(self.moe_norm(x))
        return x + y, balance


class Model(nn.Module):
    """``rank`` and ``num_ranks``: of the expert-parallel group. The same seed gives the same model on any number."""

    def __init__(self, sizes: Sizes, rank: int = 0, num_ranks: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes.check_ranks(num_ranks)
        self.sizes, self.rank, self.dtype = sizes, rank, dtype
        self.embedding = nn.Parameter(torch.empty(sizes.vocabulary, sizes.hidden))
        self.blocks = nn.ModuleList(Block(sizes, num_ranks) for _ in range(sizes.layers))
        self.norm, self.head = RMSNorm(sizes.hidden), Linear(sizes.hidden, sizes.vocabulary)
        self.checkpoints_activations = False

    def use(self, *exchanges: Exchange) -> None:
        """One for each block, or one for all."""
        grouped_mm = has_grouped_mm(self.embedding.device.type, self.dtype)
        for number, block in enumerate(self.blocks):
            block.moe.exchange = exchanges[number % len(exchanges)]
            block.moe.experts.grouped_mm = grouped_mm

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if ".experts." in name}

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> None:
        """Every tensor, and every expert, draws from a generator of its own."""
        draw = torch.Generator(self.embedding.device)
        first = self.rank * self.blocks[0].moe.experts.count

        def fill(tensor: Tensor, inputs: int, key: int) -> None:
            draw.manual_seed((seed * 1_000_003 + key) % (1 << 62))
            tensor.normal_(0.0, 1 / math.sqrt(inputs), generator=draw)

        for number, (name, parameter) in enumerate(self.named_parameters()):
            if ".experts." in name:
                for own, weight in enumerate(parameter):
                    fill(weight, weight.shape[0], number * 100_003 + first + own)
            elif parameter.dim() > 1:
                fill(parameter, self.sizes.hidden if name == "embedding" else parameter.shape[-1], number * 100_003)

    def for_serving(self) -> Model:
        """Parameters in the model's dtype, but for the routers'. Without gradients."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(False)
            if ".router." not in name:
                parameter.data = parameter.data.to(self.dtype)
        return self

    def in_float32(self) -> Model:
        """This model, from now on in float32. Parameters keep their values."""
        self.dtype = torch.float32
        return self.float()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, S]: logits [B, S, vocabulary] float32, and the mean load-balancing loss of the layers."""
        x: Any = F.embedding(tokens, self.embedding).to(self.dtype)
        balance = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            if self.checkpoints_activations and torch.is_grad_enabled():
                x, own = checkpoint(block, x, use_reentrant=False)
            else:
                x, own = block(x)
            balance = balance + own / len(self.blocks)
        return self.head(self.norm(x)).float(), balance
