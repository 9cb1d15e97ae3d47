"""Expert parallelism for the Mixture-of-Experts models of Hugging Face ``transformers``.

``use_expert_parallel(model, group)`` leaves each rank its share of the experts, and registers "nccl_ep" as an
implementation of experts. The model's own code runs otherwise: routers, gates, activations and biases are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..bootstrap import rendezvous_of
from ..buffer import Buffer
from ..functional import combine, dispatch

NAME = "nccl_ep"
_STATE = "_nccl_ep"  # attribute of an experts module


class _Share:
    """What an experts module of a model needs: the buffer, the number of all experts, and who computes."""

    def __init__(self, buffer: Buffer, num_experts: int, compute: Callable[..., torch.Tensor]) -> None:
        self.buffer, self.num_experts, self.compute = buffer, num_experts, compute


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts module's forward pass in expert parallelism: [T, H], ids [T, K] and weights [T, K] give [T, H].

    UsageError without ``use_expert_parallel``. Otherwise it raises as ``nccl_ep.dispatch``.
    """
    share = getattr(self, _STATE, None)
    if share is None:
        from ..errors import UsageError

        raise UsageError(
            f'experts_implementation is "{NAME}", but the experts are not shared out: '
            "call nccl_ep.integrations.transformers.use_expert_parallel(model, group)"
        )
    out = dispatch(
        hidden_states, top_k_index, top_k_weights.float(), buffer=share.buffer, num_experts=share.num_experts,
        mode="ht", layout="packed", capacity="exact",
    )  # fmt: skip
    assert out.row_expert is not None
    # Every row is a token of one expert, whose weight is applied on its way home.
    ids = out.row_expert.unsqueeze(1).to(top_k_index.dtype)
    rows = share.compute(self, out.x, ids, out.x.new_ones(ids.shape)) if out.x.shape[0] else _no_rows(self, out.x)
    return combine(rows, out.handle)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def use_expert_parallel(
    model: Any,
    group: Any = None,
    *,
    max_tokens: int = 4096,
    compute: str | None = None,
    **options: Any,
) -> Buffer:
    """Leaves this rank its share of every layer's experts, and makes the model run them in expert parallelism.

    Collective. Expert e of E is on rank e // (E / R) afterwards. Other parameters stay as they are. The model's weights
    must be loaded before, equal on all ranks.

    Args:
        model: a ``PreTrainedModel`` of ``transformers`` 5, with experts as parameters of three dimensions, as Mixtral,
            Qwen2-MoE, Qwen3-MoE.
        group: of the ranks, as ``nccl_ep.Buffer`` takes it.
        max_tokens: tokens (batch * sequence) of a rank in a forward pass at most, equal on all ranks.
        compute: what runs a rank's own experts: "eager", "grouped_mm", "batched_mm", or another name that transformers
            knows; by default what the model was loaded with.
        options: of ``nccl_ep.Buffer.for_shapes``: ``device``, ``timeout``, ``dtype`` and others.

    Returns: the buffer of all layers. The model needs it for as long as it runs.

    All ranks must run the same forward and backward passes (``generate(synced_gpus=True)``); a rank may have no tokens.

    Raises: TypeError for a model without such experts; ValueError if they do not divide over the ranks, or the model
    uses the tensor parallelism of transformers; otherwise as ``nccl_ep.Buffer``.
    """
    modules = _experts_of(model)
    if not modules:
        raise TypeError(f"{type(model).__name__} has no experts that transformers' experts_implementation can replace")
    rendezvous = rendezvous_of(group)
    rank, ranks = rendezvous.rank(), rendezvous.size()
    first = modules[0]
    for module in modules:
        if getattr(module, "_is_expert_parallel", False) or hasattr(module, _STATE):
            raise ValueError(f"the experts of {type(model).__name__} are shared out already")
        if module.num_experts % ranks or module.num_experts != first.num_experts:
            raise ValueError(f"{module.num_experts} experts do not divide over {ranks} ranks")
    parameter = next(_parameters_of(first))[1]
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    shapes: dict[str, Any] = {
        "max_tokens": max_tokens, "hidden": config.hidden_size, "topk": config.num_experts_per_tok,
        "num_experts": first.num_experts, "dtype": parameter.dtype, "mode": "ht", "device": parameter.device,
    }  # fmt: skip
    name = compute or getattr(config, "_experts_implementation", None) or "eager"
    computes = [_compute_of(module, name) for module in modules]
    buffer = Buffer.for_shapes(group if group is not None else rendezvous, **(shapes | options))
    for module, its_own in zip(modules, computes, strict=True):
        share = _Share(buffer, module.num_experts, its_own)
        _keep_share(module, rank, ranks)
        setattr(module, _STATE, share)
    model.set_experts_implementation(NAME)
    return buffer


def _experts_of(model: torch.nn.Module) -> list[Any]:
    """The modules that ``use_experts_implementation`` of transformers has decorated."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")
    ]


def _compute_of(module: torch.nn.Module, name: str) -> Callable[..., torch.Tensor]:
    if name == NAME:
        raise ValueError(f'compute is "{NAME}": what runs a rank\'s own experts must be another implementation')
    stock = getattr(type(module).forward, "__wrapped__", None)
    if name == "eager" and stock is None:
        raise ValueError(f"{type(module).__name__} has no eager implementation")
    if name == "eager":
        assert stock is not None
        return stock  # type: ignore[no-any-return]
    if name not in ALL_EXPERTS_FUNCTIONS:
        raise ValueError(f"compute is {name!r}, must be eager or one of {', '.join(ALL_EXPERTS_FUNCTIONS)}")
    return ALL_EXPERTS_FUNCTIONS[name]  # type: ignore[no-any-return]


def _parameters_of(module: Any) -> Any:
    """Names and parameters that have a slice for each expert."""
    return (
        (name, each)
        for name, each in module.named_parameters(recurse=False)
        if each.dim() > 1 and each.shape[0] == module.num_experts
    )


def _keep_share(module: Any, rank: int, ranks: int) -> None:
    local = module.num_experts // ranks
    for name, each in list(_parameters_of(module)):
        with torch.no_grad():
            share = each[rank * local : (rank + 1) * local].clone()
        module.register_parameter(name, torch.nn.Parameter(share, requires_grad=each.requires_grad))
    module.num_experts = local


def _no_rows(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The experts' rows of none, with gradients that are zero rather than missing."""
    zero = x.sum() * 0
    for _, each in _parameters_of(module):
        if each.requires_grad:
            zero = zero + each.reshape(-1)[0].to(x.dtype) * 0
    return x + zero
