"""From one placement to the next: whose weights go where, and their way there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..bootstrap import process_group_of
from ..checks import MAX_INT32, described, require_tensors, require_within
from ..errors import UsageError
from .balancing import require_whole_numbers


class Move(NamedTuple):
    """The weights of a logical expert, from a slot of a rank to a slot of a rank: of another one, or the same."""

    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int


def plan_moves(old: torch.Tensor, new: torch.Tensor, num_gpus: int, num_nodes: int = 1) -> list[Move]:
    """What must move so that a placement becomes another: one move for each place whose expert changes.

    A copy comes from the same rank if that has one, or from the same node, of equal ones from the rank that has sent
    least. Deterministic. What a slot held is gone only when all moves are done (``move_experts``).

    Args:
        old, new: int64 [P], ``physical_to_logical_map`` of a layer; -1 for an empty place, to which nothing comes.
        num_gpus: R, which divides P. num_nodes: divides R.

    Raises:
        ValueError: for shapes that do not fit, and for an expert of ``new`` that ``old`` has not got.
    """
    require_whole_numbers(old=old, new=new)
    require_within(1, MAX_INT32, num_gpus=num_gpus, num_nodes=num_nodes)
    if old.dim() != 1 or old.shape != new.shape:
        raise ValueError(f"old has shape {list(old.shape)}, new {list(new.shape)}: both must be [physical experts]")
    if len(old) % num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, must divide the {len(old)} physical experts")
    if num_gpus % num_nodes:
        raise ValueError(f"num_nodes is {num_nodes}, must divide num_gpus, {num_gpus}")
    slots, gpus_of_node = len(old) // num_gpus, num_gpus // num_nodes
    before, after = old.tolist(), new.tolist()
    holders: dict[int, list[int]] = {}
    for place, expert in enumerate(before):
        holders.setdefault(expert, []).append(place)
    sent = [0] * num_gpus
    moves = []
    for place, expert in enumerate(after):
        if expert in (-1, before[place]):
            continue
        if expert not in holders:
            raise ValueError(f"new has expert {expert} at {place}, old has it nowhere")
        rank = place // slots

        def cost(source: int, rank: int = rank) -> tuple[bool, bool, int, int]:
            other = source // slots
            return other != rank, other // gpus_of_node != rank // gpus_of_node, sent[other], source

        source = min(holders[expert], key=cost)
        sent[source // slots] += source // slots != rank
        moves.append(Move(expert, source // slots, source % slots, rank, place % slots))
    return moves


@torch.no_grad()
def move_experts(moves: Sequence[Move], tensors: Sequence[torch.Tensor], group: Any = None) -> None:
    """Moves weights in place. Collective: all ranks of the group, the same moves, tensors of the same shapes.

    Rows travel as bytes by torch's ``batch_isend_irecv``; on a GPU in the order of the current stream. Beside a tensor
    there is memory for what comes to this rank, one tensor at a time.

    Args:
        moves: of ``plan_moves``. tensors: of this rank, each [S, ..], contiguous, slot by slot; of any dtype: weights,
            biases, scales, states of an optimizer. group: torch's; None for the default one.

    Raises:
        ValueError: for moves or a tensor of any rank that do not fit, and where the ranks disagree: on all ranks,
            before anything is sent. RuntimeError without a process group.
    """
    group = process_group_of(group)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {described(group)}, must be a torch process group that this rank is in, or None")
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialized: call init_process_group, or give a group")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"this process, rank {dist.get_rank()}, is no member of the group")
    moves, tensors = _agreed(moves, tensors, rank, size, group)
    coming = [each for each in moves if each.to_rank == rank]
    for tensor in tensors:
        if any(each.from_rank != each.to_rank for each in moves):  # NCCL's first call wants all ranks
            dist.all_reduce(torch.zeros(1, device=tensor.device), group=group)
        staged = tensor.new_empty((len(coming), *tensor.shape[1:]))
        rows = iter(staged.unbind())
        ops = []
        for each in moves:  # in the same order on both sides
            if each.from_rank == each.to_rank:
                if each.to_rank == rank:
                    next(rows).copy_(tensor[each.from_slot])
            elif each.from_rank == rank:
                ops.append(dist.P2POp(dist.isend, _bytes(tensor[each.from_slot]), _global(each.to_rank, group), group))
            elif each.to_rank == rank:
                ops.append(dist.P2POp(dist.irecv, _bytes(next(rows)), _global(each.from_rank, group), group))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for each, row in zip(coming, staged.unbind(), strict=True):
            tensor[each.to_slot].copy_(row)


def _agreed(
    moves: Sequence[Move], tensors: Sequence[torch.Tensor], rank: int, size: int, group: Any
) -> tuple[list[Move], list[torch.Tensor]]:
    """Raises on all ranks what is wrong on one of them: the others would wait for it."""
    error: Exception | None = None
    given: Any = None
    try:
        given = _checked(moves, tensors, rank, size)
    except (TypeError, ValueError) as caught:
        error = caught
    about = None if given is None else (given[0], [(each.dtype, each.shape[1:]) for each in given[1]])
    found: list[Any] = [(about, None if error is None else str(error))] * size
    if size > 1:
        dist.all_gather_object(found, found[0], group=group)
    if error is not None:
        raise error
    for other, (theirs, text) in enumerate(found):
        if text is not None:
            raise ValueError(f"rank {other}: {text}")
        for name, mine, its in zip(("moves", "tensors"), about, theirs, strict=True):  # type: ignore[arg-type]
            for number, (a, b) in enumerate(itertools.zip_longest(its, mine)):
                if a != b:
                    raise ValueError(f"{name}[{number}] is {a} on rank {other} and {b} on rank {rank}: must be one")
    return given  # type: ignore[no-any-return]


def _checked(
    moves: Sequence[Move], tensors: Sequence[torch.Tensor], rank: int, size: int
) -> tuple[list[Move], list[torch.Tensor]]:
    """Raises what keeps this rank from moving them."""
    if not isinstance(moves, list | tuple) or not all(isinstance(each, tuple) and len(each) == 5 for each in moves):
        raise TypeError(f"moves is {described(moves)}, must be a list of Move, as plan_moves returns it")
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"tensors is {described(tensors)}, must be a list of tensors")
    moves, tensors = [Move(*each) for each in moves], list(tensors)
    for number, move in enumerate(moves):
        for name in ("from_rank", "to_rank"):
            require_within(0, size - 1, **{f"moves[{number}].{name}": getattr(move, name)})
        for name in ("from_slot", "to_slot"):
            require_within(0, MAX_INT32, **{f"moves[{number}].{name}": getattr(move, name)})
    slots = {each.from_slot for each in moves if each.from_rank == rank}
    slots |= {each.to_slot for each in moves if each.to_rank == rank}
    for number, tensor in enumerate(tensors):
        require_tensors(**{f"tensors[{number}]": tensor})
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.dim() < 1:
            raise ValueError(f"tensors[{number}] has shape {list(tensor.shape)}, must be contiguous, slot by slot")
        if slots and max(slots) >= len(tensor):
            raise ValueError(f"tensors[{number}] has {len(tensor)} slots, a move needs slot {max(slots)}")
    return moves, tensors


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return row.reshape(-1).view(torch.uint8)


def _global(rank: int, group: Any) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
