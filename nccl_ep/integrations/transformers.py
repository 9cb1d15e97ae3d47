"""Expert parallelism for the Mixture-of-Experts models of Hugging Face ``transformers``.

``use_expert_parallel(model, group)`` leaves each rank its share of the experts. The model's own code runs otherwise:
routers, gates, activations and biases are its own. ``save_pretrained(model, folder)`` saves it whole.

The experts of transformers 5 are modules with tensors that have a slice for each expert, whose ``forward`` it looks up
in a registry: one for experts of bf16, fp16 and fp32, and another for those of FP8 and FP4. "nccl_ep" is in both.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..bootstrap import Rendezvous, meeting_of, rendezvous_of
from ..buffer import Buffer
from ..checks import MAX_TOPK, described, require_integers, require_timeout
from ..errors import MismatchError, SystemError, UsageError
from ..functional import combine, dispatch
from .expert_share import (
    _STATE,
    Share,
    full_state_dict,
    keep_share,
    require_own,
    sharded_state_dict,
    share_of,
    stacks_of,
    whole,
)
from .optimizer_share import sharded_optimizer_state_dict, watch_optimizers_of

__all__ = [
    "full_state_dict",
    "save_pretrained",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "use_expert_parallel",
]

NAME = "nccl_ep"
_TIMEOUT = 100.0  # of Buffer


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts module's forward pass in expert parallelism: [T, H], ids [T, K] and weights [T, K] give [T, H].

    Ids that are no expert's add nothing. UsageError without ``use_expert_parallel``; ValueError for more tokens than
    ``max_tokens``, or hidden states of a wider dtype than the buffer's. Otherwise it raises as ``nccl_ep.dispatch``.
    """
    share = share_of(self)
    if share is None:
        raise UsageError(
            f'experts_implementation is "{NAME}", but the experts are not shared out: '
            "call nccl_ep.integrations.transformers.use_expert_parallel(model, group)"
        )
    if not torch.compiler.is_compiling():
        require_own(self, share)
    x = _as_computed(hidden_states)
    if x.element_size() > share.dtype.itemsize:
        raise ValueError(
            f"hidden_states are {x.dtype}, but the buffer's rows were made for {share.dtype}: "
            f"give use_expert_parallel(dtype={x.dtype})"
        )
    ids = torch.where((top_k_index >= 0) & (top_k_index < share.num_experts), top_k_index, -1)
    out = dispatch(
        x, ids, top_k_weights.float(), buffer=share.buffer, num_experts=share.num_experts,
        mode="ht", layout="packed", capacity="exact",
    )  # fmt: skip
    assert out.row_expert is not None
    # Every row is a token of one expert, whose weight is applied on its way home.
    row_ids = out.row_expert.unsqueeze(1).to(ids.dtype)
    if out.x.shape[0]:
        rows = share.compute(self, out.x, row_ids, out.x.new_ones(row_ids.shape))
    else:
        rows = _no_rows(self, out.x)
    return combine(rows, out.handle).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def use_expert_parallel(
    model: Any,
    group: Any = None,
    *,
    max_tokens: int = 4096,
    compute: str | None = None,
    **options: Any,
) -> Buffer:
    """Leaves this rank its share of every layer's experts, and makes the model run them in expert parallelism.

    Collective. Expert e of a layer of E is on rank e // (E / R) afterwards. Other parameters stay as they are. The
    model's weights must be loaded before, equal on all ranks. A model that raises is as it was.

    Args:
        model: a ``PreTrainedModel`` of ``transformers`` 5 whose experts' implementation can be chosen
            (``experts_implementation``), those of FP8 among them. Layers may have unequal numbers of experts.
        group: of the ranks, as ``nccl_ep.Buffer`` takes it.
        max_tokens: tokens (batch * sequence) of a rank in a forward pass at most, equal on all ranks.
        compute: what runs a rank's own experts: "eager", "grouped_mm", "batched_mm", or another name that transformers
            knows for them; by default what the model was loaded with.
        options: of ``nccl_ep.Buffer.for_shapes``: ``device``, ``timeout``, ``dtype`` and others. ``topk`` is 32 by
            default (or the number of experts, if that is less); a smaller one makes a somewhat smaller window.

    Returns: the buffer of all layers. The model needs it for as long as it runs.

    All ranks must run the same forward and backward passes (``generate(synced_gpus=True)``); a rank may have no tokens.
    ``model.state_dict()`` raises afterwards if there are several ranks, as it would lack the other ranks' experts:
    ``save_pretrained``, ``full_state_dict`` and ``sharded_state_dict`` of this module stand in for it.
    ``model.load_state_dict()`` takes the tensors of all experts, and keeps this rank's. The same holds for the
    ``state_dict`` of an optimizer, which is made after this call: ``sharded_optimizer_state_dict`` stands in for it.

    Raises: TypeError for a model without such experts; ValueError if they do not divide over the ranks, are shared out
    already, or have hooks; MismatchError on the other ranks, and where the ranks' models differ; otherwise as
    ``nccl_ep.Buffer``.
    """
    rendezvous = rendezvous_of(group)
    error: Exception | None = None
    try:
        layers, computes = _to_share_out(model, rendezvous.size(), compute)
        told = "\n".join(["fine", *map(_told, layers, layers.values())])
    except (TypeError, ValueError) as caught:
        error, told = caught, f"{type(caught).__name__}: {caught}"
    timeout = options.get("timeout", _TIMEOUT)
    require_timeout(timeout=timeout)
    with meeting_of(rendezvous) as allgather:
        every = allgather(told.encode(), timeout)
    if error is not None:
        raise error
    _require_same(told, [each.decode(errors="replace") for each in every])
    shapes = _shapes_of(model, list(layers.values()))
    if options.get("mode") == "ll":
        raise ValueError('mode is "ll", must be "ht" or "auto": numbers of tokens differ from rank to rank')
    for name in ("hidden", "num_experts"):
        given = options.get(name, shapes[name])
        require_integers(**{name: given})
        if given < shapes[name]:
            raise ValueError(f"{name} is {given}, but the layers have {shapes[name]}")
    shapes |= {"max_tokens": max_tokens, "mode": "ht"} | options
    buffer = Buffer.for_shapes(group if group is not None else rendezvous, **shapes)
    kept: dict[int, torch.Tensor] = {}
    for module, its_own in zip(layers.values(), computes, strict=True):
        if rendezvous.size() > 1:
            watch_optimizers_of(module)
        share = Share(buffer, rendezvous, shapes["hidden"], shapes["dtype"], module.num_experts, its_own)
        keep_share(module, share, kept)
        # Of its own: the model's is shared with whatever else was made of it, and says what others may change.
        module.config = copy.copy(module.config)
        module.config._experts_implementation_internal = NAME
    _leave_out_of_ddp(model, layers, rendezvous)
    return buffer


