"""The experts of a rank: SwiGLUs whose GEMMs are done together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nccl_ep.placement import ExpertMap


def has_grouped_mm(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped GEMM here that does not wait for the host. It is tried on a small one."""
    if dtype != torch.bfloat16 or (device_type == "cuda" and torch.cuda.get_device_capability() < (9, 0)):
        return False  # what torch has for these is a loop, too
    try:
        rows, weights = (torch.zeros(shape, dtype=dtype, device=device_type) for shape in ((8, 16), (1, 16, 16)))
        F.grouped_mm(rows, weights, offs=torch.tensor([8], dtype=torch.int32, device=device_type))
    except (AttributeError, RuntimeError):
        return False
    return True


def looped_gemm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """What F.grouped_mm does: rows [N, A] up to ends[0] times weights[0], and so on, of weights [L, A, B].

    The host waits for the ends, int32 [L]. Past the last one there are zeros; in F.grouped_mm anything.
    """
    limits = [0, *ends.tolist()]
    parts = [rows[begin:end] @ weight for begin, end, weight in zip(limits, limits[1:], weights, strict=False)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - limits[-1], weights.shape[-1])])


def activate(gates: Tensor) -> Tensor:
    gate, up = gates.chunk(2, -1)
    return F.silu(gate) * up


class Experts(nn.Module):
    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.count = count
        self.grouped_mm = False  # Model.use asks has_grouped_mm
        self.up = nn.Parameter(torch.empty(count, hidden, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, hidden))
        self.places: ExpertMap | None = None  # of all ranks' experts, where these move (rebalance.py)

    def choose(self, idx: Tensor) -> Tensor:
        """The router's choices [T, K] as the exchange takes them."""
        return idx if self.places is None else self.places(idx)

    @torch.no_grad()
    def make_room(self, count: int) -> None:
        """For so many experts more, whose weights are zeros until they are moved here."""
        for name in ("up", "down"):
            own = getattr(self, name)
            wider = torch.cat([own, own.new_zeros(count, *own.shape[1:])])
            setattr(self, name, nn.Parameter(wider, requires_grad=own.requires_grad))
        self.count += count

    def packed(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [N, H], expert after expert, up to ``ends`` (int32 [L], on the device): a dispatch's ``offsets[1:]``.

        Rows past the last end are unspecified, before and after: combine reads none of them.
        """
        up, down = self.up.to(rows.dtype), self.down.to(rows.dtype)
        if self.grouped_mm:
            return F.grouped_mm(activate(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)
        return looped_gemm(activate(looped_gemm(rows, up, ends)), down, ends)

    def batched(self, rows: Tensor) -> Tensor:
        """rows [L, C, H], all of them: GEMMs whose shapes do not depend on how many came."""
        up, down = self.up.to(rows.dtype), self.down.to(rows.dtype)
        return torch.bmm(activate(torch.bmm(rows, up)), down)
