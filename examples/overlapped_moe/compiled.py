"""The forward pass of high throughput as one graph of torch.compile. A compiled program has one stream: an op of the
dispatch lets that run beside what follows, and the GEMM waits for its blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

import nccl_ep
from examples.overlapped_moe.layer import MoeLayer

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def compiled_forward(moe: MoeLayer, *, overlaps: bool) -> Forward:
    """x, ids, weights as the layer takes them, but for ``sorts`` and ``signals``, to the same [T, H]."""
    num_sms = moe.num_sms if overlaps else 0

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pending = moe.send(x, ids, weights, num_sms)
        out = pending.early_output if overlaps else pending.receive()
        gemms = moe.forward_gemms(out)
        gemms.first(gemms.num_sms - num_sms)
        if overlaps:
            out = pending.receive()
        gemms.second(gemms.num_sms)
        return nccl_ep.combine(gemms.rows, out.handle, weights="dispatch")

    made: Forward = torch.compile(forward, fullgraph=True, options=nccl_ep.KEEP_PROGRAM_ORDER)  # type: ignore[arg-type]
    return made
