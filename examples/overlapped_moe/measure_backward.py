"""The backward pass of the layer, for measure.py: times, bits, and how far it is from torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import nccl_ep
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.timing import timed

Gradients = Sequence[torch.Tensor]  # of x, weights, w13 and w2


def gradients_by_torch(
    layer: MoeLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor,
    multiply: Callable[[nccl_ep.DispatchOutput, Experts], torch.Tensor],
) -> Gradients:  # fmt: skip
    """By the autograd of ``nccl_ep`` and torch. multiply: torch's GEMMs, which take rows that do not exist, too."""
    given = [each.detach().requires_grad_() for each in (x, weights, layer.experts.w13, layer.experts.w2)]
    out = nccl_ep.dispatch(
        given[0], ids, given[1], buffer=layer.buffer, num_experts=layer.num_experts, mode=layer.mode,
        layout=layer.layout, max_tokens=layer.max_tokens, capacity=layer.capacity, zero_padding=True,
        expert_alignment=layer.rows_per_block if layer.layout == "packed" else 1,
    )  # fmt: skip
    y = nccl_ep.combine(multiply(out, Experts(given[2], given[3])), out.handle)
    return torch.autograd.grad(y, given, gradient)


def relative_error(got: Gradients, want: Gradients) -> float:
    """The largest difference, of the largest value of the same gradient. Part by part: weights are large."""
    most = 0.0
    for a, b in zip(got, want, strict=True):
        parts = list(zip(a.split(1) if a.dim() == 3 else [a], b.split(1) if b.dim() == 3 else [b], strict=True))
        difference = max((float((p.float() - q.float()).abs().max()) for p, q in parts), default=0.0)
        most = max(most, difference / max(float(b.abs().max()), 1e-30))
    return most


class BackwardPass:
    """Of one forward pass, any number of times."""

    def __init__(
        self, layer: MoeLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self.layer, self.ids, self.weights, self.gradient = layer, ids, weights, gradient
        _, kept, self.handle = layer.forward(x, ids, weights, overlaps=False, keeps=True)
        assert kept is not None
        self.kept = kept

    def run(self, overlaps: bool) -> Gradients:
        return self.layer.backward(
            self.gradient, self.ids, self.weights, self.kept, self.handle, self.layer.experts, overlaps=overlaps
        )

    def dispatch(self) -> torch.Tensor:
        if self.layer.mode == "ht":
            arrivals = self.layer.arrivals
            return nccl_ep.dispatch_cached_send(self.gradient, self.handle, arrivals=arrivals).receive().x
        return self.layer.send(self.gradient, self.ids, self.weights, 0).receive().x

    def communicate(self) -> None:
        home = None if self.layer.mode == "ht" else torch.ones_like(self.weights)
        nccl_ep.combine(self.dispatch(), self.handle, weights=home)
        nccl_ep.combine_weights(self.kept.weights, self.handle)

    def multiply(self, gradient: torch.Tensor) -> None:
        gemms = self.layer.backward_gemms(gradient, self.kept, self.layer.experts)
        gemms.first(gemms.num_sms)
        gemms.second(gemms.num_sms)
        gemms.beside(gemms.num_sms)

    def measure(self, wanted: Gradients, repetitions: int) -> dict[str, Any]:
        one_behind, same = self.run(False), True
        for _ in range(3):
            same = same and all(map(torch.equal, self.run(True), one_behind))
        found: dict[str, Any] = {
            "backward_same_bits": same, "backward_relative_error_to_torch": relative_error(one_behind, wanted)
        }  # fmt: skip
        del one_behind
        found["backward_overlapped_ms"] = timed(lambda: self.run(True), repetitions)
        found["backward_one_behind_ms"] = timed(lambda: self.run(False), repetitions)
        found["backward_communication_ms"] = timed(self.communicate, repetitions)
        gradient = self.dispatch()
        found["backward_gemms_ms"] = timed(lambda: self.multiply(gradient), repetitions)
        longer = max(found["backward_communication_ms"], found["backward_gemms_ms"])
        found["backward_of_one_behind"] = found["backward_overlapped_ms"] / found["backward_one_behind_ms"]
        found["backward_of_longer"] = found["backward_overlapped_ms"] / longer
        return found
