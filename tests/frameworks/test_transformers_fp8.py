"""Experts that transformers holds in FP8: their weights and scales are shared out, and saved whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

from transformers.integrations import finegrained_fp8 as fp8  # noqa: E402
from transformers.utils.quantization_config import FineGrainedFP8Config  # noqa: E402

from nccl_ep.integrations.transformers import full_state_dict, save_pretrained, use_expert_parallel  # noqa: E402
from nccl_ep.testing import run_ranks  # noqa: E402

HIDDEN, EXPERTS, BLOCK = 128, 4, 128
OPTIONS = {"max_tokens": 32, "timeout": 60.0, "device": "cpu"}
IDS = torch.arange(3, 17).view(2, 7)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own product needs a GPU."""
    monkeypatch.setattr(fp8.FP8Experts, "linear", dequantised_linear)


def dequantised_linear(
    _: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, activation_scale: torch.Tensor | None = None
) -> torch.Tensor:
    factors = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    if activation_scale is not None:
        factors = factors * activation_scale
    return torch.nn.functional.linear(x.float(), weight.float() * factors).to(x.dtype)


def stock_model(scheme: str) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4,
        head_dim=32, num_key_value_heads=4, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=HIDDEN,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()
    kept = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate"]
    how = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), activation_scheme=scheme)
    model = fp8.replace_with_fp8_linear(model, kept, how, pre_quantized=True)
    experts = experts_of(model).to_empty(device="cpu")
    for name, each in experts.named_parameters():
        numbers = torch.randn(each.shape)
        each.data = (numbers.abs() / 8 if "scale" in name else numbers).to(each.dtype)
    model.set_experts_implementation("eager")
    return model


def experts_of(model: Any) -> Any:
    (found,) = [module for module in model.modules() if isinstance(module, fp8.FP8Experts)]
    return found


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_logits_and_what_is_saved(scheme: str, tmp_path: Path) -> None:
    stock = stock_model(scheme)
    with torch.no_grad():
        want = stock(IDS).logits

    def body(group: Any) -> Any:
        model = copy.deepcopy(stock)
        with use_expert_parallel(model, group, **OPTIONS), torch.no_grad():
            assert all(each.shape[0] == EXPERTS // 2 for each in experts_of(model).parameters())
            logits = model(IDS).logits
            save_pretrained(model, tmp_path, save_original_format=False)
            return logits, full_state_dict(model)

    (first, whole), (second, _) = run_ranks(2, body)
    for logits in (first, second):
        torch.testing.assert_close(logits, want, rtol=3e-2, atol=3e-2)
    assert whole.keys() == stock.state_dict().keys()
    for name, each in stock.state_dict().items():
        assert torch.equal(whole[name].float(), each.float()), name
    assert list(tmp_path.glob("*.safetensors"))


def test_functions_of_the_right_registry() -> None:
    model = stock_model("dynamic")
    with pytest.raises(
        ValueError, match=r"compute is .sonicmoe., must be eager or one of .*grouped_mm.* for FP8Experts"
    ):
        use_expert_parallel(model, compute="sonicmoe", **OPTIONS)
    assert experts_of(model).num_experts == EXPERTS
    with use_expert_parallel(model, compute="grouped_mm", **OPTIONS):
        assert experts_of(model)._nccl_ep.compute is fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
