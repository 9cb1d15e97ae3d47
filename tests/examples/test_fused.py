"""Fused kernels of others: what each is given, by stand-ins that take what its package says it takes. One rank."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.overlapped_moe import fused
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs, Shape
from tests.examples.moe_reference import distance, layer

SHAPE = Shape("ht", 256, 20, 128, 2, 4)
LARGEST = Shape("ht", 512, 30, 128, 2, 4)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    vars(sys.modules[name]).update(members)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> tuple[Experts, Inputs, torch.Tensor]:
    """Experts, inputs, and what torch makes of them."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    experts = Experts.random(SHAPE.experts, SHAPE.hidden, SHAPE.inner, "cpu")
    inputs = Inputs.random(SHAPE, 0, "cpu")
    return experts, inputs, reference(inputs.x, inputs.ids, inputs.weights, experts.w13, experts.w2)


def reference(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Any, w2: Any) -> torch.Tensor:
    return layer(x.float(), ids, weights.float(), w13.float(), w2.float()).bfloat16()


def test_flashinfer(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inputs, wanted = given
    closed = []

    class Layer:
        def __init__(self, bootstrap: Any, fleet: Any, weights: Any, backend: Any) -> None:
            assert bootstrap.args == (1, 0) and set(bootstrap.named) == {"device", "process_group"}
            assert fleet.args == (SHAPE.experts, SHAPE.tokens, SHAPE.hidden)
            (kernel,) = backend.args
            assert kernel.args == (SHAPE.inner, SHAPE.topk)
            self.weights = weights.args

        def __call__(self, tensors: Any) -> torch.Tensor:
            x, ids, weights = tensors.args
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and x.dtype == torch.bfloat16
            output: torch.Tensor = tensors.named["output"]
            return output.copy_(reference(x, ids, weights, *self.weights))

        def destroy(self) -> None:
            closed.append(1)

    def keeps(*args: Any, **named: Any) -> Any:
        return SimpleNamespace(args=args, named=named)

    names = "BootstrapConfig", "FleetParams", "MoEWeightPack", "MegaConfig", "MoEEpTensors"
    members = dict.fromkeys((*names, "Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig"), keeps)
    stand_in(monkeypatch, "flashinfer.moe_ep", MoEEpLayer=Layer, **members)
    kernel = fused.KERNELS["flashinfer_fused"](SHAPE, LARGEST, experts, inputs)
    assert distance(kernel(), wanted) < kernel.most_error == 0.02
    kernel.close()
    assert closed == [1]


def test_liger(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inputs, wanted = given
    configured = []

    def moe_fused(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, experts: int, topk: int) -> Any:
        assert ids.dtype == torch.int32 and weights.dtype == x.dtype == torch.bfloat16 and not torch.is_grad_enabled()
        assert gate.shape == up.shape == (SHAPE.experts, SHAPE.inner, SHAPE.hidden)
        assert gate.stride()[1:] == (SHAPE.hidden, 1) and (experts, topk) == (SHAPE.experts, SHAPE.topk)
        return reference(x, ids, weights, torch.cat([gate, up], 1), down)

    stand_in(
        monkeypatch, "liger_cute_kernels", configure=lambda **given: configured.append(given),
        MoEConfig=lambda **given: given,
    )  # fmt: skip
    stand_in(monkeypatch, "liger_kernel.ops.cute.ops.moe", moe_fused=moe_fused)
    kernel = fused.KERNELS["liger_fused"](SHAPE, LARGEST, experts, inputs)
    moe = {"max_tokens": 30, "hidden_size": 512, "num_experts": 4, "top_k": 2, "num_hosts": 1, "gpus_per_host": 1}
    assert configured == [{"device": torch.device("cpu"), "moe": moe}]
    assert distance(kernel(), wanted) < kernel.most_error == 0.02
    kernel.close()


def test_deep_gemm(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inputs, wanted = given
    buffer = SimpleNamespace(x=None, x_sf=None, topk_idx="ids", topk_weights="weights", destroy=lambda: None)
    staged: list[Any] = []

    def dequantized(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.float8_e4m3fn and scales.is_contiguous() and scales.dtype == torch.float32
        assert scales.shape == (len(rows), rows.shape[1] // 128, rows.shape[2] // 128)
        return rows.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)

    def stage(x: Any, ids: Any, weights: Any, *rest: Any) -> None:
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert rest == (None, None, "ids", "weights", SHAPE.tokens)
        staged[:] = x, ids, weights

    def run(y: torch.Tensor, first: Any, second: Any, symmetric: Any) -> None:
        assert symmetric is buffer and y.dtype == torch.bfloat16
        y.copy_(reference(*staged, dequantized(*first), dequantized(*second)))

    def make(group: Any, *sizes: int) -> Any:
        assert sizes == (SHAPE.experts, SHAPE.tokens, SHAPE.topk, SHAPE.hidden, SHAPE.inner)
        return buffer

    stand_in(
        monkeypatch, "deep_gemm", get_symm_buffer_for_sm90_mega_moe=make, mega_moe_pre_dispatch_sm90=stage,
        fp8_mega_moe=run, transform_weights_for_mega_moe_sm90=lambda first, second: (first, second),
    )  # fmt: skip
    kernel = fused.KERNELS["deep_gemm_fused"](SHAPE, LARGEST, experts, inputs)
    assert distance(kernel(), wanted) < kernel.most_error == 0.1
    kernel.close()


@pytest.mark.parametrize("name", fused.KERNELS)
def test_what_is_absent_says_so(given: Any, name: str) -> None:
    experts, inputs, _ = given
    with pytest.raises(ImportError):
        fused.KERNELS[name](SHAPE, LARGEST, experts, inputs)
