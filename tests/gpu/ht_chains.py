"""Chains of high-throughput operations on new data and routing each time, checked on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import nccl_ep
from tests.gpu.chains import HIDDEN, LOCAL_EXPERTS, TOPK, Chain, count_differences, home_sum
from tests.support.harness import synchronize
from tests.support.patience import of_living_ranks

TOKENS = 200  # of a rank: an announced piece of its rows for another has several
# d: a packed dispatch of the next inputs. f: a flat one. h: a cached dispatch of the next x along the last d or f.
# c: a combine of the oldest of these that has none yet, or once more of the last one. s: the last d's or f's weights go
# home. An odd number of operations each, so that the kinds' epochs begin a replay at any parity, together or apart.
HT_CHAINS = ("dcc", "fhcsc", "dfchcsc")
FEW_SMS = 2  # of the longest chain's dispatches: their warps draw most copies by tickets


def rank_sum(
    x: torch.Tensor, ids: torch.Tensor, num_ranks: int, experts: int, domain_size: int | None = None
) -> torch.Tensor:
    """What combine makes of untouched rows of a flat dispatch: x once for each rank with an expert of the token; of
    several domains, a bf16 row each."""
    owner = torch.where(ids >= 0, ids // (experts // num_ranks), -1)
    total, has_total = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(owner[:, :1], dtype=torch.bool)
    size = domain_size or num_ranks
    for first in range(0, num_ranks, size):
        inside, has_inside = torch.zeros_like(total), torch.zeros_like(has_total)
        for rank in range(first, first + size):
            is_here = (owner == rank).any(1, keepdim=True)
            inside = torch.where(is_here, torch.where(has_inside, inside + x.float(), x.float()), inside)
            has_inside |= is_here
        row = inside if size == num_ranks else inside.bfloat16().float()
        total = torch.where(has_inside, torch.where(has_total, total + row, row), total)
        has_total |= has_inside
    return total.bfloat16()


@dataclass
class Sent:
    """Rows that a combine may bring home, from `slot` of the inputs, routed as `route` of them."""

    slot: int
    route: int
    is_flat: bool
    rows: torch.Tensor
    out: nccl_ep.DispatchOutput


class HtChain(Chain):
    """given: dispatches write into outputs of the first run, which lie in the current stream's part of the arena. Else
    a graph's lie elsewhere."""

    fresh = "dfh"
    tokens = TOKENS

    def __init__(self, letters: str, buffer: nccl_ep.Buffer, *, given: bool, seed: int = 0) -> None:
        super().__init__(letters, buffer, seed=seed)
        self._is_given = given
        self._num_sms = FEW_SMS if letters == HT_CHAINS[-1] else 0
        self._outs: dict[int, nccl_ep.DispatchOutput] = {}

    def _send(self, letter: str, slot: int, last: Sent | None) -> Sent:
        if letter == "h":
            assert last is not None
            payload = nccl_ep.dispatch_cached(self.x[slot], last.out.handle, num_sms=self._num_sms)
            return Sent(slot, last.route, last.is_flat, payload.x, last.out)
        out = nccl_ep.dispatch(
            self.x[slot], self.ids[slot], self.weights[slot], buffer=self.buffer, num_experts=self.experts, mode="ht",
            layout="flat" if letter == "f" else "packed", expert_alignment=1 if letter == "f" else 8,
            out=self._outs.get(slot), num_sms=self._num_sms,
        )  # fmt: skip
        if self._is_given:
            self._outs.setdefault(slot, out)
        return Sent(slot, slot, letter == "f", out.x, out)

    def run(self, waits: bool = False) -> None:
        """All operations, then the checks: the elements of what came home that differ are added to ``wrong``.

        waits: for the end of each operation.
        """
        sent: list[Sent] = []
        combined: list[tuple[Sent, torch.Tensor]] = []
        scalars: list[tuple[Sent, torch.Tensor]] = []
        for letter in self.letters:
            if letter in self.fresh:
                sent.append(self._send(letter, len(sent), sent[-1] if sent else None))
            elif letter == "c":
                each = sent[min(len(combined), len(sent) - 1)]
                combined.append((each, nccl_ep.combine(each.rows, each.out.handle)))
            else:
                scalars.append((sent[-1], nccl_ep.combine_weights(sent[-1].out.weights, sent[-1].out.handle)))
            if waits:
                synchronize(self.buffer.device)
        for each, y in combined:
            x, ids, weights = self.x[each.slot], self.ids[each.route], self.weights[each.route]
            ranks = self.buffer.num_ranks
            if each.is_flat:
                want = rank_sum(x, ids, ranks, self.experts, self.buffer.domain_size)
            else:
                want = home_sum(x, ids, weights, ranks, self.experts, self.buffer.domain_size)
            self.wrong.add_(count_differences(y, want))
        for each, values in scalars:
            want = torch.where(self.ids[each.route] >= 0, self.weights[each.route], 0.0)
            self.wrong.add_(count_differences(values, want))
        if waits:
            synchronize(self.buffer.device)


def ht_chain_buffer(group: Any, device: str | torch.device, **options: Any) -> nccl_ep.Buffer:
    """A buffer for chains, with room for all outputs. ``group``: a rendezvous, or None for a world of one rank."""
    ranks = 1 if group is None else group.size()
    output = ranks * TOKENS * TOPK * HIDDEN * 2
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=LOCAL_EXPERTS * ranks, device=device,
        mode="ht", arena_bytes=max(16 * output, 1 << 27) if torch.device(device).type == "cuda" else 8 * output,
        timeout=of_living_ranks(30.0), **options,
    )  # fmt: skip


def replay_ht_graphs(buffer: nccl_ep.Buffer, replays: int, *, given: bool, seed: int = 0) -> tuple[int, float]:
    """At least so many replays, each with new data and routing, of a graph for each of HT_CHAINS.

    Returns how many elements were wrong, of all replays, and the microseconds of a replay with its checks. Fails if
    rows went through the staging rows where they need not, or not where they must.
    """
    wrong, each, seconds = 0, -(-replays // len(HT_CHAINS)), 0.0
    for letters in HT_CHAINS:
        chain = HtChain(letters, buffer, given=given, seed=seed)
        graph = chain.capture()
        staged = buffer.stats()["staged_dispatches"]
        seconds += chain.replay(graph, each)
        staged = buffer.stats()["staged_dispatches"] - staged
        expected = sum(letters.count(letter) for letter in ("h" if given else "dfh"))
        assert staged == each * expected, f"{letters}: {staged} staged dispatches in {each} replays"
        wrong += chain.finish()
    return wrong, seconds / (each * len(HT_CHAINS)) * 1e6
