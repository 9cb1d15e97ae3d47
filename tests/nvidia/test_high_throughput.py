"""High throughput by the names of ``nccl.ep``, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor, bindings
from nccl_ep.testing import run_ranks
from tests.nvidia.tokens import (
    EXPERTS,
    HIDDEN,
    LOCAL,
    MOST,
    RANKS,
    TOPK,
    Tokens,
    alone,
    assert_close,
    local_ids,
    made_group,
    rows_of_expert,
    tokens_for,
    tokens_of,
    weighted_sum,
)
from tests.support.harness import synchronize

BF16 = torch.bfloat16
HT = ep.Algorithm.HIGH_THROUGHPUT
ALIGNMENT = 4


def counts_of(rank: int) -> list[int]:
    return [len(rows_of_expert(rank * LOCAL + local)) for local in range(LOCAL)]


def dispatched(handle: ep.Handle, mine: Tokens, rows: torch.Tensor, flat: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids (of none in EXPERT_MAJOR), in tensors as long as rows."""
    weights = torch.full((len(rows), TOPK) if flat else (len(rows),), 9.0)
    ids = torch.full((len(rows), TOPK), 9)
    handle.dispatch(
        ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights)),
        ep.DispatchOutputs(
            tokens=Tensor(rows), topk_weights=Tensor(weights), topk_idx=Tensor(ids) if flat else None
        ),
        stream=0,
    )  # fmt: skip
    return weights, ids


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_flat(eager: bool, dtype: torch.dtype) -> None:
    """Tokens by source, and the counters of the update that came before, with the gradients of all."""

    def body(group: Any) -> None:
        mine, rank = tokens_of(group.rank()), group.rank()
        owner = made_group(group, algorithm=HT, max_recv_tokens_per_rank=0 if eager else RANKS * MOST)
        total, counters = torch.zeros(1, dtype=dtype), torch.zeros(LOCAL, dtype=torch.int32)
        info = ep.LayoutInfo(recv_total_counter=Tensor(total), expert_counters=Tensor(counters))
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids), layout_info=info, stream=0)
        came = tokens_for(rank)
        assert int(total) == len(came) and counters.tolist() == counts_of(rank)
        rows = torch.full((int(total) if eager else RANKS * MOST, HIDDEN), 7.0).to(BF16)
        weights, ids = dispatched(handle, mine, rows, flat=True)
        for at in range(len(rows)):
            source, token = came[at] if at < len(came) else (0, -1)
            want = local_ids(rank, source, token) if at < len(came) else [-1] * TOPK
            assert ids[at].tolist() == want
            assert weights[at].equal(torch.where(ids[at] >= 0, tokens_of(source).weights[token], 0))
            assert at >= len(came) or rows[at].equal(tokens_of(source).x[token])
        home = torch.zeros_like(mine.x)
        made = (rows.float() * weights.sum(1, keepdim=True)).bfloat16()[
            : len(came)
        ]  # without rows that nothing came for
        handle.combine(ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
        assert_close(home, weighted_sum(mine))
        check_backward(handle, mine, rows, weights)
        owner.destroy()

    run_ranks(RANKS, body)


def check_backward(handle: ep.Handle, mine: Tokens, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """Gradients go out as rows did; those of rows and weights come home summed, and each to its choice."""
    moved = torch.full_like(rows, 3)
    backward = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
    handle.dispatch(
        ep.DispatchInputs(tokens=Tensor(mine.x)), ep.DispatchOutputs(tokens=Tensor(moved)), config=backward, stream=0
    )
    there = weights.reshape(len(rows), -1).sum(1) > 0
    assert moved[there].equal(rows[there])
    home, home_weights = torch.zeros_like(mine.x), torch.zeros_like(mine.weights)
    handle.combine(
        ep.CombineInputs(tokens=Tensor(moved), topk_weights=Tensor(weights)),
        ep.CombineOutputs(tokens=Tensor(home), topk_weights=Tensor(home_weights)),
        config=ep.CombineConfig(pass_direction=ep.PassDir.BWD), stream=0,
    )  # fmt: skip
    assert home_weights.equal(torch.where(mine.ids >= 0, mine.weights, 0))
    choices = mine.ids // LOCAL if weights.dim() == 2 else mine.ids
    different = torch.tensor([len({*each} - {-1}) for each in choices.tolist()])  # rows of each token
    assert_close(home, mine.x.float() * different[:, None])


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("alignment", [0, ALIGNMENT])
def test_expert_major(eager: bool, alignment: int) -> None:
    """Experts one behind the other, each at a multiple of the alignment, with zeros between them; a weight a row."""

    def body(group: Any) -> None:
        mine, rank = tokens_of(group.rank()), group.rank()
        owner = made_group(group, algorithm=HT, max_recv_tokens_per_rank=0 if eager else 64)
        # of several dtypes, one of them longer than it must be
        total, offsets = torch.zeros(1, dtype=torch.int32), torch.zeros(LOCAL, dtype=torch.int64)
        counters = torch.full((LOCAL + 1,), -5, dtype=torch.int32)
        info = ep.LayoutInfo(
            recv_total_counter=Tensor(total), expert_counters=Tensor(counters), expert_offsets=Tensor(offsets)
        )
        handle = owner.create_handle(
            ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), layout_info=info,
            config=ep.HandleConfig(dispatch_output_per_expert_alignment=alignment), stream=0,
        )  # fmt: skip
        step = max(alignment, 1)
        padded = [-(-count // step) * step for count in counts_of(rank)]
        assert counters.tolist() == [*padded, -5] and int(total) == sum(padded)
        assert offsets.tolist() == [sum(padded[:local]) for local in range(LOCAL)]
        rows = torch.full((sum(padded) if eager else 64, HIDDEN), 7.0).to(BF16)
        weights, _ = dispatched(handle, mine, rows, flat=False)
        for local, first in enumerate(offsets.tolist()):
            sources = rows_of_expert(rank * LOCAL + local)
            for at, (source, token, k) in enumerate(sources, first):
                assert rows[at].equal(tokens_of(source).x[token]) and weights[at] == tokens_of(source).weights[token, k]
            end = first + padded[local]
            assert not rows[first + len(sources) : end].any() and not weights[first + len(sources) : end].any()
        home = torch.zeros_like(mine.x)
        made = (rows.float() * weights[:, None]).bfloat16()
        handle.combine(ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
        assert_close(home, weighted_sum(mine))
        check_backward(handle, mine, rows, weights)
        owner.destroy()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("layout", [ep.Layout.FLAT, ep.Layout.EXPERT_MAJOR])
@pytest.mark.parametrize("most", [0, 64])
def test_an_update_is_all_that_combine_and_a_backward_pass_need(layout: ep.Layout, most: int, told: bool) -> None:
    """Of a handle that has dispatched nothing, or something else."""

    def body(group: Any) -> None:
        owner, flat = made_group(group, algorithm=HT, max_recv_tokens_per_rank=most), layout is ep.Layout.FLAT
        backward = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
        config = None if flat else ep.HandleConfig(dispatch_output_per_expert_alignment=ALIGNMENT)
        counters = Tensor(torch.zeros(LOCAL, dtype=torch.int32))
        info = ep.LayoutInfo(expert_counters=counters) if told else None

        def used(handle: ep.Handle, mine: Tokens, forward: bool, first: str) -> list[torch.Tensor]:
            rows = torch.full((64, HIDDEN), 7.0).to(BF16)
            if forward:
                dispatched(handle, mine, rows.clone(), flat)
            made = tokens_of(group.rank(), 9).x.repeat(64, 1)[:64].contiguous()
            moved, home = torch.full_like(rows, 3), torch.zeros_like(mine.x)
            for step in (first, *({"combine", "dispatch"} - {first})):
                if step == "combine":
                    handle.combine(
                        ep.CombineInputs(tokens=Tensor(made)), ep.CombineOutputs(tokens=Tensor(home)), stream=0
                    )
                    continue
                handle.dispatch(
                    ep.DispatchInputs(tokens=Tensor(mine.x)), ep.DispatchOutputs(tokens=Tensor(moved)),
                    config=backward, stream=0,
                )  # fmt: skip
            return [moved, home]

        plain = owner.create_handle(
            layout, Tensor(tokens_of(group.rank()).ids), layout_info=info, config=config, stream=0
        )
        other = owner.create_handle(
            layout, Tensor(tokens_of(group.rank()).ids), layout_info=info, config=config, stream=0
        )
        for seed, first in enumerate(("combine", "dispatch", "combine")):
            mine = tokens_of(group.rank(), seed)
            for handle in (plain, other):
                handle.update(Tensor(mine.ids), layout_info=info, stream=0)
            want = used(other, mine, True, first)
            assert want[1].any()
            for got, each in zip(used(plain, mine, False, first), want, strict=True):
                assert got.equal(each)
        owner.destroy()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("policy", list(ep.OverflowPolicy))
def test_rows_that_do_not_fit(policy: ep.OverflowPolicy) -> None:
    """TRAP raises; DROP goes on without them, and the counters say what would have come."""

    def body(group: Any) -> None:
        mine = tokens_of(group.rank())
        owner = made_group(group, algorithm=HT, max_recv_tokens_per_rank=MOST, overflow_policy=policy)
        total = torch.zeros(1, dtype=torch.int32)
        info = ep.LayoutInfo(recv_total_counter=Tensor(total))
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids), layout_info=info, stream=0)
        assert int(total) == len(tokens_for(group.rank())) > MOST
        rows = torch.zeros(MOST + 3, HIDDEN, dtype=BF16)
        if policy is not ep.OverflowPolicy.DROP:
            with pytest.raises(nccl_ep.OverflowError, match="rows did not fit into capacity 6"):
                dispatched(handle, mine, rows, flat=True)
            with pytest.raises(nccl_ep.OverflowError, match="rows did not fit into capacity 6"):  # the update's routing
                handle.combine(
                    ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(mine.x)), stream=0
                )
        else:
            _, ids = dispatched(handle, mine, rows, flat=True)
            for at, (source, token) in enumerate(tokens_for(group.rank())[:MOST]):
                assert rows[at].equal(tokens_of(source).x[token])
            assert not rows[MOST:].any() and (ids[MOST:] == 9).all()
        owner.destroy()

    run_ranks(RANKS, body)


def test_numbers_of_experts_within_all() -> None:
    def body(group: Any) -> None:
        mine, rank = tokens_of(group.rank()), group.rank()
        owner = made_group(group, algorithm=HT)
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids.int()), stream=0)
        rows, ids = torch.zeros(RANKS * MOST, HIDDEN, dtype=BF16), torch.zeros(RANKS * MOST, TOPK, dtype=torch.int64)
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights)),
            ep.DispatchOutputs(
                tokens=Tensor(rows), topk_weights=Tensor(torch.zeros(RANKS * MOST, TOPK)), topk_idx=Tensor(ids)
            ),
            layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL), stream=0,
        )  # fmt: skip
        for at, (source, token) in enumerate(tokens_for(rank)):
            here = tokens_of(source).ids[token] // LOCAL == rank
            assert ids[at].equal(torch.where(here, tokens_of(source).ids[token], -1))
        owner.destroy()

    run_ranks(RANKS, body)


