"""Low latency by the names of ``nccl.ep``, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nccl_ep
from nccl_ep import nvidia as ep
from nccl_ep.nvidia import Tensor
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


def by_expert(width: int = HIDDEN, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full((LOCAL, RANKS * MOST, width), 7).to(dtype)


@pytest.mark.parametrize("send_only", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_expert_major(send_only: int, dtype: torch.dtype) -> None:
    """Rows by expert and source; the weights are those of combine's outputs."""

    def body(group: Any) -> None:
        mine, rank = tokens_of(group.rank()), group.rank()
        owner = made_group(group)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids.to(dtype)), stream=0)
        rows, counts = by_expert(), torch.full((LOCAL,), -5, dtype=torch.int32)
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(mine.x)), ep.DispatchOutputs(tokens=Tensor(rows)),
            layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)), config=ep.DispatchConfig(send_only=send_only),
            stream=0,
        )  # fmt: skip
        if send_only:
            with pytest.raises(nccl_ep.UsageError, match="call complete"):
                handle.combine(
                    ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(mine.x)), stream=0
                )
        handle.complete(stream=0)
        for local in range(LOCAL):
            sources = rows_of_expert(rank * LOCAL + local)
            assert counts[local] == len(sources)
            for row, (source, token, _) in zip(rows[local], sources, strict=False):
                assert row.equal(tokens_of(source).x[token])
        home, weights = torch.zeros_like(mine.x), mine.weights.clone()
        outputs = ep.CombineOutputs(tokens=Tensor(home), topk_weights=Tensor(weights))
        handle.combine(
            ep.CombineInputs(tokens=Tensor(rows)), outputs, config=ep.CombineConfig(send_only=send_only), stream=0
        )
        handle.complete(stream=0)
        assert_close(home, weighted_sum(mine))
        assert weights.equal(mine.weights)
        handle.combine(ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
        assert_close(home, mine.x.float() * (mine.ids >= 0).sum(1, keepdim=True))
        owner.destroy()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("kind", list(ep.ExpertIdKind))
@pytest.mark.parametrize("send_only", [0, 1])
def test_rank_major(kind: ep.ExpertIdKind, send_only: int) -> None:
    """Rows by source; ids are int32 whatever the routing's are. A row brings all weights of its token, also of choices
    that are another rank's, whose id is -1; rows without a token have id -1 and weight 0."""

    def body(group: Any) -> None:
        mine, rank = tokens_of(group.rank()), group.rank()
        owner = made_group(group)
        handle = owner.create_handle(ep.Layout.RANK_MAJOR, Tensor(mine.ids), stream=None)
        rows, counts = torch.empty(RANKS, MOST, HIDDEN, dtype=BF16), torch.zeros(RANKS, dtype=torch.int32)
        ids, weights = torch.full((RANKS, MOST, TOPK), 9, dtype=torch.int32), torch.full((RANKS, MOST, TOPK), 9.0)
        info = ep.LayoutInfo(src_rank_counters=Tensor(counts))
        info._lowpp.recv_topk_idx_kind = kind
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights)),
            ep.DispatchOutputs(tokens=Tensor(rows), topk_weights=Tensor(weights), topk_idx=Tensor(ids)),
            layout_info=info, config=ep.DispatchConfig(send_only=send_only), stream=0,
        )  # fmt: skip
        handle.complete(stream=0)
        first = rank * LOCAL if kind is ep.ExpertIdKind.GLOBAL else 0
        for source in range(RANKS):
            came = [token for of, token in tokens_for(rank) if of == source]
            assert counts[source] == len(came)
            for at in range(MOST):
                want = local_ids(rank, source, came[at]) if at < len(came) else [-1] * TOPK
                assert ids[source, at].tolist() == [each + first if each >= 0 else -1 for each in want]
                given = tokens_of(source).weights[came[at]] if at < len(came) else torch.zeros(TOPK)
                assert weights[source, at].equal(given)
                assert at >= len(came) or rows[source, at].equal(tokens_of(source).x[came[at]])
        rows = (rows.float() * torch.where(ids >= 0, weights, 0).sum(-1, keepdim=True)).bfloat16()
        home = torch.zeros_like(mine.x)
        handle.combine(ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(home)), stream=0)
        assert_close(home, weighted_sum(mine))
        owner.destroy()

    run_ranks(RANKS, body)


