"""What a user would do without the library: torch's own all-to-alls, between a sort and index operations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..operations import Call, Operations
from ..workload import Given, Shape
from ..world import Skipped, World
from .interface import GROUP, Rival, quantized


@dataclass
class Received:
    """Rows for the local experts, expert after expert (bytes), and the way back."""

    rows: Tensor
    counts: Tensor  # [R, L] rows from each rank for each expert
    order: Tensor  # of the own choices, by expert
    index: Tensor  # where each row stood among what came
    in_splits: Any
    out_splits: Any


def by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """Received rows lie by (rank, expert): their numbers in the order (expert, rank). counts: [R, L]."""
    starts = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    place = torch.arange(num_rows, device=counts.device)
    block = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
    return starts[block] + place - (ends - lengths)[block]


class TorchAllToAll:
    """Sort by expert, all_to_all_single of counts and of rows, index: NCCL on GPUs, gloo on CPUs. One row an expert."""

    name = "torch_all_to_all"

    def __init__(self, shape: Shape, world: World, given: Given) -> None:
        self.shape, self.world, self.given = shape, world, given

    # ---- What both rivals share

    def payload(self) -> Tensor:
        """Rows to send as bytes [T, ...], scales behind them. Whatever dispatch quantises has plain scales here."""
        x, scales = self.given.x, self.given.scales
        if self.shape.quant is not None:
            x, scales = quantized(x)
        return x.view(torch.uint8) if scales is None else torch.cat([x.view(torch.uint8), scales.view(torch.uint8)], 1)

    def sorted_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of all choices by expert, their order, and what each expert gets [E]."""
        experts = self.given.topk_idx.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = experts.new_zeros(self.shape.num_experts)  # bincount would wait for the GPU
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        return self.payload()[order // self.shape.topk], order, counts

    def exchange_counts(self, counts: Tensor) -> Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return received.view(self.shape.num_ranks, -1)

    def sum_at_home(self, home: Tensor, order: Tensor) -> Tensor:
        """Rows of the own choices, by expert, weighted and added: [T, H]."""
        shape = self.shape
        choices = torch.empty_like(home)
        choices[order] = home
        weighted = choices.view(shape.tokens, shape.topk, shape.hidden) * self.given.weights.unsqueeze(-1)
        return weighted.sum(1).to(shape.payload.combined)

    # ---- The operations

    def dispatch(self) -> Received:
        rows, order, counts = self.sorted_rows()
        received = self.exchange_counts(counts)
        in_splits = counts.view_as(received).sum(1).tolist()
        out_splits = received.sum(1).tolist()
        came = rows.new_empty(sum(out_splits), rows.shape[1])
        dist.all_to_all_single(came, rows, out_splits, in_splits)
        index = by_expert(received, len(came))
        return Received(came[index], received, order, index, in_splits, out_splits)

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """rows: [.., H] in the dtype that is combined, as ``Received.rows`` lie."""
        back = torch.empty_like(rows)
        back[received.index] = rows
        home = rows.new_empty(len(received.order), rows.shape[1])
        dist.all_to_all_single(home.view(torch.uint8), back.view(torch.uint8), received.in_splits, received.out_splits)
        return self.sum_at_home(home, received.order)

    # ---- What is measured

    def check(self) -> tuple[Tensor, Received]:
        """A round trip with experts that do nothing. Returns what combine takes. Raises AssertionError."""
        received = self.dispatch()
        rows = self.decode(received.rows)
        y = self.combine(rows, received).to(torch.float32)
        sent = self.given.x if self.shape.quant is not None else self.decode(self.payload())
        want = sent.to(torch.float32) * self.given.weights.sum(1, keepdim=True)
        error = float((y - want).norm() / want.norm().clamp(min=1e-9))
        if not error < (0.05 if self.shape.quant else 0.01):
            raise AssertionError(f"{self.name}: rows come home with a relative error of {error}")
        return rows, received

    def decode(self, rows: Tensor) -> Tensor:
        """Received bytes as rows to combine; packed bytes stand for numbers as in workload.expert."""
        shape, payload = self.shape, self.shape.payload
        dtype, group = payload.rows, payload.group
        if shape.quant is not None:
            dtype, group = torch.float8_e4m3fn, GROUP
        if not group:
            return rows.view(payload.combined)
        end = shape.width * dtype.itemsize
        values = rows[:, :end].contiguous().view(dtype).to(torch.float32)
        if payload.packed == 1:
            scales = rows[:, end:].contiguous().view(payload.scales).to(torch.float32)
            values = values * scales.repeat_interleave(group, 1)[:, : shape.width]
        return torch.cat([values] * payload.packed, 1).to(payload.combined)

    def close(self) -> None:
        """Frees what the rival holds. Collective."""


class TorchSymmMem(TorchAllToAll):
    """The same with torch.ops.symm_mem.all_to_all_vdev, which needs no numbers on the host.

    Its two-dimensional form, which would sort by expert on the way, takes 16 experts a rank at most. Buffers are as
    large as this routing needs, which a user could not know: in the rival's favour.
    """

    name = "torch_symm_mem"

    def __init__(self, shape: Shape, world: World, given: Given) -> None:
        super().__init__(shape, world, given)
        if not world.is_cuda:
            raise Skipped("torch's symmetric memory needs GPUs")
        import torch.distributed._symmetric_memory as symm_mem

        if not symm_mem.is_nvshmem_available():
            raise Skipped("this torch finds no NVSHMEM")
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        if symm_mem.get_backend(world.device) != "NVSHMEM":
            symm_mem.set_backend("NVSHMEM")
        assert dist.group.WORLD is not None
        self.group_name = dist.group.WORLD.group_name
        _, _, counts = self.sorted_rows()
        self.num_rows = int(self.exchange_counts(counts).sum())
        largest = torch.tensor([max(shape.tokens * shape.topk, self.num_rows)], device=world.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # symmetric buffers have one size
        capacity = int(largest)

        def rows(width: int, dtype: torch.dtype) -> Tensor:
            return symm_mem.empty(capacity, width, dtype=dtype, device=world.device)

        def splits(*sizes: int) -> Tensor:
            return symm_mem.empty(*sizes, dtype=torch.int64, device=world.device)

        ranks, width = shape.num_ranks, self.payload().shape[1]
        self.there = rows(width, torch.uint8), rows(width, torch.uint8), splits(ranks), splits(2, ranks)
        self.back = (
            rows(shape.hidden, shape.payload.combined),
            rows(shape.hidden, shape.payload.combined),
            splits(ranks),
            splits(2, ranks),
        )
        for tensor in (*self.there, *self.back):
            symm_mem.rendezvous(tensor, self.group_name)

    def dispatch(self) -> Received:
        source, target, splits, splits_offsets = self.there
        rows, order, counts = self.sorted_rows()
        source[: len(rows)] = rows
        received = self.exchange_counts(counts)
        splits.copy_(counts.view_as(received).sum(1))
        torch.ops.symm_mem.all_to_all_vdev(source, target, splits, splits_offsets, self.group_name)
        index = by_expert(received, self.num_rows)
        return Received(target[index], received, order, index, None, None)

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        source, target, splits, splits_offsets = self.back
        source.index_copy_(0, received.index, rows)
        splits.copy_(received.counts.sum(1))
        torch.ops.symm_mem.all_to_all_vdev(source, target, splits, splits_offsets, self.group_name)
        return self.sum_at_home(target[: len(received.order)], received.order)

    def close(self) -> None:
        self.world.synchronize()
        self.world.gate.wait()
        del self.there, self.back


RIVALS: dict[str, type[TorchAllToAll]] = {rival.name: rival for rival in (TorchAllToAll, TorchSymmMem)}


# ---- As one of the rivals


class _InTorch(Rival):
    captures = False  # numbers of rows go to the host

    def __init__(self, world: World, shape: Shape, inputs: list[Given]) -> None:
        super().__init__(world, shape, inputs)
        self.version, self._all_to_all = torch.__version__, TorchAllToAll(shape, world, self.given)

    def check(self) -> None:
        mine = self._all_to_all
        rows, received = mine.check()
        calls: dict[str, Call] = {
            "dispatch": mine.dispatch,
            "combine": lambda: mine.combine(rows, received),
            "pair": lambda: mine.combine(rows, mine.dispatch()),
        }
        self.ways[None] = Operations(calls)


ON_CPU, make = True, _InTorch


def layouts(mode: str, dtype: str) -> tuple[str, ...]:
    return ("packed",)