def test_rows_lie_in_the_window() -> None:
    """Tensors of ``Group.empty`` with zero_copy ON take no copy in the library."""

    def body(group: Any) -> None:
        mine = tokens_of(group.rank())
        owner = made_group(group, algorithm=HT, zero_copy=ep.ZeroCopyMode.ON, max_recv_tokens_per_rank=RANKS * MOST)
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids), stream=0)
        for rows, copies in (
            (owner.empty((RANKS * MOST, HIDDEN)), 0),
            (torch.empty(RANKS * MOST, HIDDEN, dtype=BF16), 1),
        ):
            dispatched(handle, mine, rows, flat=True)
            synchronize(owner.buffer.device)  # kernels count, and stats() waits for none
            assert owner.buffer.stats()["staged_dispatches"] == copies
        owner.destroy()

    run_ranks(RANKS, body)


def test_what_does_not_fit_is_refused() -> None:
    with alone(algorithm=HT, max_recv_tokens_per_rank=MOST) as owner:
        mine = tokens_of(0)
        x, weights = Tensor(mine.x), Tensor(mine.weights)
        rows, ids = torch.zeros(MOST, HIDDEN, dtype=BF16), Tensor(torch.zeros(MOST, TOPK, dtype=torch.int64))
        row_weights = Tensor(torch.zeros(MOST, TOPK))
        handle = owner.create_handle(ep.Layout.FLAT, Tensor(mine.ids), stream=0)
        whole = {"tokens": Tensor(rows), "topk_weights": row_weights, "topk_idx": ids}
        backward = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
        fp8 = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.DS_FP8E3M4)
        for inputs, outputs, config, text in (
            ({"tokens": x}, whole, None, "inputs.topk_weights is None in a dispatch with pass_direction FWD"),
            ({}, whole, None, "inputs.tokens is None"),
            ({"tokens": x, "topk_weights": weights}, whole | {"topk_idx": None}, None, "outputs.topk_idx is None"),
            ({"tokens": x, "topk_weights": weights}, whole | {"topk_weights": None}, None, "outputs.topk_weights is N"),
            (
                {"tokens": x, "topk_weights": weights}, whole | {"tokens": Tensor(rows[:3])}, None,
                r"outputs.tokens is torch.bfloat16 \[3, 512\], must be torch.bfloat16 \[6, 512\]",
            ),
            ({"tokens": x, "topk_weights": weights}, whole, backward, "inputs.topk_weights is given .* BWD"),
            ({"tokens": x, "topk_weights": weights}, whole, fp8, "DS_FP8E3M4, which is of low latency"),
            ({"tokens": x, "topk_weights": weights, "scales": weights}, whole, None, "both are given, or none"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                handle.dispatch(ep.DispatchInputs(**inputs), ep.DispatchOutputs(**outputs), config=config, stream=0)
        with pytest.raises(nccl_ep.UsageError, match="the handle has no routing: call update"):
            ep.Handle(bindings.init_handle(owner.ptr, int(ep.Layout.FLAT), 0, TOPK, 0)).dispatch(
                ep.DispatchInputs(tokens=x), ep.DispatchOutputs(tokens=Tensor(rows)), config=backward, stream=0
            )
        # The update's routing, which these would bring, is not sent either.
        with pytest.raises(ValueError, match=r"outputs\.tokens is torch\.bfloat16 \[4, 512\], must be"):
            handle.combine(
                ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(mine.x[:4])), stream=0
            )
        with pytest.raises(ValueError, match=r"outputs\.tokens is torch\.float32 \[6, 512\], must be"):
            handle.dispatch(
                ep.DispatchInputs(tokens=x), ep.DispatchOutputs(tokens=Tensor(rows.float())), config=backward, stream=0
            )
        assert owner.buffer.stats()["calls"]["ht_dispatch"] == 0
        dispatched(handle, mine, rows, flat=True)
        with pytest.raises(ValueError, match=r"inputs\.topk_weights is given with pass_direction FWD"):
            handle.combine(
                ep.CombineInputs(tokens=Tensor(rows), topk_weights=row_weights), ep.CombineOutputs(tokens=x), stream=0
            )
        with pytest.raises(ValueError, match=r"outputs\.tokens is torch\.bfloat16 \[4, 512\], must be"):
            handle.combine(
                ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(mine.x[:4])), stream=0
            )
        with pytest.raises(ValueError, match="expert_offsets is of EXPERT_MAJOR"):
            info = ep.LayoutInfo(expert_offsets=Tensor(torch.zeros(EXPERTS, dtype=torch.int32)))
            handle.update(Tensor(mine.ids[:1]), layout_info=info, stream=0)
        handle.combine(
            ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=x), stream=0
        )  # its routing stays
        longer = torch.full((len(mine.x) + 2, HIDDEN), 3.0, dtype=BF16)  # of which the first rows are written
        handle.combine(ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(longer)), stream=0)
        assert longer[:-2].equal(mine.x) and (longer[-2:] == 3).all()
        with pytest.raises(ValueError, match="alignment is 3, must be a power of two"):
            owner.create_handle(
                ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0,
                config=ep.HandleConfig(dispatch_output_per_expert_alignment=3),
            )  # fmt: skip
        with pytest.raises(ValueError, match="RANK_MAJOR: 2>, must be FLAT or EXPERT_MAJOR"):
            owner.create_handle(ep.Layout.RANK_MAJOR, Tensor(mine.ids), stream=0)
