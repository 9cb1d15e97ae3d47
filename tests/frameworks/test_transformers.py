"""Models of Hugging Face transformers with their experts shared out over ranks, beside the same models on one rank."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

from torch.nn.utils import parametrize  # noqa: E402

import nccl_ep  # noqa: E402
from nccl_ep.integrations.transformers import use_expert_parallel  # noqa: E402
from nccl_ep.testing import run_ranks  # noqa: E402

VOCABULARY, EXPERTS = 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True}
MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN | {"head_dim": 8}),
}


@pytest.fixture(params=MODELS)
def stock(request: pytest.FixtureRequest) -> Any:
    """A small model with random weights, as transformers makes and runs it."""
    model, config, own = MODELS[request.param]
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**(COMMON | own)))
    made.set_experts_implementation("eager")
    for module in made.modules():  # routers of random models choose nearly alike
        if hasattr(module, "is_transposed"):
            for each in module.parameters(recurse=False):
                torch.nn.init.normal_(each, std=0.3)
    return made.eval()


def ids_of(rank: int, batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(rank))


def shared(stock: Any, group: Any, **options: Any) -> Any:
    model = copy.deepcopy(stock)
    model.buffer_of_test = use_expert_parallel(model, group, max_tokens=32, **options)
    return model


def is_of_experts(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize(("ranks", "compute"), [(1, "eager"), (2, "eager"), (2, "grouped_mm"), (4, "eager")])
def test_logits_are_those_of_the_stock_model(stock: Any, ranks: int, compute: str) -> None:
    def body(group: Any) -> torch.Tensor:
        model = shared(stock, group, compute=compute)
        experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
        assert len(experts) == 2 and all(each.gate_up_proj.shape[0] == EXPERTS // ranks for each in experts)
        with torch.no_grad():
            return model(ids_of(group.rank())).logits

    for rank, logits in enumerate(run_ranks(ranks, body)):
        with torch.no_grad():
            torch.testing.assert_close(logits, stock(ids_of(rank)).logits, rtol=1e-4, atol=1e-5)


def test_generate_gives_the_tokens_of_the_stock_model(stock: Any) -> None:
    """Ranks with unequal batches, greedy: the same tokens as on one rank."""
    lengths = {"max_new_tokens": 6, "do_sample": False}

    def body(group: Any) -> torch.Tensor:
        model = shared(stock, group)
        return model.generate(ids_of(group.rank(), 1 + group.rank()), **lengths)

    for rank, tokens in enumerate(run_ranks(2, body)):
        assert torch.equal(tokens, stock.generate(ids_of(rank, 1 + rank), **lengths))


def test_gradients_are_those_of_the_stock_model(stock: Any) -> None:
    """Of all parameters: those of experts lie on the rank that has them, summed over the tokens of all ranks."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        ids = ids_of(rank)
        return model(ids, labels=ids).loss

    def body(group: Any) -> dict[str, torch.Tensor]:
        model = shared(stock, group)
        loss_of(model, group.rank()).backward()
        return {name: each.grad for name, each in model.named_parameters()}

    ranks = 2
    results = run_ranks(ranks, body)
    alone = copy.deepcopy(stock)
    sum(loss_of(alone, rank) for rank in range(ranks)).backward()
    for name, each in alone.named_parameters():
        parts = [grads[name] for grads in results]
        whole = torch.cat(parts) if is_of_experts(name) else torch.stack(parts).sum(0)
        torch.testing.assert_close(whole, each.grad, rtol=1e-4, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_a_rank_whose_experts_nobody_chose_has_zero_gradients(stock: Any) -> None:
    """Its experts have gradients of zero, and the others wait for nothing."""

    def body(group: Any) -> list[torch.Tensor]:
        model = shared(stock, group)
        for module in model.modules():  # all tokens go to the experts of rank 0
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(
                    lambda _module, _given, made: (made[0], made[1], torch.zeros_like(made[2]) + torch.arange(2))
                )
        model(ids_of(group.rank())).logits.sum().backward()
        return [
            each.grad for name, each in model.named_parameters() if "experts.gate_up" in name and "shared" not in name
        ]

    first, second = run_ranks(2, body)
    assert all(each.abs().max() > 0 for each in first)
    assert all(each.abs().max() == 0 for each in second)


def test_what_cannot_be_shared_is_refused(stock: Any) -> None:
    with pytest.raises(TypeError, match="Linear has no experts"):
        use_expert_parallel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="compute is 'none', must be eager or one of"):
        shared(stock, None, compute="none")
    unshared = copy.deepcopy(stock)
    unshared.set_experts_implementation("nccl_ep")
    with pytest.raises(nccl_ep.UsageError, match="the experts are not shared out"):
        unshared(ids_of(0))
    model = shared(stock, None)
    with pytest.raises(ValueError, match="shared out already"):
        use_expert_parallel(model)

    def uneven(group: Any) -> None:
        with pytest.raises(ValueError, match=r"layers.0.* has 4 experts, which do not divide over 3 ranks"):
            shared(stock, group)

    run_ranks(3, uneven)


