"""Runs a generated case in high throughput on real ranks and holds every result, and every row on the wire, against the
oracle."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nccl_ep
from nccl_ep import _C, reference
from nccl_ep.testing import run_ranks
from tests.ht.network import expected_bytes
from tests.support.cases import OPAQUE, Case
from tests.support.contents import FLOATS, as_bytes
from tests.support.expected import Expected
from tests.support.harness import case_buffer, check_results, combine_case, garble, synchronize, to_device

ARENAS = ("none", "tight", "ample")
_STREAM_EXTRA = 100  # beside those of cases.py


@dataclass(frozen=True)
class HtPlan:
    """What a case leaves open: drawn from its seed.

    exact: sizes asked of the other ranks. arena: room for outputs. rows_in_arena: where combine's input lies.
    extra: (hidden, dtype) of extra tensors. cached: (hidden, dtype, quant) of payloads that use the handle again.
    given: the outputs are those of an earlier call.
    """

    exact: bool
    arena: str
    rows_in_arena: bool
    extra: tuple[tuple[int, torch.dtype], ...]
    cached: tuple[tuple[int, torch.dtype, str | None], ...]
    given: bool

    @staticmethod
    def of(case: Case) -> HtPlan:
        rng = random.Random(f"high throughput {case.seed}")

        def tensor() -> tuple[int, torch.dtype]:
            dtype = rng.choice([*FLOATS, *OPAQUE])
            return rng.randint(1, 12) * 16 // dtype.itemsize, dtype

        exact = case.capacity_kind == "default" and case.layout != "expert_major" and rng.random() < 0.7
        cached: list[tuple[int, torch.dtype, str | None]] = []
        for _ in range(rng.choice([0, 0, 1, 2])):
            quant = rng.choice([None, None, *reference.QUANT_MODES])
            if quant is None:
                cached.append((*tensor(), None))
            else:
                cached.append((rng.randint(1, 20) * 16, rng.choice(FLOATS[:2]), quant))
        return HtPlan(
            exact=exact,
            arena=rng.choice(ARENAS),
            rows_in_arena=rng.random() < 0.7,
            extra=tuple(tensor() for _ in range(rng.choice([0, 0, 1, 2]))),
            cached=tuple(cached),
            given=not exact and rng.random() < 0.2,
        )

    def buckets(self) -> dict[str, object]:
        return {
            "sizes": "exact" if self.exact else "capacity", "arena": self.arena,
            "rows in the arena": self.rows_in_arena, "extra tensors": len(self.extra), "cached": len(self.cached),
            "given outputs": self.given,
        }  # fmt: skip


EXPECTED_BUCKETS: dict[str, tuple[object, ...]] = {
    "sizes": ("capacity", "exact"),
    "arena": ARENAS,
    "rows in the arena": (False, True),
    "extra tensors": (0, 1, 2),
    "cached": (0, 1, 2),
    "given outputs": (False, True),
    "placed by": ("sender", "receiver"),
    "combine reads": ("in place", "staged"),
}


class HtCoverage:
    """How many cases fell into each bucket of EXPECTED_BUCKETS."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[object]] = {name: Counter() for name in EXPECTED_BUCKETS}

    def add(self, outcome: HtOutcome) -> None:
        for name, bucket in outcome.plan.buckets().items():
            self.counts[name][bucket] += 1
        for result in outcome.ranks:
            self.counts["placed by"]["receiver" if result.stats["staged_dispatches"] else "sender"] += 1
            self.counts["combine reads"]["staged" if result.stats["staged_combines"] else "in place"] += 1

    def report(self) -> str:
        return "\n".join(f"  {name}: {dict(counts)}" for name, counts in self.counts.items())

    def missing(self) -> list[str]:
        return [
            f"{name}: {bucket}"
            for name, expected in EXPECTED_BUCKETS.items()
            for bucket in expected
            if self.counts[name][bucket] == 0
        ]


@dataclass
class HtRankResult:
    """What one rank made of a case."""

    dispatched: nccl_ep.DispatchOutput
    cached: list[nccl_ep.Payload]
    combined: torch.Tensor
    scalars: torch.Tensor
    wire: list[dict[str, list[int]]]  # up to the dispatch, the combine, that of weights, the cached dispatches
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class HtOutcome:
    plan: HtPlan
    results: list[reference.DispatchResult]
    ranks: list[HtRankResult]


