"""Programs of two CPU ranks whose traffic can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS, STEPS = 2, 6, 64, 3, 8, 3
ROW_BYTES = HIDDEN * 2
SIZES = {"max_tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS, "device": "cpu"}


def ids_of(rank: int, step: int) -> torch.Tensor:
    """Some tokens go to one rank alone, some choices are none."""
    ids = torch.tensor([[0, 1, 2], [4, 5, -1], [0, 4, 7], [3, -1, -1], [7, 6, 5], [2, 1, 0]])
    return (ids + rank * 2 + step).remainder(EXPERTS).where(ids >= 0, -1)


def counted_rows() -> list[list[int]]:
    """Rows of one mode's dispatches [from][to]: a token once for each rank that has an expert of it."""
    rows = [[0] * RANKS for _ in range(RANKS)]
    for rank in range(RANKS):
        for step in range(STEPS):
            for choices in ids_of(rank, step).tolist():
                for other in {expert // (EXPERTS // RANKS) for expert in choices if expert >= 0}:
                    rows[rank][other] += 1
    return rows


def counted_choices(step: int) -> list[int]:
    given = [expert for rank in range(RANKS) for expert in ids_of(rank, step).flatten().tolist() if expert >= 0]
    return [given.count(expert) for expert in range(EXPERTS)]


def exchange(buffer: nccl_ep.Buffer, rank: int, mode: str, step: int) -> None:
    x = torch.ones(TOKENS, HIDDEN).bfloat16()
    out = nccl_ep.dispatch(x, ids_of(rank, step), buffer=buffer, num_experts=EXPERTS, mode=mode, layout="packed")
    nccl_ep.combine(out.x, out.handle)


def recorded(folder: Path, *modes: str) -> list[dict[str, list[int]]]:
    """Runs STEPS of each mode. Returns what the windows say that each rank sent, or, of HT's sums, fetched."""

    def body(group: ThreadGroup) -> dict[str, list[int]]:
        with nccl_ep.Buffer.for_shapes(group, mode="auto", **SIZES) as buffer:
            for mode in modes:
                for step in range(STEPS):
                    exchange(buffer, group.rank(), mode, step)
            return buffer.wire_bytes()

    with nccl_ep.record(folder):
        return run_ranks(RANKS, body)