def small(experts: int = EXPERTS, **own: Any) -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**(COMMON | {"num_local_experts": experts} | own))
    )


def test_layers_with_unequal_numbers_of_experts() -> None:
    torch.manual_seed(5)
    stock, wide = small(), small(8)
    stock.model.layers[1] = wide.model.layers[1]
    stock.set_experts_implementation("eager")
    wide.set_experts_implementation("eager")

    def body(group: Any) -> torch.Tensor:
        model = shared(stock, group, compute="eager")
        assert [layer.mlp.experts.num_experts for layer in model.model.layers] == [2, 4]
        with torch.no_grad():
            return model(ids_of(group.rank())).logits

    for rank, logits in enumerate(run_ranks(2, body)):
        with torch.no_grad():
            torch.testing.assert_close(logits, stock(ids_of(rank)).logits, rtol=1e-4, atol=1e-5)


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    """Of the second layer, of the buffer, and of the way to compute."""
    model = small()
    odd = small(6)
    model.model.layers[1] = odd.model.layers[1]
    ids, before = ids_of(0), {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        want = model(ids).logits

    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=r"layers.1.* has 6 experts, which do not divide over 4 ranks"):
            use_expert_parallel(model, group)

    run_ranks(4, body)
    for options in ({"timeout": -1.0}, {"compute": "none"}, {"max_tokens": 0}):
        with pytest.raises(ValueError):
            use_expert_parallel(model, **options)
    model.model.layers[1].mlp.experts.down_proj.data = torch.zeros(5, 32, 48)
    with pytest.raises(TypeError, match=r"experts.down_proj has shape \[5, 32, 48\], but there are 6 experts"):
        use_expert_parallel(model)
    model.model.layers[1].mlp.experts.down_proj.data = before["model.layers.1.mlp.experts.down_proj"]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)


class _Lora(torch.nn.Module):
    """Of a layer that its user has made otherwise: a tensor with a slice for each expert, where nobody looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(EXPERTS, 1, 1))

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights * self.a


def test_experts_that_are_not_all_seen_are_refused() -> None:
    """Only some of their tensors would be cut."""
    changes: list[tuple[Any, str]] = [
        (
            lambda each: parametrize.register_parametrization(each, "down_proj", _Lora()),
            "parametrizations of down_proj",
        ),
        (lambda each: each.register_module("lora", _Lora()), r"experts.lora.a has shape \[4, 1, 1\], a slice for each"),
        (lambda each: each.double(), "is torch.float64, and rows of experts are at most torch.float32"),
    ]
    for change, text in changes:
        model = small()
        change(model.model.layers[1].mlp.experts)
        with pytest.raises(TypeError, match=rf"layers.1.*{text}"):
            use_expert_parallel(model, device="cpu")
        assert model.model.layers[0].mlp.experts.down_proj.shape[0] == EXPERTS


class _Adapter(torch.nn.Module):
    """Around experts, as PEFT makes it for ``target_parameters``: its tensors count for the time of a forward pass."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.base_layer, self.lora = experts, _Lora()

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base_layer, "down_proj", self.lora)
        try:
            return self.base_layer(*given)  # type: ignore[no-any-return]
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", leave_parametrized=False)


def test_adapters_of_experts_are_refused() -> None:
    model = small()
    block = model.model.layers[1].mlp
    block.experts = _Adapter(block.experts)
    model(ids_of(0))
    with pytest.raises(TypeError, match=r"layers.1.mlp.experts.base_layer has an adapter around it"):
        use_expert_parallel(model, device="cpu")
    block.experts = block.experts.base_layer
    with use_expert_parallel(model, device="cpu", max_tokens=32):
        block.experts = _Adapter(block.experts)
        with pytest.raises(nccl_ep.UsageError, match=r"experts of a .* have adapters .* Merge them before"):
            model(ids_of(0))


