"""Tokens of all ranks, the same on each, and what plain PyTorch makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nccl_ep import nvidia as ep
from nccl_ep.bootstrap import SoloRendezvous
from nccl_ep.nvidia.communicator import get_nccl_comm_from_group
from tests.support.ranks import DEVICE

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 8, 512, 3, 6
LOCAL = EXPERTS // RANKS
TOKENS = (5, 4)  # of each rank


@dataclass
class Tokens:
    """Of one rank: x [T, H], ids [T, K] with some -1, weights [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def tokens_of(rank: int, seed: int = 0) -> Tokens:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    count = TOKENS[rank]
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOPK] for _ in range(count)])
    ids[torch.rand(count, TOPK, generator=draw) < 0.2] = -1
    return Tokens(torch.randn(count, HIDDEN, generator=draw).bfloat16(), ids, torch.rand(count, TOPK, generator=draw))


def rows_of_expert(expert: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """(rank, token, k) of each of its rows, in their order."""
    return [
        (rank, *at)
        for rank in range(RANKS)
        for at in (tokens_of(rank, seed).ids == expert).nonzero().tolist()
    ]  # fmt: skip


def tokens_for(rank: int, seed: int = 0) -> list[tuple[int, int]]:
    """(rank, token) of each token with an expert on ``rank``, in their order."""
    return [
        (source, token)
        for source in range(RANKS)
        for token in range(TOKENS[source])
        if (tokens_of(source, seed).ids // LOCAL == rank).any(1)[token]
    ]


def local_ids(rank: int, source: int, token: int, seed: int = 0) -> list[int]:
    """As ``rank`` numbers them, -1 for those of other ranks."""
    ids = tokens_of(source, seed).ids[token].tolist()
    return [each - rank * LOCAL if each >= 0 and each // LOCAL == rank else -1 for each in ids]


def weighted_sum(mine: Tokens) -> torch.Tensor:
    """What comes home where every expert returns its rows as they are."""
    return mine.x.float() * (mine.weights * (mine.ids >= 0)).sum(1, keepdim=True)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Sums of a few bf16 rows, each rounded once on its way."""
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=3e-2)


def made_group(group: Any, **options: Any) -> ep.Group:
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "max_token_bytes": 2 * HIDDEN,
    }  # fmt: skip
    return ep.Group.create(get_nccl_comm_from_group(group), ep.GroupConfig(**(sizes | options)), device=DEVICE)


@contextlib.contextmanager
def alone(**options: Any) -> Iterator[ep.Group]:
    """A group of one rank."""
    group = made_group(SoloRendezvous(), **options)
    yield group
    group.destroy()
