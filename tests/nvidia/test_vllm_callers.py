"""How vLLM's open changes call ``nccl.ep``: their calls, in their order, with their tensors.

Read on 28 November 2026: vLLM's pull request 46889 at 098d9fc (its batched and its standard PrepareAndFinalize: tensors
by their addresses, a handle a step), and the form of it with ``NcclEPLLPrepareAndFinalize`` and
``NcclEPHTPrepareAndFinalize`` (one handle for all steps; exact sizes, FP8 rows with scales). vLLM is not installed
here. Its pull request 47948 goes through FlashInfer's fleets: tests/frameworks/test_flashinfer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor
from nccl_ep.nvidia.datatypes import datatype_of
from nccl_ep.testing import run_ranks
from tests.nvidia.tokens import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    MOST,
    RANKS,
    TOPK,
    Tokens,
    assert_close,
    local_ids,
    made_group,
    rows_of_expert,
    tokens_for,
    tokens_of,
    weighted_sum,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SCALES = 4  # of a row: one number, four times


def by_address(tensor: torch.Tensor) -> Tensor:
    """FP8 rows are bytes."""
    dtype = torch.uint8 if tensor.dtype == FP8 else tensor.dtype
    return Tensor(tensor.data_ptr(), dtype=int(datatype_of(dtype)), shape=tuple(tensor.shape))


@pytest.mark.parametrize("sends", [True, False], ids=["finalize_async", "finalize"])
@pytest.mark.parametrize("described", [by_address, Tensor], ids=["a_handle_a_step", "one_handle"])
def test_low_latency(described: Callable[[torch.Tensor], Tensor], sends: bool) -> None:
    """Batched experts: the dispatch is sent and received by a hook, combine applies the weights."""

    def body(group: Any) -> None:
        rank, owner = group.rank(), made_group(group)
        handle: Any = None
        for seed in range(2):
            mine = tokens_of(rank, seed)
            if handle is None or described is by_address:
                handle = owner.create_handle(
                    ep.Layout.EXPERT_MAJOR, described(mine.ids), config=ep.HandleConfig(), stream=0
                )
            else:
                handle.update(described(mine.ids), stream=0)
            rows, counts = torch.empty(LOCAL, RANKS * MOST, HIDDEN, dtype=BF16), torch.empty(LOCAL, dtype=torch.int32)
            handle.dispatch(
                ep.DispatchInputs(tokens=described(mine.x)), ep.DispatchOutputs(tokens=described(rows)),
                layout_info=ep.LayoutInfo(expert_counters=described(counts)), config=ep.DispatchConfig(send_only=1),
                stream=0,
            )  # fmt: skip
            handle.complete(stream=0)
            for local in range(LOCAL):
                sources = rows_of_expert(rank * LOCAL + local, seed)
                assert counts[local] == len(sources)
                for row, (source, token, _) in zip(rows[local], sources, strict=False):
                    assert row.equal(tokens_of(source, seed).x[token])
            home = torch.empty_like(mine.x)
            handle.combine(
                ep.CombineInputs(tokens=described(rows)),
                ep.CombineOutputs(tokens=described(home), topk_weights=described(mine.weights)),
                config=ep.CombineConfig(send_only=int(sends)), stream=0,
            )  # fmt: skip
            if sends:
                handle.complete(stream=0)
            assert_close(home, weighted_sum(mine))
        owner.destroy()

    run_ranks(RANKS, body)


def weighted(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a rank's experts make of its rows, if each returns them as they are. An id of -1 is none."""
    return (rows.float() * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)).bfloat16()


