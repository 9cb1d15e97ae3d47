"""How TensorRT-LLM calls ``nccl.ep``: its calls, in their order, with its tensors.

Read on 28 November 2026: NcclEP's communication with its context (merged; at 42c39fe), and pull request 17715, which
has high throughput. TensorRT-LLM is not installed here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor
from nccl_ep.nvidia.communicator import Communicator, get_unique_id
from nccl_ep.testing import run_ranks
from tests.nvidia.tokens import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    MOST,
    RANKS,
    TOPK,
    assert_close,
    local_ids,
    made_group,
    tokens_for,
    tokens_of,
    weighted_sum,
)
from tests.support.ranks import DEVICE, same_for_all

MOST_ROWS = RANKS * MOST


def routed(owner: ep.Group, handle: ep.Handle | None, layout: ep.Layout, ids: torch.Tensor) -> ep.Handle:
    """One handle for all steps: made in the first, with int32 ids."""
    routing = Tensor(ids.int())
    if handle is None:
        return owner.create_handle(layout, routing, stream=0)
    handle.update(routing, stream=0)
    return handle


@pytest.mark.parametrize("recipe", ["bf16", "fp8_bytes", "nvfp4"])
def test_low_latency(recipe: str) -> None:
    """Ranks that meet by a unique id, one handle for all steps, int32 ids, global ids by ``_lowpp``, window outputs."""
    unique_id = same_for_all(get_unique_id())

    def body(group: Any) -> None:
        rank = group.rank()
        comm = Communicator.init(nranks=RANKS, rank=rank, unique_id=unique_id)
        assert "zero_copy" in ep.GroupConfig.__dataclass_fields__ and hasattr(ep.LayoutInfo(), "recv_topk_idx_kind")
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY, num_experts=EXPERTS, max_dispatch_tokens_per_rank=MOST,
            max_recv_tokens_per_rank=MOST_ROWS, max_token_bytes=2 * HIDDEN,
        )  # fmt: skip
        owner = ep.Group.create(comm, config, device=DEVICE)
        width = {"bf16": HIDDEN, "fp8_bytes": HIDDEN // 2, "nvfp4": HIDDEN // 4}[recipe]
        rows = torch.empty(RANKS, MOST, width, dtype=torch.bfloat16)
        ids = torch.empty(RANKS, MOST, TOPK, dtype=torch.int32)
        weights, counts = torch.empty(RANKS, MOST, TOPK), torch.empty(RANKS, dtype=torch.int32)
        scales = torch.empty(RANKS, MOST, HIDDEN // 16, dtype=torch.uint8) if recipe == "nvfp4" else None
        outputs = ep.DispatchOutputs(
            tokens=Tensor(rows, window=SimpleNamespace(handle=0x77), window_offset=0), topk_weights=Tensor(weights),
            topk_idx=Tensor(ids), scales=None if scales is None else Tensor(scales),
        )  # fmt: skip
        info = ep.LayoutInfo(src_rank_counters=Tensor(counts))
        info._lowpp.recv_topk_idx_kind = ep.ExpertIdKind.GLOBAL
        recipes = ep.DispatchQuantizationRecipe
        config_of_dispatch = ep.DispatchConfig(
            round_scales=0, quantization_recipe=recipes.FWD if recipe == "nvfp4" else recipes.NONE
        )
        handle: ep.Handle | None = None
        for seed in range(2):
            mine = tokens_of(rank, seed)
            handle = routed(owner, handle, ep.Layout.RANK_MAJOR, mine.ids)
            payload = mine.x[:, :width].contiguous()
            factors = mine.x[:, : HIDDEN // 32].contiguous().view(torch.uint8)
            inputs = ep.DispatchInputs(
                tokens=Tensor(payload), topk_weights=Tensor(mine.weights),
                scales=Tensor(factors) if recipe == "nvfp4" else None,
            )  # fmt: skip
            handle.dispatch(inputs, outputs, layout_info=info, config=config_of_dispatch, stream=0)
            for source in range(RANKS):
                came = [token for of, token in tokens_for(rank, seed) if of == source]
                assert counts[source] == len(came) and (ids[source, len(came) :] == -1).all()
                for at, token in enumerate(came):
                    theirs = tokens_of(source, seed)
                    assert rows[source, at].equal(theirs.x[token, :width])
                    assert scales is None or scales[source, at].equal(theirs.x[token, : HIDDEN // 32].view(torch.uint8))
                    here = [each + rank * LOCAL if each >= 0 else -1 for each in local_ids(rank, source, token, seed)]
                    assert ids[source, at].tolist() == here
            made = torch.zeros(RANKS, MOST, HIDDEN, dtype=torch.bfloat16)
            made[..., :width] = (rows.float() * torch.where(ids >= 0, weights, 0).sum(-1, keepdim=True)).bfloat16()
            made[(ids < 0).all(-1)] = 0
            home = torch.empty(len(mine.x), HIDDEN, dtype=torch.bfloat16)
            handle.combine(ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
            assert_close(home[:, :width], weighted_sum(mine)[:, :width])
        handle.destroy()
        owner.destroy()
        comm.finalize()
        comm.destroy()

    run_ranks(RANKS, body)


def test_high_throughput() -> None:
    """Rows of a fixed number, int32 ids that arrive as int64 ones of the rank, no counters."""

    def body(group: Any) -> None:
        rank = group.rank()
        owner = made_group(group, algorithm=ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=MOST_ROWS)
        rows, weights = torch.empty(MOST_ROWS, HIDDEN, dtype=torch.bfloat16), torch.empty(MOST_ROWS, TOPK)
        ids = torch.empty(MOST_ROWS, TOPK, dtype=torch.int64)
        outputs = ep.DispatchOutputs(tokens=Tensor(rows), topk_weights=Tensor(weights), topk_idx=Tensor(ids))
        config = ep.DispatchConfig(round_scales=0, quantization_recipe=ep.DispatchQuantizationRecipe.NONE)
        handle: ep.Handle | None = None
        for seed in range(2):
            mine = tokens_of(rank, seed)
            handle = routed(owner, handle, ep.Layout.FLAT, mine.ids)
            inputs = ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights))
            handle.dispatch(inputs, outputs, layout_info=None, config=config, stream=0)
            came = tokens_for(rank, seed)
            for at in range(MOST_ROWS):
                want = local_ids(rank, *came[at], seed) if at < len(came) else [-1] * TOPK
                assert ids[at].tolist() == want
                assert at >= len(came) or rows[at].equal(tokens_of(came[at][0], seed).x[came[at][1]])
            made = (rows.float() * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)).bfloat16()
            home = torch.empty_like(mine.x)
            handle.combine(ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
            assert_close(home, weighted_sum(mine))
        handle.destroy()
        owner.destroy()

    run_ranks(RANKS, body)
