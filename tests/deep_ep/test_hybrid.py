"""Hybrid-EP's buffer on CPU ranks: as Megatron and torchtitan call it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.deep_ep import HybridEPBuffer
from nccl_ep.deep_ep.hybrid import indices_to_map
from nccl_ep.testing import run_ranks
from tests.support.harness import synchronize
from tests.support.patience import PATIENCE, Clock
from tests.support.ranks import DEVICE

RANKS, LOCAL, TOKENS, HIDDEN, TOPK = 2, 3, 6, 32, 2
EXPERTS = RANKS * LOCAL
HALF = torch.bfloat16


class Case:
    """Tokens of all ranks, and where their rows must come."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.x = [torch.randint(-4, 5, (TOKENS, HIDDEN), generator=draw).to(HALF) for _ in range(RANKS)]
        self.idx = [torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOPK)[1] for _ in range(RANKS)]
        self.weights = [torch.rand(TOKENS, TOPK, generator=draw) for _ in range(RANKS)]
        self.idx[0][3, 1] = -1  # a token that was dropped in part
        maps = [
            indices_to_map(ids, weights, TOKENS, EXPERTS) for ids, weights in zip(self.idx, self.weights, strict=True)
        ]
        self.maps, self.probs = [each[0] for each in maps], [each[1] for each in maps]

    def rows(self, rank: int, pad: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Rows, probs and padded counts of a rank's experts."""
        rows, probs, counts = [], [], []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            of_expert = [
                (self.x[source][token], self.probs[source][token, expert])
                for source in range(RANKS) for token in range(TOKENS) if self.maps[source][token, expert]
            ]  # fmt: skip
            empty = -len(of_expert) % pad
            rows += [row for row, _ in of_expert] + [torch.zeros(HIDDEN, dtype=HALF)] * empty
            probs += [prob for _, prob in of_expert] + [torch.tensor(0.0)] * empty
            counts.append(len(of_expert) + empty)
        return torch.stack(rows), torch.stack(probs), counts


def on_ranks(body: Callable[[HybridEPBuffer, int], Any], **options: Any) -> list[Any]:
    def run(group: Any) -> Any:
        sizes = {"hidden_dim": HIDDEN, "max_num_of_tokens_per_rank": TOKENS, "num_local_experts": LOCAL} | options
        with HybridEPBuffer(group=group, device=DEVICE, timeout=60, **sizes) as buffer:
            return body(buffer, group.rank())

    return run_ranks(RANKS, run)


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("by_map", [True, False])
def test_permuted_rows_and_sums_are_right(pad: int | None, blocks: bool, by_map: bool) -> None:
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        rows, probs, counts = case.rows(rank, pad or 1)
        most = 32
        routing: dict[str, Any] = {"routing_map": case.maps[rank], "probs": case.probs[rank]}
        if not by_map:
            routing = {"topk_idx": case.idx[rank], "topk_weights": case.weights[rank], "num_of_experts": EXPERTS}
        got, got_probs, scales, tokens, handle = buffer.dispatch_with_permute(
            hidden=case.x[rank], scaling_factor=None, num_of_experts_per_rank=LOCAL, pad_multiple=pad,
            num_permuted_tokens=None if blocks else most, non_blocking=not blocks, **routing,
        )  # fmt: skip
        assert scales is None and got_probs is not None and tokens.dtype == torch.int64 and tokens.tolist() == counts
        assert got.shape[0] == (len(rows) if blocks else most)
        assert torch.equal(got[: len(rows)], rows) and (got[len(rows) :] == 0).all()
        assert torch.equal(got_probs[: len(rows)], probs)

        home, home_probs = buffer.combine_with_unpermute(hidden=got, probs=got_probs, handle=handle, pad_multiple=pad)
        assert torch.equal(home, case.x[rank] * case.maps[rank].sum(1, keepdim=True))
        assert torch.equal(home_probs, case.probs[rank])

        # The backward pass of combine: Megatron gives the number as a tensor.
        again, none, _, _, same = buffer.dispatch_with_permute(
            hidden=case.x[rank] + 1, scaling_factor=None, handle=handle, pad_multiple=pad,
            num_permuted_tokens=torch.tensor(got.shape[0]),
        )  # fmt: skip
        is_row = (got_probs > 0).unsqueeze(1)
        assert none is None and same is handle and torch.equal(again, torch.where(is_row, got + 1, 0))
        _, twice, _, _, _ = buffer.dispatch_with_permute(hidden=case.x[rank], probs=case.probs[rank] * 2, handle=handle)
        assert torch.equal(twice, got_probs * 2)

    on_ranks(body)


def test_scales_travel_and_rows_past_the_room_are_dropped() -> None:
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        x = case.x[rank].to(torch.float8_e4m3fn)
        rows, _, _ = case.rows(rank, 1)
        got, none, scales, _, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=case.maps[rank], scaling_factor=case.x[rank][:, :1].float(), use_fp8=True
        )
        assert none is None and torch.equal(got.to(HALF), rows) and torch.equal(scales, rows[:, :1].float())
        assert handle.overflow_flag.item() == 0
        few, _, _, tokens, handle = buffer.dispatch_with_permute(
            hidden=case.x[rank], routing_map=case.maps[rank], num_permuted_tokens=3, non_blocking=True
        )
        assert torch.equal(few, rows[:3]) and tokens.sum() == 3 and handle.overflow_flag.item() == len(rows) - 3

    on_ranks(body)


