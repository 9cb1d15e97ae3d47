"""The example's one rank adds up as the library does: to the bit, on any number of ranks and domains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from examples.moe_lm.engine import fixed_shape_exchange
from examples.moe_lm.experts import Experts
from examples.moe_lm.one_rank import AsServed, one_rank
from nccl_ep.testing import run_ranks

TOKENS, HIDDEN, EXPERTS, TOPK = 24, 32, 8, 3


def _inputs(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a rank: some tokens have no expert, some fewer than others."""
    draw = torch.Generator().manual_seed(rank)
    weights, idx = torch.randn(TOKENS, EXPERTS, generator=draw).softmax(-1).topk(TOPK)
    missing = torch.rand(TOKENS, TOPK, generator=draw) < 0.2
    missing[:2] = True
    return torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype), idx.masked_fill(missing, -1), weights


def _experts(first: int, count: int, dtype: torch.dtype) -> Experts:
    every = Experts(EXPERTS, HIDDEN, 16)
    draw = torch.Generator().manual_seed(99)
    for parameter in every.parameters():
        parameter.data.normal_(0.0, 0.2, generator=draw)
    some = Experts(count, HIDDEN, 16)
    for mine, of_all in zip(some.parameters(), every.parameters(), strict=True):
        mine.data, mine.requires_grad = of_all.data[first : first + count].to(dtype), False
    return some


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "batched"])
@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (4, 1)])
def test_one_rank_computes_the_servers_bits(
    num_ranks: int, domain_size: int, mode: str, grouped: bool, dtype: torch.dtype
) -> None:
    def body(group: Any) -> torch.Tensor:
        own = EXPERTS // num_ranks
        buffer = nccl_ep.Buffer.for_shapes(
            group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, dtype=dtype, mode=mode,
            device="cpu", domain_size=domain_size,
        )  # fmt: skip
        exchange = fixed_shape_exchange(buffer, EXPERTS, mode, TOKENS, grouped)
        return exchange(*_inputs(group.rank(), dtype), _experts(own * group.rank(), own, dtype))

    alone = AsServed(num_ranks, domain_size, TOKENS, grouped)
    for rank, served in enumerate(run_ranks(num_ranks, body)):
        mine = alone(*_inputs(rank, dtype), _experts(0, EXPERTS, dtype))
        assert torch.equal(mine, served)
        assert served[:2].count_nonzero() == 0 and served.abs().max() > 0.01
        if dtype == torch.float32:  # the other sums of this rank are rounded once, and not once a rank
            torch.testing.assert_close(served, one_rank(*_inputs(rank, dtype), _experts(0, EXPERTS, dtype)))
