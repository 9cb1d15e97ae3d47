"""Experts that move: a balanced placement, the map to copies, and the way of the weights."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nccl_ep
from nccl_ep.placement import (
    ExpertMap,
    Move,
    imbalance,
    logical_maps,
    map_experts,
    move_experts,
    plan_moves,
    rebalance_experts,
)
from nccl_ep.testing import run_ranks
from tests.support.op_checks import UTILS, described, faked
from tests.support.processes import run_processes

# ---- The balancer


def fullest(loads: list[int], placed: list[list[int]]) -> float:
    count = Counter(expert for own in placed for expert in own)
    return max(sum(loads[expert] / count[expert] for expert in own) for own in placed)


def best_of_all(loads: list[int], slots: int, num_ranks: int) -> float:
    """The least load of the fullest rank, of every placement that there is."""
    own = list(itertools.combinations(range(len(loads)), slots))
    every = itertools.combinations_with_replacement(own, num_ranks)
    return min(
        fullest(loads, list(map(list, each)))
        for each in every
        if {expert for part in each for expert in part} == set(range(len(loads)))
    )


SMALL = [
    (4, 2, 2),
    (4, 3, 2),
    (5, 3, 2),
    (6, 3, 2),
    (4, 2, 3),
    (5, 2, 3),
    (6, 2, 3),
    (6, 4, 2),
]  # experts, slots, ranks


def test_small_placements_are_as_good_as_any() -> None:
    """Greedy with swaps: never above 1.2 times the best of all, and the best of all in seven of ten cases."""
    draw = torch.Generator().manual_seed(3)
    best = 0
    cases = [(sizes, seed) for sizes in SMALL for seed in range(6)]
    for (experts, slots, ranks), seed in cases:
        loads = torch.randint(0, 100, (experts,), generator=draw)
        if seed % 2:
            loads = (1000 / (1 + torch.randperm(experts, generator=draw))).long()  # Zipf's law
        placed, _, _ = rebalance_experts(loads[None], slots * ranks, 1, 1, ranks)
        got = fullest(loads.tolist(), placed[0].view(ranks, slots).tolist())
        want = best_of_all(loads.tolist(), slots, ranks)
        assert got <= 1.2 * want, (loads, placed, want)
        best += got <= want * (1 + 1e-12)
    assert best >= 0.7 * len(cases), best


@pytest.mark.parametrize("experts, slots, ranks, nodes", [(64, 9, 8, 1), (64, 9, 8, 2), (16, 16, 8, 4), (12, 5, 6, 3)])
def test_placements_are_whole_and_better(experts: int, slots: int, ranks: int, nodes: int) -> None:
    loads = torch.stack(
        [1000 / (1 + torch.randperm(experts, generator=torch.Generator().manual_seed(i))) for i in (1, 2)]
    )
    placed, places, count = rebalance_experts(loads, slots * ranks, 1, nodes, ranks)
    for layer in range(2):
        by_rank = placed[layer].view(ranks, slots).tolist()
        assert all(len(set(own)) == slots for own in by_rank)  # no expert twice on a rank
        for expert in range(experts):
            own = (placed[layer] == expert).nonzero().flatten().tolist()
            assert own and places[layer, expert].tolist() == own + [-1] * (places.shape[2] - len(own))
            assert count[layer, expert] == len(own)
    one_each = torch.arange(experts).view(1, -1)
    if experts % ranks == 0:
        assert bool((imbalance(loads, placed, ranks) < imbalance(loads, one_each, ranks)).all())
    mean = loads.sum(1) / ranks
    assert bool((imbalance(loads, placed, ranks) <= (loads / count).amax(1) / mean + 1).all())
    again = rebalance_experts(loads.float(), slots * ranks, 1, nodes, ranks)[0]
    assert torch.equal(again, rebalance_experts(loads.float(), slots * ranks, 1, nodes, ranks)[0])


def test_groups_stay_in_a_node() -> None:
    loads = torch.tensor([[90.0, 5, 3, 2, 60, 20, 10, 30, 1, 1, 1, 1, 50, 50, 10, 10]])
    placed, _, _ = rebalance_experts(loads, 24, 4, 2, 4)
    nodes = [{int(expert) // 4 for expert in half} for half in placed[0].view(2, 12)]
    assert sorted(nodes[0] | nodes[1]) == [0, 1, 2, 3] and len(nodes[0]) == len(nodes[1]) == 2
    assert imbalance(loads, placed, 4)[0] < 1.02 * 220 / 172  # the groups of the fuller node have 220 of 344
    # Groups that do not divide over nodes may lie anywhere.
    anywhere, _, _ = rebalance_experts(loads, 24, 1, 2, 4)
    assert imbalance(loads, anywhere, 4)[0] <= imbalance(loads, placed, 4)[0]


def test_no_load_and_one_loaded_expert() -> None:
    placed, _, count = rebalance_experts(torch.zeros(1, 4), 8, 1, 1, 4)
    assert count.tolist() == [[2, 2, 2, 2]] and imbalance(torch.zeros(1, 4), placed, 4).tolist() == [1.0]
    placed, _, count = rebalance_experts(torch.tensor([[0, 0, 7, 0]]), 8, 1, 1, 4)
    assert count[0, 2] == 4 and count.sum() == 8  # never twice on a rank


def test_what_stays_on_a_rank_keeps_its_slot() -> None:
    draw = torch.Generator().manual_seed(5)
    loads = torch.rand(1, 32, generator=draw)
    old, _, _ = rebalance_experts(loads, 40, 1, 1, 8)
    same, _, _ = rebalance_experts(loads, 40, 1, 1, 8, previous=old)
    assert torch.equal(same, old)
    other = loads * (1 + 0.1 * torch.rand(1, 32, generator=draw))
    new, _, _ = rebalance_experts(other, 40, 1, 1, 8, previous=old)
    fresh, _, _ = rebalance_experts(other, 40, 1, 1, 8)
    assert imbalance(other, new, 8) == imbalance(other, fresh, 8)
    assert len(plan_moves(old[0], new[0], 8)) < len(plan_moves(old[0], fresh[0], 8))
    for rank in range(8):
        mine = slice(5 * rank, 5 * rank + 5)
        for slot, expert in enumerate(old[0, mine].tolist()):
            if expert in new[0, mine]:
                assert new[0, 5 * rank + slot] == expert


@pytest.mark.parametrize(
    "weight, numbers, message",
    [
        (torch.ones(4), (4, 1, 1, 2), r"weight has shape \[4\], must be \[layers, experts\]"),
        (-torch.ones(1, 4), (4, 1, 1, 2), "weight has an entry that is negative or not finite"),
        (torch.full((1, 4), torch.nan), (4, 1, 1, 2), "weight has an entry"),
        (torch.ones(1, 4), (3, 1, 1, 3), "num_replicas is 3, must be 4 to 12"),
        (torch.ones(1, 4), (10, 1, 1, 2), "num_replicas is 10, must be 4 to 8: a rank has an expert once"),
        (torch.ones(1, 4), (5, 1, 1, 2), "num_replicas is 5, must be a multiple of num_gpus, 2"),
        (torch.ones(1, 4), (4, 3, 1, 2), "num_groups is 3, must divide the 4 experts"),
        (torch.ones(1, 4), (4, 1, 3, 2), "num_nodes is 3, must divide num_gpus, 2"),
        (torch.ones(1, 4), (4, 0, 1, 2), "num_groups is 0, must be 1 to"),
        (torch.ones(1, 4).to("meta"), (4, 1, 1, 2), "weight is a torch.strided tensor of torch.float32 on meta"),
    ],
)
def test_what_cannot_be_balanced_is_refused(weight: Tensor, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebalance_experts(weight, *numbers)


_NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
TABLE, COUNT = torch.tensor([[0, 3], [1, -1], [2, -1]]), torch.tensor([2, 1, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: rebalance_experts([[1.0]], 4, 1, 1, 2), TypeError, "weight is a list, must be a tensor"),
        (lambda m: rebalance_experts(torch.ones(1, 4), 4.0, 1, 1, 2), TypeError, "num_replicas is 4.0, must be an int"),
        (lambda m: rebalance_experts(torch.ones(1, 4), 4, 1, 1, "2"), TypeError, "num_gpus is '2', must be an integer"),
        (
            lambda m: rebalance_experts(torch.ones(1, 4), 4, 1, 1, 2, previous=m[None].float()), ValueError,
            "previous is torch.float32, must be torch.int64",
        ),
        (lambda m: logical_maps(m.float(), 4), ValueError, "physical_to_logical_map is torch.float32, must be"),
        (lambda m: logical_maps(m, 5), ValueError, r"\[4\], which has no place for each of num_logical_experts, 5"),
        (lambda m: logical_maps(m, "4"), TypeError, "num_logical_experts is '4', must be an integer"),
        (lambda m: imbalance(torch.ones(4), m, 3), ValueError, "num_gpus is 3, must divide the 4 physical experts"),
        (lambda m: imbalance(torch.ones(3), m, 2), ValueError, "numbers of no expert, must be -1 to 2"),
        (lambda m: map_experts([[0]], TABLE, COUNT, rank=0), TypeError, "topk_idx is a list, must be a tensor"),
        (lambda m: map_experts(m[None], TABLE, COUNT, rank="0"), TypeError, "rank is '0', must be an integer"),
        (lambda m: ExpertMap(m[None], 4, rank=0), ValueError, r"has shape \[1, 4\], must be \[physical experts\]"),
        (lambda m: ExpertMap(m, 4, rank=-1), ValueError, "rank is -1, must be 0 to"),
        (lambda m: ExpertMap(m, 4, rank=0, device="gpu"), ValueError, "device is 'gpu', must be"),
        (lambda m: ExpertMap(m, 4, rank=0).set([0, 1, 2, 3]), TypeError, "physical_to_logical_map is a list, must be"),
        (lambda m: plan_moves(m, m.float(), 2), ValueError, "new is torch.float32, must be torch.int64"),
        (lambda m: plan_moves(m, m, 0), ValueError, "num_gpus is 0, must be 1 to"),
        (lambda m: plan_moves(m, _NESTED, 2), ValueError, "new is a torch.jagged tensor .*: must be strided"),
        (lambda m: imbalance(m.to("meta"), m, 2), ValueError, "weight is a torch.strided tensor .* on meta: must be"),
        (lambda m: imbalance(m.float()[None].to_sparse(), m, 2), ValueError, "weight is a torch.sparse_coo tensor"),
        (lambda m: map_experts(m[None], TABLE, COUNT, rank=None), TypeError, "rank is None, must be an integer"),
        (lambda m: map_experts(m[None], TABLE, COUNT, rank=1 << 70), ValueError, "rank is 11805916207174113"),
        (
            lambda m: map_experts(m[None], TABLE, COUNT, rank=0, load=torch.ones(3, requires_grad=True)), ValueError,
            "load requires a gradient",
        ),
        (lambda m: move_experts([], [m], 3), TypeError, "group is 3, must be a torch process group"),
        (lambda m: move_experts([], [m]), nccl_ep.UsageError, "torch.distributed is not initialized"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(torch.arange(4))
    assert caught.type is error


def test_the_imbalance_of_each_layer_under_one_placement() -> None:
    loads = torch.tensor([[1.0, 1, 1, 1], [3, 1, 0, 0]])
    assert imbalance(loads, torch.arange(4)[None], 2).tolist() == [1.0, 2.0]
    assert imbalance(loads[:0], torch.arange(4)[None], 2).shape == (0,)


def test_an_expert_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="physical_to_logical_map has no place for expert 1"):
        logical_maps(torch.tensor([0, 2, 0, -1]), 3)
    with pytest.raises(ValueError, match="physical_to_logical_map has 3 at 1, must be -1 to 2"):
        logical_maps(torch.tensor([0, 3, 1, 2]), 3)
    with pytest.raises(ValueError, match=r"previous has shape \[1, 4\], must be \[1, 8\]"):
        rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, previous=torch.zeros(1, 4))


# ---- The map


def expected(ids: Tensor, placed: list[int], rank: int) -> list[list[int]]:
    copies: dict[int, list[int]] = {}
    for place, expert in enumerate(placed):
        copies.setdefault(expert, []).append(place)
    return [
        [-1 if expert < 0 else copies[expert][(token + rank) % len(copies[expert])] for expert in row]
        for token, row in enumerate(ids.tolist())
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_choices_are_mapped_and_counted(dtype: torch.dtype) -> None:
    placed = [0, 1, 2, 3, 1, -1, 1, 0]
    ids = torch.randint(-1, 4, (50, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    for rank in (0, 1, 5):
        experts = ExpertMap(torch.tensor(placed), 4, rank=rank)
        for times in (1, 2):
            mapped = experts(ids)
            assert mapped.dtype == dtype and mapped.tolist() == expected(ids, placed, rank)
            assert experts.load.tolist() == [times * int((ids == expert).sum()) for expert in range(4)]
        transposed = ids.t().contiguous().t()
        assert torch.equal(experts(transposed), mapped) and experts(ids[:0]).shape == (0, 3)
        experts.clear_load()
        assert not experts.load.any()


def test_copies_share_tokens_alike() -> None:
    """Of a rank's tokens to within one, and of a token on each rank, too."""
    placed, ranks = torch.tensor([0, 1, 0, 2, 0, 3]), 6
    maps = [ExpertMap(placed, 4, rank=rank) for rank in range(ranks)]
    ids = torch.zeros(32, 1, dtype=torch.int64)
    for experts in maps:
        used = torch.bincount(experts(ids).flatten(), minlength=6)
        assert used[[0, 2, 4]].max() - used[[0, 2, 4]].min() <= 1 and used.sum() == 32
    used = torch.bincount(torch.cat([experts(ids[:1]) for experts in maps]).flatten(), minlength=6)
    assert used.tolist() == [2, 0, 2, 0, 2, 0]


