"""What high throughput sends between domains of GPUs, by docs/network_protocol.md: every byte."""

from __future__ import annotations

import torch

from nccl_ep import reference
from tests.support.cases import Case

CHUNKS, HEADER, COMBINE_WORDS = 16, 16, 13


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def rows_between(case: Case, inputs: list[reference.RankInput]) -> torch.Tensor:
    """[source, domain]: tokens with an expert there."""
    size = case.domain_size or case.num_ranks
    local = case.num_experts // case.num_ranks * size  # experts of a domain
    rows = torch.zeros(case.num_ranks, case.num_ranks // size, dtype=torch.int64)
    for source, given in enumerate(inputs):
        ids = given.topk_idx
        domains = torch.where((ids >= 0) & (ids < case.num_experts), ids // local, -1)
        for domain in range(case.num_ranks // size):
            rows[source, domain] = (domains == domain).any(-1).sum()
    return rows


def dispatch_bytes(case: Case, rows: int, tokens: int, parts: list[int]) -> int:
    """Of the rows from a rank with so many tokens to a domain: headers of chunks, rows, routes."""
    share = -(-tokens // CHUNKS) if tokens > CHUNKS else 1
    entry = sum(_aligned(each) for each in parts) + _aligned(16 * case.topk + 4)
    return -(-tokens // share) * HEADER + rows * entry


def expected_bytes(
    case: Case,
    inputs: list[reference.RankInput],
    *,
    exact: bool,
    times: int,
    parts: list[int],
    cached: list[list[int]],
    home: int,
) -> torch.Tensor:
    """[sender, peer] of a dispatch, a combine, one of weights and the cached dispatches together.

    parts, cached: bytes of a row's tensors. times: how often the dispatch was called. home: bytes of a row of combine.
    """
    ranks, size = case.num_ranks, case.domain_size or case.num_ranks
    rows = rows_between(case, inputs)
    counts, no_counts = _aligned(4 * (32 + ranks + case.num_experts)), 4 * 32
    is_weighted = case.is_weighted_at_home
    sent = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank in range(ranks):
        for peer in range(ranks):
            if peer % size != rank % size or peer == rank:
                continue
            tokens = case.tokens[rank]
            there, back = int(rows[rank, peer // size]), int(rows[peer, rank // size])
            records = counts + no_counts if exact else counts
            sent[rank, peer] += times * (records + dispatch_bytes(case, there, tokens, parts))
            weights = tokens * _aligned(8 * case.topk) if is_weighted else 0
            sent[rank, peer] += 2 * _aligned(4 * COMBINE_WORDS) + weights
            sent[rank, peer] += back * (_aligned(home) + _aligned(4 * case.topk))
            sent[rank, peer] += sum(no_counts + dispatch_bytes(case, there, tokens, each) for each in cached)
    return sent