def save_pretrained(model: Any, folder: Any, *, timeout: float = 3600.0, **options: Any) -> None:
    """``model.save_pretrained(folder)`` with all experts. Collective: rank 0 of the group writes, and all ranks wait.

    The files are those of a model that is not shared out: ``from_pretrained`` reads them, for any number of ranks.

    Args:
        timeout: seconds that the other ranks wait for rank 0 to write.
        options: of ``model.save_pretrained``. Where several groups have the same experts, ``is_main_process`` says
            which of them writes.

    Raises: UsageError for a model whose experts are not shared out; SystemError on the other ranks where rank 0 cannot
    write, which raises what ``model.save_pretrained`` raises; otherwise as ``full_state_dict``.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder is {described(folder)}, must be a path")
    require_timeout(timeout=timeout)
    error: Exception | None = None
    with whole(model) as state:  # FP8 models ask for their state_dict once more
        rendezvous = next(share for module in model.modules() if (share := share_of(module)) is not None).rendezvous
        if rendezvous.rank() == 0:
            try:
                _write(model, folder, state_dict=state, **options)
            except Exception as caught:
                error = caught
    told = "saved" if error is None else f"{type(error).__name__}: {error}"[:1000]
    said = rendezvous.allgather(told.encode(), timeout)[0].decode(errors="replace")
    if error is not None:
        raise error
    if said != "saved":
        raise SystemError(f"rank 0 could not save the model in {folder}: {said}")


def _write(model: Any, folder: Any, **options: Any) -> None:
    """transformers by itself writes on rank 0 of the default process group, which may have none of these experts."""
    if os.path.isfile(folder):  # transformers would only log it
        raise NotADirectoryError(f"folder is {str(folder)!r}, a file: must be a folder")
    model.should_save_on_this_rank = bool  # of is_main_process
    try:
        model.save_pretrained(folder, **options)
    finally:
        del model.should_save_on_this_rank


def _to_share_out(model: Any, ranks: int, compute: str | None) -> tuple[dict[str, Any], list[Any]]:
    """The layers, and what runs a rank's own experts in each. Raises what keeps them from being shared out."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {described(model)}, must be a model of transformers")
    layers = _experts_of(model)
    if not layers:
        raise TypeError(f"{type(model).__name__} has no experts that transformers' experts_implementation can replace")
    for name, module in layers.items():
        _check(name, module, ranks)
        if getattr(model.get_submodule(name.rpartition(".")[0]), "base_layer", None) is module:  # as PEFT has it
            raise TypeError(f"{name} has an adapter around it, which is of all its experts: merge it into them before")
    return layers, [_compute_of(module, compute) for module in layers.values()]


def _told(name: str, module: Any) -> str:
    """Of a layer, to the other ranks."""
    return f"{name}: {', '.join(f'{at} {list(each.shape)} {each.dtype}' for at, each in stacks_of(module).items())}"


def _require_same(own: str, every: list[str]) -> None:
    """MismatchError where the layers of the ranks differ, or a rank has none."""
    for rank, theirs in enumerate(every):
        if not theirs.startswith("fine"):
            raise MismatchError(f"rank {rank} cannot share out the experts of its model: {theirs}")
        for mine, other in zip_longest(own.splitlines(), theirs.splitlines(), fillvalue="no layer more"):
            if mine != other:
                raise MismatchError(f"the ranks have different models: rank {rank} has {other}, this one {mine}")


