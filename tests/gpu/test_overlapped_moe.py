"""The layer of examples/overlapped_moe on GPUs: overlapped, in graphs and compiled it has the bits of one step behind
the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from examples.overlapped_moe.compiled import compiled_forward
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.timing import captured
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup
from tests.support.gpus import in_processes, needs_gpu, num_replays, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytest.importorskip("triton")
pytestmark = needs_gpu
REPLAYS = num_replays(20)
HIDDEN, INNER, TOPK, EXPERTS, TOKENS = 512, 256, 2, 8, 300
WAYS: dict[str, tuple[nccl_ep.choices.Mode, bool, dict[str, Any]]] = {  # mode, whether in FP8, of MoeLayer
    "ht": ("ht", False, {}),
    "ht, all variants": ("ht", False, {"sorts": True, "signals": True, "how": {"group": 4, "tma": True}}),
    "ht, fp8": ("ht", True, {}),
    "ll": ("ll", False, {}),
    "ll, fp8": ("ll", True, {}),
}


class Given:
    """A layer, and what it is given, in memory that stays."""

    def __init__(self, group: Any, device: torch.device, way: str, tokens: int = TOKENS) -> None:
        mode, is_fp8, how = WAYS[way]
        self.buffer = nccl_ep.Buffer.for_shapes(
            group, max_tokens=tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode=mode, device=device,
            timeout=20.0, late_weights=mode == "ll",
        )  # fmt: skip
        local = EXPERTS // self.buffer.num_ranks
        self.experts = Experts.random(local, HIDDEN, INNER, device, seed=self.buffer.rank)
        self.layer = MoeLayer(
            self.buffer, self.experts.in_fp8() if is_fp8 else self.experts, num_experts=EXPERTS, max_tokens=tokens,
            topk=TOPK, mode=mode, **how,
        )  # fmt: skip
        self.x = torch.empty(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        self.ids = torch.zeros(tokens, TOPK, device=device, dtype=torch.int64)
        self.weights = torch.empty(tokens, TOPK, device=device)
        self.draw(0)

    def draw(self, turn: int) -> None:
        """In odd turns the last experts get few rows."""
        draw = torch.Generator(self.x.device).manual_seed(turn * 8 + self.buffer.rank)
        scores = torch.rand(len(self.x), EXPERTS, generator=draw, device=self.x.device)
        scores[:, EXPERTS // 2 :] *= 1 - 0.7 * (turn % 2)
        weights, ids = scores.topk(TOPK)
        self.weights.copy_(weights)
        self.ids.copy_(ids)
        self.x.normal_(generator=draw)

    def run(self, overlaps: bool) -> torch.Tensor:
        return self.layer(self.x, self.ids, self.weights, overlaps=overlaps)

    def check(self) -> None:
        self.buffer.check()
        self.layer.arrivals.check()


def compare(group: Any, device: torch.device, way: str, replays: int) -> None:
    given = Given(group, device, way)
    with given.buffer:
        for turn in range(3):
            given.draw(turn)
            assert torch.equal(given.run(True), given.run(False)), f"call {turn}"
        graph, made = captured(lambda: given.run(True))
        assert made is not None
        for turn in range(replays):
            given.draw(turn)
            made.fill_(7)
            graph.replay()
            assert torch.equal(made, given.run(False)), f"replay {turn}"
        given.check()


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_one_step_behind_the_other(way: str) -> None:
    compare(ThreadGroup.make(1)[0], torch.device("cuda", 0), way, REPLAYS)


def _compare_on_gpus(rank: int, way: str, replays: int) -> None:
    compare(rendezvous_of(dist.group.WORLD), on_gpu(rank), way, replays)


@ranks_on_gpus
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_one_step_behind_the_other_over_nccl(way: str, tmp_path: Path) -> None:
    run_processes(2, _compare_on_gpus, tmp_path, way, in_processes(REPLAYS))


@pytest.mark.parametrize("way", ["ht", "ht, all variants", "ll"])
def test_gradients_have_the_same_bits(way: str) -> None:
    given = Given(ThreadGroup.make(1)[0], torch.device("cuda", 0), way)
    wanted = [given.x, given.weights, given.experts.w13, given.experts.w2]
    for each in wanted:
        each.requires_grad_()
    with given.buffer:
        one_behind = torch.autograd.grad(given.run(False).float().pow(2).sum(), wanted)
        for _ in range(3):
            for got, want in zip(
                torch.autograd.grad(given.run(True).float().pow(2).sum(), wanted), one_behind, strict=True
            ):
                assert torch.equal(got, want)
        given.check()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_compiled_layer_with_the_gemm_has_the_same_bits(overlaps: bool) -> None:
    torch._dynamo.reset()
    given = Given(ThreadGroup.make(1)[0], torch.device("cuda", 0), "ht")
    forward = compiled_forward(given.layer, overlaps=overlaps)
    with given.buffer:
        for turn in range(3):
            given.draw(turn)
            assert torch.equal(forward(given.x, given.ids, given.weights), given.run(False))
        given.check()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_compiled_layer_has_its_first_gemm_beside_the_dispatch(overlaps: bool) -> None:
    """In a graph, where no launch of the host comes between them."""
    torch._dynamo.reset()
    given = Given(ThreadGroup.make(1)[0], torch.device("cuda", 0), "ht", tokens=16384)
    forward = compiled_forward(given.layer, overlaps=overlaps)
    with given.buffer:
        want = given.run(False)
        assert torch.equal(forward(given.x, given.ids, given.weights), want)
        graph, made = captured(lambda: forward(given.x, given.ids, given.weights))
        assert made is not None
        graph.replay()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(made, want)
        given.check()

    def kernels(name: str) -> list[Any]:
        found = [each for each in profile.events() if name in each.name]
        return sorted((each.time_range for each in found), key=lambda each: each.start)

    (dispatch,) = kernels("dispatch_send")
    first_gemm, _ = kernels("grouped_gemm")
    assert (first_gemm.start < dispatch.end) == overlaps
