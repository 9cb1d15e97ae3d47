"""Rows by token, as some libraries give them, in the order of experts and back: what a user of theirs has to do.
Nothing waits for the GPU. There the rows are moved by moved_rows.py, which leaves out those that do not exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class ExpertOrder:
    """
    Args:
        ids: [N, K] of local experts; negative ones are no choice.
        capacity: rows in the order of experts. alignment: of each expert's first one. Choices past the capacity are
            left out: ``ends`` tells.

    Attributes:
        counts, firsts: int32 [L] rows of each expert, and the first of them. ends: int32 [L] aligned, for a grouped
            GEMM.
        source: int32 [capacity] the token of each row, -1: there is none. places: int32 [N, K] the row of each choice,
            or -1.
    """

    def __init__(self, ids: torch.Tensor, local: int, capacity: int, alignment: int) -> None:
        tokens, topk = ids.shape
        chosen = ids.reshape(-1)
        keys = torch.where(chosen < 0, local, chosen).int()
        ordered, choices = torch.sort(keys, stable=True)
        counts = torch.zeros(local + 1, dtype=torch.int32, device=ids.device)  # bincount would wait for the GPU
        counts.scatter_add_(0, keys.long(), torch.ones_like(keys))
        ends = ((counts[:local] + (alignment - 1)) // alignment * alignment).cumsum(0, dtype=torch.int32)
        first_choices = counts.cumsum(0, dtype=torch.int32) - counts
        firsts = torch.cat([ends.new_zeros(1), ends])  # the last is that of no expert
        of_row = ordered.long()
        rows = torch.arange(len(ordered), dtype=torch.int32, device=ids.device) + (firsts - first_choices)[of_row]
        is_there = (ordered < local) & (rows < capacity)
        self.counts, self.firsts, self.ends = counts[:local], firsts[:local], ends
        places = torch.empty_like(rows).scatter_(0, choices, torch.where(is_there, rows, -1))
        source = torch.full((capacity + 1,), -1, dtype=torch.int32, device=ids.device)
        source.scatter_(0, torch.where(is_there, rows, capacity).long(), (choices // topk).int())
        self.places, self.source = places.view(tokens, topk), source[:capacity]

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, H] -> [capacity, H]. Rows that do not exist are unspecified."""
        if rows.device.type == "cpu":
            return F.pad(rows, (0, 0, 0, 1))[self.source.long()]  # the last is of those that do not exist
        from examples.overlapped_moe.moved_rows import gather

        return gather(rows, self.source)

    def add(self, rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """rows [capacity, H], weights [N, K] -> out [N, H]: sums in float32, 0 where a token has no choice here."""
        if rows.device.type == "cpu":
            is_there = (self.places >= 0)[..., None]
            choices = torch.where(is_there, rows[self.places.long()].float(), 0)
            return out.copy_((choices * torch.where(is_there, weights[..., None], 0)).sum(1))
        from examples.overlapped_moe.moved_rows import add

        return add(rows, self.places, weights, out)
