"""torch's TokenSwitch over nccl_ep, beside plain PyTorch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("torch.distributed._token_switch") is None:
    pytest.skip("torch has no TokenSwitch: make newest", allow_module_level=True)

import nccl_ep
from nccl_ep.integrations.token_switch import NcclEpTokenSwitch
from nccl_ep.testing import run_ranks

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 4, 64, 2, 6
LOCAL, ROOM = EXPERTS // RANKS, 2 * MOST * TOPK


def drawn(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    count = 4 + rank
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOPK] for _ in range(count)])
    x, weight = torch.randn(count, HIDDEN, generator=draw), torch.rand(count, TOPK, generator=draw)
    return x, ids, weight, torch.randn(count, HIDDEN, generator=draw)


def factors() -> torch.Tensor:
    """What each expert multiplies rows with: parameters."""
    return torch.tensor([1.0, 2.0, 0.5, 3.0])


def layer(switch: Any, layout: str, rank: int, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    _, ids, weights, _ = drawn(rank)
    counts = torch.zeros(LOCAL, dtype=torch.int32)
    routing = switch.create_routing(ids, counts, layout=layout)
    own = scale[rank * LOCAL : (rank + 1) * LOCAL]
    rows, row_weights, row_ids = switch.dispatch(routing, x, weights, ROOM)
    if layout == "flat":
        here = row_ids >= 0
        factor = torch.where(here, own[row_ids.clamp(min=0)] * row_weights, 0).sum(1)
        assert counts.sum() == here.sum()
    else:
        assert row_ids is None
        experts = torch.arange(LOCAL).repeat_interleave(counts)
        factor = torch.cat([own[experts] * row_weights[: len(experts)], torch.zeros(ROOM - len(experts))])
    return switch.combine(routing, rows * factor[:, None])


def test_outputs_and_gradients() -> None:
    def body(group: Any) -> list[torch.Tensor]:
        switch = NcclEpTokenSwitch(group, EXPERTS, MOST, ROOM, 4 * HIDDEN, device="cpu")
        x, ids, weights, grad = drawn(group.rank())
        made = []
        for layout in ("flat", "expert_major"):
            mine, scale = x.clone().requires_grad_(), factors().requires_grad_()
            out = layer(switch, layout, group.rank(), mine, scale)
            out.backward(grad)
            plain, plain_scale = x.clone().requires_grad_(), factors().requires_grad_()
            want = plain * (plain_scale[ids] * weights).sum(1, keepdim=True)
            want.backward(grad)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(mine.grad, plain.grad)
            made.append(torch.stack([scale.grad, plain_scale.grad]))
        with pytest.raises(ValueError, match="layout is 'rank_major', must be one of flat, expert_major"):
            switch.create_routing(ids, layout="rank_major")
        switch.destroy()
        return made

    for of_layout in zip(*run_ranks(RANKS, body), strict=True):  # experts' gradients are of the tokens of all ranks
        got, want = sum(of_layout)
        torch.testing.assert_close(got, want)


def test_rows_past_the_room() -> None:
    def body(group: Any) -> None:
        switch = NcclEpTokenSwitch(group, EXPERTS, MOST, ROOM, 4 * HIDDEN, device="cpu")
        x, ids, weights, _ = drawn(group.rank())
        routing = switch.create_routing(ids, layout="flat")
        with pytest.raises(nccl_ep.OverflowError, match="rows did not fit into capacity 1 of layout flat"):
            switch.dispatch(routing, x, weights, 1)
        switch.destroy()

    run_ranks(RANKS, body)