class Copies(TorchDispatchMode):
    """How many elements were copied at the most in one call."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.most = max(self.most, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_results_of_split_calls_are_written_once() -> None:
    """Into the caller's tensors; those that nobody receives are not."""

    def body(group: Any) -> None:
        mine, owner = tokens_of(group.rank()), made_group(group)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0)
        counts, home = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros_like(mine.x)

        def send(rows: torch.Tensor) -> None:
            handle.dispatch(
                ep.DispatchInputs(tokens=Tensor(mine.x)), ep.DispatchOutputs(tokens=Tensor(rows)),
                layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)), config=ep.DispatchConfig(send_only=1),
                stream=0,
            )  # fmt: skip

        rows, lost = by_expert(), by_expert()
        with Copies() as copies:
            send(rows)
            handle.complete(stream=0)
            handle.combine(
                ep.CombineInputs(tokens=Tensor(rows)), ep.CombineOutputs(tokens=Tensor(home)),
                config=ep.CombineConfig(send_only=1), stream=0,
            )  # fmt: skip
            handle.complete(stream=0)
        assert copies.most <= LOCAL  # the counters
        assert_close(home, mine.x.float() * (mine.ids >= 0).sum(1, keepdim=True))
        send(lost)
        handle.destroy()
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0)
        again = by_expert()
        send(again)
        handle.complete(stream=0)
        assert lost.equal(by_expert())
        for local in range(LOCAL):
            came = int(counts[local])
            assert again[local, :came].equal(rows[local, :came])
        owner.destroy()

    run_ranks(RANKS, body)


def test_a_handle_is_updated() -> None:
    def body(group: Any) -> None:
        owner = made_group(group)
        first, second = tokens_of(group.rank()), tokens_of(group.rank(), seed=1)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(first.ids), stream=0)
        handle.update(Tensor(second.ids), stream=0)
        rows, counts = by_expert(), torch.zeros(LOCAL, dtype=torch.int32)
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(second.x)), ep.DispatchOutputs(tokens=Tensor(rows)),
            layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)), stream=0,
        )  # fmt: skip
        assert counts.tolist() == [len(rows_of_expert(group.rank() * LOCAL + e, seed=1)) for e in range(LOCAL)]
        owner.destroy()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("round_scales", [0, 1])
def test_rows_are_quantised(round_scales: int) -> None:
    """DS_FP8E3M4: the bits of ``quant=``. Scales in memory of another order are written where their strides say."""

    def body(group: Any) -> None:
        mine = tokens_of(group.rank())
        owner = made_group(group)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0)
        rows, counts = by_expert(dtype=torch.float8_e4m3fn), torch.zeros(LOCAL, dtype=torch.int32)
        scales = torch.zeros(LOCAL, HIDDEN // 128, RANKS * MOST).transpose(1, 2)
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(mine.x)),
            ep.DispatchOutputs(tokens=Tensor(rows), scales=Tensor(scales)),
            layout_info=ep.LayoutInfo(expert_counters=Tensor(counts)),
            config=ep.DispatchConfig(
                round_scales=round_scales, quantization_recipe=ep.DispatchQuantizationRecipe.DS_FP8E3M4
            ),
            stream=0,
        )  # fmt: skip
        out = nccl_ep.dispatch(
            mine.x, mine.ids, buffer=owner.buffer, num_experts=EXPERTS, quant="fp8_rounded" if round_scales else "fp8"
        )
        assert out.scales is not None and counts.equal(out.counts)
        for local, count in enumerate(counts.tolist()):
            assert rows[local, :count].view(torch.uint8).equal(out.x[local, :count].view(torch.uint8))
            assert scales[local, :count].equal(out.scales[local, :count])
        owner.destroy()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("layout", [ep.Layout.EXPERT_MAJOR, ep.Layout.RANK_MAJOR])