def extra_tensor(case: Case, rank: int, number: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [T, hidden] of any bits, the same at every call."""
    made = torch.Generator().manual_seed((case.seed * 64 + rank) * 64 + number + _STREAM_EXTRA)
    if dtype in FLOATS:
        return torch.randn(case.tokens[rank], hidden, generator=made).to(dtype)
    return torch.randint(0, 256, (case.tokens[rank], hidden), dtype=torch.uint8, generator=made).view(dtype)


def ht_kwargs(case: Case, plan: HtPlan) -> dict[str, Any]:
    """Arguments of nccl_ep.dispatch: the default capacity of an expert must be spelt out."""
    kwargs = case.dispatch_kwargs()
    if plan.exact:
        kwargs["capacity"] = "exact"
    elif case.layout == "expert_major" and case.capacity is None:
        kwargs["capacity"] = case.num_ranks * case.max_tokens
    return {**kwargs, "mode": "ht"}


def oracle_kwargs(case: Case, plan: HtPlan, inputs: list[reference.RankInput]) -> list[dict[str, Any]]:
    """Those of the oracle, for each rank: exact sizes are the demand."""
    kwargs = case.dispatch_kwargs()
    if not plan.exact or case.layout == "rank_major":
        return [kwargs] * case.num_ranks
    demand = [result.demand.tolist() for result in reference.dispatch(inputs, **kwargs)]
    align = case.expert_alignment
    return [{**kwargs, "capacity": sum(-(-rows // align) * align for rows in each)} for each in demand]


def oracle(
    inputs: list[reference.RankInput], kwargs: list[dict[str, Any]], **changes: Any
) -> list[reference.DispatchResult]:
    """The oracle's dispatch where every rank has a capacity of its own."""
    made: dict[Any, list[reference.DispatchResult]] = {}
    for each in kwargs:
        if each["capacity"] not in made:
            made[each["capacity"]] = reference.dispatch(inputs, **{**each, **changes})
    return [made[each["capacity"]][rank] for rank, each in enumerate(kwargs)]


# On a GPU torch cuts blocks from segments of 2 MiB, or of 20 and more for those beyond 1 MiB.
SMALL_ARENA, LARGE_ARENA = 1 << 21, 1 << 26


def crowd(buffer: nccl_ep.Buffer, room: int) -> list[torch.Tensor]:
    """Tensors that leave about so many bytes of a GPU's small arena, for as long as they are kept."""
    if buffer.device.type == "cpu" or buffer.stats()["arena_bytes"] != SMALL_ARENA:
        return []
    return [buffer.empty([1 << 14], torch.uint8) for _ in range(max(SMALL_ARENA - room, 0) >> 14)]


def ht_buffer(case: Case, plan: HtPlan, group: Any, **options: Any) -> nccl_ep.Buffer:
    """A buffer in which all operations of the case fit."""
    beside = case.scales_width * 8 + 16
    row = case.hidden * case.dtype.itemsize + beside
    extra_bytes = sum(hidden * dtype.itemsize for hidden, dtype in plan.extra)
    cached_bytes = max([hidden * dtype.itemsize + 400 for hidden, dtype, _ in plan.cached], default=0)
    beside = max(beside + extra_bytes, cached_bytes - case.hidden * case.dtype.itemsize)
    output = case.num_ranks * case.max_tokens * (row + extra_bytes + case.hidden * 4)
    arena = {"none": 0, "tight": output // 2, "ample": 64 * output + (1 << 20)}[plan.arena]
    if plan.arena != "none" and torch.device(options.get("device", "cpu")).type == "cuda":
        arena = SMALL_ARENA if plan.arena == "tight" else max(arena, LARGE_ARENA)
    return case_buffer(
        case, group, dtype=case.dtype, wire_dtype=torch.float32, scale_bytes=beside, mode="ht", arena_bytes=arena,
        **{"device": "cpu", **options},
    )  # fmt: skip


HT_STEPS = ("dispatch", "exact", "cached", "combine", "weighted combine", "scalars")


def ht_step(name: str, case: Expected, buffer: nccl_ep.Buffer, out: nccl_ep.DispatchOutput) -> Callable[[], Any]:
    """A call of HT_STEPS whose inputs are ready, with the handle of ``out`` where it needs one."""
    rank, device = buffer.rank, buffer.device
    rows, x, values = (each.to(device) for each in (case.rows[rank], case.inputs[rank].x, case.values[rank]))
    ones = torch.ones(case.inputs[rank].topk_idx.shape, device=device)
    steps: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: case.send(buffer),
        "exact": lambda: case.send(buffer, capacity="exact"),
        "cached": lambda: nccl_ep.dispatch_cached(x, out.handle),
        "combine": lambda: nccl_ep.combine(rows, out.handle),
        "weighted combine": lambda: nccl_ep.combine(rows, out.handle, weights=ones),
        "scalars": lambda: nccl_ep.combine_weights(values, out.handle),
    }
    return steps[name]


def run_on_rank(
    case: Case, plan: HtPlan, buffer: nccl_ep.Buffer, given: reference.RankInput, result: reference.DispatchResult,
    **options: Any,
) -> HtRankResult:  # fmt: skip
    rank, device = buffer.rank, buffer.device
    x, topk_idx, weights, scales = (
        to_device(each, device) for each in (given.x, given.topk_idx, given.topk_weights, given.scales)
    )
    extra = [extra_tensor(case, rank, i, *what).to(device) for i, what in enumerate(plan.extra)]

    def dispatch(**more: Any) -> nccl_ep.DispatchOutput:
        return nccl_ep.dispatch(
            x, topk_idx, weights, buffer=buffer, scales=scales, extra=extra, **ht_kwargs(case, plan), **options, **more
        )

    out = dispatch()
    if plan.given:
        garble(out.x, out.weights, out.handle.tensor, out.handle.slots, *out.extra)
        out = dispatch(out=out)
    wire = [buffer.wire_bytes()]
    # Over GIN a copy to the host that waits for kernels may hold up the network (docs/network_tests.md).
    synchronize(device)
    rows = case.expert(out.x, result, rank)
    if plan.rows_in_arena:
        rows = buffer.empty(rows.shape, rows.dtype).copy_(rows)
    combined = combine_case(case, rows, out.handle, rank, **options)
    rows.zero_()
    wire.append(buffer.wire_bytes())
    stats = buffer.stats()
    scalars = nccl_ep.combine_weights(case.scalars(result, rank).to(device), out.handle)
    wire.append(buffer.wire_bytes())
    cached = [
        nccl_ep.dispatch_cached(
            extra_tensor(case, rank, 10 + i, hidden, dtype).to(device), out.handle, quant=quant,
            zero_padding=case.zero_padding, **options,
        )
        for i, (hidden, dtype, quant) in enumerate(plan.cached)
    ]  # fmt: skip
    wire.append(buffer.wire_bytes())
    synchronize(device)
    buffer.require_usable()  # its error says more than a difference does
    return HtRankResult(out, cached, combined.cpu(), scalars.cpu(), wire, stats)


def check_ht_case(case: Case, *, network_seed: int = 0, device: str = "cpu", **options: Any) -> HtOutcome:
    """Runs the case; fails with its description where a bit differs, or a row crosses once too often (CPU ranks)."""
    plan = HtPlan.of(case)
    inputs = case.inputs()
    kwargs = oracle_kwargs(case, plan, inputs)
    results = oracle(inputs, kwargs)

    def body(group: Any) -> HtRankResult:
        rank = group.rank()
        with ht_buffer(case, plan, group, network_seed=network_seed, device=device) as buffer:
            kept = crowd(buffer, case.num_ranks * case.max_tokens * case.hidden * case.dtype.itemsize)
            made = run_on_rank(case, plan, buffer, case.rank_input(rank), results[rank], **options)
            del kept
            if "network" in made.wire[-1]:  # counts what the network has taken: all, when all ranks are done
                group.allgather(b":", 600.0)
                made.wire[-1] = buffer.wire_bytes()
            return made

    got = run_ranks(case.num_ranks, body)
    check_results(case, inputs, results, got, f"{case.describe()} {plan}")
    check_extra(case, plan, inputs, kwargs, dict(enumerate(got)))
    if device == "cpu" and not _C.EMULATES_GPU:
        check_ht_wire(case, plan, results, inputs, got)
        check_ht_other(case, plan, inputs, got)
    elif "network" in got[0].wire[0]:
        check_ht_network(case, plan, inputs, got)
    return HtOutcome(plan, results, got)


def check_ht_network(case: Case, plan: HtPlan, inputs: list[reference.RankInput], got: list[HtRankResult]) -> None:
    """Between domains of GPUs: a row for each (token, domain with an expert of it), each way, and no byte more."""

    def widths(tensors: Sequence[torch.Tensor | None]) -> list[int]:
        return [each.shape[-1] * each.element_size() for each in tensors if each is not None]

    out = got[0].dispatched
    expected = expected_bytes(
        case, inputs, exact=plan.exact, times=2 if plan.given else 1, parts=widths([out.x, out.scales, *out.extra]),
        cached=[widths([each.x, each.scales]) for each in got[0].cached], home=case.home_bytes,
    )  # fmt: skip
    for rank, result in enumerate(got):
        crossed, wanted = result.wire[-1]["network"], expected[rank].tolist()
        assert crossed == wanted, f"{case.describe()} {plan}: rank {rank}: {crossed} bytes, not {wanted}"


def check_extra(
    case: Case, plan: HtPlan, inputs: list[reference.RankInput], kwargs: list[dict[str, Any]],
    got: dict[int, HtRankResult],
) -> None:  # fmt: skip
    """Extra tensors and cached payloads of these ranks lie where the rows of x do."""
    ranks = range(case.num_ranks)
    for i, what in enumerate(plan.extra):
        moved = [replace(inputs[rank], x=extra_tensor(case, rank, i, *what), scales=None) for rank in ranks]
        wanted = oracle(moved, kwargs, quant=None)
        for rank, result in got.items():
            where = f"{case.describe()} rank {rank} extra {i}"
            _check_rows(result.dispatched.extra[i], wanted[rank].x, wanted[rank], where, case)
    for i, (hidden, dtype, quant) in enumerate(plan.cached):
        moved = [
            replace(inputs[rank], x=extra_tensor(case, rank, 10 + i, hidden, dtype), scales=None) for rank in ranks
        ]
        wanted = oracle(moved, kwargs, quant=quant)
        for rank, result in got.items():
            where, want, payload = f"{case.describe()} rank {rank} cached {i}", wanted[rank], result.cached[i]
            _check_rows(payload.x, want.x, want, where, case)
            assert (payload.scales is None) == (want.scales is None), where
            if want.scales is not None:
                _check_rows(payload.scales, want.scales, want, where, case)


def _check_rows(
    mine: torch.Tensor | None, theirs: torch.Tensor, want: reference.DispatchResult, where: str, case: Case
) -> None:
    assert mine is not None and mine.shape == theirs.shape and mine.dtype == theirs.dtype, where
    flat, wanted = (as_bytes(each.cpu()).reshape(-1, each.shape[-1]) for each in (mine, theirs))
    valid = want.valid.flatten()
    difference = reference.first_difference(flat[valid], wanted[valid])
    assert not difference, f"{where}: {difference}"
    if case.zero_padding:
        assert not flat[~valid].reshape(-1).view(torch.uint8).any(), f"{where}: padding is not zero"


def visits(case: Case, inputs: list[reference.RankInput]) -> Iterator[tuple[int, int, int, list[int]]]:
    """(source, token, rank, ids) for each domain with experts of a token: these ids, and the rank that hands it out."""
    ranks, domain = case.num_ranks, case.domain_size or case.num_ranks
    for source, given in enumerate(inputs):
        for token, choices in enumerate(given.topk_idx.tolist()):
            ids: dict[int, list[int]] = {}
            for e in choices:
                if 0 <= e < case.num_experts:
                    ids.setdefault(e * ranks // case.num_experts // domain, []).append(e)
            for other, there in ids.items():
                is_home = other == source // domain
                yield source, token, source if is_home else other * domain + source % domain, there


def check_ht_wire(
    case: Case, plan: HtPlan, results: list[reference.DispatchResult], inputs: list[reference.RankInput],
    got: list[HtRankResult],
) -> None:  # fmt: skip
    """A row crosses once to each rank that keeps it, once to each other domain, and as many come home."""
    ranks = case.num_ranks
    rows = [[[0, 0] for _ in range(ranks)] for _ in range(ranks)]  # [mover][peer]: dispatch, combine inside the domain
    rail = [[[0, 0] for _ in range(ranks)] for _ in range(ranks)]
    for source, token, via, ids in visits(case, inputs):
        if via != source:
            rail[source][via][0] += 1
            rail[via][source][1] += 1
        for owner in {e * ranks // case.num_experts for e in ids}:
            if bool((results[owner].row_of[source, token] >= 0).any()):
                rows[via][owner][0] += 1
                rows[via][owner][1] += 1
    out = got[0].dispatched
    parts = [out.x, *([] if out.scales is None else [out.scales]), *out.extra]
    body = sum(-(-each.shape[-1] * each.element_size() // 16) * 16 for each in parts)
    times = 2 if plan.given else 1
    for rank, result in enumerate(got):
        for peer in range(ranks):
            where = f"{case.describe()} {plan}: {rank} -> {peer}"
            sent = rows[rank][peer][0] + rail[rank][peer][0]
            assert result.wire[0]["rows_count"][peer] == times * sent, where
            assert result.wire[0]["rows"][peer] == times * sent * body, where
            home, pulled = rail[rank][peer][1], rows[rank][peer][1]
            assert result.wire[1]["rows_count"][peer] - times * sent == home + pulled, where
            is_in_place = (
                case.layout in reference.RANK_LAYOUTS and not got[peer].stats["staged_combines"]
                and case.hidden * case.rows_dtype.itemsize <= case.home_bytes
            )  # fmt: skip
            pulled_bytes = case.hidden * case.rows_dtype.itemsize if is_in_place else case.home_bytes
            home_bytes = -(-case.home_bytes // 16) * 16
            expected = home * home_bytes + pulled * pulled_bytes
            assert result.wire[1]["rows"][peer] - times * sent * body == expected, f"{where} bytes"
            assert result.wire[2]["rows"] == result.wire[1]["rows"], f"{where}: rows beside scalars"


def other_bytes(case: Case, plan: HtPlan, inputs: list[reference.RankInput]) -> torch.Tensor:
    """What is no row, [operation of HtRankResult.wire, sender, peer], by docs/wire_format.md."""
    ranks, domain, topk = case.num_ranks, case.domain_size or case.num_ranks, case.topk
    is_weighted = case.is_weighted_at_home
    counts, no_counts = 8 * (32 + ranks + case.num_experts), 8 * 32
    other = torch.zeros(4, ranks, ranks, dtype=torch.int64)
    other[0] += counts + no_counts if plan.exact else counts
    other[1:3] += 8 * 13
    other[3] += no_counts * len(plan.cached)
    for source, _, via, ids in visits(case, inputs):
        if via != source:
            other[2, via, source] += -(-4 * topk // 16) * 16
        owners = [e * ranks // case.num_experts for e in ids]
        for owner in owners:
            other[1, via, owner] += 8 * is_weighted
            other[2, via, owner] += 4
        for owner in set(owners):
            other[0, via, owner] += 4 * (2 * topk + 1)
    for source, peer in itertools.product(range(ranks), repeat=2):
        if source // domain != peer // domain and source % domain == peer % domain:
            other[:2, source, peer] += 16 * topk * case.tokens[source] * torch.tensor([1, is_weighted])
    if plan.given:
        other[0] *= 2
    return other.cumsum(0)


def check_ht_other(case: Case, plan: HtPlan, inputs: list[reference.RankInput], got: list[HtRankResult]) -> None:
    """Messages, routes, weights and scalars: no byte beside rows but these."""
    for rank, wanted in enumerate(other_bytes(case, plan, inputs).unbind(1)):
        other = [wire["other"] for wire in got[rank].wire]
        assert other == wanted.tolist(), f"{case.describe()} {plan}: rank {rank} beside rows"