def test_high_throughput_of_a_fixed_size() -> None:
    """Standard experts: no counters, as many rows as could come. Ids of rows without a token are -1."""

    def body(group: Any) -> None:
        rank, most = group.rank(), RANKS * MOST
        owner = made_group(group, algorithm=ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=most)
        for seed in range(2):
            mine = tokens_of(rank, seed)
            handle = owner.create_handle(
                ep.Layout.FLAT, by_address(mine.ids), config=ep.HandleConfig(), stream=0
            )  # fmt: skip
            rows, weights = torch.zeros(most, HIDDEN, dtype=BF16), torch.zeros(most, TOPK)
            ids = torch.zeros(most, TOPK, dtype=torch.int64)
            handle.dispatch(
                ep.DispatchInputs(tokens=by_address(mine.x), topk_weights=by_address(mine.weights)),
                ep.DispatchOutputs(
                    tokens=by_address(rows), topk_weights=by_address(weights), topk_idx=by_address(ids)
                ),
                config=ep.DispatchConfig(send_only=0), stream=0,
            )  # fmt: skip
            handle.complete(stream=0)
            came = tokens_for(rank, seed)
            assert [each.tolist() for each in ids] == [
                local_ids(rank, *came[at], seed) if at < len(came) else [-1] * TOPK for at in range(most)
            ]
            home, made = torch.empty_like(mine.x), weighted(rows, ids, weights)
            handle.combine(
                ep.CombineInputs(tokens=by_address(made)), ep.CombineOutputs(tokens=by_address(home)),
                config=ep.CombineConfig(send_only=0), stream=0,
            )  # fmt: skip
            handle.complete(stream=0)
            assert_close(home, weighted_sum(mine))
        owner.destroy()

    run_ranks(RANKS, body)


def routed(rank: int, to_last: bool) -> Tokens:
    """``to_last``: no token has an expert on rank 0, which receives nothing."""
    mine = tokens_of(rank)
    if to_last:
        draw = torch.Generator().manual_seed(rank)
        mine.ids = torch.stack([EXPERTS - 1 - torch.randperm(LOCAL, generator=draw)[:TOPK] for _ in mine.ids])
    return mine


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("to_last", [False, True], ids=["both_receive", "one_receives_nothing"])
def test_high_throughput_of_exact_sizes(to_last: bool, dtype: torch.dtype) -> None:
    """The counter of a new handle says how many rows the tensors have, which may be none."""

    def body(group: Any) -> None:
        rank = group.rank()
        mine = routed(rank, to_last)
        owner = made_group(group, algorithm=ep.Algorithm.HIGH_THROUGHPUT)
        total = torch.empty(1, dtype=torch.int32)
        info = ep.LayoutInfo(recv_total_counter=Tensor(total), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids), layout_info=info, stream=0)
        everyone = [routed(source, to_last) for source in range(RANKS)]
        came = [
            (source, token)
            for source, theirs in enumerate(everyone)
            for token in range(len(theirs.x))
            if (theirs.ids[token] // LOCAL == rank).any()
        ]
        count = int(total)
        assert count == len(came) and (count == 0) == (to_last and rank == 0)
        with_scales = dtype == FP8
        x, factors = mine.x.to(dtype), mine.weights[:, :1].expand(-1, SCALES).contiguous()
        rows, weights = torch.empty(count, HIDDEN, dtype=dtype), torch.empty(count, TOPK)
        ids, scales = torch.empty(count, TOPK, dtype=torch.int64), torch.empty(count, SCALES)
        recipes = ep.DispatchQuantizationRecipe
        handle.dispatch(
            ep.DispatchInputs(
                tokens=Tensor(x), topk_weights=Tensor(mine.weights), scales=Tensor(factors) if with_scales else None
            ),
            ep.DispatchOutputs(
                tokens=Tensor(rows), topk_weights=Tensor(weights), topk_idx=Tensor(ids),
                scales=Tensor(scales) if with_scales else None,
            ),
            config=ep.DispatchConfig(quantization_recipe=recipes.FWD if with_scales else recipes.NONE), stream=0,
        )  # fmt: skip
        for at, (source, token) in enumerate(came):
            theirs = everyone[source]
            assert rows[at].float().equal(theirs.x[token].to(dtype).float())
            assert not with_scales or scales[at].equal(theirs.weights[token, :1].expand(SCALES))
            here = theirs.ids[token] // LOCAL == rank
            assert ids[at].equal(torch.where(here, theirs.ids[token] - rank * LOCAL, -1))
        home, made = torch.empty_like(mine.x), weighted(rows.float(), ids, weights)
        handle.combine(
            ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), config=ep.CombineConfig(),
            stream=0,
        )  # fmt: skip
        handle.destroy()
        assert_close(home, weighted_sum(Tokens(x.bfloat16(), mine.ids, mine.weights)))
        owner.destroy()

    run_ranks(RANKS, body)
