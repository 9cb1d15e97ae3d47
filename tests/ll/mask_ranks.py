"""What a rank does in the tests of masks, on CPU ranks and on GPUs: ranks fall apart in two groups, each of which must
go on as if the other had no tokens and no experts. Run as a program: a few cases on one GPU, for sanitizers."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep, reference
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.ranks import cuda_cases
from tests.gpu.sanitizers import run_arguments
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.gpus import on_gpu
from tests.support.harness import combine_case, dispatch_case, on_host, synchronize
from tests.support.patience import PATIENCE, Clock, Late

DEADLINE = 2.0  # seconds, of ranks with a GPU each
DEAD = 7  # exit code


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOf(Case):
    """The case as a group of ranks has it without the others."""

    group: frozenset[int]

    @staticmethod
    def make(case: Case, group: frozenset[int]) -> CaseOf:
        fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        fields["tokens"] = tuple(count if rank in group else 0 for rank, count in enumerate(case.tokens))
        return CaseOf(**fields, group=group)

    def rank_ids(self, rank: int) -> torch.Tensor:
        ids, local = super().rank_ids(rank), self.num_experts // self.num_ranks
        for other in set(range(self.num_ranks)) - self.group:
            ids[(ids >= other * local) & (ids < (other + 1) * local)] = -1
        return ids


class Parted:
    """A case, and what the oracle says of each of two groups."""

    def __init__(self, case: Case, first: frozenset[int] | None = None) -> None:
        self.whole = Expected(case)
        rng, ranks = random.Random(case.seed), range(case.num_ranks)
        if first is None:
            first = frozenset(rng.sample(ranks, rng.randint(1, case.num_ranks - 1)))
        self.groups = (first, frozenset(ranks) - first)
        self.parts = [Expected(CaseOf.make(case, group)) for group in self.groups]

    def number_of(self, rank: int) -> int:
        return 0 if rank in self.groups[0] else 1

    def run(self, buffer: nccl_ep.Buffer, *, staged: bool = False) -> None:
        """All operations of the case by one rank, which calls them as it would with all the others."""
        run_parted(self.whole, self.parts[self.number_of(buffer.rank)], buffer, staged=staged)

    def run_together(self, buffer: nccl_ep.Buffer) -> None:
        run_parted(self.whole, self.whole, buffer)

    def part(self, buffer: nccl_ep.Buffer, barrier: Any) -> None:
        """The ranks of the first group mask those of the second, which are to hear of it."""
        barrier()
        if self.number_of(buffer.rank) == 0:
            for other in self.groups[1]:
                deep_ep.Buffer.of(buffer).low_latency_update_mask_buffer(other, True)
        barrier()


def run_parted(whole: Expected, part: Expected, buffer: nccl_ep.Buffer, *, staged: bool = False) -> None:
    """Inputs of `whole`, results of `part`."""
    rank, device = buffer.rank, buffer.device
    out = dispatch_case(whole.case, whole.case.rank_input(rank), buffer, staged=staged)
    part.check_dispatch(out, rank)
    y = combine_case(whole.case, part.rows[rank].to(device, copy=True), out.handle, rank, staged=staged)
    part.check_combine(on_host(y), rank)
    scalars = nccl_ep.combine_weights(part.values[rank].to(device), out.handle)
    part.check_scalars(on_host(scalars), rank)
    synchronize(device)


def masks_of(buffer: nccl_ep.Buffer) -> list[int]:
    status = torch.full((buffer.num_ranks,), 7, dtype=torch.int32, device=buffer.device)
    deep_ep.Buffer.of(buffer).low_latency_query_mask_buffer(status)
    masked = [rank for rank, is_masked in enumerate(status.tolist()) if is_masked]
    assert masked == buffer.stats()["masked_ranks"] and set(status.tolist()) <= {0, 1}
    return masked


def run_all(cases: list[Parted], buffer: nccl_ep.Buffer, barrier: Any, *, in_step: bool = False) -> None:
    """Together, apart and together again, for each of the cases. The two groups make different numbers of calls while
    they are apart, unless all ranks must keep in step."""
    for number, case in enumerate(cases):
        case.run_together(buffer)
        case.part(buffer, barrier)
        for turn in range(1 + (number + (0 if in_step else case.number_of(buffer.rank))) % 3):
            case.run(buffer, staged=(number + turn) % 2 == 1)
            assert masks_of(buffer) == sorted(case.groups[1 - case.number_of(buffer.rank)])
        deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
        assert masks_of(buffer) == []
        case.run_together(buffer)


def run_over_shapes(cases: list[Parted], buffer: nccl_ep.Buffer, barrier: Any) -> None:
    """The two groups, the same in all cases, stay apart over operations of many sizes: what a rank has sent to those
    that had masked it is in nobody's way."""
    cases[0].part(buffer, barrier)
    for case in cases:
        case.run(buffer)
    deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
    for case in cases:
        case.run_together(buffer)