def test_rows_of_the_caller_go_with_their_scales(layout: ep.Layout) -> None:
    """FWD: bytes and scales, bit for bit."""

    def body(group: Any) -> None:
        mine, rank, by_rank = tokens_of(group.rank()), group.rank(), layout is ep.Layout.RANK_MAJOR
        payload, factors = mine.x.view(torch.uint8), mine.x[:, :32].view(torch.uint8).contiguous()
        owner = made_group(group, max_token_bytes=2 * HIDDEN + 64)
        handle = owner.create_handle(layout, Tensor(mine.ids), stream=0)
        shape = (RANKS, MOST) if by_rank else (LOCAL, RANKS * MOST)
        rows, scales = (torch.zeros(*shape, n, dtype=torch.uint8) for n in (payload.shape[1], factors.shape[1]))
        ids, weights = torch.empty(*shape, TOPK, dtype=torch.int64), torch.empty(*shape, TOPK)
        outputs = ep.DispatchOutputs(tokens=Tensor(rows), scales=Tensor(scales))
        inputs = ep.DispatchInputs(tokens=Tensor(payload), scales=Tensor(factors))
        info = ep.LayoutInfo(expert_counters=None if by_rank else Tensor(torch.zeros(LOCAL, dtype=torch.int32)))
        if by_rank:
            outputs.topk_idx, outputs.topk_weights = Tensor(ids), Tensor(weights)
            inputs.topk_weights = Tensor(mine.weights)
        config = ep.DispatchConfig()
        config._lowpp.quant_recipe = ep.DispatchQuantizationRecipe.FWD
        handle.dispatch(inputs, outputs, layout_info=info, config=config, stream=0)
        for at, (source, token) in enumerate(tokens_for(rank) if by_rank else []):
            part = at - sum(of < source for of, _ in tokens_for(rank))
            x = tokens_of(source).x[token]
            assert rows[source, part].equal(x.view(torch.uint8)) and scales[source, part].equal(
                x[:32].view(torch.uint8)
            )
        for local in range(0 if by_rank else LOCAL):
            for at, (source, token, _) in enumerate(rows_of_expert(rank * LOCAL + local)):
                x = tokens_of(source).x[token]
                assert rows[local, at].equal(x.view(torch.uint8)) and scales[local, at].equal(x[:32].view(torch.uint8))
        owner.destroy()

    run_ranks(RANKS, body)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": torch.zeros(LOCAL, 3, HIDDEN, dtype=BF16)}, r"outputs.tokens is torch.bfloat16 \[4, 3, 512\], must be"),
    ({"tokens": by_expert(dtype=torch.float16)}, "outputs.tokens is torch.float16"),
    ({"tokens": None}, "outputs.tokens is None"),
    ({"scales": torch.zeros(1, 1, 1)}, "outputs.scales is given with recipe NONE"),
    ({"in_scales": torch.zeros(5, 4)}, "inputs.scales is given with recipe NONE"),
    ({"topk_weights": torch.zeros(1)}, "are of RANK_MAJOR, must be None here"),
    ({"counters": None}, "expert_counters is None in EXPERT_MAJOR"),
    ({"counters": torch.zeros(LOCAL - 1, dtype=torch.int32)}, r"expert_counters is torch.int32 \[3\], must be"),
    ({"counters": torch.zeros(LOCAL)}, "expert_counters is torch.float32"),
    ({"recipe": ep.DispatchQuantizationRecipe.FWD}, "inputs.scales is None with recipe FWD"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], text: str) -> None:
    with alone() as owner:
        mine = tokens_of(0)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0)
        given = {"tokens": torch.zeros(EXPERTS, MOST, HIDDEN, dtype=BF16)}
        given |= {"counters": torch.zeros(EXPERTS, dtype=torch.int32)} | wrong
        wrapped = {name: each if each is None or name == "recipe" else Tensor(each) for name, each in given.items()}
        with pytest.raises(ValueError, match=text):
            handle.dispatch(
                ep.DispatchInputs(tokens=Tensor(mine.x), scales=wrapped.get("in_scales")),
                ep.DispatchOutputs(
                    tokens=wrapped["tokens"], scales=wrapped.get("scales"), topk_weights=wrapped.get("topk_weights")
                ),
                layout_info=ep.LayoutInfo(expert_counters=wrapped["counters"]),
                config=ep.DispatchConfig(quantization_recipe=wrapped.get("recipe", 0)), stream=0,
            )  # fmt: skip


