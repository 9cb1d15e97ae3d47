"""An operation and the GEMMs of experts that begin together, as a server has them that works on two batches in turn."""

from __future__ import annotations

import torch

from .measure import Effort, event_times, graph_times
from .operations import Call
from .workload import Shape
from .world import World

INNER = 2048  # of DeepSeek-V3's experts
EFFORT = Effort(warm_up=3, iterations=15, chain=10, host_calls=1)


def experts_call(shape: Shape, device: torch.device) -> Call:
    """Both GEMMs of the experts of a rank, of as many rows each as there are on average."""
    rows = -(-shape.num_ranks * shape.tokens * shape.topk // shape.num_experts)
    hidden, inner = shape.hidden, min(INNER, shape.hidden)
    x, w13, w2 = (
        torch.randn(shape.num_local, *size, device=device, dtype=torch.bfloat16)
        for size in ((rows, hidden), (hidden, 2 * inner), (inner, hidden))
    )
    made = torch.empty(shape.num_local, rows, 2 * inner, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def run() -> None:
        torch.bmm(x, w13, out=made)
        torch.bmm(made[..., :inner], w2, out=out)

    return run


def together(world: World, op: Call, experts: Call) -> Call:
    """Both, the operation on a stream of its own. CPU ranks: one behind the other."""
    if not world.is_cuda:
        return lambda: (op(), experts(), None)[-1]
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            op()
        experts()
        current.wait_stream(side)

    return run


def times(world: World, call: Call) -> list[float]:
    """us of a call, in a captured chain."""
    return (graph_times if world.is_cuda else event_times)(world, call, EFFORT)