def rest_of(whole: Expected, part: Expected) -> Expected:
    """What the combines of a group give after a dispatch with all ranks: `whole`, but for what comes home."""
    rest = Expected(whole.case)
    rest.combined = reference.combine(whole.rows, whole.results, part.inputs, **part.case.combine_kwargs())
    for rank, (all_ids, ids) in enumerate(zip(whole.inputs, part.inputs, strict=True)):
        if len(ids.topk_idx) == len(all_ids.topk_idx):  # a rank of the group
            rest.scalars[rank] = torch.where(ids.topk_idx >= 0, whole.scalars[rank], 0.0)
    return rest


def run_in_step(cases: list[Parted], buffer: nccl_ep.Buffer, barrier: Any) -> None:
    run_all(cases, buffer, barrier, in_step=True)


def run_on_one_gpu(cases: list[Parted], run: Callable[..., None] = run_in_step) -> None:
    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [each.whole for each in cases], enable_shrink=True, device="cuda") as buffer:
            run(cases, buffer, lambda: group.allgather(b"", PATIENCE))

    run_ranks(cases[0].whole.case.num_ranks, body)


# ---- Ranks that are late

# "home weights": a combine whose weights the home ranks give; "unweighted rows": the same split.
PHASES = ("dispatch", "receive", "combine", "home weights", "unweighted rows", "combine_weights")


def tell_if_late(group: Any, text: str) -> None:
    """All ranks meet, and hear of a living one that was masked: others have wrong results for it."""
    told = [text] if group is None else [each.decode() for each in group.allgather(text.encode(), PATIENCE)]
    if any(told):
        raise Late("; ".join(filter(None, told)))


def go_on_without(
    missing: int, buffer: nccl_ep.Buffer, whole: Expected, rest: Expected, *, calls: int, deadline: float, group: Any
) -> None:
    """Dispatches of the others, with the inputs of all; `rest`: what they must give. The missing rank makes none."""
    rank, text = buffer.rank, ""
    outs: list[nccl_ep.DispatchOutput] = []
    if rank != missing:
        buffer.set_timeout(deadline)
        outs = [dispatch_case(whole.case, whole.inputs[rank], buffer) for _ in range(calls)]
        masked = masks_of(buffer)
        text = "" if masked == [missing] else f"rank {rank} has masked {masked}"
    tell_if_late(group, text)
    for out in outs:
        rest.check_dispatch(out, rank)


def fail_to_clean(missing: int, buffer: nccl_ep.Buffer, group: Any) -> None:
    """By all ranks; the missing one does not clean. group: not the buffer's own, of which that would be a round."""
    rank, text = buffer.rank, ""
    if rank != missing:
        with pytest.raises(nccl_ep.TimeoutError, match="to clean its masks; nothing was heard from rank ") as caught:
            deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
        text = str(caught.value)
        text = "" if text.endswith(f" from rank {missing}") else text
    tell_if_late(group, text)


