"""What frameworks put around a layer: DDP, FSDP2, activation checkpointing, export, autocast, a DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nccl_ep
from nccl_ep.testing import run_ranks
from tests.support.processes import run_processes
from tests.training.moe import EXPERTS, HIDDEN, TOPK, make_buffer
from tests.training.test_compile import KINDS, Layer, check_equal, train_step

MODES = ("ll packed", "ht packed", "ht packed, exact")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", MODES)
def test_activation_checkpointing_changes_no_bit(kind: str, num_ranks: int) -> None:
    """What is computed again is the same to the bit, on every rank; one of several ranks has no tokens."""

    def body(group: Any) -> None:
        with make_buffer(group) as buffer:
            layer = Layer(buffer, **KINDS[kind])
            x = torch.randn(0 if buffer.rank == 2 else 5, HIDDEN)
            want = train_step(layer, x)
            for use_reentrant in (False, True):
                before = buffer.stats()["calls"]
                wrapped = _Wrapped(layer, lambda f, v, r=use_reentrant: checkpoint(f, v, use_reentrant=r))
                got = train_step(wrapped, x)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
                calls = {name: count - before[name] for name, count in buffer.stats()["calls"].items()}
                assert sum(calls.values()) >= 6, "forward, forward again, backward"

    run_ranks(num_ranks, body)


def test_selective_checkpointing_keeps_what_it_is_told_to() -> None:
    """The results of communication are kept: nothing is sent twice."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_ours = str(op).startswith("nccl_ep.")
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    def run(f: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        return result

    with make_buffer(None) as buffer:
        layer = Layer(buffer, **KINDS["ht packed"])
        x = torch.randn(5, HIDDEN)
        want = train_step(layer, x)
        before = buffer.stats()["calls"]
        check_equal(train_step(_Wrapped(layer, run), x), want)
        after = buffer.stats()["calls"]
        # Forward and backward once each: two dispatches, two combines.
        assert after["ht_dispatch"] - before["ht_dispatch"] == 2 and after["ht_combine"] - before["ht_combine"] == 2


class _Wrapped(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, how: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.layer, x)


@pytest.mark.parametrize("kind", ["ll packed", "ht packed"])
def test_gradients_under_autocast_are_right(kind: str) -> None:
    with make_buffer(None, dtype=torch.bfloat16, hidden=16) as buffer:
        x, idx = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True), torch.rand(5, EXPERTS).topk(TOPK)[1]
        logits = torch.randn(5, TOPK, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weights = logits.bfloat16()
            out = nccl_ep.dispatch(
                x, idx, weights, buffer=buffer, num_experts=EXPERTS, zero_padding=True, **KINDS[kind]
            )
            nccl_ep.combine(out.x, out.handle).float().sum().backward()
        assert x.grad is not None and logits.grad is not None
        torch.testing.assert_close(
            logits.grad, x.detach().float().sum(1, keepdim=True).expand(5, 2), rtol=0.05, atol=0.1
        )


@pytest.mark.parametrize("kind", ["ll packed", "ht packed"])
def test_an_exported_layer_gives_the_same(kind: str) -> None:
    with make_buffer(None) as buffer:
        layer = Layer(buffer, **KINDS[kind])
        x = torch.randn(5, HIDDEN)
        exported = torch.export.export(layer, (x,), strict=True)
        names = [str(node.target) for node in exported.graph.nodes]
        assert any("dispatch" in name for name in names) and any("combine" in name for name in names)
        torch.testing.assert_close(exported.module()(x), layer(x))


# ---- Processes of a torch group


def _step_of(model: torch.nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).sin().sum().backward()


def _wrapped(kind: str, layer: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(layer)
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer)
    return layer


class _Model(torch.nn.Module):
    """A dense part, which is shared, around a layer whose experts are not."""

    def __init__(self, buffer: nccl_ep.Buffer, how: dict[str, Any], wrap: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = _wrapped(wrap, torch.nn.Linear(HIDDEN, HIDDEN))
        self.moe = Layer(buffer, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.moe(self.dense(x))
        return out


def _train_each(rank: int, wrap: str) -> None:
    for kind in ("ll packed", "ht packed"):
        for compiled in (False, True):
            try:
                _train(rank, wrap, kind, compiled)
            except Exception as error:
                raise AssertionError(f"{kind}{', compiled' if compiled else ''}") from error
            torch._dynamo.reset()


def _train(rank: int, wrap: str, kind: str, compiled: bool) -> None:
    group = dist.group.WORLD
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank))
    with make_buffer(group) as buffer:
        plain = _Model(buffer, KINDS[kind], wrap)
        model: Any = torch.compile(plain, backend="aot_eager") if compiled else plain
        _step_of(model, x)
        grads = [each.grad for each in plain.dense.parameters()]
        got = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in grads if each is not None]

        torch.manual_seed(3)
        alone = torch.nn.Linear(HIDDEN, HIDDEN)
        layer = Layer(buffer, **KINDS[kind])
        layer(alone(x)).sin().sum().backward()
        for parameter, mean in zip(alone.parameters(), got, strict=True):
            want = parameter.grad
            assert want is not None
            dist.all_reduce(want)
            torch.testing.assert_close(mean, want / dist.get_world_size(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_data_parallel_wrappers_train_alike(wrap: str, tmp_path: Path) -> None:
    """In both modes, eager and compiled."""
    run_processes(2, _train_each, tmp_path, wrap)
