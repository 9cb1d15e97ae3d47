"""Blocks of rows that have all come, in the form in which gemm.py takes those that are still coming: for rows that
another library has brought. Nothing waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nccl_ep.arrivals import Block

# The parts of Arrivals.state that consumers read: csrc/runtime/common/arrivals.h.
_HEADER, _TABLES, _ROWS, _FIRST, _EXPERTS = 16, 5, 1, 2, 3


class Came:
    """
    Args:
        experts, firsts, rows: int32 [blocks] of each block: its expert, its first row, and how many it has, perhaps 0.

    Attributes: as ``nccl_ep.Arrivals`` has them.
    """

    def __init__(
        self, experts: torch.Tensor, firsts: torch.Tensor, rows: torch.Tensor, rows_per_block: int
    ) -> None:  # fmt: skip
        self.blocks, self.rows_per_block = len(rows), rows_per_block
        order_at = _HEADER + (_TABLES * self.blocks + 1) // 2 * 2
        self.state = torch.zeros(order_at + 2 * self.blocks, dtype=torch.int32, device=rows.device)
        self.state[0].fill_(1)  # what words are expected to be
        tables = self.state[_HEADER : _HEADER + _TABLES * self.blocks].view(_TABLES, self.blocks)
        tables[_ROWS], tables[_FIRST], tables[_EXPERTS] = rows, firsts, experts
        # Blocks without rows stand last.
        self.order = self.state[order_at:].view(torch.int64)
        self.order.copy_((rows == 0).to(torch.int8).argsort(stable=True)).add_(1 << 32)
        self.rows, self.first, self.experts = tables[_ROWS], tables[_FIRST], tables[_EXPERTS]

    @staticmethod
    def packed(firsts: torch.Tensor, counts: torch.Tensor, capacity: int, rows_per_block: int) -> Came:
        """Of [capacity, H]. firsts: int32 [L] the first row of each expert, a multiple of rows_per_block, ascending."""
        begins = torch.arange(0, capacity, rows_per_block, dtype=torch.int32, device=counts.device)
        # Of experts that begin at one row the last has it.
        experts = torch.searchsorted(firsts, begins, right=True, out_int32=True) - 1
        rows = ((firsts + counts)[experts.long()] - begins).clamp(0, rows_per_block)
        return Came(experts, begins, rows, rows_per_block)

    @staticmethod
    def by_expert(counts: torch.Tensor, capacity: int, rows_per_block: int) -> Came:
        """Of [L, capacity, H]."""
        begins = torch.arange(0, capacity, rows_per_block, dtype=torch.int32, device=counts.device)
        experts = torch.arange(len(counts), dtype=torch.int32, device=counts.device)[:, None]
        rows = (counts[:, None] - begins).clamp(0, rows_per_block)
        return Came(
            experts.expand_as(rows).flatten(), (experts * capacity + begins).flatten(), rows.flatten(), rows_per_block
        )

    def await_blocks(self) -> Iterator[Block]:
        """Those that have rows, for on_host.py. The host waits."""
        for number in (self.order & 0xFFFFFFFF).tolist():
            if self.rows[number] == 0:
                return
            yield Block(number, *(int(each[number]) for each in (self.first, self.rows, self.experts)))