class LateRank:
    """The last rank does not come to an operation. The others go on after the deadline, and from then on without
    waiting; the late rank hears of it, goes on by itself, and comes back when the masks are cleaned."""

    def __init__(
        self, num_ranks: int, phase: str, turns: int = 3, domain_size: int | None = None, patience: float = PATIENCE
    ) -> None:
        """patience: in seconds, of waits for ranks that come."""
        self.patience = patience
        self.tell: Callable[[str], None] = lambda step: None  # how far this rank has come
        self.missing, self.phase, self.turns, self.domain_size = num_ranks - 1, phase, turns, domain_size
        weights = "tensor" if phase in ("home weights", "unweighted rows") else "dispatch"
        plain = plain_case(num_ranks, combine_weights=weights, domain_size=domain_size)
        self.case = Parted(plain, frozenset(range(self.missing)))
        self.rests = [rest_of(self.case.whole, part) for part in self.case.parts]

    def run(self, group: Any, deadline: float, device: Any = "cpu") -> None:
        domains = {"domain_size": self.domain_size, "ll_network": "auto"}
        options = {"enable_shrink": True, "device": device, **domains}
        with shared_buffer(group, [self.case.whole], **options) as buffer:
            buffer.set_timeout(self.patience)
            self.tell("runs with all")
            self.case.run_together(buffer)
            self.tell("parts")
            if group.rank() == self.missing:
                self._come_late(buffer, group)
            else:
                self._go_on(buffer, deadline, group)
                group.allgather(b"", PATIENCE)
            self.tell("cleans")
            deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
            assert masks_of(buffer) == []
            self.tell("runs with all again")
            self.case.run_together(buffer)

    def _go_on(self, buffer: nccl_ep.Buffer, deadline: float, group: Any = None) -> None:
        """group: of all ranks, if the missing one is alive."""
        out = self._dispatch_with_all(buffer)
        buffer.set_timeout(deadline)
        with Clock(deadline + PATIENCE / 2):
            self._miss(buffer, group, out)
        self.tell("goes on")
        buffer.set_timeout(self.patience * 2)
        with Clock(PATIENCE):
            for turn in range(self.turns):
                self.case.run(buffer, staged=turn == 1)
        assert masks_of(buffer) == [self.missing]

    def _dispatch_with_all(self, buffer: nccl_ep.Buffer) -> nccl_ep.DispatchOutput | None:
        return None if self.phase in ("dispatch", "receive") else self.case.whole.dispatch(buffer)

    def _miss(self, buffer: nccl_ep.Buffer, group: Any, before: nccl_ep.DispatchOutput | None) -> None:
        """The first operation without the rank, which is to be masked alone."""
        case, rank = self.case.whole, buffer.rank
        if before is None:
            out = dispatch_case(case.case, case.case.rank_input(rank), buffer, staged=self.phase == "receive")
            self._masked_alone(buffer, group)
            return self.case.parts[0].check_dispatch(out, rank)
        got = self._send_home(buffer, before.handle)
        self._masked_alone(buffer, group)
        rest = self.rests[0]
        rest.check_scalars(got, rank) if self.phase == "combine_weights" else rest.check_combine(got, rank)

    def _masked_alone(self, buffer: nccl_ep.Buffer, group: Any) -> None:
        masked = masks_of(buffer)
        tell_if_late(group, "" if masked == [self.missing] else f"rank {buffer.rank} has masked {masked}")

    def _send_home(self, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle) -> torch.Tensor:
        case, rank = self.case.whole, buffer.rank
        if self.phase == "combine_weights":
            return on_host(nccl_ep.combine_weights(case.values[rank].to(buffer.device), handle))
        rows, staged = case.rows[rank].to(buffer.device, copy=True), self.phase == "unweighted rows"
        return on_host(combine_case(case.case, rows, handle, rank, staged=staged))

    def _come_late(self, buffer: nccl_ep.Buffer, group: Any) -> None:
        case, rest, rank = self.case.whole, self.rests[1], self.missing
        out = self._dispatch_with_all(buffer)
        tell_if_late(group, "")
        group.allgather(b"", PATIENCE)
        if out is not None:  # what the others had sent by then may be taken or not
            got, is_scalar = self._send_home(buffer, out.handle), self.phase == "combine_weights"
            wants = [each.scalars[rank] if is_scalar else each.combined[rank] for each in (case, rest)]
            assert ((got == wants[0]) | (got == wants[1])).all()
        for turn in range(min(self.turns, 2)):
            self.case.run(buffer, staged=turn == 1)
            assert masks_of(buffer) == list(range(rank))


# ---- A rank that comes at the deadline


def come_at_the_deadline(
    group: Any, layout: str, deadline: float, rounds: int, device: Any = "cpu", domain_size: int | None = None
) -> int:
    """The last rank comes just before the others give it up, or after. Each rank has all of another's tokens or none,
    whatever its blocks have heard, and where. Returns in how many rounds this rank has masked another."""
    rank, num_ranks = group.rank(), group.size()
    case = plain_case(num_ranks, layout=layout, domain_size=domain_size)
    others = [each for each in range(num_ranks) if each != rank]
    heard = [frozenset({rank, *some}) for count in range(num_ranks) for some in itertools.combinations(others, count)]
    parts, whole, missed = [Expected(CaseOf.make(case, each)) for each in heard], Expected(case), 0
    domains = {"domain_size": domain_size, "ll_network": "auto"}
    with shared_buffer(group, [whole], enable_shrink=True, device=device, **domains) as buffer:
        for number in range(rounds):
            buffer.set_timeout(deadline)
            given = case.rank_input(rank)
            group.allgather(b"", PATIENCE)
            if rank == num_ranks - 1:
                time.sleep(deadline * random.Random(number).uniform(0.8, 1.2))
            out = dispatch_case(case, given, buffer)
            synchronize(buffer.device)
            missed += len(masks_of(buffer)) > 0
            assert any(is_as_heard(out, part.results[rank]) for part in parts), (whole.where(rank), number, out.counts)
            buffer.set_timeout(PATIENCE)
            deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
        whole.run(buffer)
    return missed


