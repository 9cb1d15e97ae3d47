"""Kernels of others that do a whole layer in BF16 on Hopper, from packages of PyPI. Forward, without gradients."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from bench.rivals.interface import version_of
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs, Shape


class FlashInferFused:
    """flashinfer-python 0.7.2: dispatch, two grouped GEMMs and combine, kernels that need no host between them. nvcc
    compiles them at their first use. Its experts' gate and up are interleaved before, in a copy."""

    def __init__(self, shape: Shape, largest: Shape, experts: Experts) -> None:
        ep: Any = importlib.import_module("flashinfer.moe_ep")
        self.version, self.tensors = version_of("flashinfer-python"), ep.MoEEpTensors
        self.layer: Any = ep.MoEEpLayer(
            ep.BootstrapConfig(
                dist.get_world_size(), dist.get_rank(), device=torch.cuda.current_device(),
                process_group=dist.group.WORLD,
            ),
            ep.FleetParams(shape.experts, shape.tokens, shape.hidden),
            ep.MoEWeightPack(experts.w13, experts.w2),
            backend=ep.MegaConfig(ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(shape.inner, shape.topk)),
        )  # fmt: skip
        self.output = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.ids: torch.Tensor | None = None

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        if self.ids is None:  # a router would give them so
            self.ids = inputs.ids.int()
        made: torch.Tensor = self.layer(self.tensors(inputs.x, self.ids, inputs.weights, output=self.output))
        return made

    def close(self) -> None:
        torch.cuda.synchronize()
        self.layer.destroy()


class LigerFused:
    """liger-cute-kernels 0.8.5 with liger-kernel: one persistent kernel, over NVSHMEM. Weights of rows are BF16."""

    def __init__(self, shape: Shape, largest: Shape, experts: Experts) -> None:
        native: Any = importlib.import_module("liger_cute_kernels")
        self.run: Any = importlib.import_module("liger_kernel.ops.cute.ops.moe").moe_fused
        self.version, self.num_experts, self.experts = version_of("liger-cute-kernels"), shape.experts, experts
        native.configure(  # again for each shape: what it has reserved cannot grow
            device=torch.device("cuda", torch.cuda.current_device()),
            moe=native.MoEConfig(
                max_tokens=largest.tokens, hidden_size=largest.hidden, num_experts=shape.experts, top_k=shape.topk,
                num_hosts=1, gpus_per_host=dist.get_world_size(),
            ),
        )  # fmt: skip
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        if self.given is None:
            self.given = inputs.ids.int(), inputs.weights.bfloat16()
        ids, weights = self.given
        gate, up = self.experts.w13.chunk(2, 1)
        made: torch.Tensor = self.run(inputs.x, ids, weights, gate, up, self.experts.w2, self.num_experts, ids.shape[1])
        return made

    def close(self) -> None:
        torch.cuda.synchronize()


_KERNELS: dict[str, Any] = {"flashinfer_fused": FlashInferFused, "liger_fused": LigerFused}
NAMES = tuple(_KERNELS)


def make(name: str, shape: Shape, largest: Shape, experts: Experts) -> Any:
    """Collective. ImportError, OSError where it is not installed. largest: of all shapes, in tokens and hidden."""
    return _KERNELS[name](shape, largest, experts)
