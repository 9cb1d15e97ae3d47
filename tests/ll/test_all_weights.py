"""Rows of rank layouts that bring the weights of all choices of their token (DispatchOptions::all_weights)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.config import pack_dispatch
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import run_ranks
from tests.support.gpus import needs_gpu

HIDDEN, TOPK, MOST, LOCAL = 64, 5, 6, 5  # LOCAL: experts of a rank
_ops = torch.ops.nccl_ep


def _given(rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, of which some name no expert, and weights, of which none is 0."""
    made = torch.Generator().manual_seed(rank)
    ids = torch.rand(MOST - rank % 3, experts, generator=made).topk(TOPK).indices
    ids[torch.rand(ids.shape, generator=made) < 0.2] = -1
    return ids, torch.rand(ids.shape, generator=made) + 1


def check_all_weights(group: Any, device: str = "cpu", split: bool = False, **options: Any) -> None:
    experts = LOCAL * (1 if group is None else group.size())
    with nccl_ep.Buffer.for_shapes(
        group, max_tokens=MOST, hidden=HIDDEN, topk=TOPK, num_experts=experts, device=device, timeout=60.0, **options
    ) as buffer:
        ids, weights = (each.to(device) for each in _given(buffer.rank, experts))
        x = torch.ones(len(ids), HIDDEN, dtype=torch.bfloat16, device=device)
        mine = range(LOCAL * buffer.rank, LOCAL * (buffer.rank + 1))
        for layout in ("rank_major", "flat"):
            numbers = {"num_experts": experts, "topk": TOPK, "max_tokens": MOST, "all_weights": True}
            config = pack_dispatch(numbers | {"layout": int(LAYOUTS[layout])})
            capacity = MOST * (1 if layout == "rank_major" else buffer.num_ranks)
            call = (buffer._seq, x, None, ids, weights, capacity, config)
            if split:
                handle = _ops.ll_dispatch_send.default(*call)
                types = (x.dtype, HIDDEN, 0, torch.float32, len(x), True)
                out = _ops.ll_dispatch_recv.default(buffer._seq, handle, *types, capacity, config, None, None)
            else:
                out = _ops.ll_dispatch.default(*call)
            got_weights, got_ids = out[2].cpu(), out[3].cpu()
            row = 0
            for source in range(buffer.num_ranks):
                row = row if layout == "flat" else source * MOST
                for of_token, its_weights in zip(*_given(source, experts), strict=True):
                    here = [e - mine[0] if e in mine else -1 for e in of_token.tolist()]
                    if max(here) < 0:
                        continue
                    place = (row,) if layout == "flat" else divmod(row, MOST)
                    assert got_ids[place].tolist() == here, (layout, source)
                    assert got_weights[place].equal(its_weights), (layout, source)
                    row += 1


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("num_ranks, domain_size", [(1, None), (3, None), (4, 2)])
def test_rows_bring_all_weights(num_ranks: int, domain_size: int | None, split: bool) -> None:
    run_ranks(num_ranks, partial(check_all_weights, split=split, domain_size=domain_size))


def test_masks_do_not_change_that() -> None:
    run_ranks(3, partial(check_all_weights, enable_shrink=True))


class TestOnGpu:
    pytestmark = needs_gpu

    def test_rows_bring_all_weights(self) -> None:
        check_all_weights(None, "cuda")
