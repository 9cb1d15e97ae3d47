"""What one does without the library: sort the choices by expert, exchange them with torch's all_to_all_single, and sort
again. Every choice travels as a row of its own, and the host waits for the numbers of rows."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .experts import Experts

# Where rows stood among what came, the own choices by expert, rows to and from each rank.
Route: TypeAlias = tuple[Tensor, Tensor, list[int], list[int]]


class _Exchange(torch.autograd.Function):
    """Rows [N, H] to the ranks, ``sent[r]`` of them to rank r, and gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.args = received, sent, group
        came = rows.new_empty(sum(received), rows.shape[1])
        # As bytes: gloo does not know bf16.
        dist.all_to_all_single(came.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent, group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with record_function("baseline.exchange"):
            return _Exchange.apply(grad, *ctx.args), None, None, None


class _Pick(torch.autograd.Function):
    """Row ``order[i] // K`` at i: each token once for every choice of it. Its gradient is a sum in the order of k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = len(x), topk
        return x[order // topk]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        with record_function("baseline.permute"):
            return _place(grad, order, ctx.sizes[0] * ctx.sizes[1]).view(*ctx.sizes, grad.shape[1]).sum(1), None, None


class _Place(torch.autograd.Function):
    """Row i at ``index[i]`` of ``count`` rows; zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return _place(rows, index, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with record_function("baseline.permute"):
            return grad[ctx.saved_tensors[0]], None, None


def _place(rows: Tensor, index: Tensor, count: int) -> Tensor:
    placed = rows.new_empty(count, rows.shape[1]) if len(rows) == count else rows.new_zeros(count, rows.shape[1])
    placed[index] = rows
    return placed


def order_by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """counts [R, L]: rows that came, by (rank, expert). Returns their numbers in the order (expert, rank)."""
    starts = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    place = torch.arange(num_rows, device=counts.device)
    block = torch.searchsorted(ends, place, right=True)
    return starts[block] + place - (ends - lengths)[block]


class AllToAll:
    """``group``: of the ranks that have the experts. The call is that of exchange.NcclEp."""

    name = "all_to_all_single"

    def __init__(self, group: Any, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts
        self.num_ranks = dist.get_world_size(group)

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        rows, ends, route = self.dispatch(x, idx)
        return self.combine(experts.packed(rows, ends), weights, route)

    # A compiler leaves these two alone: the host waits in them.

    @torch.compiler.disable
    def dispatch(self, x: Tensor, idx: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Rows [N, H] expert after expert, the experts' ends int32 [L], and the way back."""
        with record_function("baseline.dispatch"):
            chosen = idx.reshape(-1)
            key = torch.where(chosen < 0, self.num_experts, chosen)  # no choice: behind the others
            order = torch.argsort(key, stable=True)
            counts = key.new_zeros(self.num_experts + 1)
            counts = counts.scatter_add_(0, key, torch.ones_like(key))[:-1].view(self.num_ranks, -1)
            came = torch.empty_like(counts)
            dist.all_to_all_single(came, counts, group=self.group)
            sent, received = torch.stack([counts.sum(1), came.sum(1)]).tolist()  # the host waits
            order = order[: sum(sent)]
            rows = _Exchange.apply(_Pick.apply(x, order, idx.shape[1]), sent, received, self.group)
            index = order_by_expert(came, len(rows))
            places = torch.empty_like(index)
            places[index] = torch.arange(len(index), device=index.device)
            ends = came.sum(0).cumsum(0).to(torch.int32)
            return _Place.apply(rows, places, len(rows)), ends, (index, order, sent, received)

    @torch.compiler.disable
    def combine(self, rows: Tensor, weights: Tensor, route: Route) -> Tensor:
        """rows as dispatch has returned them; their weighted sums at home [T, H]."""
        index, order, sent, received = route
        with record_function("baseline.combine"):
            home = _Exchange.apply(_Place.apply(rows, index, len(rows)), received, sent, self.group)
            choices = _Place.apply(home, order, weights.numel()).view(*weights.shape, rows.shape[1])
            return torch.bmm(weights.to(rows.dtype).unsqueeze(1), choices).squeeze(1)
