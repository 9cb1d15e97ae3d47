"""Which rank has which experts, and how many times: from their load, the same on all ranks that know it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..checks import MAX_INT32, require_tensors, require_within

_SWAPS = 8  # of a rank, at most, on average: each makes the fullest rank less full


def rebalance_experts(
    weight: torch.Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    previous: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the loaded experts, and a place for each. Deterministic; nothing is sent.

    The expert with the most load a copy gets the next copy. The copy with the most load goes to the rank with the
    least, of equal ones to that of the node with the least. Then places are swapped as long as the fullest rank gains.
    A rank has an expert once.

    Args:
        weight: [layers, E] of any dtype and device: the load of each logical expert, finite and 0 or more.
        num_replicas: P, physical experts of all ranks: at least E, a multiple of ``num_gpus``, at most E * num_gpus.
        num_groups: of experts that a router chooses together, E a multiple of it. If it is a multiple of ``num_nodes``,
            each group stays in one node, and each node has as many groups. Otherwise any expert may lie anywhere.
        num_nodes: of which each has ``num_gpus / num_nodes`` ranks, one after another.
        num_gpus: R, ranks.
        previous: int64 [layers, P], a ``physical_to_logical_map``, or None. Experts that stay on a rank keep their
            slots, and ranks of a node take the part that is most like what they have.

    Returns:
        physical_to_logical_map: int64 [layers, P]; logical_to_physical_map: int64 [layers, E, P - E + 1], -1 where
        there is no copy more; expert_count: int64 [layers, E] copies. All on the CPU.

    Raises:
        ValueError: with the argument's name and value.
    """
    _check(weight, num_replicas, num_groups, num_nodes, num_gpus)
    layers, experts = weight.shape
    if previous is not None:
        require_plain(previous=previous)
        if tuple(previous.shape) != (layers, num_replicas):
            raise ValueError(f"previous has shape {list(previous.shape)}, must be [{layers}, {num_replicas}]")
        require_whole_numbers(previous=previous)
    slots = num_replicas // num_gpus
    before = [None] * layers if previous is None else previous.tolist()
    placed = []
    for loads, old in zip(weight.double().tolist(), before, strict=True):
        ranks: list[list[int]] = []
        for part, gpus, nodes in _parts(loads, num_groups, num_nodes, num_gpus):
            made = _place([loads[expert] for expert in part], slots, gpus, nodes)
            ranks += [[part[expert] for expert in each] for each in made]
        placed.append(_keep_places(ranks, old, slots, num_gpus // num_nodes))
    physical_to_logical_map = torch.tensor(placed, dtype=torch.int64).view(layers, num_replicas)
    return physical_to_logical_map, *logical_maps(physical_to_logical_map, experts)


def logical_maps(physical_to_logical_map: torch.Tensor, num_logical_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies of each expert, from the expert in each place.

    Args:
        physical_to_logical_map: int64 [.., P], -1 for an empty place. num_logical_experts: E.

    Returns:
        logical_to_physical_map: int64 [.., E, P - E + 1], the places in their order, then -1; expert_count: int64
        [.., E]. Shapes do not depend on the placement: a captured graph can have the next one written over it.

    Raises:
        ValueError: for an expert that does not exist, or that has no place.
    """
    require_whole_numbers(physical_to_logical_map=physical_to_logical_map)
    shape = physical_to_logical_map.shape
    if not shape:
        raise ValueError("physical_to_logical_map has shape [], must be [.., physical experts]")
    require_within(1, MAX_INT32, num_logical_experts=num_logical_experts)
    if shape[-1] < num_logical_experts:
        raise ValueError(
            f"physical_to_logical_map has shape {list(shape)}, which has no place for each of num_logical_experts, "
            f"{num_logical_experts}"
        )
    width = shape[-1] - num_logical_experts + 1
    maps, counts = [], []
    for placed in physical_to_logical_map.reshape(-1, shape[-1]).tolist():
        places: list[list[int]] = [[] for _ in range(num_logical_experts)]
        for place, expert in enumerate(placed):
            if not -1 <= expert < num_logical_experts:
                raise ValueError(
                    f"physical_to_logical_map has {expert} at {place}, must be -1 to {num_logical_experts - 1}"
                )
            if expert >= 0:
                places[expert].append(place)
        for expert, own in enumerate(places):
            if not own:
                raise ValueError(f"physical_to_logical_map has no place for expert {expert}")
        maps.append([own + [-1] * (width - len(own)) for own in places])
        counts.append([len(own) for own in places])
    new = torch.tensor(maps, dtype=torch.int64).view(*shape[:-1], num_logical_experts, width)
    return new, torch.tensor(counts, dtype=torch.int64).view(*shape[:-1], num_logical_experts)


def imbalance(weight: torch.Tensor, physical_to_logical_map: torch.Tensor, num_gpus: int) -> torch.Tensor:
    """float64 [..]: the load of the fullest rank over the mean; 1 is best. Copies of an expert share its load alike.

    weight: [.., E]. physical_to_logical_map: int64 [.., P], P a multiple of ``num_gpus``, -1 for an empty place; layers
    are broadcast.
    """
    require_plain(weight=weight)
    require_whole_numbers(physical_to_logical_map=physical_to_logical_map)
    require_within(1, MAX_INT32, num_gpus=num_gpus)
    if weight.dim() < 1 or physical_to_logical_map.dim() < 1:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, physical_to_logical_map {list(physical_to_logical_map.shape)}: "
            "both must have a dimension of experts"
        )
    layers = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        weight.shape[:-1], physical_to_logical_map.shape[:-1]
    )
    weight, physical_to_logical_map = weight.expand(*layers, -1), physical_to_logical_map.expand(*layers, -1)
    experts, places = weight.shape[-1], physical_to_logical_map.shape[-1]
    if places % num_gpus:
        raise ValueError(f"num_gpus is {num_gpus}, must divide the {places} physical experts")
    weight, placed = weight.double().cpu(), physical_to_logical_map.cpu()
    if placed.numel() and not -1 <= int(placed.min()) <= int(placed.max()) < experts:
        raise ValueError(f"physical_to_logical_map has numbers of no expert, must be -1 to {experts - 1}")
    is_there = placed >= 0
    index = placed.clamp(min=0)
    count = torch.zeros_like(weight).scatter_add_(-1, index, is_there.double())
    share = torch.where(is_there, (weight / count.clamp(min=1)).gather(-1, index), 0.0)
    ranks = share.view(*share.shape[:-1], num_gpus, places // num_gpus).sum(-1)
    mean = ranks.mean(-1)
    return torch.where(mean > 0, ranks.amax(-1) / mean, 1.0)


def require_whole_numbers(**tensors: torch.Tensor) -> None:
    """ValueError for a tensor that has no integers on a device of its own."""
    require_plain(**tensors)
    for name, each in tensors.items():
        if each.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} is {each.dtype}, must be torch.int64")


def require_plain(**tensors: torch.Tensor) -> None:
    """ValueError for a tensor that has no elements to be read."""
    require_tensors(**tensors)
    for name, each in tensors.items():
        if each.layout != torch.strided or each.is_meta or each.is_nested or each.is_quantized:
            raise ValueError(f"{name} is a {each.layout} tensor of {each.dtype} on {each.device}: must be strided")


def _check(weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    require_plain(weight=weight)
    if weight.is_complex():
        raise ValueError(f"weight is {weight.dtype}, must be of real numbers")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {list(weight.shape)}, must be [layers, experts]")
    weight = weight.double()
    if not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError("weight has an entry that is negative or not finite")
    experts = weight.shape[1]
    require_within(
        1, MAX_INT32, num_replicas=num_replicas, num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus
    )  # fmt: skip
    if experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}, must divide the {experts} experts")
    if num_gpus % num_nodes:
        raise ValueError(f"num_nodes is {num_nodes}, must divide num_gpus, {num_gpus}")
    if num_replicas % num_gpus:
        raise ValueError(f"num_replicas is {num_replicas}, must be a multiple of num_gpus, {num_gpus}")
    # A node that keeps whole groups has its share of experts, and as many ranks for their copies.
    most = experts * (num_gpus // num_nodes if num_groups % num_nodes == 0 else num_gpus)
    if not experts <= num_replicas <= most:
        raise ValueError(f"num_replicas is {num_replicas}, must be {experts} to {most}: a rank has an expert once")


def _parts(
    loads: list[float], num_groups: int, num_nodes: int, num_gpus: int
) -> list[tuple[list[int], int, int]]:  # fmt: skip
    """Experts that stay together, with the ranks and nodes that they have."""
    if num_groups % num_nodes:
        return [(list(range(len(loads))), num_gpus, num_nodes)]
    size = len(loads) // num_groups
    of_group = [sum(loads[group * size : (group + 1) * size]) for group in range(num_groups)]
    bins = _Bins(num_nodes, num_groups // num_nodes, [0] * num_nodes, of_group)
    for group in sorted(range(num_groups), key=lambda each: (-of_group[each], each)):
        bins.add(group)
    bins.refine()
    return [
        ([group * size + i for group in sorted(groups) for i in range(size)], num_gpus // num_nodes, 1)
        for groups in bins.contents
    ]


def _place(loads: list[float], slots: int, num_ranks: int, num_nodes: int) -> list[list[int]]:
    """The experts of each rank."""
    copies = [1] * len(loads)
    waiting = [(-load, 1, expert) for expert, load in enumerate(loads)]  # of equal ones, that with fewer copies
    heapq.heapify(waiting)
    for _ in range(slots * num_ranks - len(loads)):
        _, _, expert = heapq.heappop(waiting)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(waiting, (-loads[expert] / copies[expert], copies[expert], expert))
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    node_of = [rank // (num_ranks // num_nodes) for rank in range(num_ranks)]
    bins = _Bins(num_ranks, slots, node_of, shares)
    for expert in sorted(range(len(loads)), key=lambda each: (-shares[each], each)):
        for _ in range(copies[expert]):
            bins.add(expert)
    bins.refine()
    return bins.contents


@dataclass
class _Bins:
    """Bins of ``room`` items each, no item twice in one. ``shares``: the load of an item."""

    count: int
    room: int
    node_of: Sequence[int]
    shares: Sequence[float]
    contents: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.contents = [[] for _ in range(self.count)]

    def load(self, number: int) -> float:
        return math.fsum(self.shares[item] for item in self.contents[number])

    def add(self, item: int) -> None:
        free = [number for number, own in enumerate(self.contents) if len(own) < self.room]
        allowed = [number for number in free if item not in self.contents[number]]
        if not allowed:
            self._make_room(item, free[0])
            return
        loads = [self.load(number) for number in range(self.count)]
        of_node: dict[int, float] = dict.fromkeys(self.node_of, 0.0)
        for number, load in enumerate(loads):
            of_node[self.node_of[number]] += load
        self.contents[min(allowed, key=lambda each: (loads[each], of_node[self.node_of[each]], each))].append(item)

    def _make_room(self, item: int, free: int) -> None:
        """Every bin with room has the item: a full one without it gives the free one something that it has not got."""
        full = min(
            (number for number, own in enumerate(self.contents) if item not in own),
            key=lambda each: (self.load(each), each),
        )
        given = min(
            (other for other in self.contents[full] if other not in self.contents[free]),
            key=lambda each: (self.shares[each], each),
        )
        self.contents[full].remove(given)
        self.contents[full].append(item)
        self.contents[free].append(given)

    def refine(self) -> None:
        """Swaps an item of the fullest bin for a lighter one of another bin, as long as there is such a swap."""
        for _ in range(_SWAPS * self.count):
            loads = [self.load(number) for number in range(self.count)]
            fullest = max(range(self.count), key=lambda each: (loads[each], -each))
            best, found = loads[fullest], None
            for other, theirs in enumerate(self.contents):
                for give in self.contents[fullest]:
                    for take in theirs:
                        gain = self.shares[give] - self.shares[take]
                        after = max(loads[fullest] - gain, loads[other] + gain)
                        if gain > 0 and after < best and give not in theirs and take not in self.contents[fullest]:
                            best, found = after, (other, give, take)
            if found is None:
                return
            other, give, take = found
            self.contents[fullest].remove(give)
            self.contents[fullest].append(take)
            self.contents[other].remove(take)
            self.contents[other].append(give)


def _keep_places(ranks: list[list[int]], old: list[int] | None, slots: int, gpus_of_node: int) -> list[int]:
    """Experts by place: what is on a rank already keeps its slot there."""
    if old is None:
        return [expert for own in ranks for expert in sorted(own)]
    before = [old[first : first + slots] for first in range(0, len(old), slots)]
    pairs = [
        (-len(set(ranks[part]) & set(before[rank])), rank, part)
        for part in range(len(ranks))
        for rank in range(len(ranks))
        if part // gpus_of_node == rank // gpus_of_node
    ]
    part_of: dict[int, int] = {}
    for _, rank, part in sorted(pairs):
        if rank not in part_of and part not in part_of.values():
            part_of[rank] = part
    placed: list[int] = []
    for rank, had in enumerate(before):
        coming = set(ranks[part_of[rank]])
        own: list[int | None] = []
        for expert in had:
            own.append(expert if expert in coming else None)
            coming.discard(expert)
        rest = iter(sorted(coming))
        placed += [next(rest) if expert is None else expert for expert in own]
    return placed
