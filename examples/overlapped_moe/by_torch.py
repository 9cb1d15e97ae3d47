"""The layer by torch alone, and its GEMMs: what the others are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.moe_lm.baseline import AllToAll
from examples.moe_lm.experts import Experts as TorchExperts
from examples.moe_lm.experts import looped_gemm
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs


def grouped(rows: torch.Tensor, ends: torch.Tensor, experts: Experts) -> torch.Tensor:
    """rows [N, H], expert after expert, up to ``ends`` int32 [L]. Rows past the last end are unspecified."""
    w13, w2 = experts.w13.transpose(1, 2), experts.w2.transpose(1, 2)
    if rows.device.type == "cpu":
        gate, up = looped_gemm(rows, w13, ends).chunk(2, -1)
        return looped_gemm(F.silu(gate) * up, w2, ends)
    gate, up = torch._grouped_mm(rows, w13, offs=ends).chunk(2, -1)
    return torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)


def batched(rows: torch.Tensor, experts: Experts, out: torch.Tensor | None = None) -> torch.Tensor:
    """rows [L, C, H]: a batched GEMM, which multiplies rows that do not exist, too."""
    gate, up = torch.bmm(rows, experts.w13.transpose(1, 2)).chunk(2, -1)
    return torch.bmm(F.silu(gate) * up, experts.w2.transpose(1, 2), out=out)


def layer(inputs: Inputs, experts: Experts, num_experts: int) -> Callable[[], torch.Tensor]:
    """all_to_all_single and torch's grouped GEMMs, of torch's default group."""
    local, hidden, inner = experts.w2.shape
    with torch.device("meta"):
        modules = TorchExperts(local, hidden, inner)
    modules.grouped_mm = experts.w13.device.type == "cuda"
    modules.up = torch.nn.Parameter(experts.w13.transpose(1, 2), requires_grad=False)
    modules.down = torch.nn.Parameter(experts.w2.transpose(1, 2), requires_grad=False)
    exchange = AllToAll(dist.group.WORLD, num_experts)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return exchange(inputs.x, inputs.ids, inputs.weights, modules)

    return run
