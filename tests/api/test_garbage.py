"""Eager calls leave nothing that only Python's garbage collector could free: its full collections take tens of ms."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep

SIZES: dict[str, Any] = {"max_tokens": 4, "hidden": 512, "topk": 2, "num_experts": 4, "device": "cpu"}
X, IDS, WEIGHTS = torch.ones(2, 512).bfloat16(), torch.tensor([[0, 1], [3, -1]]), torch.ones(2, 2)
TIMES = 3


def _garbage(call: Callable[[], object]) -> Counter[str]:
    """Types of what so many calls leave to the collector."""
    call()  # the first may keep what it makes
    gc.collect()
    gc.freeze()  # what is here is not looked at, which would take long
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(TIMES):
            call()
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@pytest.fixture(scope="module", params=["ll", "ht"])
def how(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Arguments of a dispatch."""
    with nccl_ep.Buffer.for_shapes(None, mode=request.param, **SIZES) as buffer:
        yield {"buffer": buffer, "num_experts": 4, "mode": request.param, "layout": "packed"}


@pytest.mark.parametrize("quant", [None, "fp8", "mxfp8", "nvfp4"])
def test_a_pair_leaves_nothing(quant: Any, how: dict[str, Any]) -> None:
    def pair() -> None:
        out = nccl_ep.dispatch(X, IDS, WEIGHTS, quant=quant, **how)
        nccl_ep.combine(out.x if quant is None else out.dequantized(), out.handle)

    assert not _garbage(pair)


def test_gradients_leave_nothing(how: dict[str, Any]) -> None:
    x, weights = X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()

    def step() -> None:
        out = nccl_ep.dispatch(x, IDS, weights, **how)
        nccl_ep.combine(out.x, out.handle).sum().backward()  # type: ignore[no-untyped-call]

    assert not _garbage(step)


def test_calls_in_halves_leave_nothing(how: dict[str, Any]) -> None:
    def pair() -> None:
        out = nccl_ep.dispatch_send(X, IDS, WEIGHTS, **how).receive()
        nccl_ep.combine_send(out.x, out.handle).receive()

    if how["mode"] == "ht":
        pytest.skip("high throughput has no split calls")
    assert not _garbage(pair)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_low_latency_calls_of_deep_ep_leave_nothing(use_fp8: bool) -> None:
    def pair() -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(X, IDS, 4, 4, use_fp8=use_fp8)
        buffer.low_latency_combine(rows, IDS, WEIGHTS, handle)

    with nccl_ep.Buffer.for_shapes(None, mode="ll", late_weights=True, **SIZES) as made:
        buffer, rows = deep_ep.Buffer.of(made), torch.ones(4, 4, 512).bfloat16()
        assert not _garbage(pair)


def test_normal_calls_of_deep_ep_leave_nothing() -> None:
    def pair() -> None:
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(IDS, 4)
        rows, _, _, _, handle, _ = buffer.dispatch(
            X, None, per_rank, None, is_in_rank, per_expert, IDS, WEIGHTS
        )  # fmt: skip
        assert isinstance(rows, torch.Tensor) and handle is not None
        buffer.combine(rows, handle)

    buffer = deep_ep.Buffer(None, 6 << 20, device="cpu")
    assert not _garbage(pair)
