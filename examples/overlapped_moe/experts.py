"""Weights of a rank's experts, and what a backward pass needs of a forward one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALED = 128  # elements with one scale in FP8


@dataclass
class Experts:
    """Weights of the local experts: w13 [L, 2 * I, H], gate above up; w2 [L, H, I]. scales: of e4m3, see gemm.py."""

    w13: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def random(local: int, hidden: int, inner: int, device: torch.device | str, seed: int = 0) -> Experts:
        generator = torch.Generator(device).manual_seed(seed)

        def made(*shape: int) -> torch.Tensor:
            scale = shape[-1] ** -0.5
            rows = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            return rows.mul_(scale)

        return Experts(made(local, 2 * inner, hidden), made(local, hidden, inner))

    def in_fp8(self) -> Experts:
        """In e4m3, with a scale for 128 x 128 elements."""

        def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            blocks = w.unflatten(1, (-1, SCALED)).unflatten(3, (-1, SCALED)).float()  # [L, rows, 128, columns, 128]
            scales = blocks.abs().amax((2, 4)).clamp(min=1e-10) / 448
            made = blocks / scales[:, :, None, :, None]
            return made.view(w.shape).to(torch.float8_e4m3fn), scales

        (w13, of_w13), (w2, of_w2) = quantised(self.w13), quantised(self.w2)
        return Experts(w13, w2, (of_w13, of_w2))


@dataclass
class Kept:
    """Of the rows of a dispatch. Rows that do not exist are unspecified.

    Attributes:
        x: [.., H]. gates: [rows, 2 * I] x times w13, gate beside up. weights: float32, one a row.
        firsts, counts: int32 [L] the first row of each expert, of x as [rows, H], and how many there are.
    """

    x: torch.Tensor
    gates: torch.Tensor
    weights: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
