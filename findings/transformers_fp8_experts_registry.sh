#!/usr/bin/env bash
# transformers 5.24.0: an experts' implementation of one's own, registered in ALL_EXPERTS_FUNCTIONS.
# Guess: set_experts_implementation finds it for every model, also for one whose experts are held in FP8.
# Is: FP8 experts look in a second registry, ALL_FP8_EXPERTS_FUNCTIONS. The name is accepted when it is set, and the
# first forward raises KeyError, whose text says that it is not registered in "ExpertsInterface", where it is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
cd "$work"
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.15.0 transformers==5.24.0 numpy==2.2.6
TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - << 'EOF'
import sys

import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.quantization_config import FineGrainedFP8Config

print("transformers", transformers.__version__, "torch", torch.__version__)
ALL_EXPERTS_FUNCTIONS.register("mine", lambda experts, hidden, ids, weights: hidden)
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, head_dim=32,
    num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
)
x, ids, weights = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
seen = []
for in_fp8 in (False, True):
    model = Qwen3MoeForCausalLM(config).bfloat16()
    if in_fp8:
        kept = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate"]
        model = replace_with_fp8_linear(model, kept, FineGrainedFP8Config(), pre_quantized=True)
    model.set_experts_implementation("mine")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, FP8Experts) == in_fp8
    if in_fp8:
        experts.to_empty(device="cpu")
    try:
        seen.append("runs" if experts(x, ids, weights) is x else "another one runs")
    except KeyError as error:
        seen.append(f"KeyError: {error}")
    print("experts in FP8:" if in_fp8 else "experts in bf16:", seen[-1])
if seen[0] != "runs" or "not a valid experts implementation registered in the `ExpertsInterface`" not in seen[1]:
    sys.exit("changed")
EOF
