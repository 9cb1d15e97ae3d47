"""Kernels of others that do a whole layer on Hopper, from packages of PyPI. Forward, without gradients.

Ids and weights come as a router would give them to each: that they are converted is none of its time.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from bench.rivals.interface import version_of
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs, Shape

BF16_ERROR, FP8_ERROR = 0.02, 0.1  # the largest difference to torch's layer, of its largest value


class Fused:
    """A kernel with its memory. Collective, as its calls are.

    Attributes: version: of its package. most_error: see above.
    """

    version = ""
    most_error = BF16_ERROR

    def __init__(self, shape: Shape, largest: Shape, experts: Experts, inputs: Inputs) -> None:
        """largest: of all shapes that this process will have, in tokens and hidden."""
        self.shape, self.largest, self.experts, self.x = shape, largest, experts, inputs.x
        self.ids, self.weights = inputs.ids.int(), inputs.weights
        self.make()

    def make(self) -> None:
        """ImportError, OSError where it is not installed."""
        raise NotImplementedError

    def __call__(self) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass


class FlashInfer(Fused):
    """flashinfer-python 0.7.2: dispatch, two grouped GEMMs and combine, kernels that need no host between them. nvcc
    compiles them at their first use. Its experts' gate and up are interleaved before, in a copy."""

    def make(self) -> None:
        ep: Any = importlib.import_module("flashinfer.moe_ep")
        shape, experts = self.shape, self.experts
        self.version = version_of("flashinfer-python")
        self.layer: Any = ep.MoEEpLayer(
            ep.BootstrapConfig(
                dist.get_world_size(), dist.get_rank(), device=experts.w13.device.index, process_group=dist.group.WORLD
            ),
            ep.FleetParams(shape.experts, shape.tokens, shape.hidden),
            ep.MoEWeightPack(experts.w13, experts.w2),
            backend=ep.MegaConfig(ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(shape.inner, shape.topk)),
        )
        self.tensors = ep.MoEEpTensors(self.x, self.ids, self.weights, output=torch.empty_like(self.x))

    def __call__(self) -> torch.Tensor:
        made: torch.Tensor = self.layer(self.tensors)
        return made

    def close(self) -> None:
        self.layer.destroy()


class Liger(Fused):
    """liger-cute-kernels 0.8.5 with liger-kernel: one persistent kernel, over NVSHMEM. Weights of rows are BF16. Its
    wheel is of CUDA 12: it needs libcudart.so.12 and nvidia-nvshmem-cu12 3.6.5 beside torch's libraries."""

    def make(self) -> None:
        native: Any = importlib.import_module("liger_cute_kernels")
        self.run: Any = importlib.import_module("liger_kernel.ops.cute.ops.moe").moe_fused
        self.version, self.weights = version_of("liger-cute-kernels"), self.weights.bfloat16()
        native.configure(  # again for each shape: what it has reserved cannot grow
            device=self.x.device,
            moe=native.MoEConfig(
                max_tokens=self.largest.tokens, hidden_size=self.largest.hidden, num_experts=self.shape.experts,
                top_k=self.shape.topk, num_hosts=1, gpus_per_host=dist.get_world_size(),
            ),
        )  # fmt: skip

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        gate, up = self.experts.w13.chunk(2, 1)
        made: torch.Tensor = self.run(
            self.x, self.ids, self.weights, gate, up, self.experts.w2, self.shape.experts, self.shape.topk
        )
        return made


class DeepGemm(Fused):
    """sgl-deep-gemm: FP8 rows and experts, two kernels behind the one that quantises the tokens. nvcc compiles them at
    their first use. 0.1.5 is compiled with torch 2.11's headers, 0.2.0 with newer ones: with torch 2.11 it raises
    "tensor does not have a device"."""

    most_error = FP8_ERROR

    def make(self) -> None:
        self.gemm: Any = importlib.import_module("deep_gemm")
        shape, experts = self.shape, self.experts.in_fp8()
        assert experts.scales is not None
        self.version = version_of("sgl-deep-gemm", "deep-gemm")
        self.buffer: Any = self.gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, shape.experts, shape.tokens, shape.topk, shape.hidden, shape.inner
        )
        self.first, self.second = self.gemm.transform_weights_for_mega_moe_sm90(
            (experts.w13, experts.scales[0]), (experts.w2, experts.scales[1])
        )

    def __call__(self) -> torch.Tensor:
        buffer, made = self.buffer, torch.empty_like(self.x)
        self.gemm.mega_moe_pre_dispatch_sm90(
            self.x, self.ids, self.weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, len(self.x)
        )
        self.gemm.fp8_mega_moe(made, self.first, self.second, buffer)
        return made

    def close(self) -> None:
        self.buffer.destroy()


KERNELS: dict[str, type[Fused]] = {"flashinfer_fused": FlashInfer, "liger_fused": Liger, "deep_gemm_fused": DeepGemm}
