"""How SGLang's open changes call ``nccl.ep``: their calls, in their order, with their tensors.

Read on 28 November 2026: the token dispatcher of SGLang's pull requests 32329, 38683, 38886 and 38888 (low latency in
both layouts, two lanes, a handle a step or one for CUDA graphs), and its high throughput with FP8 rows. SGLang is not
installed here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor, bindings
from nccl_ep.nvidia.communicator import Communicator, get_nccl_comm_from_group
from nccl_ep.testing import run_ranks
from tests.nvidia.tokens import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    MOST,
    RANKS,
    TOPK,
    alone,
    assert_close,
    local_ids,
    made_group,
    rows_of_expert,
    tokens_for,
    tokens_of,
    weighted_sum,
)
from tests.support.ranks import DEVICE

BF16 = torch.bfloat16
LANES = 2


class Lane:
    """A dispatcher with its group and its tensors, which it keeps for all steps."""

    def __init__(self, group: Any, layout: ep.Layout, number: int, is_kept: bool) -> None:
        self.comm, self.rank, self.layout, self.number = get_nccl_comm_from_group(group), group.rank(), layout, number
        self.owner = ep.Group.create(
            Communicator(ptr=self.comm.ptr),
            ep.GroupConfig(
                algorithm=ep.Algorithm.LOW_LATENCY, num_experts=EXPERTS, max_dispatch_tokens_per_rank=MOST,
                max_recv_tokens_per_rank=0, max_token_bytes=2 * HIDDEN, rdma_buffer_size=0, max_num_sms=20,
            ),
            device=DEVICE,
        )  # fmt: skip
        by_expert = layout is ep.Layout.EXPERT_MAJOR
        self.rows = torch.empty((LOCAL, RANKS * MOST, HIDDEN) if by_expert else (RANKS, MOST, HIDDEN), dtype=BF16)
        self.counts = torch.zeros(LOCAL if by_expert else RANKS, dtype=torch.int32)
        self.offsets, self.total = torch.zeros(LOCAL + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.ids = torch.empty(RANKS, MOST, TOPK, dtype=torch.int32)
        self.weights, self.made = torch.empty(RANKS, MOST, TOPK), torch.zeros(RANKS, MOST, HIDDEN, dtype=BF16)
        self.home = torch.empty(MOST, HIDDEN, dtype=BF16)
        self.handle: Any = None
        if is_kept:
            number_of_it = bindings.init_handle(self.owner.ptr, int(layout), 0, TOPK, 0)
            self.handle = ep.Handle(number_of_it)
        self.is_kept = is_kept

    def seed(self, step: int) -> int:
        return LANES * step + self.number

    def dispatch_a(self, step: int) -> None:
        self.mine = mine = tokens_of(self.rank, self.seed(step))
        if self.is_kept:
            self.handle.update(topk_idx=Tensor(mine.ids), layout_info=None, stream=0)
        else:
            self.handle = self.owner.create_handle(
                layout=self.layout, topk_idx=Tensor(mine.ids), config=ep.HandleConfig(), stream=0
            )
        if self.layout is ep.Layout.EXPERT_MAJOR:
            inputs = ep.DispatchInputs(tokens=Tensor(mine.x))
            outputs = ep.DispatchOutputs(tokens=Tensor(self.rows))
            info = ep.LayoutInfo(
                expert_counters=Tensor(self.counts.zero_()), expert_offsets=Tensor(self.offsets.zero_()),
                recv_total_counter=Tensor(self.total.zero_()),
            )  # fmt: skip
        else:
            inputs = ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights))
            outputs = ep.DispatchOutputs(
                tokens=Tensor(self.rows), topk_idx=Tensor(self.ids), topk_weights=Tensor(self.weights)
            )
            info = ep.LayoutInfo(src_rank_counters=Tensor(self.counts.zero_()))
        self.handle.dispatch(inputs, outputs, layout_info=info, config=ep.DispatchConfig(send_only=1), stream=0)

    def dispatch_b(self, step: int) -> None:
        self.handle.complete(config=0, stream=0)
        seed = self.seed(step)
        if self.layout is ep.Layout.EXPERT_MAJOR:
            for local in range(LOCAL):
                sources = rows_of_expert(self.rank * LOCAL + local, seed)
                assert self.counts[local] == len(sources)
                for row, (source, token, _) in zip(self.rows[local], sources, strict=False):
                    assert row.equal(tokens_of(source, seed).x[token])
            return
        for source in range(RANKS):
            came = [token for of, token in tokens_for(self.rank, seed) if of == source]
            assert self.counts[source] == len(came)
            for at, token in enumerate(came):
                assert self.rows[source, at].equal(tokens_of(source, seed).x[token])
                assert self.ids[source, at].tolist() == local_ids(self.rank, source, token, seed)
                factor = torch.where(self.ids[source, at] >= 0, self.weights[source, at], 0).sum()
                self.made[source, at] = (self.rows[source, at].float() * factor).bfloat16()

    def combine_a(self) -> None:
        by_expert = self.layout is ep.Layout.EXPERT_MAJOR
        self.handle.combine(
            ep.CombineInputs(tokens=Tensor(self.rows if by_expert else self.made)),
            ep.CombineOutputs(
                tokens=Tensor(self.home[: len(self.mine.x)]),
                topk_weights=Tensor(self.mine.weights) if by_expert else None,
            ),
            config=ep.CombineConfig(send_only=1), stream=0,
        )  # fmt: skip

    def combine_b(self) -> None:
        self.handle.complete(config=0, stream=0)
        assert_close(self.home[: len(self.mine.x)], weighted_sum(self.mine))
        if not self.is_kept:
            self.handle.destroy()


CASES = [(ep.Layout.EXPERT_MAJOR, False), (ep.Layout.EXPERT_MAJOR, True), (ep.Layout.RANK_MAJOR, False)]


@pytest.mark.parametrize(("layout", "is_kept"), CASES, ids=["by_expert", "by_expert_for_graphs", "by_rank"])
def test_low_latency_in_two_lanes(layout: ep.Layout, is_kept: bool) -> None:
    """Each stage of one lane, then of the other, whose sends are open at the same time."""

    def body(group: Any) -> None:
        lanes = [Lane(group, layout, number, is_kept) for number in range(LANES)]
        for step in range(2):
            for lane in lanes:
                lane.dispatch_a(step)
            for lane in lanes:
                lane.dispatch_b(step)
                lane.combine_a()
            for lane in lanes:
                lane.combine_b()
        for lane in lanes:
            lane.owner.destroy()

    run_ranks(RANKS, body)


def test_a_handle_without_a_routing() -> None:
    with alone() as owner:
        handle = ep.Handle(bindings.init_handle(owner.ptr, int(ep.Layout.EXPERT_MAJOR), 0, TOPK, 0))
        rows, counts = torch.empty(EXPERTS, MOST, HIDDEN, dtype=BF16), torch.empty(EXPERTS, dtype=torch.int32)
        with pytest.raises(nccl_ep.UsageError, match="the handle has no routing: call update"):
            handle.dispatch(
                ep.DispatchInputs(tokens=Tensor(tokens_of(0).x)), ep.DispatchOutputs(tokens=Tensor(rows)),
                layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)), stream=0,
            )  # fmt: skip
        for ptr in (0, owner.ptr):
            with pytest.raises(nccl_ep.UsageError, match=f"{ptr:#x} is no handle"):
                ep.Handle(ptr)
        with pytest.raises(nccl_ep.UsageError, match="0x1 is no group"):
            bindings.init_handle(1, 1, 0, TOPK, 0)
        for config, memory in ((5, 0), (0, 5)):
            with pytest.raises(ValueError, match="5, must be 0"):
                bindings.init_handle(owner.ptr, 1, config, TOPK, memory)


def test_high_throughput() -> None:
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