def test_a_buffer_grows_and_old_handles_stay_good() -> None:
    """Tokens, rows or experts beyond the first sizes: a larger buffer. Handles of the smaller one stay good."""
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        config = buffer.configurer.buffer_config
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (8, 1, LOCAL)
        small, _, _, _, first = buffer.dispatch_with_permute(
            hidden=case.x[rank][:1, :8].contiguous(), routing_map=case.maps[rank][:1]
        )
        got, _, _, _, handle = buffer.dispatch_with_permute(hidden=case.x[rank], routing_map=case.maps[rank])
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank) == (HIDDEN, TOKENS)
        assert torch.equal(got, case.rows(rank, 1)[0])
        for rows, made, tokens in ((got, handle, TOKENS), (small, first, 1)):
            home, _ = buffer.combine_with_unpermute(hidden=rows, handle=made)
            assert torch.equal(home, (case.x[rank] * case.maps[rank].sum(1, keepdim=True))[:tokens, : rows.shape[1]])

    on_ranks(body, hidden_dim=8, max_num_of_tokens_per_rank=1)


def test_an_equal_number_serves_unequal_tokens() -> None:
    """Each rank has its own number of tokens; ``num_of_tokens_per_rank`` says for how many the buffer is."""
    case = Case()
    tokens = [2, TOKENS]

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        x, chosen = case.x[rank][: tokens[rank]], case.maps[rank][: tokens[rank]]
        for most in (TOKENS, TOKENS + 3, 1000, TOKENS):
            got, _, _, counts, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=chosen, num_of_tokens_per_rank=most
            )
            assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank >= most
            assert counts.sum() == got.shape[0]
            home, _ = buffer.combine_with_unpermute(hidden=got, handle=handle)
            assert torch.equal(home, x * chosen.sum(1, keepdim=True))
        with pytest.raises(ValueError, match=r"num_of_tokens_per_rank is 1, must be"):
            buffer.dispatch_with_permute(hidden=x, routing_map=chosen, num_of_tokens_per_rank=1)

    on_ranks(body, max_num_of_tokens_per_rank=4)


def test_none_or_all_grow_by_their_own_tokens() -> None:
    """Unequal numbers, but all of them too many: the largest decides."""
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        tokens = TOKENS - rank
        chosen = case.maps[rank][:tokens]
        got, _, _, _, handle = buffer.dispatch_with_permute(hidden=case.x[rank][:tokens], routing_map=chosen)
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == TOKENS
        home, _ = buffer.combine_with_unpermute(hidden=got, handle=handle)
        assert torch.equal(home, case.x[rank][:tokens] * chosen.sum(1, keepdim=True))

    on_ranks(body, max_num_of_tokens_per_rank=2)


@pytest.mark.parametrize("blocks", [True, False])
def test_ranks_that_would_grow_alone_hear_of_it(blocks: bool) -> None:
    """All ranks hear of it at once, and what to give."""
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        tokens = 2 + 4 * rank
        how = {} if blocks else {"non_blocking": True, "num_permuted_tokens": 64}
        text = rf"Rank {rank} has {tokens} tokens, and the buffer is for 4\. .*give num_of_tokens_per_rank, equal"
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=text):
            for _ in range(2):  # a host that does not wait for its GPU hears of it at its next call
                buffer.dispatch_with_permute(hidden=case.x[rank][:tokens], routing_map=case.maps[rank][:tokens], **how)
                synchronize(buffer.core.device)

    on_ranks(body, max_num_of_tokens_per_rank=4)


def test_unequal_numbers_of_tokens_per_rank_are_told_to_all() -> None:
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=r"max_tokens [45].*max_tokens [45]"):
            buffer.dispatch_with_permute(
                hidden=case.x[rank][:2], routing_map=case.maps[rank][:2], num_of_tokens_per_rank=4 + rank
            )

    on_ranks(body)


