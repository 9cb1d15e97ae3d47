"""Megatron-core's ``MoELayer`` with its flex dispatcher over nccl_ep, beside its allgather dispatcher: equal bits."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.support.processes import run_processes

# Not imported here: rank processes import this file, and deep_ep must be there before Megatron looks for it.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: make frameworks", allow_module_level=True)

SEQUENCE, BATCH, HIDDEN, EXPERTS, TOPK, STEPS = 5, 2, 32, 8, 2, 2


class OnCpu(TorchFunctionMode):
    """What is asked for on CUDA is made on the CPU: Megatron's managers have flags there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda" and not torch.cuda.is_available():
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


def made_layer(dispatcher: dict[str, Any], ranks: int) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=48, moe_ffn_hidden_size=48,
        num_moe_experts=EXPERTS, moe_router_topk=TOPK, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks, use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, **dispatcher,
    )  # fmt: skip
    made = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    # Until 0.18 a spec, which makes the layer; since then a function.
    with OnCpu():
        layer = made(config=config) if callable(made) else build_module(made, config=config)
    layer.set_layer_number(1)
    return layer


def trained(layer: Any, rank: int) -> list[torch.Tensor]:
    """Outputs, and gradients of the input and of all parameters, of some steps."""
    made = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw).requires_grad_()
        dist.barrier()  # on a busy machine a rank may come much later than the others
        out, bias = layer(x)
        assert bias is None
        (out * torch.randn(out.shape, generator=draw)).sum().backward()
        made += [out.detach(), x.grad]
    return made + [each.grad for _, each in sorted(layer.named_parameters())]


def install_provider(fused_a2a: Any, token_dispatcher: Any) -> None:
    """The provider of transformer_engine.pytorch.ep, after Megatron was imported without Transformer Engine: the module
    that imports the provider is loaded once more."""
    from nccl_ep.integrations import transformer_engine_ep

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = types.ModuleType(name)
    transformer_engine_ep.install()
    importlib.reload(fused_a2a)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        del sys.modules[name]
    assert fused_a2a.HAVE_TE_EP
    for name in vars(fused_a2a).keys() & vars(token_dispatcher).keys():
        if "ep_" in name:
            setattr(token_dispatcher, name, getattr(fused_a2a, name))
    fused_a2a.te_ep.ep_bootstrap = functools.partial(  # the layer is in float32; Megatron has no argument for it
        fused_a2a.te_ep.ep_bootstrap, max_token_dtype=torch.float32
    )


def compare(rank: int, ranks: int) -> None:
    os.environ["NCCL_EP_HINT_TOKENS"] = "64"
    import nccl_ep

    nccl_ep.install_as_deep_ep()
    nccl_ep.Buffer.__init__.__kwdefaults__["timeout"] = 240.0  # Megatron has no argument for it
    if not torch.cuda.is_available():  # Megatron puts what it makes on the current GPU; here there is none
        torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, moe_utils, token_dispatcher

    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it also where there is no Transformer Engine
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.manual_seed(rank)
    stock = made_layer({"moe_token_dispatcher_type": "allgather"}, ranks)
    for each in stock.router.parameters():  # data parallel: alike on all ranks
        dist.broadcast(each.data, 0)
    expected = trained(stock, rank)
    managers = {"ncclep": "_NCCLEPManager", "deepep": "_DeepepManager", "hybridep": "_HybridEPManager"}
    if not hasattr(token_dispatcher, "_NCCLEPManager"):  # before 0.19
        del managers["ncclep"]
    elif importlib.util.find_spec("transformer_engine") is None:
        install_provider(fused_a2a, token_dispatcher)
    for backend, manager in managers.items():
        options = {"moe_expert_rank_capacity_factor": 8.0} if backend == "ncclep" else {}
        layer = made_layer(
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend, **options}, ranks
        )
        assert type(layer.token_dispatcher) is token_dispatcher.MoEFlexTokenDispatcher
        assert type(layer.token_dispatcher._comm_manager).__name__ == manager
        layer.load_state_dict(stock.state_dict())
        got = trained(layer, rank)
        assert len(expected) == len(got) == 2 * STEPS + len(list(stock.parameters()))
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert a.abs().max() > 0, i
            assert torch.equal(a, b), f"{backend}, tensor {i}: {(a - b).abs().max()}"
    check_budget(layer.token_dispatcher._comm_manager, rank)
    parallel_state.destroy_model_parallel()


def check_budget(manager: Any, rank: int) -> None:
    """Hybrid-EP's manager with a budget of rows a rank, which the layer has with Transformer Engine alone: whether rows
    were dropped it reads from the handle."""
    if not hasattr(manager, "over_budget"):
        return  # before 0.17
    draw = torch.Generator().manual_seed(rank)
    x = torch.randint(-4, 5, (SEQUENCE * BATCH, HIDDEN), generator=draw).bfloat16()
    chosen = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter_(1, torch.tensor([[0, 1]]).expand(len(x), 2), True)
    for factor, is_over in ((8.0, False), (0.25, True)):
        manager.moe_expert_rank_capacity_factor = None
        manager.setup_metadata(chosen, chosen.float())
        manager.moe_expert_rank_capacity_factor = factor
        manager.num_permuted_tokens = budget = int(len(x) * TOPK * factor)
        manager.over_budget.zero_()
        rows = manager.dispatch(x)
        assert rows.shape[0] == budget
        assert bool(manager.over_budget) == (is_over and rank == 0)  # which has the experts
        home = manager.combine(rows)
        if not is_over:
            assert torch.equal(home, x * TOPK)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_of_megatron_gives_the_same_over_nccl_ep(ranks: int, tmp_path: Path) -> None:
    run_processes(ranks, compare, tmp_path, ranks)
