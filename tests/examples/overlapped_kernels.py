"""The road of GPUs through examples/overlapped_moe on a CPU rank: its kernels in Triton's interpreter
(TRITON_INTERPRET=1), over the rows of real dispatches, on streams that do all at once. Rows that do not exist are NaN.
Prints JSON: how far each result is from float32 and torch's autograd."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from triton.runtime import interpreter

import nccl_ep
from examples.overlapped_moe import on_gpu
from examples.overlapped_moe.experts import Experts, Kept
from examples.overlapped_moe.layer import MoeLayer
from nccl_ep.testing import ThreadGroup
from tests.examples.moe_reference import distance, layer

TOKENS, HIDDEN, INNER, TOPK, EXPERTS = 140, 256, 128, 2, 3
DTYPE = torch.float32  # the interpreter takes the bits of bf16 for integers
CASES: dict[str, tuple[Any, bool, dict[str, Any]]] = {  # mode, whether they overlap, how
    "ht": ("ht", True, {"group": 4, "tma": True}),
    "ht, one behind": ("ht", False, {"group": 4, "tma": True}),
    "ll": ("ll", True, {}),
}

_patch = interpreter._patch_lang_tensor


def patch_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of arrays of one element, which numpy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_index


class Stream:
    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


torch.cuda.current_stream = lambda *_: Stream()  # type: ignore[assignment, return-value]
torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, return-value]


class Layer(MoeLayer):
    """With programs of one SM for the operations, and of two for the GEMMs."""

    def forward_gemms(self, out: nccl_ep.DispatchOutput, keeps: bool = False) -> Any:
        self.there = torch.zeros(out.weights.numel(), dtype=torch.bool)
        for expert, count in enumerate(out.counts.tolist()):
            first = expert * self.capacity if out.offsets is None else int(out.offsets[expert])
            self.there[first : first + count] = True
        gemms = on_gpu.Forward(out.x, None, self.experts, keeps, self.arrivals, self.blocks, 60.0, **self.how)
        return self.poisoned(gemms, out.x, gemms.h, gemms.rows)

    def backward_gemms(self, gradient: torch.Tensor, kept: Kept, experts: Experts) -> Any:
        gemms = on_gpu.Backward(gradient, kept, experts, self.arrivals, self.blocks, 60.0, **self.how)
        return self.poisoned(
            gemms, gradient, kept.x, kept.gates, kept.weights, gemms.of_gates, gemms.weighted, gemms.dots, gemms.rows
        )

    def poisoned(self, gemms: Any, *rows: torch.Tensor) -> Any:
        for each in rows:
            each.view(len(self.there), -1)[~self.there] = torch.nan
        self.gemms, gemms.num_sms = gemms, 3
        return gemms

    def _run_on_host(self, *args: Any) -> torch.Tensor:
        combined = self._run_on_gpu(*args)
        assert torch.equal(self.gemms.signals, self.gemms.tiles * (self.arrivals.rows > 0).int())
        assert not self.arrivals.has_failed()
        return combined


def distances(mode: Any, overlaps: bool, how: dict[str, Any]) -> dict[str, float]:
    """Expert 0 has more rows than a block, and the last one has none."""
    draw = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(TOKENS, HIDDEN, generator=draw, dtype=DTYPE) for _ in range(2))
    weights, ids = torch.rand(TOKENS, TOPK, generator=draw), torch.tensor([[0, 1]]).repeat(TOKENS, 1)
    ids[torch.rand(TOKENS, generator=draw) < 0.8, 1] = -1
    experts = Experts.random(EXPERTS, HIDDEN, INNER, "cpu")
    given = [each.to(DTYPE).requires_grad_() for each in (x, weights, experts.w13, experts.w2)]
    wanted = layer(given[0], ids, *given[1:])
    with nccl_ep.Buffer.for_shapes(
        ThreadGroup.make(1)[0], max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode=mode,
        device="cpu", dtype=DTYPE, late_weights=mode == "ll",
    ) as buffer:  # fmt: skip
        moe = Layer(
            buffer, Experts(*given[2:]), num_experts=EXPERTS, max_tokens=TOKENS, topk=TOPK, mode=mode, num_sms=1,
            how=how,
        )  # fmt: skip
        made = moe(given[0], ids, given[1], overlaps=overlaps)
        gradients = torch.autograd.grad(made, given, gradient)
    found = {"y": distance(made, wanted)}
    for name, *each in zip(
        ("x", "weights", "w13", "w2"), gradients, torch.autograd.grad(wanted, given, gradient), strict=True
    ):
        found[name] = distance(*each)
    return found


if __name__ == "__main__":
    print(json.dumps({name: distances(*case) for name, case in CASES.items()}))
