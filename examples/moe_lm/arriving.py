"""Experts that begin while rows still come, in training while gradients do: the layer of examples/overlapped_moe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nccl_ep
from examples.overlapped_moe.experts import Experts as Weights
from examples.overlapped_moe.layer import MoeLayer

from .experts import Experts

CPU_ROWS, GPU_ROWS = 8, 128  # of a block


class Arriving:
    """Dispatch, experts, combine, in high throughput. ``max_tokens``: of a rank. On GPUs of bf16, H a multiple of 256
    and an expert's inner size one of 128. ``overlaps``: False does the same one step behind the other."""

    name = "nccl_ep_arrivals"

    def __init__(self, buffer: nccl_ep.Buffer, num_experts: int, max_tokens: int, topk: int) -> None:
        self.buffer, self.overlaps = buffer, True
        rows = CPU_ROWS if buffer.device.type == "cpu" else GPU_ROWS
        self.how: dict[str, Any] = {
            "num_experts": num_experts,
            "max_tokens": max_tokens,
            "topk": topk,
            "rows_per_block": rows,
        }
        self.layer: MoeLayer | None = None  # of the model's first call: it has room for as many experts as that has

    @torch.compiler.disable  # its streams are the buffer's
    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        own = Weights(experts.up.to(x.dtype).transpose(1, 2), experts.down.to(x.dtype).transpose(1, 2))
        if self.layer is None:
            self.layer = MoeLayer(self.buffer, own, mode="ht", **self.how)
        self.layer.experts = own
        return self.layer(x, experts.choose(idx), weights, overlaps=self.overlaps)
