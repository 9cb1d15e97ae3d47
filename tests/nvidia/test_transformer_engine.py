"""The provider of ``transformer_engine.pytorch.ep``, called as its callers do.

Read on 28 November 2026: Transformer Engine 2.20.2's module of that name; of ``fused_a2a`` of Megatron-core 0.19.2, and
of its newest source, what calls it: ``ensure_nccl_ep_bootstrapped``, ``nccl_ep_dispatch``, ``nccl_ep_combine``. Neither
package is installed here: this is a contract test. tests/frameworks/test_megatron.py has Megatron's layer itself.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.integrations import transformer_engine_ep
from nccl_ep.testing import run_ranks
from tests.deep_ep.test_install import python
from tests.nvidia.tokens import EXPERTS, HIDDEN, LOCAL, MOST, RANKS, TOPK, rows_of_expert, tokens_of
from tests.support.ranks import DEVICE

ROOM = 64


def provider(rank: int) -> Any:
    """A rank's own: there is one group a process, and ranks are threads here."""
    name = f"nccl_ep.integrations._transformer_engine_ep_{rank}"
    spec = importlib.util.spec_from_file_location(name, transformer_engine_ep.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bootstrap(te_ep: Any, group: Any, room: int | None = ROOM, **options: Any) -> None:
    te_ep.ep_bootstrap(
        group, num_experts=EXPERTS, max_tokens_per_rank=MOST, recv_capacity_per_rank=room, hidden_dim=HIDDEN,
        max_num_sms=0, device=DEVICE, **options,
    )  # fmt: skip


def buffer_of(te_ep: Any, alignment: int, room: int | None = ROOM) -> Any:
    return te_ep.EpBuffer(
        top_k=TOPK, max_tokens_per_rank=MOST, recv_capacity_per_rank=room, hidden_dim=HIDDEN,
        num_local_experts=LOCAL, alignment=alignment,
    )  # fmt: skip


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("alignment", [0, 4])
def test_a_layer_and_its_gradients(eager: bool, alignment: int) -> None:
    def body(group: Any) -> None:
        te_ep, mine, step = provider(group.rank()), tokens_of(group.rank()), max(1, alignment)
        assert te_ep._BOOTSTRAPPED is te_ep.is_ep_bootstrapped() is False
        room = None if eager else ROOM
        bootstrap(te_ep, group, room, num_topk=TOPK, drop_on_overflow=False, zero_copy=False)
        assert te_ep._BOOTSTRAPPED is te_ep.is_ep_bootstrapped() is True
        with pytest.raises(nccl_ep.UsageError, match="ep_bootstrap was called already"):
            bootstrap(te_ep, group)
        if not eager:
            with pytest.raises(ValueError, match="recv_capacity_per_rank is None, must be a number"):
                buffer_of(te_ep, alignment, None)
        buffer = buffer_of(te_ep, alignment, room)
        counts = [len(rows_of_expert(group.rank() * LOCAL + local)) for local in range(LOCAL)]
        padded = [-(-count // step) * step for count in counts]
        assert te_ep.ep_prepare(buffer, mine.ids).tolist() == padded
        assert buffer.total_recv_tokens.tolist() == [sum(padded)]
        x, weights = mine.x.clone().requires_grad_(), mine.weights.clone().requires_grad_()
        kept = None if eager else torch.zeros(ROOM, HIDDEN, dtype=torch.bfloat16)
        rows, probs, per_expert = te_ep.ep_dispatch(buffer, x, mine.ids, weights, recv_tokens=kept)
        assert rows.shape == (sum(padded) if eager else ROOM, HIDDEN) and per_expert.tolist() == padded
        assert kept is None or kept[: sum(padded)].equal(rows[: sum(padded)])
        made = rows * probs[:, None].to(rows.dtype)
        grad_out = torch.zeros_like(rows)
        out = te_ep.ep_combine(buffer, made, num_local_tokens=len(mine.x), grad_out=grad_out)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(group.rank())).bfloat16()
        out.backward(grad)
        factor = (mine.weights * (mine.ids >= 0)).sum(1, keepdim=True)
        assert x.grad is not None and weights.grad is not None
        torch.testing.assert_close(out.float(), mine.x.float() * factor, rtol=3e-2, atol=5e-2)
        torch.testing.assert_close(x.grad.float(), grad.float() * factor, rtol=3e-2, atol=5e-2)
        want = torch.where(mine.ids >= 0, (grad.float() * mine.x.float()).sum(1, keepdim=True), 0)
        torch.testing.assert_close(weights.grad, want, rtol=3e-2, atol=0.5)
        assert grad_out.any()
        te_ep.release_symm_mem_pool()
        te_ep.ep_finalize()
        te_ep.ep_finalize()
        with pytest.raises(nccl_ep.UsageError, match="call ep_bootstrap first"):
            te_ep.symm_mem_alloc((1, 8), torch.bfloat16)

    run_ranks(RANKS, body)


def test_rows_past_the_capacity_and_memory_of_the_window() -> None:
    def body(group: Any) -> None:
        te_ep, mine = provider(group.rank()), tokens_of(group.rank())
        for option in ("zero_copy", "drop_on_overflow"):
            with pytest.raises(ValueError, match=f"{option} is True with recv_capacity_per_rank None"):
                bootstrap(te_ep, group, None, **{option: True})
        bootstrap(te_ep, group, MOST, zero_copy=True)
        inside = te_ep.symm_mem_alloc((4, HIDDEN), torch.bfloat16, group)
        assert te_ep.is_symm_backed(inside) and not te_ep.is_symm_backed(mine.x)
        buffer = buffer_of(te_ep, 0, room=MOST)
        with pytest.raises(nccl_ep.UsageError, match="ep_combine before ep_dispatch"):
            te_ep.ep_combine(buffer, mine.x)
        with pytest.raises(nccl_ep.OverflowError, match="did not fit into capacity 6"):
            te_ep.ep_dispatch(buffer, mine.x, mine.ids, mine.weights)
        te_ep.ep_finalize()
        bootstrap(te_ep, group, MOST, drop_on_overflow=True)
        buffer = buffer_of(te_ep, 0, room=MOST)
        rows, _, per_expert = te_ep.ep_dispatch(buffer, mine.x, mine.ids, mine.weights)
        assert len(rows) == per_expert.sum() == MOST < buffer.total_recv_tokens.item()
        with pytest.raises(ValueError, match="num_local_tokens is 1, the dispatch had"):
            te_ep.ep_combine(buffer, rows, num_local_tokens=1)
        te_ep.ep_finalize()

    run_ranks(RANKS, body)


INSTALL = """
import nccl_ep.integrations.transformer_engine_ep as ours
ours.install()
from transformer_engine.pytorch import ep as te_ep
from transformer_engine.pytorch.ep import EpBuffer, ep_bootstrap, ep_combine, ep_dispatch, ep_finalize, symm_mem_alloc
assert te_ep is ours
"""


BOOTSTRAPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_dim": None}, TypeError, "hidden_dim is None, must be an integer"),
    ({"max_tokens_per_rank": 0}, ValueError, "max_tokens_per_rank is 0, must be 1 to"),
    ({"recv_capacity_per_rank": "64"}, TypeError, "recv_capacity_per_rank is '64', must be an integer"),
    ({"max_token_dtype": "bf16"}, TypeError, "max_token_dtype is 'bf16', must be a torch.dtype"),
]
CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda te, b, x, i, w: te.EpBuffer(TOPK, MOST, HIDDEN, LOCAL, ROOM, 2.0), TypeError, "alignment is 2.0, must be"),
    (lambda te, b, x, i, w: te.EpBuffer(TOPK, MOST, HIDDEN, 0, ROOM), ValueError, "num_local_experts is 0, must be 1"),
    (lambda te, b, x, i, w: te.EpBuffer(TOPK, MOST, HIDDEN, LOCAL, -1), ValueError, "recv_capacity_per_rank is -1"),
    (lambda te, b, x, i, w: te.ep_dispatch(None, x, i, w), TypeError, "buffer is None, must be an EpBuffer"),
    (lambda te, b, x, i, w: te.ep_dispatch(b, x.tolist(), i, w), TypeError, "tokens is a list, must be a tensor"),
    (lambda te, b, x, i, w: te.ep_dispatch(b, x, i, None), TypeError, "topk_weights is None, must be a tensor"),
    (lambda te, b, x, i, w: te.ep_dispatch(b, x[0, 0], i, w), ValueError, r"tokens has shape \[\], must have rows"),
    (lambda te, b, x, i, w: te.ep_prepare(b, i.tolist()), TypeError, "topk_idx is a list, must be a tensor"),
    (lambda te, b, x, i, w: te.ep_combine(x, x), TypeError, "buffer is a Tensor, must be an EpBuffer"),
    (lambda te, b, x, i, w: te.ep_combine(b, None), TypeError, "expert_out is None, must be a tensor"),
]


