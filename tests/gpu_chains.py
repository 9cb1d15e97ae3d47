"""Operations in a row on new data and routing each time, checked on the device: eagerly, or captured in a graph."""

from __future__ import annotations

import time
from typing import Any

import floor_calls
import torch
from harness import synchronize
from patience import of_living_ranks

import nccl_ep

HIDDEN, TOPK, TOKENS, LOCAL_EXPERTS = 1024, 4, 24, 4
NUM_SMS = (0, 4)  # of combines in turn; on four, a kernel's senders draw tickets for most of what they send
# d: a dispatch of the next inputs. c: a combine of the oldest dispatch that has none yet, or once more of the last one.
# p: a push of the benchmark's floor, a call of dispatch's kind that waits for credits alone.
# An odd number of operations each: the kinds' epochs begin a replay at any parity, together or apart.
CHAINS = ("dcc", "ddccc", "dcddccc")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def home_sum(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_ranks: int, experts: int) -> torch.Tensor:
    """What combine makes of untouched rows, to the bit: fp32 sums in the order of k, a bf16 row a rank, their sum."""
    owner = torch.where(ids >= 0, ids // (experts // num_ranks), -1)
    products = weights.unsqueeze(-1) * x.float().unsqueeze(1)
    total, has_total = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(owner[:, :1], dtype=torch.bool)
    for rank in range(num_ranks):
        partial, has_partial = torch.zeros_like(total), torch.zeros_like(has_total)
        for k in range(ids.shape[1]):
            is_here, product = owner[:, k : k + 1] == rank, products[:, k]
            added = torch.where(has_partial, partial + product, product)
            partial = torch.where(is_here, added, partial)
            has_partial |= is_here
        row = partial.bfloat16().float()
        total = torch.where(has_partial, torch.where(has_total, total + row, row), total)
        has_total |= has_partial
    return total.bfloat16()


def count_differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    bits = _BITS[got.element_size()]
    return (got.view(bits) != want.view(bits)).sum()


class Chain:
    """One rank's part of the operations that ``letters`` name (CHAINS), with inputs of their own.

    to_rank_0: all tokens of all ranks have their experts there, so that rank 0 waits for nobody's rows.
    """

    fresh = "d"  # letters that take inputs of their own
    tokens = TOKENS

    def __init__(self, letters: str, buffer: nccl_ep.Buffer, *, seed: int = 0, to_rank_0: bool = False) -> None:
        self.letters, self.buffer, self._to_rank_0 = letters, buffer, to_rank_0
        self.experts = LOCAL_EXPERTS * buffer.num_ranks
        device, slots = buffer.device, sum(letter in self.fresh for letter in letters)
        self._random = torch.Generator(device).manual_seed(1000 * seed + buffer.rank)
        self.x = torch.empty(slots, self.tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        self.ids = torch.empty(slots, self.tokens, TOPK, dtype=torch.int64, device=device)
        self.weights = torch.empty(slots, self.tokens, TOPK, device=device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self.renew()

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._random, device=self.ids.device)

    def renew(self) -> None:
        """New data and routing for the next run, drawn on the device: the host may be many runs ahead."""
        self.x.normal_(generator=self._random)
        self.weights.normal_(generator=self._random)
        slots, experts = len(self.ids), LOCAL_EXPERTS if self._to_rank_0 else self.experts
        ids = self._draw(slots, self.tokens, experts).argsort(-1)[..., :TOPK]
        is_left_out = (self._draw(slots, 1, 1) < 0.2) & (ids >= experts // 2)  # some dispatches leave ranks out
        is_none = (self._draw(slots, self.tokens, TOPK) < 0.15) | (self._draw(slots, self.tokens, 1) < 0.1)
        self.ids.copy_(torch.where(is_left_out | is_none, -1, ids))

    def run(self) -> None:
        """All operations, then the checks: the elements of combined rows that differ are added to ``wrong``."""
        outs: list[nccl_ep.DispatchOutput] = []
        combined: list[tuple[int, torch.Tensor]] = []
        for letter in self.letters:
            slot = len(outs)
            if letter == "d":
                inputs = self.x[slot], self.ids[slot], self.weights[slot]
                outs.append(nccl_ep.dispatch(*inputs, buffer=self.buffer, num_experts=self.experts))
            elif letter == "c":
                slot = min(len(combined), len(outs) - 1)
                num_sms = NUM_SMS[len(combined) % 2]
                combined.append((slot, nccl_ep.combine(outs[slot].x, outs[slot].handle, num_sms=num_sms)))
            else:
                floor_calls.push(outs[-1].handle, HIDDEN * 2)
        ranks = self.buffer.num_ranks
        want = [home_sum(*inputs, ranks, self.experts) for inputs in zip(self.x, self.ids, self.weights, strict=True)]
        for slot, y in combined:
            self.wrong.add_(count_differences(y, want[slot]))

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph of ``run()``, which is run once before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        """So many times, each with new data and routing. Returns the seconds of all, with their checks."""
        start = time.monotonic()
        for number in range(count):
            self.renew()
            if (number + 5 * self.buffer.rank) % 17 == 0:
                torch.cuda._sleep(200_000)  # ranks fall behind in turn
            graph.replay()
        torch.cuda.synchronize()
        return time.monotonic() - start

    def finish(self) -> int:
        """Eager once more, at whatever parity replays have left. Returns how many elements were wrong, of all runs."""
        self.run()
        synchronize(self.buffer.device)
        self.buffer.check()
        return int(self.wrong)


def chain_buffer(group: Any, device: str | torch.device) -> nccl_ep.Buffer:
    """A buffer for chains. ``group``: a rendezvous, or None for a world of one rank."""
    ranks = 1 if group is None else group.size()
    return nccl_ep.Buffer.for_shapes(
        group,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        num_experts=LOCAL_EXPERTS * ranks,
        device=device,
        timeout=of_living_ranks(30.0),
    )


def replay_graphs(buffer: nccl_ep.Buffer, replays: int, *, pdl: bool, seed: int = 0) -> tuple[int, float]:
    """At least so many replays, each with new data and routing, of a graph for each of CHAINS.

    Returns how many elements were wrong, of all replays, and the microseconds of a replay with its checks.
    """
    wrong, each, seconds = 0, -(-replays // len(CHAINS)), 0.0
    buffer.runtime.set_pdl(pdl)
    for letters in CHAINS:
        chain = Chain(letters, buffer, seed=seed)
        graph = chain.capture()
        seconds += chain.replay(graph, each)
        wrong += chain.finish()
    buffer.runtime.set_pdl(True)  # as it is without a word
    return wrong, seconds / (each * len(CHAINS)) * 1e6
