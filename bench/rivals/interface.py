"""What a rival is to the benchmark, and how its results are held against the tokens that were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operations import Operations
from ..workload import Given, Shape
from ..world import World

_FP8_MAX, GROUP = 448.0, 128


@dataclass
class Received:
    """What a dispatch has brought, as the system has it: by expert with ``counts``, or by token with ``ids``.

    Attributes:
        rows: [L, C, H] by expert, weighted where they go home, or [N, H] by token, which the caller weights and adds.
        counts: int32 [L] rows of each expert. ids: [N, K] of this rank's experts from 0; -1 for others, and for rows
            that do not exist. weights: float32 [N, K]. way: whatever its combine needs.
    """

    rows: Tensor
    counts: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    way: Any = None


class Rival:
    """One system with one shape. A module of a rival has

    - ``layouts(mode, dtype)``: those of its rows that are measured, none where it has no such operation. "fp8" is
      quantised in dispatch, "given_fp8" is FP8 with scales of 128 elements before it;
    - ``make(world, shape, inputs)``: a Rival with the memory that it needs, and no more. Collective. ImportError and
      OSError where it is not installed, ``Skipped`` where it cannot run here;
    - ``ON_CPU``: whether it runs on CPU ranks.

    Attributes:
        version: of what is measured. note: what a reader of its figures must know.
        ways: how it is called, by the name of the interface (None: it has one); ``check`` makes them. Graphs, and times
            of kernels, are those of the first.
        captures: whether CUDA graphs take its calls. kernels: a part of the names of its kernels, by operation.
    """

    version = ""
    note = ""
    captures = True

    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        """inputs: of all ranks, on this rank's device."""
        self.world, self.shape, self.device = world, shape, world.device
        self.all = inputs
        self.given = self.all[world.rank]
        self.ways: dict[str | None, Operations] = {}
        self.kernels: Mapping[str, str] = {}

    def check(self) -> None:
        """Makes the calls, and holds their results against what was sent. Collective. Raises AssertionError."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what it holds. Collective."""

    # ---- Its calls as the exchange of a layer, of bf16, after ``check``: examples/overlapped_moe/others.py

    def receive(self) -> Received:
        """A dispatch of this rank's tokens. Nothing waits for the GPU."""
        raise NotImplementedError

    def room(self, received: Received) -> Tensor:
        """Where rows to send home are written, as ``Received.rows`` lie."""
        return torch.empty_like(received.rows)

    def send_home(self, rows: Tensor, received: Received) -> Tensor:
        """A combine of rows in ``room``: [T, H]."""
        raise NotImplementedError

    # ---- What came

    @property
    def experts(self) -> range:
        """Of this rank."""
        return range(self.world.rank * self.shape.num_local, (self.world.rank + 1) * self.shape.num_local)

    def every(self, name: str) -> Tensor:
        """A field of all ranks' inputs, one behind the other."""
        return torch.cat([getattr(each, name) for each in self.all])

    def here(self, topk_idx: Tensor) -> Tensor:
        """bool [T]: tokens with an expert of this rank."""
        return (topk_idx // self.shape.num_local == self.world.rank).any(1)

    def plain(self, of: Given) -> Tensor:
        """What its rows stand for [T, H]: of FP8 with scales in float32."""
        return of.x if of.scales is None else dequantized(of.x, of.scales)

    # ---- What goes home

    def factors(self) -> Tensor:
        """float32 [E]: what each expert multiplies rows with; exact in bf16."""
        return 1 + (torch.arange(self.shape.num_experts, device=self.device) % 64).float() / 64

    def require_sum(self, y: Tensor) -> None:
        """Holds what came home from experts that multiply with ``factors``; sums of FP8 rows to 6 %."""
        applied = (self.given.weights * self.factors()[self.given.topk_idx]).sum(1, keepdim=True)
        want = self.plain(self.given).float() * applied
        error = relative(y, want)
        if not error < (0.06 if self.shape.quant else 0.01):
            raise AssertionError(f"what came home differs by {error:.3g} of its length")


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [T, H] and float32 scales of groups of 128, contiguous."""
    tokens, hidden = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -hidden % GROUP)).view(tokens, -1, GROUP)
    amax = padded.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    rows = (padded * (_FP8_MAX / amax)).to(torch.float8_e4m3fn).view(tokens, -1)[:, :hidden]
    return rows.contiguous(), (amax / _FP8_MAX).squeeze(-1)


def dequantized(rows: Tensor, scales: Tensor) -> Tensor:
    """float32, of groups of 128."""
    return rows.float() * scales.float().repeat_interleave(GROUP, -1)[..., : rows.shape[-1]]


def _hashes(rows: Tensor) -> Tensor:
    """int64 [N], sorted: of the bytes of each row."""
    whole = rows.contiguous().view(torch.uint8)
    whole = torch.nn.functional.pad(whole, (0, -whole.shape[1] % 8)).view(torch.int64)
    draw = torch.Generator().manual_seed(1)
    odd = torch.randint(-(2**62), 2**62, (whole.shape[1],), generator=draw).to(rows.device) * 2 + 1
    mixed = whole ^ (whole >> 29)
    return (mixed * odd).sum(1).sort().values


def require_rows(name: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> None:
    """The same rows in any order, to the bit; with a tolerance as many rows whose sums differ by no more."""
    if len(got) != len(want):
        raise AssertionError(f"{name}: {len(got)} rows came, must be {len(want)}")
    if not len(want):
        return
    if tolerance:
        error = relative(got.double().sum(0), want.double().sum(0))
        if not error < tolerance:
            raise AssertionError(f"{name}: their sum differs by {error:.3g}")
    elif not torch.equal(_hashes(got), _hashes(want)):
        raise AssertionError(f"{name}: not the rows that were sent")


def version_of(*packages: str) -> str:
    """Of the first of the installed packages."""
    from importlib import metadata

    for each in packages:
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return ""
