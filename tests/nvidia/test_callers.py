"""How frameworks call ``nccl.ep``: their calls, in their order, with their tensors.

Read on 28 November 2026: TensorRT-LLM's NcclEP communication with its context (merged), and SGLang's open changes for
``nccl_ep`` (high throughput with FP8 rows and an alignment of 128, low latency with FP8). Neither is installed here.
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
    rows_of_expert,
    tokens_for,
    tokens_of,
    weighted_sum,
)
from tests.support.ranks import DEVICE, same_for_all

MOST_ROWS = RANKS * MOST


@pytest.mark.parametrize("recipe", ["bf16", "fp8_bytes", "nvfp4"])
def test_tensorrt_llm(recipe: str) -> None:
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
        handle: Any = None
        for seed in range(2):
            mine = tokens_of(rank, seed)
            routing = Tensor(mine.ids.int())
            if handle is None:
                handle = owner.create_handle(ep.Layout.RANK_MAJOR, routing, stream=0)
            else:
                handle.update(routing, stream=0)
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
            made[..., :width] = (rows.float() * weights.sum(-1, keepdim=True)).bfloat16()
            made[(ids < 0).all(-1)] = 0
            home = torch.empty(len(mine.x), HIDDEN, dtype=torch.bfloat16)
            handle.combine(ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
            assert_close(home[:, :width], weighted_sum(mine)[:, :width])
        handle.destroy()
        owner.destroy()
        comm.finalize()
        comm.destroy()

    run_ranks(RANKS, body)


def test_sglang_high_throughput() -> None:
    """FP8 rows with scales, experts at multiples of 128, counters filled by each update, a static number of rows."""
    alignment, room = 128, LOCAL * 128

    def body(group: Any) -> None:
        rank = group.rank()
        owner = made_group(
            group, algorithm=ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=room, num_qp_per_rank=0
        )
        counters, offsets = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros(LOCAL, dtype=torch.int32)
        total = torch.zeros(1, dtype=torch.int32)
        info = ep.LayoutInfo(
            expert_counters=Tensor(counters), expert_offsets=Tensor(offsets), recv_total_counter=Tensor(total)
        )
        mine = tokens_of(rank)
        rows = torch.zeros(room, HIDDEN, dtype=torch.float8_e4m3fn)
        scales, weights = torch.zeros(room, HIDDEN // 128), torch.zeros(room)
        handle = owner.create_handle(
            ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), layout_info=info, stream=0,
            config=ep.HandleConfig(dispatch_output_per_expert_alignment=alignment),
        )  # fmt: skip
        handle.update(Tensor(mine.ids), layout_info=info, stream=0)
        quantised, factors = mine.x.to(torch.float8_e4m3fn), mine.weights.repeat(1, 2)[:, : HIDDEN // 128].contiguous()
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(quantised), topk_weights=Tensor(mine.weights), scales=Tensor(factors)),
            ep.DispatchOutputs(tokens=Tensor(rows), topk_weights=Tensor(weights), scales=Tensor(scales)),
            layout_info=info, config=ep.DispatchConfig(round_scales=0, pass_direction=ep.PassDir.FWD), stream=0,
        )  # fmt: skip
        handle.complete(stream=0)
        counts = [len(rows_of_expert(rank * LOCAL + local)) for local in range(LOCAL)]
        assert counters.tolist() == [alignment if count else 0 for count in counts] and int(total) == int(
            counters.sum()
        )
        for local, first in enumerate(offsets.tolist()):
            for at, (source, token, k) in enumerate(rows_of_expert(rank * LOCAL + local), first):
                theirs = tokens_of(source)
                assert rows[at].view(torch.uint8).equal(theirs.x[token].to(torch.float8_e4m3fn).view(torch.uint8))
                assert weights[at] == theirs.weights[token, k]
                assert scales[at].equal(theirs.weights[token].repeat(2)[: HIDDEN // 128])
        made = (rows.float() * weights[:, None]).bfloat16()
        home = torch.empty_like(mine.x)
        handle.combine(
            ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)),
            config=ep.CombineConfig(pass_direction=ep.PassDir.FWD), stream=0,
        )  # fmt: skip
        torch.testing.assert_close(home.float(), weighted_sum(mine), rtol=0.1, atol=0.05)  # e4m3 has 3 bits
        owner.destroy()

    run_ranks(RANKS, body)
