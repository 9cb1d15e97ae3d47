"""Save and load with torch.distributed.checkpoint, onto any number of ranks: each expert has a name of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .model import Model


def _named(model: Model, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors shaped as parameters, under the names that they have in a checkpoint."""
    first = model.rank * model.blocks[0].moe.experts.count
    named = {}
    for name, value in values.items():
        if ".experts." in name:
            named |= {f"{name}.{first + own}": part for own, part in enumerate(value.detach())}
        else:
            named[name] = value.detach()
    return named


def _moments(model: Model, optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Of AdamW, by the parameters' names; zeros before the first step."""
    found: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in model.named_parameters():
        state = optimiser.state[parameter]
        if not state:
            on_device = parameter.device if parameter.is_cuda else "cpu"
            state |= {"step": torch.zeros((), dtype=torch.float32, device=on_device)}
            state |= {moment: torch.zeros_like(parameter) for moment in found}
        for moment, values in found.items():
            values[name] = state[moment]
    return found


def _state(model: Model, optimiser: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": _named(model, dict(model.named_parameters()))}
    if optimiser is not None:
        moments = _moments(model, optimiser)
        state["optimiser"] = {moment: _named(model, values) for moment, values in moments.items()}
    return state


def save(folder: str, model: Model, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Collective. ``model``: not the wrapper around it."""
    dcp.save(_state(model, optimiser) | {"step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder: str, model: Model, optimiser: torch.optim.Optimizer | None = None) -> int:
    """Collective. Reads this rank's tensors in place, and returns the number of steps that were made."""
    state = _state(model, optimiser) | {"step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    step = int(state["step"])
    if optimiser is not None:
        for parameter in model.parameters():
            optimiser.state[parameter]["step"].fill_(step)
    return step
