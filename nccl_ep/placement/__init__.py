"""Experts that move: physical experts, which ranks have, of logical ones, which routers know.

With R ranks of S slots there are P = R * S physical experts; p lies in slot p % S of rank p // S. A logical expert has
one or more of them, its copies. Names are those of DeepSeek's EPLB where the meaning is the same. A step of a program:

    idx = experts(topk_idx)                                    # an ExpertMap: one op, which counts the load, too
    out = nccl_ep.dispatch(x, idx, weights, buffer=buffer, num_experts=P)

and, now and then, on all ranks:

    dist.all_reduce(load)                                      # [layers, E] of all layers' maps
    new, _, _ = rebalance_experts(load, P, 1, 1, R, previous=old)
    for layer, experts in enumerate(maps):
        move_experts(plan_moves(old[layer], new[layer], R), weights[layer], group)
        experts.set(new[layer])
"""

from .balancing import imbalance, logical_maps, rebalance_experts
from .mapping import ExpertMap, map_experts
from .moving import Move, move_experts, plan_moves

__all__ = [
    "ExpertMap",
    "Move",
    "imbalance",
    "logical_maps",
    "map_experts",
    "move_experts",
    "plan_moves",
    "rebalance_experts",
]
