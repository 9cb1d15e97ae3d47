"""Larger models of Hugging Face transformers on GPUs, with their experts shared out, beside the same models before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

import torch.distributed as dist  # noqa: E402

from nccl_ep.integrations.transformers import use_expert_parallel  # noqa: E402
from tests.support.gpus import NUM_GPUS, needs_gpu, on_gpu  # noqa: E402
from tests.support.processes import run_processes  # noqa: E402

pytestmark = needs_gpu
RANKS = min(NUM_GPUS, 2)
VOCABULARY, BATCH, LENGTH = 4096, 2, 192
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.05,
}  # fmt: skip
MODELS = {
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 4096},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "intermediate_size": 4096,
         "decoder_sparse_step": 1, "norm_topk_prob": True, "head_dim": 128},
    ),
}  # fmt: skip


def stock(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The same weights on every rank."""
    model, config, own = MODELS[name]
    torch.manual_seed(3)
    with torch.device(device):
        made = getattr(transformers, model)(getattr(transformers, config)(**(COMMON | own)))
    made.set_experts_implementation("eager")
    return made.to(dtype).eval()


def ids_of(rank: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=draw).to(device)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of the whole."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def run_logits(rank: int, name: str, compute: str) -> dict[str, float]:
    """Distances of logits from the stock model's in fp32, and greedy tokens that differ from the stock model's."""
    device = on_gpu(rank)
    ids, lengths = ids_of(rank, device), {"max_new_tokens": 8, "do_sample": False}
    found = {}
    with torch.no_grad():
        model = stock(name, device, torch.float32)
        exact, tokens = model(ids).logits, model.generate(ids, **lengths)
        buffer = use_expert_parallel(model, dist.group.WORLD, max_tokens=BATCH * LENGTH, compute="eager")
        found["fp32"] = distance(model(ids).logits, exact)
        found["tokens"] = int((model.generate(ids, **lengths) != tokens).sum())
        buffer.check()
        buffer.destroy()
        model = stock(name, device, torch.bfloat16)
        found["stock bf16"] = distance(model(ids).logits, exact)
        buffer = use_expert_parallel(model, dist.group.WORLD, max_tokens=BATCH * LENGTH, compute=compute)
        found["bf16"] = distance(model(ids).logits, exact)
        buffer.check()
        buffer.destroy()
    return found


@pytest.mark.parametrize("compute", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_on_gpus_are_those_of_the_stock_model(name: str, compute: str, tmp_path: Path) -> None:
    """In fp32 within its rounding; in bf16 no further from fp32 than the stock model is."""
    for found in run_processes(RANKS, run_logits, tmp_path, name, compute):
        print(name, compute, found)
        assert found["fp32"] < 1e-5 and found["tokens"] == 0, found
        assert found["bf16"] < 1.1 * found["stock bf16"], found


def run_gradients(rank: int, name: str) -> dict[str, float]:
    """Distances of gradients from the stock model's, of all tokens: the largest of experts and of the rest."""
    device = on_gpu(rank)

    def loss_of(model: Any, of: int) -> torch.Tensor:
        ids = ids_of(of, device)
        return model(ids, labels=ids).loss

    alone = stock(name, device, torch.float32)
    for each in range(RANKS):
        loss_of(alone, each).backward()
    wanted = {at: each.grad for at, each in alone.named_parameters()}
    model = stock(name, device, torch.float32)
    buffer = use_expert_parallel(model, dist.group.WORLD, max_tokens=BATCH * LENGTH, compute="eager")
    loss_of(model, rank).backward()
    found = {"experts": 0.0, "rest": 0.0}
    for at, each in model.named_parameters():
        is_shared_out = ".experts." in at
        want, have = wanted[at], each.grad
        if is_shared_out:
            share = have.shape[0]
            want = want[rank * share : (rank + 1) * share]
        else:
            have = have.cpu()
            dist.all_reduce(have)
            have = have.to(device)
        key = "experts" if is_shared_out else "rest"
        found[key] = max(found[key], distance(have, want))
    buffer.check()
    buffer.destroy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_on_gpus_are_those_of_the_stock_model(name: str, tmp_path: Path) -> None:
    for found in run_processes(RANKS, run_gradients, tmp_path, name):
        print(name, "gradients", found)
        assert found["experts"] < 1e-4 and found["rest"] < 1e-4, found
