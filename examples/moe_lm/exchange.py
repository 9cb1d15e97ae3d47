"""How tokens reach the experts and come back, with nccl_ep."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

import nccl_ep

from .experts import Experts
from .sizes import Sizes

ALIGNMENT = 8  # rows of an expert in packed: 16 bytes of bf16, wherever a grouped GEMM starts


def make_buffer(
    group: Any, sizes: Sizes, max_tokens: int, dtype: torch.dtype, device: torch.device, mode: str
) -> nccl_ep.Buffer:
    """A buffer for dispatches of up to ``max_tokens`` a rank.

    An output of high throughput lies in the buffer's arena, where peers write it, as long as there is room. That is
    reserved for four outputs of as many rows as come where experts are used alike; more go through a copy.
    """
    arena = None
    if device.type == "cuda" and mode != "ll":
        rows = (max_tokens + ALIGNMENT) * sizes.topk + ALIGNMENT * sizes.experts
        arena = int(4 * rows * sizes.hidden * dtype.itemsize) + (64 << 20)
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=max_tokens, hidden=sizes.hidden, topk=sizes.topk, num_experts=sizes.experts, dtype=dtype,
        mode=mode, device=device, arena_bytes=arena,
    )  # fmt: skip


class NcclEp:
    """Dispatch, experts, combine.

    Args:
        num_experts: of all ranks. max_tokens: of a rank; by it ``mode="auto"`` chooses. Default: the buffer's.
        layout: "packed", for a grouped GEMM on the rows where they lie; "expert_major", for a batched one.
        rows: packed: "exact", outputs of the size of what comes, for which the host waits; "all", of what can come.
        quant: None or "fp8": rows travel in eight bits, and experts get them back in the dtype of x.
        trains: padding is zeroed, so that gradients of weights are sums of rows that exist.
    """

    name = "nccl_ep"

    def __init__(
        self,
        buffer: nccl_ep.Buffer,
        num_experts: int,
        *,
        mode: str = "ht",
        layout: str = "packed",
        rows: str = "exact",
        quant: str | None = None,
        trains: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        self.layout, self.quant = layout, quant
        max_tokens = max_tokens or buffer.max_tokens
        self.how: dict[str, Any] = {
            "buffer": buffer, "num_experts": num_experts, "mode": mode, "layout": layout, "quant": quant,
            "max_tokens": max_tokens, "zero_padding": trains,
        }  # fmt: skip
        if layout == "packed":
            self.how["expert_alignment"] = ALIGNMENT
            if rows == "exact":
                self.how["capacity"] = "exact"
        elif max_tokens is not None:
            self.how["capacity"] = buffer.num_ranks * max_tokens

    def compute(self, out: nccl_ep.DispatchOutput, experts: Experts, dtype: torch.dtype) -> Tensor:
        rows = out.x if self.quant is None else out.dequantized(dtype)
        if self.layout == "expert_major":
            return experts.batched(rows)
        assert out.offsets is not None
        return experts.packed(rows, out.offsets[1:])

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        out = nccl_ep.dispatch(x, experts.choose(idx), weights, **self.how)
        return nccl_ep.combine(self.compute(out, experts, x.dtype), out.handle)

    def in_halves(
        self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts
    ) -> Generator[None, None, Tensor]:  # fmt: skip
        """The same, low latency, giving way while rows travel: another batch computes meanwhile."""
        dispatched = nccl_ep.dispatch_send(x, experts.choose(idx), weights, **self.how)
        yield
        out = dispatched.receive()
        combined = nccl_ep.combine_send(self.compute(out, experts, x.dtype), out.handle)
        yield
        return combined.receive()
