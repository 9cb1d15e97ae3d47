"""A dispatch whose blocks of rows announce themselves, and a kernel beside it that copies each when its word has come.
Outputs are poisoned before, so that a word that is set before its rows shows in the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.arrivals import Arrivals
from nccl_ep.bootstrap import rendezvous_of
from tests.gpu.cuda_consumer import CudaConsumer
from tests.support.gpus import on_gpu

HIDDEN, TOPK, EXPERTS, TOKENS, ROWS, POISON = 1024, 4, 16, 256, 64, 0x7F
TIMEOUT_NS = 10_000_000_000


class Watched:
    """A dispatch and its consumer, captured in a graph. in_cuda: a consumer in CUDA, in place of one in Triton."""

    def __init__(
        self, buffer: nccl_ep.Buffer, mode: Any, layout: Any, quant: Any, in_cuda: CudaConsumer | None = None
    ) -> None:
        self.buffer, self.in_cuda, device = buffer, in_cuda, buffer.device
        self.x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
        self.ids = torch.zeros(TOKENS, TOPK, device=device, dtype=torch.int64)
        local = EXPERTS // buffer.num_ranks
        self.capacity = buffer.num_ranks * TOKENS if layout == "expert_major" else 32 * ROWS * buffer.num_ranks
        blocks = Arrivals.blocks_of(layout, self.capacity, local, ROWS)
        self.arrivals, self.blocks = Arrivals(buffer, blocks=blocks + 3, rows_per_block=ROWS), blocks
        self.options: dict[str, Any] = {
            "buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": layout, "quant": quant,
            "max_tokens": TOKENS, "capacity": self.capacity,
            "expert_alignment": 1 if layout == "expert_major" else ROWS,
        }  # fmt: skip
        self.draw(0)

    def draw(self, turn: int) -> None:
        generator = torch.Generator(self.x.device).manual_seed(turn * 8 + self.buffer.rank)
        scores = torch.rand(TOKENS, EXPERTS, generator=generator, device=self.x.device)
        scores[:, : EXPERTS // 4] *= 0.3 + 0.7 * (turn % 2)
        self.ids.copy_(scores.topk(TOPK).indices)
        self.x.normal_(generator=generator)

    def run(self) -> None:
        pending = nccl_ep.dispatch_send(
            self.x, self.ids, **self.options, num_sms=16, arrivals=self.arrivals, async_finish=True
        )
        out = self.out = pending.early_output
        self.seen = torch.zeros_like(out.x)
        self.experts = torch.full((out.weights.numel(),), -1, dtype=torch.int32, device=self.x.device)
        words = HIDDEN * out.x.element_size() // 4
        given = out.x.view(torch.int32), self.seen.view(torch.int32), self.experts
        if self.in_cuda is not None:
            self.in_cuda(*given, self.arrivals, self.blocks, words, TIMEOUT_NS)
        else:
            from tests.gpu.arrivals_consumer import copy_blocks

            copy_blocks[(48,)](
                *given, self.arrivals.state, self.arrivals.blocks, self.blocks, words, TIMEOUT_NS, WIDTH=256
            )
        pending.receive()

    def check(self, where: str) -> None:
        self.buffer.check()
        assert not self.arrivals.has_failed(), where
        if self.in_cuda is not None:
            self.in_cuda.check(self.arrivals, self.blocks, where)
        plain = nccl_ep.dispatch(self.x, self.ids, **self.options)
        out, width = self.out, self.seen.shape[-1]
        assert torch.equal(out.counts, plain.counts), where
        rows = torch.zeros(self.experts.numel(), dtype=torch.bool, device=self.x.device)
        want = torch.full_like(self.experts, -1)
        for expert, count in enumerate(plain.counts.tolist()):
            first = expert * self.capacity if plain.offsets is None else int(plain.offsets[expert])
            rows[first : first + count] = True
            want[first : first + count] = expert
        assert torch.equal(self.experts, want), where
        for name, got in (("output", out.x), ("seen", self.seen)):
            same = torch.equal(
                got.view(torch.uint8).view(-1, width * got.element_size())[rows],
                plain.x.view(torch.uint8).view(-1, width * got.element_size())[rows],
            )
            assert same, f"{where}: {name} differs"


class Layer:
    """Dispatch, the consumer in the place of experts, combine."""

    def __init__(self, buffer: nccl_ep.Buffer, mode: Any, layout: Any, is_beside: bool) -> None:
        """is_beside: the consumer runs beside the dispatch, and not behind it."""
        self.watched, self.is_beside = Watched(buffer, mode, layout, None), is_beside

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from tests.gpu.arrivals_consumer import copy_blocks

        mine = self.watched
        pending = nccl_ep.dispatch_send(x, ids, **mine.options, num_sms=16, arrivals=mine.arrivals, async_finish=True)
        out = pending.early_output if self.is_beside else pending.receive()
        words = out.x.view(torch.int32)
        seen = torch.zeros_like(words)
        experts = torch.full((out.weights.numel(),), -1, dtype=torch.int32, device=x.device)
        copy_blocks[(48,)](
            words, seen, experts, mine.arrivals.state, mine.arrivals.blocks, mine.blocks, HIDDEN // 2, TIMEOUT_NS,
            WIDTH=256,
        )  # fmt: skip
        if self.is_beside:
            out = pending.receive()
        return nccl_ep.combine(seen.view(x.dtype), out.handle, weights=None)


def make_buffer(group: Any, device: torch.device, timeout: float) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode="auto", device=device,
        timeout=timeout,
    )  # fmt: skip


def watch(group: Any, device: torch.device, replays: int, in_cuda: CudaConsumer | None = None) -> None:
    """Calls, and replays of a captured one, of both modes."""
    with make_buffer(group, device, 20.0) as buffer:
        for mode in ("ht", "ll"):
            for layout, quant in (("packed", None), ("expert_major", None), ("packed", "fp8")):
                watched = Watched(buffer, mode, layout, quant, in_cuda)
                for turn in range(3):
                    watched.draw(turn)
                    watched.run()
                    watched.check(f"{mode} {layout} {quant} call {turn}")
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    watched.run()
                for turn in range(replays):
                    watched.draw(turn)
                    watched.out.x.view(torch.uint8).fill_(POISON)
                    graph.replay()
                    if turn % 20 == 19 or turn < 3:
                        watched.check(f"{mode} {layout} {quant} replay {turn}")


def outlive(rank: int, mode: Any, layout: Any, library: Path | None = None) -> None:
    """Rank 1 stays away from a dispatch: the consumer of rank 0 ends in an error, and has copied nothing of it."""
    with make_buffer(rendezvous_of(dist.group.WORLD), on_gpu(rank), 2.0) as buffer:
        in_cuda = None if library is None else CudaConsumer(library)
        watched = Watched(buffer, mode, layout, None, in_cuda)
        watched.run()
        watched.check("all ranks")
        dist.barrier()
        if rank == 0:
            watched.run()
            assert watched.arrivals.has_failed()
            assert bool((watched.seen == 0).all())
            with pytest.raises(nccl_ep.TimeoutError, match="rank 1"):
                buffer.check()
        dist.barrier()
