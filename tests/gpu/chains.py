"""Operations in a row on new data and routing each time, checked on the device: eagerly, or captured in a graph.

Checks make no copies within the GPU (clone, copy_): over tests/gin_loopback the operations wait for copies of the
plugin, and one of the GPU's own that waits behind them may stand in front.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import nccl_ep
from nccl_ep import deep_ep
from tests.support.harness import synchronize
from tests.support.patience import of_living_ranks

HIDDEN, TOPK, TOKENS, LOCAL_EXPERTS = 1024, 4, 24, 4
NUM_SMS = (0, 4)  # of combines in turn; on four, a kernel's senders draw tickets for most of what they send
# d: a dispatch of the next inputs. c: a combine of the oldest dispatch that has none yet, or once more of the last one.
# An odd number of operations each: the kinds' epochs begin a replay at any parity, together or apart.
CHAINS = ("dcc", "ddccc", "dcddccc")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class How:
    """Of a chain's operations. is_staged: split, with operations of the other kind between send and receive."""

    layout: str = "expert_major"
    has_fp8: bool = False
    is_staged: bool = False
    is_deepep: bool = False


HOWS = (
    How(has_fp8=True),
    How("packed", is_staged=True),
    How("packed", has_fp8=True, is_staged=True),
    How(has_fp8=True, is_deepep=True),
    How(is_staged=True, is_deepep=True),
)
Sent = tuple[torch.Tensor, Any]  # rows, handle


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """quant="fp8" of ordinary values, on any device: e4m3 rows, and scales of groups of 128."""
    groups = x.float().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    rows = (groups * (torch.full_like(amax, 448) / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rows.flatten(-2), (amax * (1 / 448)).squeeze(-1)


def dequantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).bfloat16()


def home_sum(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_ranks: int, experts: int,
    domain_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """What combine makes of untouched rows, to the bit: fp32 sums in the order of k, a bf16 row a rank, their sum; of
    several domains, a bf16 row each."""
    owner = torch.where(ids >= 0, ids // (experts // num_ranks), -1)
    products = weights.unsqueeze(-1) * x.float().unsqueeze(1)
    nothing = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(owner[:, :1], dtype=torch.bool)
    total, has_total = nothing
    size = domain_size or num_ranks
    for first in range(0, num_ranks, size):
        inside, has_inside = _sum_of_ranks(range(first, first + size), owner, products, nothing)
        row = inside if size == num_ranks else inside.bfloat16().float()
        total = torch.where(has_inside, torch.where(has_total, total + row, row), total)
        has_total = has_total | has_inside
    return total.bfloat16()


def _sum_of_ranks(
    ranks: range, owner: torch.Tensor, products: torch.Tensor, nothing: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32, and for which tokens there is one."""
    total, has_total = nothing
    for rank in ranks:
        partial, has_partial = torch.zeros_like(total), torch.zeros_like(has_total)
        for k in range(owner.shape[1]):
            is_here, product = owner[:, k : k + 1] == rank, products[:, k]
            added = torch.where(has_partial, partial + product, product)
            partial = torch.where(is_here, added, partial)
            has_partial = has_partial | is_here
        row = partial.bfloat16().float()
        total = torch.where(has_partial, torch.where(has_total, total + row, row), total)
        has_total = has_total | has_partial
    return total, has_total


def count_differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    bits = _BITS[got.element_size()]
    return (got.view(bits) != want.view(bits)).sum()


class Chain:
    """One rank's part of the operations that ``letters`` name (CHAINS), with inputs of their own.

    to_rank_0: all tokens of all ranks have their experts there, so that rank 0 waits for nobody's rows.
    """

    fresh = "d"  # letters that take inputs of their own
    tokens = TOKENS

    def __init__(
        self, letters: str, buffer: nccl_ep.Buffer, *, seed: int = 0, to_rank_0: bool = False, how: How | None = None
    ) -> None:
        self.letters, self.buffer, self._to_rank_0, self._how = letters, buffer, to_rank_0, how or How()
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
        torch.add(torch.where(is_left_out | is_none, -1, ids), 0, out=self.ids)

    def _dispatch(self, slot: int) -> Callable[[], Sent]:
        """Sends. What is returned receives, once, and says what came, in bf16."""
        x, ids, weights, how = self.x[slot], self.ids[slot], self.weights[slot], self._how
        if how.is_deepep:
            result, _, handle, _, hook = deep_ep.Buffer.of(self.buffer).low_latency_dispatch(
                x, ids, self.tokens, self.experts, use_fp8=how.has_fp8, return_recv_hook=how.is_staged
            )

            def receive() -> Sent:
                if hook is not None:
                    hook()
                return dequantised(*result) if how.has_fp8 else result, handle
        else:
            options: dict[str, Any] = {"layout": how.layout, "quant": "fp8" if how.has_fp8 else None}
            send = nccl_ep.dispatch_send if how.is_staged else nccl_ep.dispatch
            sent: Any = send(x, ids, weights, buffer=self.buffer, num_experts=self.experts, **options)

            def receive() -> Sent:
                out = sent.receive() if how.is_staged else sent
                return out.x if out.scales is None else dequantised(out.x, out.scales), out.handle

        return functools.cache(receive)

    def _combine(self, slot: int, rows: torch.Tensor, handle: Any, num_sms: int) -> Callable[[], torch.Tensor]:
        if self._how.is_deepep:
            y, _, hook = deep_ep.Buffer.of(self.buffer).low_latency_combine(
                rows, self.ids[slot], self.weights[slot], handle, return_recv_hook=self._how.is_staged
            )
            return functools.cache(lambda: y if hook is None else (hook(), y)[1])
        if self._how.is_staged:
            return functools.cache(nccl_ep.combine_send(rows, handle, num_sms=num_sms).receive)
        combined = nccl_ep.combine(rows, handle, num_sms=num_sms)
        return lambda: combined

    def run(self, waits: bool = False) -> None:
        """All operations, then the checks: the elements of combined rows that differ are added to ``wrong``.

        waits: for the end of each operation.
        """
        outs: list[Callable[[], Sent]] = []
        combined: list[tuple[int, Callable[[], torch.Tensor]]] = []
        for letter in self.letters:
            if letter == "d":
                if outs:
                    outs[-1]()  # at most one of a kind is open
                outs.append(self._dispatch(len(outs)))
            else:
                if combined:
                    combined[-1][1]()
                slot = min(len(combined), len(outs) - 1)
                combined.append((slot, self._combine(slot, *outs[slot](), NUM_SMS[len(combined) % 2])))
            if waits:
                synchronize(self.buffer.device)
        ranks = self.buffer.num_ranks
        sent = dequantised(*quantised(self.x)) if self._how.has_fp8 else self.x
        want = [
            home_sum(*inputs, ranks, self.experts, self.buffer.domain_size)
            for inputs in zip(sent, self.ids, self.weights, strict=True)
        ]
        for slot, y in combined:
            self.wrong.add_(count_differences(y(), want[slot]))
            if waits:
                synchronize(self.buffer.device)

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph of ``run()``, which is run twice before.

        The first run waits for each operation: over tests/gin_loopback, what torch does when it first uses a kernel, or
        needs memory, holds up the copies that an operation waits for.
        """
        self.run(waits=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads work meanwhile
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


def chain_buffer(group: Any, device: str | torch.device, **options: Any) -> nccl_ep.Buffer:
    """A buffer for chains. ``group``: a rendezvous, or None for a world of one rank."""
    ranks = 1 if group is None else group.size()
    return nccl_ep.Buffer.for_shapes(
        group,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        num_experts=LOCAL_EXPERTS * ranks,
        device=device,
        **{"timeout": of_living_ranks(30.0), "ll_network": "rail", "late_weights": True, **options},
    )


def replay_graphs(buffer: nccl_ep.Buffer, replays: int, *, pdl: bool, seed: int = 0) -> tuple[int, float]:
    """At least so many replays, each with new data and routing, of a graph for each of CHAINS, and as many for HOWS.

    Returns how many elements were wrong, of all replays, and the microseconds of a replay with its checks.
    """
    chains = [(letters, How()) for letters in CHAINS]
    chains += [(CHAINS[number % len(CHAINS)], how) for number, how in enumerate(HOWS)]
    wrong, each, seconds = 0, -(-replays // len(CHAINS)), 0.0
    buffer.runtime.set_pdl(pdl)
    for letters, how in chains:
        chain = Chain(letters, buffer, seed=seed, how=how)
        graph = chain.capture()
        seconds += chain.replay(graph, each)
        wrong += chain.finish()
    buffer.runtime.set_pdl(True)  # as it is without a word
    return wrong, seconds / (each * len(chains)) * 1e6
