"""transformers' own expert parallelism with nccl_ep as its implementation, beside the model on one rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes

for package in ("transformers", "accelerate", "transformers.distributed.expert_parallel"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make frameworks", allow_module_level=True)

RANKS, VOCABULARY, EXPERTS = 2, 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True,
        "head_dim": 8,
    },
}  # fmt: skip


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (1 + rank, 5), generator=torch.Generator().manual_seed(rank))


def saved(name: str, folder: Path) -> Any:
    """A small model with random weights, in a folder."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**(COMMON | MODELS[name]))
    )
    for parameter in model.parameters():  # routers of random models choose nearly alike
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def compare(rank: int, folder: Path) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    import nccl_ep.integrations.transformers_ep as integration

    integration.MAX_TOKENS = 32
    for name in MODELS:
        kind = getattr(transformers, f"{name}ForCausalLM")
        options = {"experts_implementation": "eager", "dtype": torch.float32}
        stock = kind.from_pretrained(folder / name, **options)
        config = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation="nccl_ep")
        model = kind.from_pretrained(folder / name, distributed_config=config, **options)
        stacks = [each for key, each in model.named_parameters() if ".experts." in key]
        assert stacks and all(each.to_local().shape[0] == EXPERTS // RANKS for each in stacks)
        dist.barrier()
        got, want = model(ids_of(rank)).logits, stock(ids_of(rank)).logits
        torch.testing.assert_close(got, want)
        got.square().mean().backward()
        for source in range(RANKS):  # experts' gradients are of the tokens of all ranks
            stock(ids_of(source)).logits.square().mean().backward()
        of_stock = dict(stock.named_parameters())
        for key, each in model.named_parameters():
            if ".experts." in key:
                local, first = each.grad.to_local(), rank * EXPERTS // RANKS
                whole = of_stock[key].grad[first : first + len(local)]
                # transformers makes means over the ranks of FSDP
                torch.testing.assert_close(local * RANKS, whole, rtol=1e-3, atol=1e-5)


def test_models_are_loaded_by_share_and_compute_the_same(tmp_path: Path) -> None:
    for name in MODELS:
        saved(name, tmp_path / name)
    run_processes(RANKS, compare, tmp_path, tmp_path)