def _experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that ``use_experts_implementation`` of transformers has decorated, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")
    }


def _check(name: str, module: Any, ranks: int) -> None:
    """Raises what keeps a layer from being shared out."""
    if getattr(module, "_is_expert_parallel", False) or hasattr(module, _STATE):
        raise ValueError(f"{name}: its experts are shared out already")
    if not hasattr(type(module).forward, "__wrapped__"):
        raise TypeError(f"{name} is a {type(module).__name__}, whose forward() transformers does not look up")
    stacks = stacks_of(module)
    if is_parametrized(module):
        raise TypeError(
            f"{name} has parametrizations of {', '.join(module.parametrizations)}, whose parts are not known to be "
            "slices for each expert: remove them before"
        )
    for at, each in module.named_parameters():
        if "." in at and each.dim() > 0 and each.shape[0] == module.num_experts > 1:
            raise TypeError(
                f"{name}.{at} has shape {list(each.shape)}, a slice for each expert, but is of a module within: such "
                "modules are not shared out"
            )
    if not isinstance(getattr(module, "down_proj", None), torch.Tensor):
        raise TypeError(f"{name} is a {type(module).__name__} without down_proj: its experts have another form")
    for at, each in stacks.items():
        if type(each.detach()) is not torch.Tensor or each.is_meta:
            raise TypeError(f"{name}.{at} is a {type(each.data).__name__} on {each.device}, must be a loaded tensor")
        if each.dtype == torch.float64 or each.is_complex():
            raise TypeError(f"{name}.{at} is {each.dtype}, and rows of experts are at most torch.float32")
        if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{name}.{at} has hooks, which its share would not have: register them afterwards")
        if each.dim() == 0 or each.shape[0] != module.num_experts:
            raise TypeError(f"{name}.{at} has shape {list(each.shape)}, but there are {module.num_experts} experts")
    if module.num_experts % ranks:
        raise ValueError(f"{name} has {module.num_experts} experts, which do not divide over {ranks} ranks")


def _shapes_of(model: Any, modules: list[Any]) -> dict[str, Any]:
    """Of ``Buffer.for_shapes``: what fits all layers."""
    first = modules[0].down_proj
    most = max(module.num_experts for module in modules)
    dtypes = [module.down_proj.dtype for module in modules]
    embeddings = None
    if hasattr(model, "get_input_embeddings"):
        with contextlib.suppress(NotImplementedError):  # transformers: it knows none
            embeddings = model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    if isinstance(weight, torch.Tensor):  # hidden states begin as these
        dtypes.append(weight.dtype)
    rows = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    return {
        "hidden": max(module.down_proj.shape[2 if module.is_transposed else 1] for module in modules),
        "topk": min(most, MAX_TOPK),
        "num_experts": most,
        "dtype": max(rows, key=lambda dtype: dtype.itemsize, default=torch.bfloat16),
        "device": first.device,
    }


def _compute_of(module: Any, name: str | None) -> Callable[..., torch.Tensor]:
    registry: Mapping[str, Any] = ALL_EXPERTS_FUNCTIONS
    if isinstance(module, FP8Experts):
        registry = ALL_FP8_EXPERTS_FUNCTIONS
    if name is None:
        name = module.config._experts_implementation or "eager"
        name = "eager" if name == NAME else name
    if name == NAME:
        raise ValueError(f'compute is "{NAME}": what runs a rank\'s own experts must be another implementation')
    if name == "eager":
        return inspect.unwrap(type(module).forward)  # type: ignore[no-any-return]
    if name not in registry:
        known = [each for each in registry if each != NAME]
        raise ValueError(f"compute is {name!r}, must be eager or one of {', '.join(known)} for {type(module).__name__}")
    function = registry[name]
    if "process_group" in inspect.signature(function).parameters:
        raise ValueError(f"compute is {name!r}, which sends tokens to other ranks by itself: give another compute=")
    return function  # type: ignore[no-any-return]


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that autocast gives to matrix products, where it is on: rows travel as narrow as they are used."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype) if dtype.itemsize < x.element_size() else x
    return x


def _no_rows(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The experts' rows of none, with gradients that are zero rather than missing."""
    zero = x.sum() * 0
    for each in module.parameters():
        if each.requires_grad and each.is_floating_point():
            zero = zero + each.flatten()[:0].to(x.dtype).sum()
    return x + zero


def _leave_out_of_ddp(model: Any, layers: dict[str, Any], rendezvous: Rendezvous) -> None:
    """DistributedDataParallel makes the tensors of all ranks equal, but those that this attribute names."""
    if rendezvous.size() > 1:
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        ignored |= {f"{name}.{at}" for name, module in layers.items() for at in stacks_of(module)}
        model._ddp_params_and_buffers_to_ignore = sorted(ignored)