def test_another_placement_comes_in_place() -> None:
    experts = ExpertMap(torch.tensor([0, 1, 2, 0]), 3, rank=0)
    pointers = experts.logical_to_physical_map.data_ptr(), experts.logical_count.data_ptr()
    experts.set(torch.tensor([1, 1, 2, 0]))
    ids = torch.tensor([[0, 1], [1, 2]])
    assert experts(ids).tolist() == [[3, 0], [1, 2]]
    assert (experts.logical_to_physical_map.data_ptr(), experts.logical_count.data_ptr()) == pointers
    with pytest.raises(ValueError, match=r"physical_to_logical_map has shape \[3\], must be \[4\]"):
        experts.set(torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    "ids, table, count, rank, load, message",
    [
        (
            torch.tensor([[0, 3]]),
            TABLE,
            COUNT,
            0,
            None,
            r"topk_idx\[0, 1\] is 3, must be -1 or a logical expert, 0 to 2",
        ),
        (torch.tensor([[-2, 0]]), TABLE, COUNT, 0, None, r"topk_idx\[0, 0\] is -2, must be -1 or a logical expert"),
        (torch.tensor([[0, 1]]), TABLE, COUNT * 0, 0, None, r"logical_count\[0\] is 0, must be 1 to 2"),
        (torch.tensor([[0, 1]]), TABLE, COUNT * 3, 0, None, r"logical_count\[0\] is 6, must be 1 to 2"),
        (torch.tensor([0, 1]), TABLE, COUNT, 0, None, "topk_idx has 1 dimensions"),
        (torch.ones(1, 2), TABLE, COUNT, 0, None, "topk_idx"),
        (torch.tensor([[0]]), TABLE.int(), COUNT, 0, None, "logical_to_physical_map"),
        (torch.tensor([[0]]), TABLE, COUNT[:2], 0, None, "logical_count"),
        (torch.tensor([[0]]), TABLE, COUNT, -1, None, "rank is -1, must be 0 to"),
        (torch.tensor([[0]]), TABLE, COUNT, 0, torch.zeros(2, dtype=torch.int64), "load"),
        (torch.tensor([[0]]), TABLE, COUNT, 0, COUNT, "load"),
    ],
)
def test_what_cannot_be_mapped_is_refused(
    ids: Tensor, table: Tensor, count: Tensor, rank: int, load: Tensor | None, message: str
) -> None:
    before = COUNT.clone()
    with pytest.raises(ValueError, match=message):
        map_experts(ids, table, count, rank=rank, load=load)
    assert torch.equal(COUNT, before)