def test_what_is_sent_alone_is_checked_before() -> None:
    """Else the results would be lost when it is complete."""
    with alone() as owner:
        mine = tokens_of(0)
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(mine.ids), stream=0)
        counters = Tensor(torch.zeros(EXPERTS, dtype=torch.int32))
        info = ep.LayoutInfo(expert_counters=counters)
        odd = ep.LayoutInfo(expert_counters=counters, recv_topk_idx_kind=7)  # type: ignore[arg-type]
        whole = ep.DispatchOutputs(tokens=Tensor(torch.zeros(EXPERTS, MOST, HIDDEN, dtype=BF16)))
        short = ep.DispatchOutputs(tokens=Tensor(torch.zeros(EXPERTS, MOST - 1, HIDDEN, dtype=BF16)))
        config = ep.DispatchConfig(send_only=1)
        for outputs, said, text in (
            (short, info, r"outputs.tokens is torch.bfloat16 \[\d+, \d+, 512\], must be"),
            (whole, odd, "layout_info.recv_topk_idx_kind is 7, must be one of ExpertIdKind"),
        ):
            for each in (config, None):
                with pytest.raises(ValueError, match=text):
                    handle.dispatch(
                        ep.DispatchInputs(tokens=Tensor(mine.x)), outputs, layout_info=said, config=each, stream=0
                    )
        assert owner.buffer.stats()["calls"]["dispatch"] == 0
        handle.dispatch(ep.DispatchInputs(tokens=Tensor(mine.x)), whole, layout_info=info, config=config, stream=0)
        handle.complete(stream=0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda h, o: h.dispatch(None, ep.DispatchOutputs(), stream=0), "inputs is None, must be a DispatchInputs"),
        (lambda h, o: h.dispatch(ep.DispatchInputs(), {}, stream=0), "outputs is a dict, must be a DispatchOutputs"),
        (
            lambda h, o: h.dispatch(ep.DispatchInputs(), ep.DispatchOutputs(), config=1, stream=0),
            "config is 1, must be a DispatchConfig",
        ),
        (
            lambda h, o: h.dispatch(ep.DispatchInputs(), ep.DispatchOutputs(), layout_info=[], stream=0),
            "layout_info is a list, must be a LayoutInfo",
        ),
        (lambda h, o: h.combine(ep.DispatchInputs(), ep.CombineOutputs(), stream=0), "inputs is a DispatchInputs, m"),
        (lambda h, o: o.create_handle(7, Tensor(tokens_of(0).ids), stream=0), "layout is 7, must be one of Layout"),
        (
            lambda h, o: h.dispatch(
                ep.DispatchInputs(tokens=Tensor(torch.zeros(8))), ep.DispatchOutputs(), stream=0
            ),
            r"inputs.tokens has shape \[8\], must be \[tokens, hidden\]",
        ),
        (
            lambda h, o: h.update(Tensor(tokens_of(0).ids.to("meta")), stream=0),
            f"topk_idx is on meta, its group on {DEVICE}",
        ),
        (lambda h, o: Tensor(torch.eye(2).to_sparse()), "buffer is a torch.sparse_coo tensor of torch.float32"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_named(call: Any, text: str) -> None:
    with alone() as owner:
        handle = owner.create_handle(ep.Layout.EXPERT_MAJOR, Tensor(tokens_of(0).ids), stream=0)
        with pytest.raises((TypeError, ValueError), match=text):
            call(handle, owner)


def test_calls_at_the_wrong_time() -> None:
    with alone() as owner:
        mine = tokens_of(0)
        handle = owner.create_handle(ep.Layout.RANK_MAJOR, Tensor(mine.ids), stream=0)
        rows = Tensor(torch.zeros(1, MOST, HIDDEN, dtype=BF16))
        with pytest.raises(nccl_ep.UsageError, match="has dispatched nothing"):
            handle.combine(ep.CombineInputs(tokens=rows), ep.CombineOutputs(tokens=Tensor(mine.x)), stream=0)
        with pytest.raises(ValueError, match="layout_info is given to the dispatch"):
            handle.update(Tensor(mine.ids), layout_info=ep.LayoutInfo(), stream=0)
        with pytest.raises(ValueError, match="config is 1"):
            handle.complete(config=1, stream=0)
        with pytest.raises(TypeError, match="stream is a str"):
            handle.complete(stream="0")
        with pytest.raises(ValueError, match=r"topk_idx is torch\.float32"):
            handle.update(Tensor(mine.weights), stream=0)
        with pytest.raises(TypeError, match=r"topk_idx is a Tensor, must be a nccl\.ep\.Tensor"):
            handle.update(mine.ids, stream=0)
        nvfp4 = ep.CombineConfig(quantization_recipe=ep.CombineQuantizationRecipe.NVFP4)
        outputs = ep.CombineOutputs(tokens=Tensor(mine.x))
        handle.dispatch(
            ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights)),
            ep.DispatchOutputs(tokens=rows), stream=0,
        )  # fmt: skip
        with pytest.raises(ValueError, match="NVFP4"):
            handle.combine(ep.CombineInputs(tokens=rows), outputs, config=nvfp4, stream=0)
        back = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
        with pytest.raises(nccl_ep.UsageError, match="pass_direction is BWD, but the handle is of low latency"):
            handle.combine(ep.CombineInputs(tokens=rows), outputs, config=back, stream=0)
        with pytest.raises(nccl_ep.UsageError, match="pass_direction is BWD, but the handle is of low latency"):
            handle.dispatch(
                ep.DispatchInputs(tokens=Tensor(mine.x), topk_weights=Tensor(mine.weights)),
                ep.DispatchOutputs(tokens=rows), config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD), stream=0,
            )  # fmt: skip
        handle.destroy()
        handle.destroy()
        with pytest.raises(nccl_ep.UsageError, match="the handle was destroyed"):
            handle.complete(stream=0)
