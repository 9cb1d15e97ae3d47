"""The Triton kernels of examples/overlapped_moe, forward and backward, in Triton's interpreter (TRITON_INTERPRET=1),
over the rows of real dispatches. Prints JSON: how far each result is from float32 and torch's autograd."""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.runtime import interpreter

import nccl_ep
from examples.overlapped_moe import on_gpu
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from nccl_ep.testing import ThreadGroup
from tests.examples.moe_reference import distance, layer

TOKENS, HIDDEN, INNER, TOPK, EXPERTS = 140, 256, 128, 2, 3
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ht, group and tma": ("ht", {"group": 4, "tma": True}),
    "ll": ("ll", {}),
}
DTYPE = torch.float32  # the interpreter takes the bits of bf16 for integers


_patch = interpreter._patch_lang_tensor


def patch_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of arrays of one element, which numpy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_index


def distances(mode: Any, how: dict[str, Any]) -> dict[str, float]:
    """Expert 0 has more rows than a block, and the last one has none."""
    draw = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(TOKENS, HIDDEN, generator=draw).to(DTYPE) for _ in range(2))
    weights, ids = torch.rand(TOKENS, TOPK, generator=draw), torch.tensor([[0, 1]]).repeat(TOKENS, 1)
    ids[torch.rand(TOKENS, generator=draw) < 0.8, 1] = -1
    experts = Experts.random(EXPERTS, HIDDEN, INNER, "cpu")
    experts = Experts(experts.w13.to(DTYPE), experts.w2.to(DTYPE))
    given = [each.float().requires_grad_() for each in (x, weights, experts.w13, experts.w2)]
    y = layer(given[0], ids, *given[1:])
    wanted = (y.detach(), *torch.autograd.grad(y, given, gradient.float()))
    with nccl_ep.Buffer.for_shapes(
        ThreadGroup.make(1)[0], max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode=mode,
        device="cpu", dtype=DTYPE,
    ) as buffer:  # fmt: skip
        moe = MoeLayer(buffer, experts, num_experts=EXPERTS, max_tokens=TOKENS, topk=TOPK, mode=mode)
        common = moe.arrivals, moe.blocks, 60.0
        out = moe.send(x, ids, weights, 0).receive()
        poison(out.x, out)
        forward = on_gpu.Forward(out.x, None, experts, True, *common, **how)
        run(forward, moe)
        kept = moe.kept(out, forward.gates)
        made = [nccl_ep.combine(forward.rows, out.handle)]
        moved: Any
        if mode == "ht":
            moved = nccl_ep.dispatch_cached(gradient, out.handle, arrivals=moe.arrivals)
        else:
            moved = moe.send(gradient, ids, weights, 0).receive()
        poison(moved.x, out)
        backward = on_gpu.Backward(moved.x, kept, experts, *common, **how)
        for each in (kept.gates, backward.of_gates, backward.weighted, backward.dots):
            poison(each, out)
        run(backward, moe)
        made.append(nccl_ep.combine(backward.rows, out.handle, weights=None))
        made.append(nccl_ep.combine_weights(backward.of_weights(), out.handle))
        backward.beside(2)
        made += [backward.of_w13, backward.of_w2]
    names = ("y", "x", "weights", "w13", "w2")
    return {name: distance(*each) for name, *each in zip(names, made, wanted, strict=True)}


def poison(rows: torch.Tensor, out: nccl_ep.DispatchOutput) -> None:
    """Rows that do not exist become NaN."""
    there = torch.zeros(out.weights.numel(), dtype=torch.bool)
    for expert, count in enumerate(out.counts.tolist()):
        first = expert * out.x.shape[1] if out.offsets is None else int(out.offsets[expert])
        there[first : first + count] = True
    rows.view(there.numel(), -1)[~there] = torch.nan


def run(gemms: Any, moe: MoeLayer) -> None:
    """By two programs, and a second launch that finds nothing left."""
    gemms.first(2)
    gemms.first(1)
    gemms.second(2)
    assert torch.equal(gemms.signals, gemms.tiles * (moe.arrivals.rows > 0).int())
    assert not moe.arrivals.has_failed()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    with torch.enable_grad():
        print(json.dumps({name: distances(*case) for name, case in CASES.items()}))