def test_opcheck_passes_for_the_map() -> None:
    args = (torch.tensor([[0, 2], [1, -1]]), TABLE, COUNT, 1, torch.zeros(3, dtype=torch.int64))
    for given in (args, (args[0].int(), *args[1:4], None)):
        assert faked("map_experts", given) == described(torch.ops.nccl_ep.map_experts(*given))
        torch.library.opcheck(torch.ops.nccl_ep.map_experts.default, given, test_utils=UTILS)


def test_a_compiled_map_counts_and_follows_a_new_placement() -> None:
    experts = ExpertMap(torch.tensor([0, 1, 2, 0]), 3, rank=1)
    compiled = torch.compile(lambda ids: experts(ids) + 0, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[0, 1], [0, 2], [-1, 0]])
    assert torch.equal(compiled(ids), torch.tensor([[3, 1], [0, 2], [-1, 3]]))
    experts.set(torch.tensor([1, 1, 2, 0]))
    assert torch.equal(compiled(ids), torch.tensor([[3, 1], [3, 2], [-1, 3]]))
    assert experts.load.tolist() == [6, 2, 2]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_moved_world_gives_the_same_sums(mode: Any) -> None:
    """Each token's experts are those of one rank, whichever copies it meets; top-2 of float32 has the same bits."""
    ranks, experts, hidden, tokens = 3, 6, 16, 12
    factors = torch.rand(experts, generator=torch.Generator().manual_seed(2))
    loads = torch.tensor([[9, 1, 1, 5, 2, 1]])
    placed = rebalance_experts(loads, 9, 1, 1, ranks)[0][0]

    def body(group: Any) -> tuple[Tensor, Tensor, list[int]]:
        rank = group.rank()
        draw = torch.Generator().manual_seed(rank)
        x, ids = torch.rand(tokens, hidden, generator=draw), torch.rand(tokens, experts, generator=draw).topk(2).indices
        found = []
        mapped = ExpertMap(placed, experts, rank=rank)
        for own, idx in ((torch.arange(experts), ids), (placed, mapped(ids))):
            with nccl_ep.Buffer.for_shapes(
                group, max_tokens=tokens, hidden=hidden, topk=2, num_experts=len(own), dtype=x.dtype, mode=mode
            ) as buffer:
                capacity = ranks * tokens
                out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=len(own), mode=mode, capacity=capacity)
                mine = factors[own.view(ranks, -1)[rank]]
                found.append(nccl_ep.combine(out.x * mine[:, None, None], out.handle))
        return found[0], found[1], mapped.load.tolist()

    for before, after, load in run_ranks(ranks, body):
        assert torch.equal(before, after) and sum(load) == 2 * tokens


