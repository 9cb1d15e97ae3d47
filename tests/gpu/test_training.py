"""Gradients on CUDA: those of the same layer on one rank, bit for bit; a compiled layer under CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import nccl_ep
from tests.support.gpus import needs_gpu, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes
from tests.training.moe import EXPERTS, HIDDEN, LAYOUTS, TOPK, Case, check_gradients, make_buffer, on_one_rank, run_rank
from tests.training.test_compile import KINDS, Layer

pytestmark = needs_gpu
WAYS = ("whole", "split", "async", "out")
WAYS_OF = [(mode, way) for mode in ("ll", "ht") for way in WAYS if (mode, way) != ("ht", "split")]


@pytest.mark.parametrize("weighting", ["dispatch", "home", "caller"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_gradients_of_one_rank_are_plain_torchs(mode: str, layout: str, weighting: str) -> None:
    case = Case(1, (8,))
    check_gradients(on_one_rank(case), [run_rank(case, None, mode, layout, weighting, device="cuda")])


@pytest.mark.parametrize("mode, way", WAYS_OF)
def test_gradients_are_the_same_by_every_way_of_calling(mode: str, way: str) -> None:
    case = Case(1, (7,), capacity=3)
    got = run_rank(case, None, mode, "expert_major", "dispatch", way, device="cuda")
    check_gradients(on_one_rank(case), [got])


def _on_gpus(rank: int) -> list[tuple[torch.Tensor, ...]]:
    device = on_gpu(rank)
    case = Case(2, (5, 3))
    return [
        run_rank(case, dist.group.WORLD, mode, layout, weighting, device=device)
        for mode in ("ll", "ht")
        for layout in LAYOUTS
        for weighting in ("dispatch", "home")
    ]


@ranks_on_gpus
def test_gradients_of_ranks_with_a_gpu_each_are_plain_torchs(tmp_path: Path) -> None:
    first, second = run_processes(2, _on_gpus, tmp_path)
    want = on_one_rank(Case(2, (5, 3)))
    for got in zip(first, second, strict=True):
        check_gradients(want, got)


@pytest.mark.parametrize("kind", ["ll packed", "ht packed", "ht packed, exact"])
def test_a_compiled_layer_trains_as_the_eager_one(kind: str) -> None:
    torch._dynamo.reset()
    with make_buffer(None, device="cuda") as buffer:
        layer = Layer(buffer, **KINDS[kind]).cuda()
        x = torch.randn(5, HIDDEN, device="cuda")

        def step() -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            out = layer(leaf)
            out.sin().sum().backward()
            assert leaf.grad is not None
            return [out.detach(), leaf.grad, *(each.grad for each in layer.parameters() if each.grad is not None)]

        want = step()
        layer.compile(fullgraph=True)
        for got, expected in zip(step(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["ll packed", "ht packed"])
def test_reduce_overhead_replays_with_new_routing(kind: str) -> None:
    """From the profile: after the warm-up every call is a launch of a graph."""
    torch._dynamo.reset()
    with make_buffer(None, device="cuda") as buffer, torch.no_grad():
        how = KINDS[kind]

        def layer(x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS, zero_padding=True, **how)
            return nccl_ep.combine(out.x * 2, out.handle)

        compiled: Any = torch.compile(layer, fullgraph=True, mode="reduce-overhead")

        def call() -> None:
            x = torch.randn(5, HIDDEN, device="cuda")
            idx = torch.rand(5, EXPERTS, device="cuda").topk(TOPK)[1]
            torch.testing.assert_close(compiled(x, idx).clone(), layer(x, idx))

        for _ in range(4):
            call()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        launches = sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")
        assert launches == 3
