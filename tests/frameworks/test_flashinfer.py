"""FlashInfer's NcclEpFleet, unchanged, over nccl_ep's ``nccl.ep``, beside plain PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gpus import CPU_OR_GPUS, device_of
from tests.support.processes import run_processes

# Not imported here: rank processes import this file, and nccl.ep must be there before FlashInfer looks for it.
if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("flashinfer is not installed: make frameworks", allow_module_level=True)

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 4, 2048, 2, 8
LOCAL = EXPERTS // RANKS
MODES = [("LOW_LATENCY", "EXPERT_MAJOR"), ("LOW_LATENCY", "RANK_MAJOR"), ("HIGH_THROUGHPUT", "EXPERT_MAJOR")]


def tokens_of(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    count = 3 + rank
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOPK] for _ in range(count)])
    x, weights = torch.randn(count, HIDDEN, generator=draw).bfloat16(), torch.rand(count, TOPK, generator=draw)
    return x.to(device), ids.to(device), weights.to(device)


def expert(number: Any) -> Any:
    """What expert ``number`` multiplies rows with: a power of two, so that only sums are rounded."""
    return 2.0 ** (number % 3)


def through(fleet: Any, layout: str, rank: int, step: int, knobs: list[Any], device: torch.device) -> torch.Tensor:
    from flashinfer.moe_ep import CombineInputParams, DispatchInputParams, HandleParams

    x, ids, _ = tokens_of(rank, step, device)
    handle = fleet.create_handle(HandleParams(topk_ids=ids), knobs)
    out = handle.dispatch(DispatchInputParams(x=[x]))
    if out.recv_topk_idx is None:  # a part for each local expert, and the weights are applied on the way home
        assert out.expert_counts.sum() == sum(
            int((tokens_of(source, step, device)[1] // LOCAL == rank).sum()) for source in range(RANKS)
        )
        rows = torch.stack([out.expert_tensors[e] * expert(rank * LOCAL + e) for e in range(LOCAL)])
    else:
        rows, slots = out.expert_tensors.reshape(-1, HIDDEN).float(), out.recv_topk_idx.reshape(-1, TOPK)
        factors = torch.where(slots >= 0, expert(rank * LOCAL + slots) * out.recv_topk_weights.reshape(-1, TOPK), 0)
        assert out.recv_total_counter is None or out.recv_total_counter == (slots >= 0).any(1).sum()
        rows = torch.where((slots >= 0).any(1, keepdim=True), rows * factors.sum(1, keepdim=True), 0).bfloat16()
        rows = rows.view(out.expert_tensors.shape)
    combined: torch.Tensor = handle.combine(CombineInputParams(x=[rows])).x
    handle.destroy()
    return combined


def run_fleets(rank: int, kind: str) -> None:
    import nccl_ep

    nccl_ep.install_as_nccl_ep()
    device = device_of(rank, kind)
    if kind == "cpu":  # FlashInfer asks, and torch has no answer without a driver
        torch.cuda.is_current_stream_capturing = lambda: False
    for algorithm, layout in MODES:
        run_fleet(rank, algorithm, layout, device)


def run_fleet(rank: int, algorithm: str, layout: str, device: torch.device) -> None:
    from flashinfer.moe_ep import (
        BootstrapConfig,
        EpAlgorithm,
        EpLayout,
        FleetAlgoKnobAllocator,
        FleetParams,
        HandleAlgoKnobNumReceivedTokens,
        HandleAlgoKnobSplitOperation,
        HandleAlgoKnobTopKWeights,
        create_fleet,
        have_nccl_ep,
    )

    assert have_nccl_ep()
    params = FleetParams(
        num_experts=EXPERTS, max_tokens_per_rank=MOST, token_hidden_size=HIDDEN, algorithm=EpAlgorithm[algorithm],
        layout=EpLayout[layout],
    )  # fmt: skip
    memory = FleetAlgoKnobAllocator(torch_caching=True)  # as vLLM asks for it; it changes nothing
    fleet = create_fleet(BootstrapConfig(world_size=RANKS, rank=rank), params, [memory], backend="nccl_ep")
    for step in range(3):
        x, ids, weights = tokens_of(rank, step, device)
        knobs: list[Any] = [HandleAlgoKnobTopKWeights(weights=weights)]
        if step == 1:
            knobs.append(HandleAlgoKnobSplitOperation())
        if step == 2:
            knobs.append(HandleAlgoKnobNumReceivedTokens(target=torch.zeros(1, dtype=torch.int32, device=device)))
        dist.barrier()
        got = through(fleet, layout, rank, step, knobs, device)
        want = x.float() * (expert(ids) * weights).sum(1, keepdim=True)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=3e-2)
    fleet.destroy()


@pytest.mark.parametrize("kind", CPU_OR_GPUS)
def test_fleets_of_all_modes(kind: str, tmp_path: Path) -> None:
    run_processes(RANKS, run_fleets, tmp_path, kind)
