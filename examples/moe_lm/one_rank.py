"""The model without any exchange: all experts in one place, in torch alone. What others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import ALIGNMENT
from .experts import Experts, activate


def one_rank(x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """An exchange (model.Exchange) for a rank that has all experts: they compute one after the other."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(experts.count):
        tokens, choices = (idx == expert).nonzero(as_tuple=True)
        up, down = experts.up[expert].to(x.dtype), experts.down[expert].to(x.dtype)
        rows = activate(x[tokens] @ up) @ down
        total = total.index_add(0, tokens, weights[tokens, choices].unsqueeze(-1) * rows.float())
    return total.to(x.dtype)


class AsServed:
    """What engine.fixed_shape_exchange does on ``num_ranks`` ranks, done by one that has all experts.

    GEMMs have as many rows an expert as there, and sums are made in the library's order (docs/semantics.md): a rank's
    rows of a token in the order of k, then the ranks of a domain, then the domains. Each of these sums is rounded to
    the dtype of x.

    Args:
        max_tokens: of a rank, as the exchange has it. domain_size: ranks that share memory.
        grouped: one GEMM over the rows of all experts; otherwise one over all rows that an expert could get.
    """

    def __init__(self, num_ranks: int, domain_size: int, max_tokens: int, grouped: bool) -> None:
        self.num_ranks, self.domain_size, self.max_tokens, self.grouped = num_ranks, domain_size, max_tokens, grouped

    def __call__(self, x: Tensor, idx: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        topk, local = idx.shape[1], experts.count // self.num_ranks
        chosen = idx.flatten()
        numbers = torch.bincount(chosen + 1, minlength=experts.count + 1)
        choices = torch.argsort(chosen, stable=True)[numbers[0] :]  # without those of no expert, -1
        numbers = numbers[1:]
        if self.grouped:
            room = self.num_ranks * self.max_tokens * min(topk, local) + local * (ALIGNMENT - 1)
            room = -(-room // ALIGNMENT) * ALIGNMENT * self.num_ranks
            taken = -(-numbers // ALIGNMENT) * ALIGNMENT
        else:
            taken = torch.full_like(numbers, self.num_ranks * self.max_tokens)
            room = experts.count * self.num_ranks * self.max_tokens
        ends = taken.cumsum(0)
        # Of the choices in order: each stands behind those of its expert before it, where the expert's rows begin.
        shift = (ends - taken) - (numbers.cumsum(0) - numbers)
        places = torch.arange(len(choices), device=x.device) + shift[chosen[choices]]
        rows = x.new_zeros(room, x.shape[1])
        rows[places] = x[choices // topk]
        if self.grouped:
            results = experts.packed(rows, ends.to(torch.int32))
        else:
            results = experts.batched(rows.view(experts.count, -1, x.shape[1])).flatten(0, 1)
        products = torch.zeros(idx.numel(), x.shape[1], device=x.device)
        products[choices] = weights.flatten()[choices].unsqueeze(-1) * results[places].float()
        return self._sum(products.view(*idx.shape, -1), idx // local, x.dtype)

    def _sum(self, products: Tensor, ranks: Tensor, dtype: torch.dtype) -> Tensor:
        """products [T, K, H] float32, ranks [T, K]: those of the experts. A product that does not count is zero."""
        total = torch.zeros_like(products[:, 0])
        for first in range(0, self.num_ranks, self.domain_size):
            of_domain = torch.zeros_like(total)
            for rank in range(first, first + self.domain_size):
                partial = torch.zeros_like(total)
                for k in range(products.shape[1]):
                    partial += products[:, k].where(ranks[:, k : k + 1] == rank, 0.0)
                of_domain += partial.to(dtype).float()
            total += of_domain.to(dtype).float()
        return total.to(dtype)
