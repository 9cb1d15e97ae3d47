"""What a rank does in the tests of DeepEP's normal mode, on CPU ranks and on GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep, reference
from tests.deep_ep.low_latency_ranks import rebuilt, similarity_gap
from tests.support.cases import Case, generate
from tests.support.contents import as_bytes
from tests.support.expected import plain_case
from tests.support.gpus import busy, captured, on_gpu
from tests.support.harness import synchronize, to_device

WINDOW = 6 << 20  # bytes in which every generated case fits
_WINDOW_OF_GRAPHS = 128 << 20  # in whose arena the outputs of replay_in_place have room
_FLAT = {
    "layout": "flat", "capacity": None, "capacity_kind": "default", "expert_alignment": 1, "zero_padding": False,
    "quant": None, "out_dtype": None, "wire_dtype": None, "combine_weights": "none",
}  # fmt: skip


def normal_cases(count: int, num_ranks: int, **changes: Any) -> list[NormalCase]:
    """The first generated cases of so many ranks."""
    fitting = (case for case in map(generate, itertools.count()) if case.num_ranks == num_ranks)
    return [NormalCase(dataclasses.replace(case, **_FLAT, **changes)) for case in itertools.islice(fitting, count)]


def small_case(num_ranks: int = 2, ids: list[torch.Tensor] | None = None, **changes: Any) -> NormalCase:
    return NormalCase(plain_case(num_ranks, **{"layout": "flat", "combine_weights": "none", **changes}), ids)


def normal_buffer(group: Any, num_nvl_bytes: int = WINDOW, **options: Any) -> deep_ep.Buffer:
    """A buffer as DeepEP's callers make it."""
    how = {"device": "cpu", "timeout": 60.0, "on_invalid_ids": "count", **options}
    return deep_ep.Buffer(group, num_nvl_bytes, **how)


def normal_arguments(buffer: deep_ep.Buffer) -> dict[str, Any]:
    """Of a dispatch of 3 tokens to 2 experts on one rank."""
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]])
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 2)
    return {
        "x": torch.ones(3, 64, dtype=torch.bfloat16), "topk_idx": ids, "topk_weights": torch.full((3, 2), 0.5),
        "num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank,
    }  # fmt: skip


Layout = tuple[list[int], list[int] | None, list[int], list[list[bool]]]


