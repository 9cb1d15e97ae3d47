"""A tiny model for every class of experts that transformers can replace, found by walking its modeling files.

Numbers of a configuration are made small by their names, wherever a configuration has them. ``ITS_OWN`` has what a
model type needs besides.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

EXPERTS, VOCABULARY = 4, 64
_DECORATOR = "\n@use_experts_implementation"
_DECORATED = re.compile(_DECORATOR + r"[^\n]*\nclass (\w+)\(")
_drawing = threading.Lock()  # ranks that are threads draw from one generator
_TAKE_EMBEDDINGS = ("Qwen3OmniMoeTalkerModel",)
_ALWAYS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WHERE_THERE: dict[str, Any] = {
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "top_k_experts": 2, "moe_topk": 2, "moe_k": 2,
    "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 8, "global_head_dim": 8,
    "n_group": 1, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 0,
    "decoder_sparse_step": 1, "num_dense_layers": 1, "mlp_only_layers": [], "mlp_layer_types": ["dense", "sparse"],
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "moe_hidden_size": 16, "moe_latent_size": 16, "enable_moe_block": True, "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 8,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ITS_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "glm4v_moe": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0]}},
    "glm5_next": {"index_topk": 16, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {
        "num_key_value_heads": 2, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "nemotron_h": {"n_groups": 1, "layers_block_type": ["attention", "moe"]},
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 16},
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@functools.cache
def experts_classes() -> dict[str, str]:
    """Names of all classes of experts that transformers can replace, and the modules that have them."""
    found: dict[str, str] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        names = _DECORATED.findall(text)
        assert len(names) == text.count(_DECORATOR), path
        found |= dict.fromkeys(names, f"transformers.models.{path.parent.name}.{path.stem}")
    return found


def model_type_of(name: str) -> str:
    return experts_classes()[name].split(".")[2]


def tiny_model(name: str) -> Any:
    """A model with experts of this class, eager, on the CPU, in float32."""
    with _drawing:
        return _tiny_model(name)


def _tiny_model(name: str) -> Any:
    kind = getattr(importlib.import_module(experts_classes()[name]), name)
    for model_class in _models_of(kind):
        torch.manual_seed(3)
        made = model_class(_config_of(model_class.config_class, ITS_OWN.get(model_type_of(name), {})))
        experts = [module for module in made.modules() if isinstance(module, kind)]
        if experts:
            made.set_experts_implementation("eager")
            for module in experts:  # experts of random models do nearly nothing
                for each in module.parameters():
                    torch.nn.init.normal_(each, std=0.3)
            return made.eval()
    raise AssertionError(f"no model with {name} was found")


def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The first of what the model returns. Some models are given embeddings, and have none for tokens."""
    with torch.no_grad():
        takes = "inputs_embeds" if type(model).__name__ in _TAKE_EMBEDDINGS else "input_ids"
        out: torch.Tensor = model(**{takes: model.get_input_embeddings()(ids) if takes != "input_ids" else ids})[0]
    return out


def _models_of(kind: type) -> Iterator[Any]:
    """Models over tokens alone: those whose configuration has no others within."""
    module = importlib.import_module(kind.__module__)
    models = [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, transformers.PreTrainedModel)
        and each.__module__ == kind.__module__
    ]
    for ending in ("ForCausalLM", "ForTokenClassification", "TextModel", "Model"):
        for each in models:
            if each.__name__.endswith(ending) and each.config_class is not None and not each.config_class.sub_configs:
                yield each


def _config_of(config_class: Any, its_own: dict[str, Any]) -> Any:
    defaults = config_class().to_dict()
    chosen = _ALWAYS | {name: value for name, value in _WHERE_THERE.items() if name in defaults}
    if "qk_rope_head_dim" in defaults:
        chosen.pop("head_dim", None)
    for name, value in defaults.items():
        if name == "layer_types" and isinstance(value, list):
            chosen[name] = sorted(set(value))[:2] if len(set(value)) > 1 else value[:1] * 2
    return config_class(**(chosen | its_own))
