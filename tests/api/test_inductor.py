"""torch.compile with its default backend, on the CPU: g++ compiles what stands between the ops. Other backends are in
test_ops.py and tests/ht/test_ops.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from tests.support.expected import plain_case
from tests.support.harness import make_buffer


@pytest.mark.parametrize(
    "how",
    [pytest.param({"mode": "ll"}, marks=pytest.mark.slow), {"mode": "ht"}, {"mode": "ht", "capacity": "exact"}],
    ids=["ll", "ht", "exact"],
)
def test_inductor_gives_the_eager_calls_bits(how: dict[str, Any]) -> None:
    """The eager call's bits, for any number of tokens."""
    case = plain_case(1, layout="packed")
    with make_buffer(case, None, mode="auto") as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.dispatch_kwargs() | how)
            return nccl_ep.combine(out.x * 2, out.handle)

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="inductor")
        before = buffer.stats()
        for num_tokens in (8, 5, 3):
            x, scores = torch.randn(num_tokens, case.hidden).to(case.dtype), torch.rand(num_tokens, case.num_experts)
            weights, ids = scores.topk(case.topk)
            assert not reference.first_difference(compiled(x, ids, weights), layer(x, ids, weights))
        calls = [buffer.stats()[name] - before[name] for name in ("dispatches", "ht_dispatches")]
        # Exact sizes take two operations.
        assert sum(calls) == (12 if "capacity" in how else 6), "Inductor has dropped or doubled a dispatch"
