"""A layer's GEMMs over the rows of a dispatch, forward and backward, by gemm.py. on_host.py has the same in torch.

``first`` takes blocks as they arrive, ``second`` makes ``rows`` for the combine, and ``beside`` does what the combine
does not wait for. Each is launched on the current stream, by so many programs.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.overlapped_moe.experts import SCALED, Experts, Kept
from examples.overlapped_moe.gemm import GroupedGemms, require_sizes
from examples.overlapped_moe.weight_gradients import weight_gradient


class Forward(GroupedGemms):
    """
    Args:
        x: bf16 [.., H], rows of the dispatch, or e4m3 with ``x_scales`` [.., H / 128]. Experts of the same dtype.
        keeps: for a backward pass. given: of ``GroupedGemms``.

    Attributes:
        gates: as in ``Kept``, if it keeps any. rows: bf16, as x; rows that do not exist are unspecified.
        tiles: what the signal of a block becomes.
    """

    works_beside = False

    def __init__(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, experts: Experts, keeps: bool, *given: Any, **how: Any
    ) -> None:
        hidden, inner = x.shape[-1], experts.w2.shape[2]
        require_sizes(hidden, inner)
        super().__init__(*given, fp8=x_scales is not None, **how)
        self.x, self.x_scales, self.experts = x, x_scales, experts
        count = x.numel() // hidden
        self.h = x.new_empty(count, inner)
        self.h_scales = None if x_scales is None else x_scales.new_empty(count, inner // SCALED)
        self.gates = x.new_empty(count, 2 * inner) if keeps else None
        self.rows = torch.empty(x.shape, dtype=x.dtype if x_scales is None else torch.bfloat16, device=x.device)
        self.tiles = hidden // self.width

    def first(self, programs: int) -> None:
        of_w13, _ = self.experts.scales or (None, None)
        self.run(
            programs, "gated", self.x, self.experts.w13, self.h, self.tickets[:1], gates=self.gates,
            scales=(self.x_scales, of_w13, self.h_scales),
        )  # fmt: skip

    def second(self, programs: int) -> None:
        _, of_w2 = self.experts.scales or (None, None)
        self.run(
            programs, "rows", self.h, self.experts.w2, self.rows, self.tickets[1:], scales=(self.h_scales, of_w2, None)
        )

    def beside(self, programs: int) -> None:
        pass


class Backward(GroupedGemms):
    """
    Args:
        gradient: of the combined rows, which a dispatch takes to the places of x. experts: bf16.

    Attributes:
        rows: the gradient of x, whose sums are the tokens'. of_w13, of_w2: gradients of the weights.
    """

    works_beside = True

    def __init__(self, gradient: torch.Tensor, kept: Kept, experts: Experts, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.gradient, self.kept, self.experts = gradient, kept, experts
        count, inner = kept.gates.shape[0], experts.w2.shape[2]
        self.of_gates = torch.empty_like(kept.gates)
        self.weighted = kept.gates.new_empty(count, inner)
        self.dots = kept.weights.new_empty(count, inner // (self.width // 2))
        self.rows = torch.empty_like(kept.x)
        self.tiles = kept.x.shape[-1] // self.width

    def first(self, programs: int) -> None:
        self.run(
            programs, "gradient", self.gradient, self.experts.w2.transpose(1, 2), self.of_gates, self.tickets[:1],
            gates=self.kept.gates, row_weights=self.kept.weights, weighted=self.weighted, dots=self.dots,
        )  # fmt: skip

    def second(self, programs: int) -> None:
        w13 = self.experts.w13.transpose(1, 2)
        self.run(programs, "rows", self.of_gates, w13, self.rows, self.tickets[1:])

    def beside(self, programs: int) -> None:
        rows = self.kept.firsts, self.kept.counts
        self.of_w13 = weight_gradient(programs, self.of_gates, self.kept.x, *rows)
        self.of_w2 = weight_gradient(programs, self.gradient, self.weighted, *rows)

    def of_weights(self) -> torch.Tensor:
        """The gradient of the rows' weights, in their shape."""
        return self.dots.sum(-1).view(self.kept.weights.shape)