def test_hooks_of_experts_are_refused() -> None:
    """The share is another parameter, whose gradients they would not see."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = small()
        getattr(model.model.layers[1].mlp.experts.down_proj, register)(lambda _: None)
        with pytest.raises(ValueError, match=r"layers.1.*experts.down_proj has hooks.*: register them afterwards"):
            use_expert_parallel(model, device="cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "ll"}, 'mode is "ll", must be "ht" or "auto"'),
        ({"num_experts": 2}, "num_experts is 2, but the layers have 4"),
        ({"hidden": 16}, "hidden is 16, but the layers have 32"),
    ],
)
def test_buffers_that_would_not_fit_are_refused_before(options: dict[str, Any], text: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=text):
        use_expert_parallel(model, device="cpu", **options)
    assert all(layer.mlp.experts.num_experts == EXPERTS for layer in model.model.layers)


@pytest.mark.parametrize(
    ("change", "own", "others"),
    [
        (lambda model: model.to("meta"), "is a Tensor on meta, must", "rank 1 cannot share out the experts .* on meta"),
        (lambda model: model.bfloat16(), "rank 0 has .*float32, this one", "rank 1 has .*bfloat16, this one"),
    ],
)
def test_all_ranks_hear_at_once_of_one_whose_model_is_another(change: Any, own: str, others: str) -> None:
    def body(group: Any) -> str:
        model = small()
        if group.rank() == 1:
            change(model)
        with pytest.raises((TypeError, nccl_ep.MismatchError)) as caught:
            use_expert_parallel(model, group, device="cpu", timeout=300.0)
        assert model.model.layers[0].mlp.experts.down_proj.shape[0] == EXPERTS
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert re.search(others, first) and re.search(own, second)


def test_models_of_one_configuration() -> None:
    """One is shared out, and the other is not; what is set afterwards does not undo it."""
    config = transformers.MixtralConfig(**(COMMON | {"num_local_experts": EXPERTS}))
    torch.manual_seed(5)
    one = transformers.MixtralForCausalLM(config).eval()
    other = transformers.MixtralForCausalLM(config).eval()
    other.load_state_dict(one.state_dict())
    with use_expert_parallel(one, max_tokens=32) as buffer, torch.no_grad():
        one.set_experts_implementation("batched_mm")
        torch.testing.assert_close(one(ids_of(0)).logits, other(ids_of(0)).logits, rtol=1e-4, atol=1e-5)
        assert buffer.stats()["ht_combines"] == len(one.model.layers)


class _WithoutEmbeddings(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """As an encoder of pictures or sounds, or a part of a model that a pipeline gives a rank."""

    config_class = transformers.MixtralConfig
    _supports_sdpa = True
    _can_set_experts_implementation_cached_value = True

    def __init__(self, layer: torch.nn.Module, config: Any) -> None:
        super().__init__(config)
        self.layer = layer


def test_a_model_without_embeddings_of_tokens() -> None:
    stock = small().eval()
    block = stock.model.layers[0].mlp
    model = _WithoutEmbeddings(copy.deepcopy(block), stock.config)
    x = torch.randn(2, 3, 32)
    with torch.no_grad(), use_expert_parallel(model, max_tokens=32):
        torch.testing.assert_close(model.layer(x), block(x), rtol=1e-4, atol=1e-5)


def test_autocast() -> None:
    """Rows travel in the dtype in which experts compute."""
    stock = small().eval()
    stock.set_experts_implementation("eager")

    def body(group: Any) -> torch.Tensor:
        model = shared(stock, group)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(ids_of(group.rank())).logits

    for rank, logits in enumerate(run_ranks(2, body)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(logits, stock(ids_of(rank)).logits, rtol=5e-2, atol=5e-2)


def test_hidden_states_of_a_wider_dtype() -> None:
    model = small().bfloat16()
    experts = model.model.layers[0].mlp.experts
    with use_expert_parallel(model, max_tokens=32):
        x, ids, weights = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
        with pytest.raises(
            ValueError, match=r"are torch.float32, but .* give use_expert_parallel\(dtype=torch.float32\)"
        ):
            experts(x, ids, weights)