def test_wrong_arguments_are_named() -> None:
    sizes = {"num_experts": LOCAL, "max_tokens_per_rank": MOST, "hidden_dim": HIDDEN, "recv_capacity_per_rank": ROOM}

    def body(group: Any) -> None:
        te_ep = provider(0)
        for changes, error, text in BOOTSTRAPS:
            with pytest.raises(error, match=text):
                te_ep.ep_bootstrap(group, **(sizes | changes), device=DEVICE)
        te_ep.ep_bootstrap(group, **sizes, device=DEVICE)
        x = torch.ones(2, HIDDEN, device=DEVICE).bfloat16()
        ids = torch.zeros(2, TOPK, dtype=torch.int64, device=DEVICE)
        buffer = te_ep.EpBuffer(TOPK, MOST, HIDDEN, LOCAL, ROOM)
        for call, error, text in CALLS:
            with pytest.raises(error, match=text):
                call(te_ep, buffer, x, ids, ids.float())
        te_ep.ep_finalize()

    run_ranks(1, body)


def test_it_takes_the_place_of_the_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    done = python(INSTALL, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    parent = type(sys)("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", parent)
    monkeypatch.delitem(sys.modules, transformer_engine_ep.NAME, raising=False)
    transformer_engine_ep.install()
    assert parent.ep is sys.modules[transformer_engine_ep.NAME] is transformer_engine_ep
    monkeypatch.delitem(sys.modules, transformer_engine_ep.NAME)
