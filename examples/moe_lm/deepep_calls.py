"""The same exchange by DeepEP's calls, through nccl_ep.deep_ep: what a program that was written for DeepEP does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

import nccl_ep
from nccl_ep import deep_ep

from .experts import Experts


class DeepEpLowLatency:
    """``low_latency_dispatch``, one batched GEMM over all rows that could have come, ``low_latency_combine``."""

    name = "deep_ep low latency"

    def __init__(self, core: nccl_ep.Buffer, num_experts: int, max_tokens: int) -> None:
        self.buffer, self.num_experts, self.max_tokens = deep_ep.Buffer.of(core), num_experts, max_tokens

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, idx, self.max_tokens, self.num_experts, use_fp8=False
        )
        assert isinstance(rows, Tensor)
        return self.buffer.low_latency_combine(experts.batched(rows), idx, weights, handle)[0]


class DeepEpNormal:
    """``get_dispatch_layout``, ``dispatch``; rows are sorted by expert and back here; ``combine``."""

    name = "deep_ep normal"

    def __init__(self, core: nccl_ep.Buffer, num_experts: int) -> None:
        self.buffer, self.num_experts = deep_ep.Buffer.of(core), num_experts

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        buffer, topk = self.buffer, idx.shape[1]
        with record_function("deep_ep.dispatch"):
            per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, self.num_experts)
            how: Any = (None, per_rank, per_node, is_in_rank, per_expert, idx, weights)
            rows, ids, row_weights, counts, handle, _ = buffer.dispatch(x, *how)
            assert isinstance(rows, Tensor) and ids is not None and row_weights is not None and counts is not None
            chosen = ids.reshape(-1)
            key = torch.where(chosen < 0, experts.count, chosen)
            order = torch.argsort(key, stable=True)[: sum(counts)]
            by_expert = rows[order // topk]
            ends = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0).to(torch.int32)
        results = experts.packed(by_expert, ends)
        with record_function("deep_ep.combine"):
            placed = x.new_zeros(len(rows) * topk, x.shape[1])
            placed[order] = results
            summed = torch.bmm(row_weights.to(x.dtype).unsqueeze(1), placed.view(len(rows), topk, x.shape[1])).squeeze(
                1
            )
            return buffer.combine(summed, handle)[0]
