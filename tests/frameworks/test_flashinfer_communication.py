"""nccl_ep in FlashInfer's registry of communication backends, beside plain PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.gpus import CPU_OR_GPUS, device_of
from tests.support.processes import run_processes

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("flashinfer is not installed: make frameworks", allow_module_level=True)

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 4, 64, 2, 8
LOCAL = EXPERTS // RANKS


def step(rank: int, kind: str) -> None:
    from flashinfer.moe_ep import (
        BootstrapConfig,
        MoEEpCommParams,
        available_communication_backends,
        create_communication,
    )

    from nccl_ep.integrations.flashinfer import NAME

    assert NAME in available_communication_backends()
    device = device_of(rank, kind)
    params = MoEEpCommParams(
        num_experts=EXPERTS, top_k=TOPK, max_tokens_per_rank=MOST, hidden_size=HIDDEN, invalid_expert_id=EXPERTS
    )
    comm = create_communication(BootstrapConfig(world_size=RANKS, rank=rank), params, NAME, device=device)
    draw = torch.Generator().manual_seed(rank)
    count = 3 + rank
    x, weights = torch.randn(count, HIDDEN, generator=draw).bfloat16(), torch.rand(count, TOPK, generator=draw)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOPK] for _ in range(count)]).int()
    x, weights, ids = x.to(device), weights.to(device), ids.to(device)
    with pytest.raises(ValueError, match="combine without a dispatch"):
        comm.combine(x)
    with pytest.raises(ValueError, match="eplb_local_stats is given"):
        comm.dispatch(x, ids, weights, eplb_local_stats=x)
    for most in (None, 5):
        scales = weights.repeat(1, 2)
        out = comm.dispatch(x, ids, weights, hidden_states_scale=scales, max_tokens_per_rank=most)
        assert out.tokens_per_rank == (most or MOST) and out.hidden_states.shape == (
            RANKS * out.tokens_per_rank,
            HIDDEN,
        )
        here = (out.topk_ids >= rank * LOCAL) & (out.topk_ids < (rank + 1) * LOCAL)
        assert (here | (out.topk_ids == EXPERTS)).all()
        assert out.hidden_states_scale[here.any(1)][:, :TOPK].eq(out.hidden_states_scale[here.any(1)][:, TOPK:]).all()
        factor = torch.where(here, out.topk_weights * (1 + out.topk_ids), 0).sum(1, keepdim=True)
        rows = torch.where(here.any(1, keepdim=True), out.hidden_states.float() * factor, 0).bfloat16()
        home = comm.combine(rows, output=torch.empty_like(x))
        want = x.float() * (weights * (1 + ids)).sum(1, keepdim=True)
        torch.testing.assert_close(home.float(), want, rtol=2e-2, atol=5e-2)
    comm.destroy()


@pytest.mark.parametrize("kind", CPU_OR_GPUS)
def test_dispatch_and_combine(kind: str, tmp_path: Path) -> None:
    run_processes(RANKS, step, tmp_path, kind)
