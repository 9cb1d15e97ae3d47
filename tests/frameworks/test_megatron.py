"""Megatron-core's ``MoELayer`` with its flex dispatcher over nccl_ep, beside its allgather dispatcher and plain torch.

On CPU ranks it has the bits of the allgather dispatcher.
"""

from __future__ import annotations

import contextlib
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

from tests.support.gpus import CPU_OR_GPUS, NUM_GPUS, device_of
from tests.support.processes import run_processes

# Not imported here: rank processes import this file, and deep_ep must be there before Megatron looks for it.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: make frameworks", allow_module_level=True)

SEQUENCE, BATCH, HIDDEN, INNER, EXPERTS, TOPK, STEPS = 5, 2, 32, 48, 8, 2, 2


class OnCpu(TorchFunctionMode):
    """What is asked for on CUDA is made on the CPU: Megatron's managers have flags there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


def made_layer(dispatcher: dict[str, Any], ranks: int, device: torch.device) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=INNER, moe_ffn_hidden_size=INNER,
        num_moe_experts=EXPERTS, moe_router_topk=TOPK, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks, use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, **dispatcher,
    )  # fmt: skip
    made = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    # Until 0.18 a spec, which makes the layer; since then a function.
    with OnCpu() if device.type == "cpu" else contextlib.nullcontext():
        layer = made(config=config) if callable(made) else build_module(made, config=config)
    layer.set_layer_number(1)
    return layer.to(device)


def drawn(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a rank, and the gradient of what comes of them."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    x, grad = (torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw).to(device) for _ in range(2))
    return x.requires_grad_(), grad


def trained(layer: Any, rank: int, device: torch.device) -> list[torch.Tensor]:
    """Outputs, and gradients of the input and of all parameters, of some steps."""
    made = []
    for step in range(STEPS):
        x, grad = drawn(step, rank, device)
        dist.barrier()  # on a busy machine a rank may come much later than the others
        out, bias = layer(x)
        assert bias is None
        out.backward(grad)
        made += [out.detach(), x.grad]
    return made + [each.grad for _, each in sorted(layer.named_parameters())]


def of_plain_torch(layer: Any, rank: int, ranks: int, device: torch.device) -> list[torch.Tensor]:
    """The same, with all experts on all tokens. An expert's gradients are of the tokens of all ranks, a router's of
    those of its own."""
    weights: list[Any] = [None] * ranks
    dist.all_gather_object(weights, {name: each.detach().cpu() for name, each in layer.named_parameters()})
    leaves = [{name: each.to(device).requires_grad_() for name, each in of_rank.items()} for of_rank in weights]

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        owner, local = divmod(number, EXPERTS // ranks)
        up, down = (leaves[owner][f"experts.local_experts.{local}.linear_fc{i}.weight"] for i in (1, 2))
        gate, values = (rows @ up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * values) @ down.T

    made = []
    for step in range(STEPS):
        for source in range(ranks):
            x, grad = drawn(step, source, device)
            scores, ids = (x @ leaves[source]["router.weight"].T).topk(TOPK)
            each = torch.stack([expert(number, x) for number in range(EXPERTS)], -2)
            chosen = each.gather(-2, ids.unsqueeze(-1).expand(*ids.shape, HIDDEN))
            out = (chosen * scores.softmax(-1).unsqueeze(-1)).sum(-2)
            out.backward(grad)
            if source == rank:
                made += [out.detach(), x.grad]
    return made + [leaves[rank][name].grad for name in sorted(leaves[rank])]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of the whole."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


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


def compare(rank: int, ranks: int, kind: str, folder: Path) -> dict[str, bool]:
    """Whether all bits are those of the allgather dispatcher, by backend."""
    device = device_of(rank, kind)
    if kind == "cpu":
        os.environ["NCCL_EP_HINT_TOKENS"] = "64"
    import nccl_ep

    nccl_ep.install_as_deep_ep()
    if kind == "cpu":
        nccl_ep.Buffer.__init__.__kwdefaults__["timeout"] = 240.0  # Megatron has no argument for it
        torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
    else:  # its own collectives are NCCL's
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / "with_nccl"), ranks)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks)
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, moe_utils, token_dispatcher

    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it also where there is no Transformer Engine
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.manual_seed(rank)
    stock = made_layer({"moe_token_dispatcher_type": "allgather"}, ranks, device)
    for each in stock.router.parameters():  # data parallel: alike on all ranks
        dist.broadcast(each.data, 0)
    expected = trained(stock, rank, device)
    far = [distance(b, a) for a, b in zip(of_plain_torch(stock, rank, ranks, device), expected, strict=True)]
    assert max(far) < 1e-5, far
    managers = {"ncclep": "_NCCLEPManager", "deepep": "_DeepepManager", "hybridep": "_HybridEPManager"}
    if not hasattr(token_dispatcher, "_NCCLEPManager"):  # before 0.19
        del managers["ncclep"]
    elif importlib.util.find_spec("transformer_engine") is None:
        install_provider(fused_a2a, token_dispatcher)
    same_bits = {}
    for backend, manager in managers.items():
        options = {"moe_expert_rank_capacity_factor": 8.0} if backend == "ncclep" else {}
        layer = made_layer(
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend, **options}, ranks, device
        )
        assert type(layer.token_dispatcher) is token_dispatcher.MoEFlexTokenDispatcher
        assert type(layer.token_dispatcher._comm_manager).__name__ == manager
        layer.load_state_dict(stock.state_dict())
        got = trained(layer, rank, device)
        assert len(expected) == len(got) == 2 * STEPS + len(list(stock.parameters()))
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert a.abs().max() > 0, i
            is_close = kind == "cuda" and distance(b, a) < 1e-5
            assert is_close or torch.equal(a, b), f"{backend}, tensor {i}: {distance(b, a)}"
        same_bits[backend] = all(map(torch.equal, expected, got))
    check_budget(layer.token_dispatcher._comm_manager, rank, device)
    parallel_state.destroy_model_parallel()
    return same_bits


def check_budget(manager: Any, rank: int, device: torch.device) -> None:
    """Hybrid-EP's manager with a budget of rows a rank, which the layer has with Transformer Engine alone: whether rows
    were dropped it reads from the handle."""
    if not hasattr(manager, "over_budget"):
        return  # before 0.17
    draw = torch.Generator().manual_seed(rank)
    x = torch.randint(-4, 5, (SEQUENCE * BATCH, HIDDEN), generator=draw).bfloat16().to(device)
    chosen = (torch.arange(EXPERTS, device=device) < 2).expand(len(x), EXPERTS).contiguous()
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


@pytest.mark.parametrize("kind", CPU_OR_GPUS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_of_megatron_gives_the_same_over_nccl_ep(ranks: int, kind: str, tmp_path: Path) -> None:
    if kind == "cuda" and ranks > NUM_GPUS:
        pytest.skip(f"{ranks} ranks, {NUM_GPUS} GPUs")
    print("bits of the allgather dispatcher, by rank:", run_processes(ranks, compare, tmp_path, ranks, kind, tmp_path))