def layout_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, domain_size: int | None = None) -> Layout:
    """Counts of ranks, domains and experts, and who gets which token, one by one."""
    local, domain = num_experts // num_ranks, domain_size or num_ranks
    per_expert = [0] * num_experts
    is_in_rank = [[False] * num_ranks for _ in range(len(topk_idx))]
    for token, ids in enumerate(topk_idx.tolist()):
        for expert in ids:
            if 0 <= expert < num_experts:
                per_expert[expert] += 1
                is_in_rank[token][expert // local] = True
    per_rank = [sum(row[r] for row in is_in_rank) for r in range(num_ranks)]
    if domain == num_ranks:
        return per_rank, None, per_expert, is_in_rank
    per_domain = [sum(any(row[first : first + domain]) for row in is_in_rank) for first in range(0, num_ranks, domain)]
    return per_rank, per_domain, per_expert, is_in_rank


def check_layout(
    buffer: deep_ep.Buffer, ids: torch.Tensor, num_experts: int, where: str = "", **options: Any
) -> dict[str, Any]:
    """What get_dispatch_layout returns, as dispatch takes it."""
    per_rank, per_domain, per_expert, is_in_rank, event = buffer.get_dispatch_layout(ids, num_experts, **options)
    wait(event, options)
    want = layout_of(ids, num_experts, buffer.num_ranks, buffer.domain_size)
    assert per_rank.dtype == per_expert.dtype == torch.int32 and is_in_rank.dtype == torch.bool, where
    assert is_in_rank.is_contiguous() and is_in_rank.shape == (len(ids), buffer.num_ranks), where
    got = (per_rank.tolist(), None if per_domain is None else per_domain.tolist(), per_expert.tolist())
    assert got == want[:3], f"{where}: {got} {want[:3]}"
    assert is_in_rank.tolist() == want[3], where
    return {
        "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_domain,
        "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank,
    }  # fmt: skip


class NormalCase:
    """A case whose operations go through DeepEP's methods, with the oracle's word on each of their results.

    Drawn from the seed: with_topk, worst (num_worst_tokens, or 0), alignment. ids: other choices for every rank.
    """

    def __init__(self, case: Case, ids: list[torch.Tensor] | None = None) -> None:
        self.case = case = dataclasses.replace(case, scale=1.0)  # DeepEP has none
        rng = random.Random(f"normal mode {case.seed}")
        self.inputs = case.inputs()
        for given, chosen in zip(self.inputs, ids or [], strict=bool(ids)):
            given.topk_idx = chosen
        self.kwargs = case.dispatch_kwargs()
        self.results = reference.dispatch(self.inputs, **self.kwargs)
        self.totals = [int(result.demand.sum()) for result in self.results]
        self.with_topk = rng.random() < 0.8
        self.worst = max(self.totals) + rng.choice([0, 1, 7, 40]) if self.with_topk and rng.random() < 0.4 else 0
        self.alignment = rng.choice([1, 1, 4, 128])
        self.rows = [case.expert(result.x, result, rank) for rank, result in enumerate(self.results)]
        self.combined = reference.combine(self.rows, self.results, self.inputs, **case.combine_kwargs())

    def where(self, rank: int) -> str:
        return f"{self.case.describe()} topk={self.with_topk} worst={self.worst} rank {rank}"

    def layout(self, rank: int) -> Layout:
        case = self.case
        return layout_of(self.inputs[rank].topk_idx, case.num_experts, case.num_ranks, case.domain_size)

    def ask_layout(self, buffer: deep_ep.Buffer, **options: Any) -> dict[str, Any]:
        ids = self.inputs[buffer.rank].topk_idx.to(buffer.device)
        return check_layout(buffer, ids, self.case.num_experts, self.where(buffer.rank), **options)

    # ---- There

    def send(self, buffer: deep_ep.Buffer, **options: Any) -> tuple[Any, ...]:
        given = self.inputs[buffer.rank]
        layout = self.ask_layout(buffer)
        ids, weights = given.topk_idx.to(buffer.device), given.topk_weights
        if weights is None:
            weights = torch.ones(ids.shape)
        topk = {"topk_idx": ids, "topk_weights": weights.to(buffer.device)} if self.with_topk else {}
        return buffer.dispatch(
            x=self.payload(buffer), **layout, **topk, expert_alignment=self.alignment, num_worst_tokens=self.worst,
            **options,
        )  # fmt: skip

    def payload(self, buffer: deep_ep.Buffer) -> Any:
        given = self.inputs[buffer.rank]
        x = given.x.to(buffer.device)
        if given.scales is None:
            return x
        return x, to_device(given.scales, buffer.device)

    def num_rows(self, rank: int) -> int:
        return self.worst or self.totals[rank]

    def check_received(self, rank: int, received: tuple[Any, ...]) -> Any:
        """Returns the handle."""
        case, want, where = self.case, self.results[rank], self.where(rank)
        recv_x, recv_idx, recv_weights, per_expert, handle, _ = received
        total = self.totals[rank]
        self.check_rows(rank, recv_x)
        if self.with_topk:
            assert want.topk_idx is not None
            assert recv_idx.shape == recv_weights.shape == (self.num_rows(rank), case.topk), where
            assert recv_idx.dtype == case.idx_dtype and recv_weights.dtype == torch.float32, where
            assert recv_idx.is_contiguous() and recv_weights.is_contiguous(), where
            assert recv_idx[:total].tolist() == want.topk_idx[:total].tolist(), where
            assert not reference.first_difference(recv_weights[:total].cpu(), want.weights[:total]), where
            assert bool((recv_idx[total:] == -1).all()) and not recv_weights[total:].any(), where
        else:
            assert recv_idx is None and recv_weights is None, where
        assert per_expert == ([] if self.worst else self.expert_counts(rank)), f"{where}: {per_expert}"
        self.check_handle(rank, handle)
        return handle

    def check_rows(self, rank: int, recv_x: Any) -> None:
        case, want, where, total = self.case, self.results[rank], self.where(rank), self.totals[rank]
        rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        assert (scales is not None) == (want.scales is not None), where
        for name, mine, theirs in (("x", rows, want.x), ("scales", scales, want.scales)):
            if theirs is None:
                continue
            assert mine.shape == (self.num_rows(rank), theirs.shape[1]) and mine.dtype == theirs.dtype, where
            assert mine.is_contiguous(), where
            difference = reference.first_difference(as_bytes(mine[:total].cpu()), as_bytes(theirs[:total]))
            assert not difference, f"{where}: {name}: {difference}"
        assert rows.shape[1] == case.hidden

    def expert_counts(self, rank: int) -> list[int]:
        local = self.case.num_experts // self.case.num_ranks
        layouts = [self.layout(source)[2] for source in range(self.case.num_ranks)]
        counts = [sum(each[e] for each in layouts) for e in range(rank * local, (rank + 1) * local)]
        return [-(-count // self.alignment) * self.alignment for count in counts]

    def check_handle(self, rank: int, handle: Any) -> None:
        case, where = self.case, self.where(rank)
        layouts = [self.layout(source) for source in range(case.num_ranks)]
        prefix = torch.tensor([each[0] for each in layouts], dtype=torch.int32).cumsum(0)
        assert isinstance(handle, tuple) and all(isinstance(each, torch.Tensor) for each in handle), where
        if case.domain_size in (None, case.num_ranks):
            rank_prefix, _, _, src_idx, is_in_rank, places = handle
            assert rank_prefix.dtype == torch.int32 and rank_prefix.tolist() == prefix.tolist(), where
        else:
            assert len(handle) == 10, where
            is_in_rank, src_idx, places = handle[0], handle[7], handle[8]
            assert handle[-4].dtype == torch.int32 and handle[-4].tolist() == prefix[:, rank].tolist(), where
            assert handle[4].tolist() == prefix[:, rank].tolist()[case.domain_size - 1 :: case.domain_size], where
        assert is_in_rank.tolist() == layouts[rank][3], where
        tokens = [token for each in layouts for token, row in enumerate(each[3]) if row[rank]]
        assert src_idx.dtype == torch.int32 and src_idx.shape == (self.num_rows(rank),), where
        assert src_idx[: len(tokens)].tolist() == tokens, where
        assert places.dtype == torch.int32 and places.tolist() == self.places(rank), where

    def places(self, rank: int) -> list[list[int]]:
        """The row of every choice at its owner; without top-k, of every token at every rank."""
        local, case = self.case.num_experts // self.case.num_ranks, self.case
        rows = [result.row_of[rank] for result in self.results]
        if not self.with_topk:
            return [[int(rows[r][token].max()) for r in range(case.num_ranks)] for token in range(case.tokens[rank])]
        return [
            [int(rows[e // local][token, k]) if 0 <= e < case.num_experts else -1 for k, e in enumerate(ids)]
            for token, ids in enumerate(self.inputs[rank].topk_idx.tolist())
        ]

    # ---- And back

    def take(self, buffer: deep_ep.Buffer, rows: torch.Tensor) -> torch.Tensor:
        """Of the oracle's rows as many as were received; beyond what came, NaN."""
        wanted = self.num_rows(buffer.rank)
        if len(rows) < wanted:
            rows = torch.cat([rows, torch.full((wanted - len(rows), rows.shape[1]), float("nan"), dtype=rows.dtype)])
        return rows[:wanted].to(buffer.device, copy=True)

    def values(self, rank: int) -> torch.Tensor:
        """A number for each choice of a received row, its own or not, and NaN beyond."""
        made = torch.Generator().manual_seed(self.case.seed * 64 + rank)
        width = self.case.topk if self.with_topk else self.case.num_ranks
        values = torch.randn(len(self.results[rank].x), width, generator=made)
        values[self.totals[rank] :] = float("nan")
        return values

    def send_back(self, buffer: deep_ep.Buffer, handle: Any, **options: Any) -> tuple[Any, ...]:
        rank, bias = buffer.rank, None
        if self.case.biases:
            bias = tuple(each.to(buffer.device) for each in self.case.rank_combine_kwargs(rank)["bias"])
            bias = bias[0] if len(bias) == 1 else bias
        return buffer.combine(self.take(buffer, self.rows[rank]), handle, bias=bias, **options)

    def check_combined(self, rank: int, combined: torch.Tensor) -> None:
        assert combined.shape == (self.case.tokens[rank], self.case.hidden) and combined.is_contiguous()
        difference = reference.first_difference(combined.cpu(), self.combined[rank])
        assert not difference, f"{self.where(rank)}: combined: {difference}"

    def check_weights(self, rank: int, weights: torch.Tensor) -> None:
        """Added up over all ranks that have the token, choice by choice."""
        values = [self.values(r) for r in range(self.case.num_ranks)]
        want = reference.combine(
            values, self.results, self.inputs, num_experts=self.case.num_experts, layout="flat", weights=None,
            domain_size=self.case.domain_size,
        )[rank]  # fmt: skip
        assert weights.is_contiguous() and weights.shape == want.shape, self.where(rank)
        difference = reference.first_difference(weights.cpu(), want)
        assert not difference, f"{self.where(rank)}: weights: {difference}"

    # ---- All of it

    def run(self, buffer: deep_ep.Buffer, **options: Any) -> None:
        """A layout, a dispatch, a cached one, and combines. options: of all."""
        rank = buffer.rank
        received = self.send(buffer, **options)
        wait(received[-1], options)
        handle = self.check_received(rank, received)
        handle = rebuilt(handle) if self.case.seed % 2 else tuple(each.clone() for each in handle)
        again, *nothing, event = buffer.dispatch(self.payload(buffer), handle=handle, **options)
        wait(event, options)
        assert nothing == [None] * 4
        self.check_rows(rank, again)
        combined, none, event = self.send_back(buffer, handle, **options)
        wait(event, options)
        assert none is None
        self.check_combined(rank, combined)
        weights = self.take(buffer, self.values(rank))
        combined, weights, event = self.send_back(buffer, handle, topk_weights=weights, **options)
        wait(event, options)
        self.check_combined(rank, combined)
        self.check_weights(rank, weights)


def wait(event: nccl_ep.EventOverlap, options: dict[str, Any]) -> None:
    assert (event.event is not None) == bool(options.get("async_finish"))
    if event.event is not None:
        event.current_stream_wait()


# ---- One graph, and routing that changes


def replay_new_routing(group: Any, device: str, is_async: bool, replays: int) -> int:
    """Layout, dispatch and combine in one graph (on "cpu", called): what a replay gives is that of its routing."""
    num_ranks = 1 if group is None else group.size()
    experts, worst = 4 * num_ranks, 8 * num_ranks + 4
    cases = [small_case(num_ranks, seed=seed, num_experts=experts) for seed in range(6)]
    for case in cases:
        case.with_topk, case.worst, case.alignment = True, worst, 1
    with normal_buffer(group, device=device) as buffer:
        rank = buffer.rank

        def tensors_of(case: NormalCase) -> tuple[torch.Tensor, ...]:
            given = case.inputs[rank]
            assert given.topk_weights is not None
            return given.x, given.topk_idx, given.topk_weights, case.take(buffer, case.rows[rank])

        assert len({case.totals[rank] for case in cases}) > 1 or num_ranks == 1
        x, ids, weights, rows = memory = [each.to(buffer.device, copy=True) for each in tensors_of(cases[0])]
        options, last = {"async_finish": is_async}, dict[str, Any]()

        def layer() -> None:
            per_rank, _, per_expert, is_in_rank, event = buffer.get_dispatch_layout(ids, experts, **options)
            wait(event, options)
            last["received"] = received = buffer.dispatch(
                x, None, per_rank, None, is_in_rank, per_expert, ids, weights, num_worst_tokens=worst, **options
            )
            wait(received[-1], options)
            last["combined"], _, event = buffer.combine(rows, received[4], **options)
            wait(event, options)

        replay = captured(layer, device)
        for number in range(replays):
            case = cases[number % len(cases)]
            for mine, theirs in zip(memory, tensors_of(case), strict=True):
                mine.copy_(theirs)
            if device != "cpu" and (number + 5 * rank) % 7 == 0:
                busy(1)  # ranks fall behind in turn
            replay()
            synchronize(buffer.device)
            buffer.require_usable()
            case.check_received(rank, last["received"])
            case.check_combined(rank, last["combined"])
    return replays


def replay_in_place(group: Any, device: str, replays: int) -> dict[str, int]:
    """Dispatch, cached dispatch and combine of its rows in one graph (on "cpu", called): their results, and which of
    them needed a staging copy meanwhile."""
    num_ranks = 1 if group is None else group.size()
    tokens, hidden, topk, experts = 256, 2048, 2, 4 * num_ranks
    with normal_buffer(group, _WINDOW_OF_GRAPHS, device=device) as buffer:
        made = torch.Generator().manual_seed(buffer.rank)
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=buffer.device)
        ids = torch.zeros(tokens, topk, dtype=torch.int64, device=buffer.device)
        weights = torch.ones(tokens, topk, device=buffer.device)
        last = dict[str, Any]()

        def change() -> None:
            x.copy_(torch.randn(tokens, hidden, generator=made))
            ids.copy_(torch.rand(tokens, experts, generator=made).topk(topk, -1).indices)
            ids[torch.rand(tokens, generator=made) < 0.2] = -1

        def layer() -> None:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, experts)
            rows, _, _, _, handle, _ = buffer.dispatch(
                x, None, per_rank, None, is_in_rank, per_expert, ids, weights, num_worst_tokens=num_ranks * tokens
            )
            again = buffer.dispatch(x, handle=handle)[0]
            last.update(rows=rows, again=again, combined=buffer.combine(again, handle)[0], is_in_rank=is_in_rank)
            last["prefix"] = handle[0]

        change()
        replay = captured(layer, device)
        synchronize(buffer.device)
        before = buffer.stats()
        for number in range(replays):
            change()
            if device != "cpu" and (number + 5 * buffer.rank) % 7 == 0:
                busy(1)  # ranks fall behind in turn
            replay()
            synchronize(buffer.device)
            buffer.require_usable()
            copies = last["is_in_rank"].sum(1, keepdim=True).to(x.dtype)  # one for each rank, all the same
            assert torch.equal(last["combined"], x * copies)
            came = int(last["prefix"][-1, buffer.rank])
            assert came > 0 and torch.equal(last["rows"][:came], last["again"][:came])
            mine = slice(0 if buffer.rank == 0 else int(last["prefix"][buffer.rank - 1, buffer.rank]), None)
            own = x[last["is_in_rank"][:, buffer.rank]]
            assert torch.equal(last["rows"][mine][: len(own)], own)
        after = buffer.stats()
        return {
            name: after[name] - before[name]
            for name in ("ht_dispatches", "ht_combines", "staged_dispatches", "staged_combines")
        }


def replay_in_place_over_nccl(rank: int, replays: int) -> dict[str, int]:
    on_gpu(rank)
    return replay_in_place(dist.group.WORLD, "cuda", replays)


def replay_over_nccl(rank: int, replays: int) -> int:
    on_gpu(rank)
    return sum(replay_new_routing(dist.group.WORLD, "cuda", is_async, replays) for is_async in (False, True))


# ---- A program as users of DeepEP write it

_HIDDEN, _TOPK, _LOCAL_EXPERTS = 256, 4, 4


def run_program(rank: int, num_ranks: int, device_type: str = "cpu") -> int:
    """Layouts, dispatches and combines over every option, each checked by what all ranks' routing says. Returns how
    many dispatches of fresh routing ran."""
    device = torch.device("cpu") if device_type == "cpu" else on_gpu(rank)
    deep_ep.Buffer.set_num_sms(24)
    num_bytes = max(
        each.get_nvl_buffer_size_hint(2 * _HIDDEN, num_ranks)
        for each in (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks))
    )
    assert num_bytes > 1 << 15
    # Too little: it will grow.
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 15, 0, device=device, explicitly_destroy=True)
    tokens = _program_tokens(buffer)
    dispatches = 0
    ways = itertools.product((False, True), (False, True), ("mixed", "same", "fp8"), (False, True))
    for with_previous, is_async, which, with_topk in ways:
        stream: dict[str, Any] = {"config": nccl_ep.Config(24, 8, 256), "async_finish": is_async}
        _there_and_back(buffer, tokens, which, with_topk, with_previous, stream)
        dispatches += 1
    assert 1 <= buffer.stats()["grown"] <= 3
    buffer.destroy()
    return dispatches


@dataclasses.dataclass
class _Tokens:
    """Of a rank: what it sends, and what it is to receive."""

    topk_idx: torch.Tensor
    rows: dict[str, torch.Tensor]  # "mixed": random ones; "same": the rank's number
    weights: dict[str, torch.Tensor]  # the same two
    layout: dict[str, Any]
    num_copies: torch.Tensor  # [T, 1]: ranks that get the token
    want_counts: list[int]  # of the local experts
    want_rows: int


def _program_tokens(buffer: deep_ep.Buffer) -> _Tokens:
    """Collective. Tokens of a random routing, some of whose choices are -1."""
    rank, device, local = buffer.rank, buffer.device, _LOCAL_EXPERTS
    num_tokens, num_experts = 64 + rank, local * buffer.num_ranks
    made = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand(num_tokens, num_experts, generator=made).topk(_TOPK, dim=1).indices
    topk_idx[torch.randint(num_tokens, (9,), generator=made), torch.randint(_TOPK, (9,), generator=made)] = -1
    all_idx: list[Any] = [None] * buffer.num_ranks
    dist.all_gather_object(all_idx, topk_idx, group=buffer.group)
    everyone = torch.cat(all_idx).to(device)
    topk_idx = topk_idx.to(device)
    mixed = torch.randn(num_tokens, _HIDDEN, generator=made).bfloat16().to(device)
    weights = torch.rand(num_tokens, _TOPK, generator=made).to(device)
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return _Tokens(
        topk_idx,
        rows={"mixed": mixed, "same": torch.full_like(mixed, float(rank))},
        weights={"mixed": weights, "same": torch.full_like(weights, float(rank))},
        layout={
            "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": is_in_rank,
            "num_tokens_per_expert": per_expert,
        },
        num_copies=is_in_rank.sum(1, keepdim=True),
        want_counts=[int((everyone == e).sum()) for e in range(rank * local, (rank + 1) * local)],
        want_rows=int(((everyone // local == rank) & (everyone >= 0)).any(1).sum()),
    )  # fmt: skip


def _there_and_back(
    buffer: deep_ep.Buffer, tokens: _Tokens, which: str, with_topk: bool, with_previous: bool, stream: dict[str, Any]
) -> None:
    """A dispatch, the same in another way (worst sizes or its handle), and a combine. stream: options of all."""
    kind = "mixed" if which == "mixed" else "same"
    x: Any = _quantised(tokens.rows[kind]) if which == "fp8" else tokens.rows[kind]
    chosen = {"topk_idx": tokens.topk_idx, "topk_weights": tokens.weights[kind]}

    def run(operation: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
        ordered = {"previous_event": buffer.capture()} if with_previous else {}
        *results, event = operation(*args, **options, **stream, **ordered)
        wait(event, stream)
        return tuple(results)

    recv_x, recv_idx, recv_weights, counts, handle = run(
        buffer.dispatch, x, **tokens.layout, **(chosen if with_topk else {})
    )
    rows, want_rows = _restored(recv_x), tokens.want_rows
    assert rows.shape == (want_rows, _HIDDEN) and counts == tokens.want_counts
    if kind == "same":
        _check_sources(rows, handle[0], buffer.rank)
    if with_topk:
        assert bool(((recv_idx >= -1) & (recv_idx < _LOCAL_EXPERTS)).all())
        assert [int((recv_idx == e).sum()) for e in range(_LOCAL_EXPERTS)] == counts
        if kind == "same":  # what DeepEP's own test does with the entries of other ranks
            recv_weights = torch.where(recv_idx == -1, recv_weights.amax(1, keepdim=True), recv_weights)
            _check_sources(recv_weights, handle[0], buffer.rank)
        worst = run(buffer.dispatch, x, **tokens.layout, **chosen, num_worst_tokens=want_rows + 5)
        assert worst[3] == [] and _restored(worst[0]).shape == (want_rows + 5, _HIDDEN)
        assert torch.equal(_restored(worst[0])[:want_rows], rows) and bool((worst[1][want_rows:] == -1).all())
    else:
        again, *_ = run(buffer.dispatch, x, handle=handle)
        assert torch.equal(_restored(again), rows)
    back = run(buffer.combine, rows, handle, topk_weights=recv_weights if with_topk else None)
    _check_home(tokens, kind, with_topk, *back)
    buffer.require_usable()


def _check_home(
    tokens: _Tokens, kind: str, with_topk: bool, combined: torch.Tensor, combined_weights: torch.Tensor | None
) -> None:
    reached = tokens.num_copies.flatten() > 0
    mean = combined.float() / tokens.num_copies.clamp(min=1)
    assert similarity_gap(mean[reached], tokens.rows[kind].float()[reached]) < 5e-6
    if not with_topk:
        assert combined_weights is None
    elif kind == "same":
        assert torch.equal(combined_weights, tokens.weights["same"] * tokens.num_copies)
    else:
        assert torch.equal(combined_weights, tokens.weights["mixed"].masked_fill(tokens.topk_idx < 0, 0))


def _check_sources(rows: torch.Tensor, rank_prefix: torch.Tensor, rank: int) -> None:
    """Rows that hold their source rank lie in its range, and nowhere else."""
    start = 0
    for source, end in enumerate(rank_prefix[:, rank].tolist()):
        assert bool((rows[start:end] == source).all())
        start = end
    assert start == len(rows)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and a scale for 128 elements, column-major as a GEMM takes them."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    rows = (groups / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return rows, scales.t().contiguous().t()


def _restored(received: Any) -> torch.Tensor:
    if isinstance(received, torch.Tensor):
        return received
    rows, scales = received
    assert scales.is_contiguous()
    return (rows.float().unflatten(1, (-1, 128)) * scales.unsqueeze(2)).flatten(1).bfloat16()