def is_as_heard(got: nccl_ep.DispatchOutput, want: reference.DispatchResult) -> bool:
    """But for zeros, of rows that were announced and did not come."""
    for name in ("counts", "demand", "overflow", "offsets", "row_expert", "total", "topk_idx"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if mine is not None and not torch.equal(mine.cpu(), theirs):
            return False
    mine, theirs = (each.cpu().view(-1, each.shape[-1])[want.valid.flatten()] for each in (got.x, want.x))
    return bool(((mine == theirs) | (mine == 0)).all())


# ---- Over NCCL


def run_masks(rank: int, num_ranks: int, count: int) -> int:
    """A process: generated cases in two groups, calls in a CUDA graph, and ranks that are late."""
    device, group = on_gpu(rank), rendezvous_of(dist.group.WORLD)
    cases = [Parted(case) for case in cuda_cases(count, num_ranks)]
    with shared_buffer(group, [each.whole for each in cases], enable_shrink=True, device=device) as buffer:
        run_all(cases, buffer, lambda: group.allgather(b"", PATIENCE))
    plain = Parted(plain_case(num_ranks))
    with shared_buffer(group, [plain.whole], enable_shrink=True, device=device) as buffer:
        replay_parted(plain, buffer, lambda: group.allgather(b"", PATIENCE))
    for phase in PHASES:
        for turns in (3, 0):
            LateRank(num_ranks, phase, turns).run(group, DEADLINE, device)
    for layout in LAYOUTS:
        come_at_the_deadline(group, layout, deadline=0.02, rounds=40, device=device)
    return len(cases)


def replay_parted(case: Parted, buffer: nccl_ep.Buffer, barrier: Any) -> None:
    """A captured dispatch and combine obey the masks of the moment, which a graph can read as well."""
    whole, part, rank = case.whole, case.parts[case.number_of(buffer.rank)], buffer.rank
    given, rows = whole.given_on(buffer), whole.rows[rank].to(buffer.device, copy=True)
    status = torch.full((buffer.num_ranks,), 7, dtype=torch.int32, device=buffer.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = nccl_ep.dispatch(
            given.x, given.topk_idx, given.topk_weights, buffer=buffer, **whole.case.dispatch_kwargs()
        )
        y = combine_case(whole.case, rows, out.handle, rank)
        deep_ep.Buffer.of(buffer).low_latency_query_mask_buffer(status)

    def replay(want: Expected, masked: list[int]) -> None:
        for _ in range(3):
            rows.copy_(want.rows[rank])
            graph.replay()
            torch.cuda.synchronize()
            buffer.require_usable()
            want.check_dispatch(out, rank)
            want.check_combine(y.cpu(), rank)
            assert status.nonzero().flatten().tolist() == masked

    replay(whole, [])
    case.part(buffer, barrier)
    replay(part, sorted(case.groups[1 - case.number_of(rank)]))
    deep_ep.Buffer.of(buffer).low_latency_clean_mask_buffer()
    replay(whole, [])


def run_without_the_dead(rank: int, num_ranks: int) -> None:
    """A process whose last rank goes away without a word."""
    late, group = LateRank(num_ranks, "dispatch"), rendezvous_of(dist.group.WORLD)
    with shared_buffer(group, [late.case.whole], enable_shrink=True, device=on_gpu(rank)) as buffer:
        late.case.run_together(buffer)
        torch.cuda.synchronize()
        group.allgather(b"", PATIENCE)
        if rank == late.missing:
            os._exit(DEAD)
        late._go_on(buffer, DEADLINE)


if __name__ == "__main__":
    run_arguments(lambda layout: run_on_one_gpu([Parted(plain_case(3, layout=layout))]))
