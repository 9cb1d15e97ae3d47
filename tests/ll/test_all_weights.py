"""Rows of rank layouts that bring the weights of all choices of their token (DispatchOptions::all_weights)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.config import pack_dispatch
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import run_ranks
from tests.support.gpus import needs_gpu

HIDDEN, MOST, LOCAL = 64, 5, 12  # LOCAL: experts of a rank
STEPS = 6  # dispatches of a buffer, in both layouts in turns
WITHOUT, DROPS, DEAD = 2, 4, 2  # the step that asks for own weights alone; those with a small capacity; a rank's last
_ops = torch.ops.nccl_ep
of_gpus = pytest.mark.skipif(not _C.EMULATES_GPU, reason="CPU ranks mask within one domain")


def _given(rank: int, experts: int, topk: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, repeated ones and -1 among them, of a token all of one expert, and of one none; weights, of which none is 0.
    Of some ranks there are no tokens."""
    made = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(-1, experts, ((rank + step) % (MOST + 1), topk), generator=made)
    ids[:1] = ids[:1].clamp(max=0)
    ids[1:2] = -1
    return ids, torch.rand(ids.shape, generator=made) + 1


def _dispatch(buffer: nccl_ep.Buffer, topk: int, step: int, split: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Weights and ids as they came, and the capacity."""
    experts, layout = LOCAL * buffer.num_ranks, ("rank_major", "flat")[step % 2]
    ids, weights = (each.to(buffer.device) for each in _given(buffer.rank, experts, topk, step))
    x = torch.ones(len(ids), HIDDEN, dtype=torch.bfloat16, device=buffer.device)
    numbers = {"num_experts": experts, "topk": topk, "max_tokens": MOST, "all_weights": step != WITHOUT}
    config = pack_dispatch(numbers | {"layout": int(LAYOUTS[layout])})
    capacity = MOST if layout == "rank_major" else 2 if step >= DROPS else MOST * buffer.num_ranks
    call = (buffer._seq, x, None, ids, weights, capacity, config)
    if not split:
        out = _ops.ll_dispatch.default(*call)
        return out[2].cpu(), out[3].cpu(), capacity
    handle = _ops.ll_dispatch_send.default(*call)
    types = (x.dtype, HIDDEN, 0, torch.float32, len(x), True)
    out = _ops.ll_dispatch_recv.default(buffer._seq, handle, *types, capacity, config, None, None)
    return out[2].cpu(), out[3].cpu(), capacity


def check_all_weights(
    group: Any, topk: int = 7, device: str = "cpu", split: bool = False, dead: int | None = None, **options: Any
) -> None:
    """``dead``: a rank that makes no calls from step DEAD on."""
    experts = LOCAL * (1 if group is None else group.size())
    with nccl_ep.Buffer.for_shapes(
        group, max_tokens=MOST, hidden=HIDDEN, topk=topk, num_experts=experts, device=device,
        timeout=60.0 if dead is None else 2.0, **options,
    ) as buffer:  # fmt: skip
        first = LOCAL * buffer.rank
        for step in range(STEPS):
            if step >= DEAD and buffer.rank == dead:
                return
            weights, ids, capacity = _dispatch(buffer, topk, step, split)
            row = 0
            for source in range(buffer.num_ranks):
                row = row if step % 2 else source * MOST
                if step >= DEAD and source == dead:
                    continue
                for chosen, its_weights in zip(*_given(source, experts, topk, step), strict=True):
                    here = [e - first if first <= e < first + LOCAL else -1 for e in chosen.tolist()]
                    if max(here) < 0:
                        continue
                    place = (row,) if step % 2 else divmod(row, MOST)
                    row += 1
                    if step % 2 and place[0] >= capacity:
                        continue  # dropped
                    if step == WITHOUT:
                        its_weights = torch.where(torch.tensor(here) >= 0, its_weights, 0)
                    assert ids[place].tolist() == here, (step, source)
                    assert weights[place].equal(its_weights), (step, source)


@pytest.mark.parametrize("topk", [1, 7, 32])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rows_bring_all_weights(num_ranks: int, split: bool, topk: int) -> None:
    run_ranks(num_ranks, partial(check_all_weights, topk=topk, split=split))


@pytest.mark.parametrize("topk", [1, 7, 32])
@pytest.mark.parametrize("network", ["rail", "mesh"])
def test_between_domains(network: str, topk: int) -> None:
    run_ranks(4, partial(check_all_weights, topk=topk, domain_size=2, ll_network=network))


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("num_ranks, domain_size", [(3, None), pytest.param(4, 2, marks=of_gpus)])
@pytest.mark.parametrize("dead", [None, 1])
def test_masked_ranks_bring_none(dead: int | None, num_ranks: int, domain_size: int | None, split: bool) -> None:
    how: dict[str, Any] = {"split": split, "dead": dead, "domain_size": domain_size, "enable_shrink": True}
    run_ranks(num_ranks, partial(check_all_weights, **how))


def test_they_have_no_gradient() -> None:
    with nccl_ep.Buffer.for_shapes(None, max_tokens=MOST, hidden=HIDDEN, topk=2, num_experts=4, device="cpu") as buffer:
        config = pack_dispatch({"num_experts": 4, "topk": 2, "max_tokens": MOST, "all_weights": True, "layout": 3})
        x, ids = torch.ones(1, HIDDEN), torch.tensor([[0, 1]])
        with pytest.raises(ValueError, match="topk_weights want a gradient, which a dispatch with all_weights has not"):
            _ops.ll_dispatch.default(buffer._seq, x, None, ids, torch.ones(1, 2, requires_grad=True), MOST, config)


class TestOnGpu:
    pytestmark = needs_gpu

    def test_rows_bring_all_weights(self) -> None:
        check_all_weights(None, device="cuda")
