"""The windows of a buffer: how they are made, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import _C
from .bootstrap import Rendezvous, StoreGroup, meeting_of
from .devices import free_memory
from .marks import mark_seq
from .room import HtSizes, LlSizes

_ADDED_UP = (  # of stats()
    "ht_dispatches", "ht_combines", "staged_dispatches", "staged_combines", "dropped_rows", "invalid_ids",
    "window_bytes", "arena_bytes", "arena_free_bytes",
)  # fmt: skip


class Windows:
    """The first, and those that DeepEP's normal mode has needed since.

    The others stay when one is added: graphs may have been captured on them, and low latency uses the first.

    Args:
        rendezvous: how the ranks meet to make one. claims: of ``_C.GroupConfig``, the same for all windows.
        masks_late_ranks: in low latency, so of the first alone.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, masks_late_ranks: bool, claims: dict[str, Any]
    ) -> None:
        self._rendezvous, self._device, self._claims = rendezvous, device, claims
        self._masks_late_ranks = masks_late_ranks
        self._all: list[_C.Group] = []
        self.seqs: list[torch.Tensor] = []  # by which ops find them (csrc/torch/ops/registry.h)
        self.memory_total = 0  # bytes of the device that went when they were made

    def __iter__(self) -> Iterator[_C.Group]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(
        self,
        name: str,
        sizes: LlSizes,
        ht_sizes: HtSizes | None,
        timeout: float,
        *,
        max_experts: int = 0,
        made_with: str = "",
        join: bool = False,
    ) -> _C.Group:
        """Collective. Where it raises, no window is added."""
        free = free_memory(self._device)
        config = _C.GroupConfig(
            device_index=-1 if self._device.type == "cpu" else self._device.index,
            tagged_bytes=sizes.routing,
            dispatch_row_bytes=sizes.dispatched,
            combine_row_bytes=sizes.combined,
            unweighted_row_bytes=sizes.unweighted,
            timeout_seconds=timeout,
            ht_sizes=ht_sizes or (0,) * 6,
            masks_late_ranks=self._masks_late_ranks and not self._all,
            max_experts=max_experts,
            made_with=made_with,
            **self._claims,
        )
        made = (_join_group if join else _make_group)(name, self._rendezvous, config, timeout)
        self.memory_total += free - free_memory(self._device)
        self.seqs.append(_new_seq(made, self._rendezvous.size(), self._device))
        self._all.append(made)
        return made

    def stats(self) -> dict[str, Any]:
        """Of the first, with those numbers of the others that add up. "grown": how many others there are."""
        first, *further = (window.stats() for window in self._all)
        stats = dict(first) | {"grown": len(further)}
        for each in further:
            stats |= {name: stats[name] + each[name] for name in _ADDED_UP}
        return stats

    def wire_bytes(self) -> dict[str, list[int]]:
        total, *further = (dict(window.wire_bytes()) for window in self._all)
        for each in further:
            total = {name: [a + b for a, b in zip(total[name], each[name], strict=True)] for name in total}
        return total


def _make_group(name: str, rendezvous: Rendezvous, config: _C.GroupConfig, timeout: float) -> _C.Group:
    with meeting_of(rendezvous) as allgather:
        return _C.Group(name, rendezvous.rank(), rendezvous.size(), lambda mine: allgather(mine, timeout), config, [])


def _join_group(name: str, rendezvous: Rendezvous, config: _C.GroupConfig, timeout: float) -> _C.Group:
    assert isinstance(rendezvous, StoreGroup)
    rank, size = rendezvous.rank(), rendezvous.size()
    with rendezvous.meet_newcomer(rank, (), timeout) as (allgather, seats):
        return _C.Group(name, rank, size, lambda mine: allgather(mine, timeout), config, seats)


def _new_seq(window: _C.Group, num_ranks: int, device: torch.device) -> torch.Tensor:
    """The tensor of a window that every op takes, and claims to change: that keeps a compiler from reordering ops.

    Its shape says which window it is. To a compiler the first length is a symbol, so that what it has made for one
    buffer serves all of the same number of ranks.
    """
    with torch.inference_mode(False):  # a buffer that is made there can be used outside
        seq = torch.empty((window.id(), num_ranks, window.domain_size(), 0), dtype=torch.int64, device=device)
    mark_seq(seq)
    return seq