def test_a_config_that_was_raised_is_obeyed() -> None:
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        config, tokens = buffer.configurer.buffer_config, TOKENS if rank else 1
        config.max_num_of_tokens_per_rank = 50
        got, _, _, _, handle = buffer.dispatch_with_permute(
            hidden=case.x[rank][:tokens], routing_map=case.maps[rank][:tokens]
        )
        assert buffer.core.max_tokens == 50 and handle.num_of_tokens_per_rank == tokens
        home, _ = buffer.combine_with_unpermute(hidden=got, handle=handle)
        assert torch.equal(home, case.x[rank][:tokens] * case.maps[rank][:tokens].sum(1, keepdim=True))

    on_ranks(body, max_num_of_tokens_per_rank=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_ids_of_each_dtype_give_the_same(dtype: torch.dtype) -> None:
    """-1 for a choice that was dropped; in place of a map, and as a map."""
    case = Case()
    for ids, weights, chosen in zip(case.idx, case.weights, case.maps, strict=True):
        assert torch.equal(indices_to_map(ids.to(dtype), weights, TOKENS, EXPERTS)[0], chosen)

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        x = case.x[rank]
        by_map = buffer.dispatch_with_permute(hidden=x, routing_map=case.maps[rank], probs=case.probs[rank])
        by_ids = buffer.dispatch_with_permute(
            hidden=x, topk_idx=case.idx[rank].to(dtype), topk_weights=case.weights[rank], num_of_experts=EXPERTS
        )
        for i in (0, 1, 3):
            assert torch.equal(by_map[i], by_ids[i])
        again = buffer.dispatch_with_permute(hidden=x, probs=case.probs[rank], handle=by_ids[4])
        assert torch.equal(again[0], by_ids[0]) and torch.equal(again[1], by_ids[1])
        _, home = buffer.combine_with_unpermute(hidden=by_ids[0], probs=by_ids[1], handle=by_ids[4])
        assert torch.equal(home, case.probs[rank])

    on_ranks(body)


def test_a_handle_is_indexed_as_hybrid_eps_tuple() -> None:
    """Megatron adds up ``handle[-1] != 0`` over the layers."""
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        over = torch.zeros(1, dtype=torch.bool)
        for most, drops in ((64, False), (3, True)):
            *_, counts, handle = buffer.dispatch_with_permute(
                hidden=case.x[rank], routing_map=case.maps[rank], num_permuted_tokens=most, non_blocking=True
            )
            over |= handle[-1] != 0
            assert bool(over) == drops and handle[-1] is handle.overflow_flag
            assert len(handle) == 11 and handle[7] is counts and handle[8] == TOKENS
        *parts, _, _, _, flag = handle
        assert parts == [None] * 7 and flag is handle[10]

    on_ranks(body)


@pytest.mark.parametrize("dtype", [HALF, torch.float8_e4m3fn])
def test_a_replayed_dispatch_has_the_rows_that_it_asks_for(dtype: torch.dtype) -> None:
    """Automodel's replay of a checkpointed dispatch: as many as the counts add up to, or more; zeros after the tokens'.
    The sums of such rows are those of the first ones."""
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        x, scales = case.x[rank].to(dtype), case.x[rank][:, :2].float()
        rows, probs, _ = case.rows(rank, 4)
        for most in (None, 40):
            *_, tokens, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=case.maps[rank], probs=case.probs[rank], scaling_factor=scales, pad_multiple=4,
                num_permuted_tokens=most, non_blocking=most is not None,
            )  # fmt: skip
            count = int(tokens.sum())
            assert count == len(rows)
            for asked in (count, count + 5, 40, 64):
                got, got_probs, got_scales, _, same = buffer.dispatch_with_permute(
                    hidden=x, probs=case.probs[rank], scaling_factor=scales, handle=handle, num_permuted_tokens=asked
                )
                assert got_probs is not None and got_scales is not None and same is handle
                for made, expected in ((got.to(HALF), rows), (got_probs, probs), (got_scales, rows[:, :2].float())):
                    assert len(made) == asked and torch.equal(made[:count], expected)
                    assert not made[count:].to(HALF).any()
                for device in dict.fromkeys(("cpu", DEVICE)):  # a number on a GPU is not read
                    none = buffer.dispatch_with_permute(
                        hidden=x, scaling_factor=scales, handle=handle,
                        num_permuted_tokens=torch.tensor(asked, device=device),
                    )  # fmt: skip
                    assert none[1] is None and len(none[0]) == (asked if device == "cpu" else most or count)
                    assert torch.equal(none[0][:count].to(HALF), rows) and not none[0][count:].to(HALF).any()
                home, home_probs = buffer.combine_with_unpermute(hidden=got.to(HALF), probs=got_probs, handle=handle)
                assert torch.equal(home, case.x[rank] * case.maps[rank].sum(1, keepdim=True))
                assert torch.equal(home_probs, case.probs[rank])

    on_ranks(body)


