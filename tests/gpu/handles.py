"""Handles in device memory that were changed: nobody can look at them before the kernels do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import torch

import nccl_ep
from nccl_ep import _C
from tests.gpu.layers import LAYOUTS, layer, layer_buffer
from tests.ht.harness import LARGE_ARENA
from tests.support.expected import Expected
from tests.support.harness import synchronize
from tests.support.op_checks import number_at

# They may name what there is not.
ODD_NUMBERS = torch.tensor([-(1 << 31), -7, -1, 3, 1 << 20, (1 << 31) - 1], dtype=torch.int32)


def changed_places(group: Any, device: Any, domain_size: int | None = None) -> None:
    """Rows behind the output that a handle names: none is written, read or added."""
    rank, ranks, topk = group.rank(), group.size(), 4
    for layout in ("packed", "expert_major"):
        case = layer(ranks, layout, 95, domain_size=domain_size)
        with layer_buffer(case.case, group, device, arena_bytes=LARGE_ARENA) as buffer:
            out = case.send(buffer)
            hidden, given = case.case.hidden, case.inputs[rank]
            rows = out.x.numel() // hidden
            assert out.handle.slots is not None
            slots = out.handle.slots.cpu().clone()
            received = sum(int((each.topk_idx // 4 == rank).any(1).sum()) for each in case.inputs)
            gone = []
            for places in slots.reshape(-1, slots.shape[-1])[:received, :topk]:
                chosen = torch.nonzero(places >= 0).flatten().tolist()
                if len(chosen) > 1:
                    gone.append(int(places[chosen[-1]]))
                    places[chosen[-1]] = rows + 1
            assert gone
            handle = dataclasses.replace(out.handle, slots=slots.to(buffer.device))
            room = buffer.empty((rows + 4, hidden), out.x.dtype).fill_(7)
            into = nccl_ep.Payload(room[:rows].reshape(out.x.shape), None)
            nccl_ep.dispatch_cached(given.x.to(buffer.device), handle, out=into)
            stays = case.results[rank].valid.clone()
            stays[gone] = False
            assert torch.equal(room[:rows].cpu()[stays], out.x.reshape(rows, hidden).cpu()[stays])
            assert (room[gone] == 7).all() and (room[rows:] == 7).all()
            owner = given.topk_idx // 4
            here = torch.stack([(owner == r).sum(1) for r in range(ranks)])
            want = (here - (here > 1).int()).sum(0).int()
            y = nccl_ep.combine(torch.ones_like(out.x), handle, weights=None)
            assert torch.equal(y.cpu()[:, 0].int(), want), f"{layout} rank {rank}"
            scalars = nccl_ep.combine_weights(torch.ones_like(out.weights), handle)
            assert torch.equal(scalars.cpu().sum(1).int(), want), f"{layout} rank {rank}"
            buffer.check()


def _parts(handle: nccl_ep.Handle) -> list[tuple[str, slice]]:
    """Six of them, each of one of the handle's tensors."""
    if handle.mode == "ll":
        sixth = handle.tensor.numel() // 6
        return [("tensor", slice(i * sixth, (i + 1) * sixth)) for i in range(6)]
    ranks = handle.num_ranks
    # Counts, the experts' counts, ids, rows, slots.
    starts = (
        0,
        *_C.ht_route_parts(
            ranks, int(handle.seq.shape[2]), handle.num_experts, handle.num_tokens, handle.max_tokens, handle.topk
        ),
    )
    return [*(("tensor", slice(*part)) for part in itertools.pairwise(starts)), ("slots", slice(None))]


def num_parts(handle: nccl_ep.Handle) -> int:
    return len(_parts(handle))


def change_handle(handle: nccl_ep.Handle, part: int, made: torch.Generator) -> nccl_ep.Handle:
    """With odd numbers in half of the places of a part."""
    name, place = _parts(handle)[part]
    tensor = getattr(handle, name)
    changed = tensor.cpu().clone()
    numbers = changed.reshape(-1)[place]
    odd = ODD_NUMBERS[torch.randint(len(ODD_NUMBERS), numbers.shape, generator=made)]
    numbers.copy_(torch.where(torch.rand(numbers.shape, generator=made) < 0.5, odd, numbers))
    if name == "tensor":  # all ranks would be told of another dispatch at once
        changed[number_at(handle)] = tensor[number_at(handle)]
    return dataclasses.replace(handle, **{name: changed.to(tensor.device)})


def use_handle(
    step: str, case: Expected, buffer: nccl_ep.Buffer, out: nccl_ep.DispatchOutput, handle: nccl_ep.Handle
) -> None:
    given = case.inputs[buffer.rank]
    if step == "cached":
        nccl_ep.dispatch_cached(given.x.to(buffer.device), handle, zero_padding=True)
    elif step == "scalars":
        nccl_ep.combine_weights(torch.ones_like(out.weights), handle)
    else:
        weights = {"sums": None, "dispatch": "dispatch", "home": given.topk_weights.to(buffer.device)}[step]
        nccl_ep.combine(out.x, handle, weights=weights)
    synchronize(buffer.device)
    buffer.require_usable()


def changed_handles(group: Any, device: Any, domain_size: int | None = None) -> None:
    """Whatever a handle holds, an operation ends, by the deadline if not well, and reaches nothing else."""
    made, turn = torch.Generator().manual_seed(group.rank()), itertools.count()
    for mode, layout in itertools.product(("ht", "ll"), LAYOUTS):
        case = layer(group.size(), layout, 96, domain_size=domain_size)
        steps = ["sums", "scalars"] + ["cached"] * (mode == "ht")
        steps += ["dispatch", "home"] * (layout in ("packed", "expert_major"))
        for step, _ in itertools.product(steps, range(3)):  # a step has half of the parts with each of two layouts
            with layer_buffer(case.case, group, device, mode=mode) as buffer:
                out = case.send(buffer, mode=mode)
                handle = change_handle(out.handle, next(turn) % num_parts(out.handle), made)
                buffer.set_timeout(0.2)
                with contextlib.suppress(nccl_ep.TimeoutError):
                    use_handle(step, case, buffer, out, handle)
        with layer_buffer(case.case, group, device, mode=mode) as buffer:
            case.check_dispatch(case.send(buffer, mode=mode), group.rank())


BODIES = (changed_places, changed_handles)
