"""The layer whose experts begin while rows come, on CPU ranks: its bits are those of one step behind the other."""

from typing import Any

import pytest
import torch

import nccl_ep
from examples.overlapped_moe.layer import Experts, MoeLayer
from nccl_ep.testing import ThreadGroup, run_ranks


@pytest.mark.parametrize(("mode", "how"), [("ll", {}), ("ht", {}), ("ht", {"sorts": True}), ("ht", {"signals": True})])
def test_experts_begin_while_rows_come(mode: nccl_ep.choices.Mode, how: dict[str, Any]) -> None:
    ranks, tokens, hidden, topk, local = 2, 40, 64, 3, 4

    def body(group: ThreadGroup) -> None:
        draw = torch.Generator().manual_seed(group.rank())
        x = torch.randn(tokens, hidden, generator=draw).bfloat16()
        weights, ids = torch.rand(tokens, ranks * local, generator=draw).softmax(-1).topk(topk)
        experts = Experts.random(ranks * local, hidden, 32, "cpu")
        first = group.rank() * local
        own = Experts(experts.w13[first : first + local], experts.w2[first : first + local])
        with nccl_ep.Buffer.for_shapes(
            group,
            max_tokens=tokens,
            hidden=hidden,
            topk=topk,
            num_experts=ranks * local,
            mode=mode,
            device="cpu",
            late_weights=mode == "ll",
        ) as buffer:
            layer = MoeLayer(
                buffer, own, num_experts=ranks * local, max_tokens=tokens, topk=topk, mode=mode, rows_per_block=8,
                **how,
            )  # fmt: skip
            one_behind = layer(x, ids, weights, overlaps=False)
            for _ in range(3):
                assert torch.equal(layer(x, ids, weights), one_behind)
        want = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                want[token] += weight * experts.rows(x[token : token + 1], expert)[0].float()
        assert (one_behind.float() - want).abs().max() < 0.02 * want.abs().max()

    run_ranks(ranks, body)