@pytest.mark.parametrize("said", ["2", "1", "3", "0", "many"])
def test_the_ranks_of_a_domain_come_from_the_environment(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", said)
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        assert buffer.core.domain_size == int(said)
        got, *_ = buffer.dispatch_with_permute(hidden=case.x[rank], routing_map=case.maps[rank])
        assert torch.equal(got, case.rows(rank, 1)[0])

    if said in ("1", "2"):
        on_ranks(body)
        with pytest.raises(AssertionError):  # what the caller says comes first
            on_ranks(body, domain_size=3 - int(said))
    else:
        with pytest.raises(ValueError, match=rf"PER_NVLINK_DOMAIN is '{said}', must be a number that divides 2 ranks"):
            on_ranks(body)


def test_gradients_come_from_the_ops_below() -> None:
    case = Case()

    def body(buffer: HybridEPBuffer, rank: int) -> None:
        x, probs = case.x[rank].float().requires_grad_(), case.probs[rank].clone().requires_grad_()
        rows, row_probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=case.maps[rank], probs=probs, pad_multiple=4
        )
        home, _ = buffer.combine_with_unpermute(hidden=rows * row_probs.unsqueeze(1), handle=handle)
        home.sum().backward()
        torch.testing.assert_close(x.grad, (probs.detach() * case.maps[rank]).sum(1, keepdim=True).expand_as(x))
        torch.testing.assert_close(probs.grad, x.detach().sum(1, keepdim=True) * case.maps[rank])

    on_ranks(body, hidden_dim=2 * HIDDEN)


def test_arguments_without_meaning_are_refused() -> None:
    x, chosen = torch.ones(2, HIDDEN, dtype=HALF), torch.ones(2, 1, dtype=torch.bool)
    sizes: dict[str, Any] = {"hidden_dim": HIDDEN, "max_num_of_tokens_per_rank": 2, "device": DEVICE}
    with (
        HybridEPBuffer(None, num_local_experts=1, **sizes) as buffer,
        HybridEPBuffer(None, num_local_experts=40, **sizes) as other,
    ):
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen)
        many = torch.ones(2, 40, dtype=torch.bool)
        for call, kind, text in (
            (lambda: buffer.dispatch_with_permute(hidden=x), ValueError, "routing_map and topk_idx are both None"),
            (lambda: buffer.dispatch_with_permute(hidden=x, routing_map=chosen, non_blocking=True), ValueError,
             "num_permuted_tokens is not"),
            (lambda: buffer.dispatch_with_permute(hidden=x, routing_map=chosen.int()), ValueError, "is torch.int32"),
            (lambda: buffer.dispatch_with_permute(hidden=x, routing_map=chosen, num_of_experts=3), ValueError,
             "num_of_experts is 3, must be 1 on each of 1 ranks"),
            (lambda: buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=1), ValueError,
             "num_permuted_tokens is 1, but the rows of the handle are 2"),
            (lambda: buffer.combine_with_unpermute(hidden=torch.cat([rows, rows]), handle=handle), ValueError, "4"),
            (lambda: buffer.combine_with_unpermute(hidden=rows), TypeError, "handle is a NoneType"),
            (lambda: other.combine_with_unpermute(hidden=rows, handle=handle), nccl_ep.UsageError, "not of this one"),
            (lambda: other.dispatch_with_permute(hidden=x, routing_map=many), ValueError,
             "a token has 40 experts in routing_map, at most 32"),
            (lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=torch.zeros(2).long(), probs=chosen.float()),
             ValueError, r"topk_idx has shape \[2\], must be \[tokens, topk\]"),
            (lambda: HybridEPBuffer(None, num_local_experts=0, **sizes), ValueError, "num_local_experts is 0"),
        ):  # fmt: skip
            with pytest.raises(kind, match=text):
                call()


def test_an_id_out_of_range_is_told_with_probs_of_all_experts_too() -> None:
    """They are not read at it, which on a GPU would end every kernel of the process."""
    x, probs = torch.ones(2, HIDDEN, dtype=HALF, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    ids = torch.tensor([[7], [1]], device=DEVICE)
    with (
        HybridEPBuffer(None, HIDDEN, 2, 4, device=DEVICE) as buffer,
        pytest.raises(ValueError, match=r"topk_idx\[0, 0\] is 7|the first is 7 at token 0, k 0"),  # the latter: GPUs
    ):
        buffer.dispatch_with_permute(hidden=x, topk_idx=ids, probs=probs)
        buffer.core.check()
