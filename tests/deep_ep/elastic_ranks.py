"""A layer over DeepEP V2's methods in a CUDA graph, replayed with new routing; on "cpu" the same without a graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nccl_ep.deep_ep import ElasticBuffer
from tests.support.gpus import captured, on_gpu

EXPERTS_OF_A_RANK, TOPK, HIDDEN, TOKENS = 4, 3, 256, 7
HALF = torch.bfloat16


def replay_new_routing(group: Any, device: str, most: int, expand: bool, is_async: bool, replays: int) -> None:
    """``most``: tokens of a rank that the calls name, which decides between the modes. Sums are exact in bf16."""
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": most, "hidden": HIDDEN, "num_topk": TOPK, "device": device}
    with ElasticBuffer(group, num_gpu_timeout_secs=30, **sizes) as buffer:
        rank, experts = buffer.rank_idx, EXPERTS_OF_A_RANK * buffer.num_ranks
        x = torch.zeros(TOKENS, HIDDEN, dtype=HALF, device=device)
        idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device=device)
        weights = torch.full((TOKENS, TOPK), 0.5, device=device)
        made: dict[str, torch.Tensor] = {}

        def layer() -> None:
            before = buffer.capture() if is_async and device == "cpu" else None  # no event from outside of a graph
            rows, ids, row_weights, handle, event = buffer.dispatch(
                x, idx, weights, num_experts=experts, expert_alignment=8, do_cpu_sync=False, do_expand=expand,
                do_zero_padding=expand, previous_event=before, async_with_compute_stream=is_async,
                allocate_on_comm_stream=before is not None,
            )  # fmt: skip
            if is_async:
                event.current_stream_wait()
            assert row_weights is not None
            made["tokens"] = handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
            made["ends"] = handle.psum_num_recv_tokens_per_expert
            made["sources"] = handle.recv_src_metadata[:, 0]
            if expand:
                y = rows * row_weights.unsqueeze(1).to(HALF)
            else:
                is_row = (torch.arange(len(rows), device=device) < made["tokens"]).unsqueeze(1)
                factors = (torch.where(ids >= 0, row_weights, 0)).sum(1, keepdim=True).to(HALF)
                y = torch.where(is_row, rows * factors, 0)
            combined, home, event = buffer.combine(y, handle, row_weights, async_with_compute_stream=is_async)
            if is_async:
                event.current_stream_wait()
            assert home is not None
            made["combined"], made["home"] = combined, home

        draw = torch.Generator().manual_seed(rank)
        replay = captured(layer, device)
        for _ in range(replays):
            new = torch.rand(TOKENS, experts, generator=draw).topk(TOPK)[1]
            new[torch.rand(TOKENS, TOPK, generator=draw) < 0.2] = -1
            values = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=draw).to(HALF)
            idx.copy_(new)
            x.copy_(values)
            replay()
            expected = values * (0.5 * (new >= 0).sum(1, keepdim=True)).to(HALF)
            assert torch.equal(made["combined"].cpu(), expected)
            assert torch.equal(made["home"].cpu(), 0.5 * (new >= 0))
            if buffer.num_ranks == 1:
                here = (new >= 0).any(1)
                assert int(made["tokens"]) == int(here.sum())
                assert made["sources"][: int(here.sum())].tolist() == here.nonzero().flatten().tolist()
                counts = torch.stack([(new == expert).sum() for expert in range(experts)])
                rounded = (counts + 7) // 8 * 8
                ends = rounded.cumsum(0) - rounded + counts if expand else rounded.cumsum(0)
                assert made["ends"].tolist() == ends.tolist()
        buffer.barrier()
        buffer.check()


def in_process(rank: int, most: int, replays: int) -> None:
    device = on_gpu(rank)
    for expand in (False, True):
        for is_async in (False, True):
            replay_new_routing(dist.group.WORLD, str(device), most, expand, is_async, replays)