# ---- Moves


def apply(moves: list[Move], old: list[int], num_ranks: int) -> list[int]:
    slots = len(old) // num_ranks
    new = list(old)
    for each in moves:
        assert old[each.from_rank * slots + each.from_slot] == each.expert
        new[each.to_rank * slots + each.to_slot] = each.expert
    return new


def test_moves_make_the_new_placement_and_come_from_near() -> None:
    draw = torch.Generator().manual_seed(8)
    old = torch.cat([torch.arange(8), torch.full((4,), -1)])[torch.randperm(12, generator=draw)]
    for seed in range(20):
        loads = torch.rand(1, 8, generator=draw)
        new = rebalance_experts(loads, 12, 1, 2, 4, previous=old[None] if seed % 2 else None)[0][0]
        moves = plan_moves(old, new, 4, 2)
        assert apply(moves, old.tolist(), 4) == new.tolist()
        assert len(moves) == int((old != new).sum())
        for each in moves:
            holders = {place // 3 for place in (old == each.expert).nonzero().flatten().tolist()}
            if each.to_rank in holders:
                assert each.from_rank == each.to_rank
            elif any(rank // 2 == each.to_rank // 2 for rank in holders):
                assert each.from_rank // 2 == each.to_rank // 2
        old = new


@pytest.mark.parametrize(
    "old, new, numbers, message",
    [
        ([0, 1], [0, 1, 2], (1,), r"old has shape \[2\], new \[3\]"),
        ([0, 1, 2], [0, 1, 2], (2,), "num_gpus is 2, must divide the 3 physical experts"),
        ([0, 1], [0, 1], (2, 3), "num_nodes is 3, must divide num_gpus, 2"),
        ([0, 1], [0, 2], (2,), "new has expert 2 at 1, old has it nowhere"),
    ],
)
def test_moves_that_cannot_be_are_refused(old: list[int], new: list[int], numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_moves(torch.tensor(old), torch.tensor(new), *numbers)


def move_on_each(rank: int) -> list[bool]:
    group = dist.new_group([2, 0, 1])  # in another order, and so with other numbers
    me, draw, found = dist.get_rank(group), torch.Generator().manual_seed(4), []
    old = torch.tensor([0, 1, -1, 2, 3, -1, 4, 5, -1])
    weights = torch.rand(6, 5, 2, generator=draw)

    def held(placed: Tensor) -> list[Tensor]:
        own = weights[placed.view(3, 3)[me].clamp(min=0)]
        return [own.clone(), own.to(torch.bfloat16), (own[:, 0, 0] * 100).to(torch.float8_e4m3fn)]

    tensors = held(old)
    tensors[0].requires_grad_()
    for _ in range(4):
        new = rebalance_experts(torch.rand(1, 6, generator=draw), 9, 1, 1, 3)[0][0]
        move_experts(plan_moves(old, new, 3), tensors, group)
        found += [
            torch.equal(mine.view(torch.uint8), want.view(torch.uint8))
            for mine, want in zip([each.detach() for each in tensors], held(new), strict=True)
        ]
        old = new
    for bad, text in (
        (tensors[0].detach().mT, "must be contiguous"),
        (tensors[0][:1], "has 1 slots, a move needs slot 2"),
    ):
        try:
            move_experts([Move(0, me, 2, me, 0)], [bad], group)
        except ValueError as error:
            found.append(text in str(error))
    mine, wrong = torch.ones(3, 2), Move(0, 0, 0, 1, 3)
    for moves, given, texts in (  # what one rank cannot do, all refuse
        ([Move(0, 0, 0, 1, 1)], [mine.tolist() if me == 1 else mine], ("rank 1: tensors[0] is a list", "is a list")),
        ([wrong], [mine], ("rank 1: tensors[0] has 3 slots, a move needs slot 3", "tensors[0] has 3 slots")),
        ([Move(0, 0, 0, 1, me)], [mine], ("moves[0] is Move(", "moves[0] is Move(")),
        ([Move(0, 0, 0, 1, 1)], [mine] * (2 + me % 2), ("tensors[2] is", "tensors[2] is")),
        ([Move(0, 0, 0, 3, 0)], [mine], ("moves[0].to_rank is 3, must be 0 to 2",) * 2),
    ):
        try:
            move_experts(moves, given, group)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            found.append(texts[me == 1] in str(error))
    return found


def test_weights_arrive(tmp_path: Path) -> None:
    for found in run_processes(3, move_on_each, tmp_path):
        assert found == [True] * 19
