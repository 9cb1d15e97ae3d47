"""Optimizers of experts that are shared out: their states are saved for all experts, or not at all."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..checks import described
from ..errors import UsageError
from .expert_share import Sharder, Share, share_of, shared_modules

_modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose experts several ranks share out
_replaced = WeakTensorKeyDictionary()  # parameters that these had before
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_sharders: weakref.WeakKeyDictionary[Optimizer, Sharder] = weakref.WeakKeyDictionary()  # where a state_dict is wanted
_hook: Any = None


def watch_optimizers_of(module: torch.nn.Module) -> None:
    """Before an experts module gets its share: optimizers of its parameters are known from their first step on."""
    global _hook
    _modules.add(module)
    for each in module.parameters(recurse=False):
        _replaced[each] = True
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _watch(optimizer))


def sharded_optimizer_state_dict(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``get_optimizer_state_dict(model, optimizer)`` of torch; states of experts are DTensors over the group.

    ``torch.distributed.checkpoint`` saves and loads it, at any number of ranks, and ``set_optimizer_state_dict`` takes
    it. Call it on all ranks.

    Raises: UsageError for a model whose experts are not shared out, and for a state that is not a slice for each
    expert; TypeError where the group is no process group.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    shared_modules(model)  # or it raises
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {described(optimizer)}, must be a torch.optim.Optimizer")
    _watch(optimizer)
    with _served(optimizer):
        return get_optimizer_state_dict(model, optimizer)


@contextlib.contextmanager
def _served(optimizer: Optimizer) -> Iterator[None]:
    _sharders[optimizer] = Sharder("sharded_optimizer_state_dict")
    try:
        yield
    finally:
        del _sharders[optimizer]


def _watch(optimizer: Optimizer) -> None:
    if optimizer in _watched:
        return
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        if each in _replaced and each.requires_grad and each.grad is None:
            raise UsageError(
                f"this {type(optimizer).__name__} was made before use_expert_parallel, and has parameters of experts "
                "that the model no longer has: make it afterwards"
            )
    _refuse_zero(optimizer)
    _watched.add(optimizer)
    optimizer.register_load_state_dict_pre_hook(_take_share)
    if optimizer.state:  # loaded before the first step
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(_put_sharded)


def _refuse_zero(optimizer: Optimizer) -> None:
    """UsageError for torch's ZeroRedundancyOptimizer, whose ranks give one another the parameters that each has
    updated."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    own = {id(each) for module in _modules for each in module.parameters(recurse=False)}
    if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        raise UsageError(
            "a ZeroRedundancyOptimizer would give all ranks the experts of one: give experts that are shared out to an "
            "optimizer of their own"
        )


def _states(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[str, Share, Any, dict[str, Any]]]:
    """Of experts that are shared out: name, share, key in the state_dict, and the state there."""
    known: dict[int, tuple[str, Share]] = {}
    for module in _modules:
        share = share_of(module)
        if share is not None:
            known |= {id(each): (name, share) for name, each in module.named_parameters(recurse=False)}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for each, key in zip(group["params"], saved["params"], strict=False):
            if id(each) in known and key in state_dict["state"]:
                yield *known[id(each)], key, state_dict["state"][key]


def _put_sharded(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Hook of state_dict."""
    sharder = _sharders.get(optimizer)
    for name, share, key, state in list(_states(optimizer, state_dict)):
        if sharder is None:
            raise UsageError(
                f"{name} of this rank has experts {share.first} to {share.first + share.num_local - 1} of "
                f"{share.num_experts}: the optimizer's state_dict would lack the others; call, on all ranks, "
                "sharded_optimizer_state_dict(model, optimizer) of nccl_ep.integrations.transformers"
            )
        sharded = {}
        for part, each in state.items():
            if isinstance(each, torch.Tensor) and each.dim() > 0:
                if each.shape[0] != share.num_local:
                    raise UsageError(
                        f"{part} of {name} has shape {list(each.shape)}, which is no slice for each of "
                        f"{share.num_local} experts: this {type(optimizer).__name__}'s state cannot be shared out"
                    )
                each = sharder(share, f"{part} of {name}", each)
            sharded[part] = each
        state_dict["state"][key] = sharded


def _take_share(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook of load_state_dict: what is of all experts becomes this rank's."""
    taken = dict(state_dict["state"])
    for name, share, key, state in _states(optimizer, state_dict):
        taken[key] = {part: _own(f"{part} of {name}", share, each) for part, each in state.items()}
    return state_dict | {"state": taken}


def _own(name: str, share: Share, given: Any) -> Any:
    if not isinstance(given, torch.Tensor) or given.dim() == 0:
        return given
    own = share.taken_from(given)
    if own is None:
        raise UsageError(
            f"{name} has {given.shape[0]} experts, must have all {share.num_experts}: whose they are cannot be known"
        )
    # A view would keep all experts in memory.
    return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own
