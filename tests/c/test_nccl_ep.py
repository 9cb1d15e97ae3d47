"""Handles without options: programs of NVIDIA's NCCL EP, which know nccl_ep.h alone, get what the oracle says."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library, point
from tests.c.case import SECOND, allgather_of, refused, tensor
from tests.support.expected import Expected, plain_case

BAD, USAGE = c_api.INVALID_ARGUMENT, c_api.INVALID_USAGE
RANKS, TOKENS, TOPK, HIDDEN, EXPERTS = 3, 8, 2, 64, 6
LOCAL, GLOBAL = 1, 2
FORWARDED, DS_FP8 = 1, 2
BACKWARD = 1


def case_of(layout: str, **changes: Any) -> Expected:
    """Ranks with fewer tokens than there may be, one with none."""
    tokens = {"tokens_kind": "some", "tokens": (8, 5, 0), "max_tokens": TOKENS}
    weights = "tensor" if layout == "expert_major" else "none"
    return Expected(plain_case(RANKS, layout=layout, combine_weights=weights, **{**tokens, **changes}))


class Program:
    """A rank of a program: a communicator, a group, and what it calls with tensors."""

    def __init__(self, library: Library, group: ThreadGroup, expected: Expected, algorithm: int, **config: Any) -> None:
        self.library, self.ranks, self.expected, self.rank = library, group, expected, group.rank()
        self.allgather = allgather_of(group)
        self.comm = library.comm(group.rank(), group.size(), self.allgather)
        self.group, self.handle = c.c_void_p(), c.c_void_p()
        fields = {
            "algorithm": algorithm, "num_experts": EXPERTS, "max_dispatch_tokens_per_rank": TOKENS,
            "max_token_bytes": HIDDEN * 4, "timeout_ns": 60 * SECOND, "max_recv_tokens_per_rank": RANKS * TOKENS * TOPK,
            "rdma_buffer_size": 1 << 20, "num_qp_per_rank": 3, "num_channels": 5,
        }  # fmt: skip
        library.EpCreateGroup(self.group, self.comm, c_api.RawGroupConfig(**{**fields, **config}))
        given = expected.inputs[self.rank]
        self.x, self.ids, self.weights = given.x, given.topk_idx, given.topk_weights
        self.result = expected.results[self.rank]
        self.experts = slice(self.rank * EXPERTS // RANKS, (self.rank + 1) * EXPERTS // RANKS)

    def all_weights(self) -> torch.Tensor:
        """What rows by rank bring: those of other ranks' choices, too."""
        made = torch.zeros(RANKS, TOKENS, TOPK)
        for source, given in enumerate(self.expected.inputs):
            is_here = (given.topk_idx >= self.experts.start) & (given.topk_idx < self.experts.stop)
            rows = given.topk_weights[is_here.any(1)]
            made[source, : len(rows)] = rows
        return made

    def create(self, layout: int, alignment: int = 0, **info: torch.Tensor) -> None:
        counters = c_api.LayoutInfo(**{name: point(tensor(each)) for name, each in info.items()})
        config = c_api.RawHandleConfig(dispatch_output_per_expert_alignment=alignment)
        ids = tensor(self.ids)
        self.library.EpCreateHandle(self.handle, self.group, layout, ids, counters if info else None, config, None)

    def dispatch(
        self, inputs: dict[str, Any], outputs: dict[str, Any], info: dict[str, Any] | None = None, **config: Any
    ) -> None:
        raw = c_api.RawDispatchInputs(**{name: point(tensor(each)) for name, each in inputs.items()})
        out = c_api.RawDispatchOutputs(**{name: point(tensor(each)) for name, each in outputs.items()})
        counters = {name: each if isinstance(each, int) else point(tensor(each)) for name, each in (info or {}).items()}
        layout_info = c_api.LayoutInfo(**counters) if info else None
        how = c_api.RawDispatchConfig(**config)
        self.library.EpDispatch(self.handle, raw, out, layout_info, how, None)
        if config.get("send_only"):
            self.library.EpComplete(self.handle, None, None)

    def combine(self, inputs: dict[str, Any], outputs: dict[str, Any], **config: Any) -> None:
        raw = c_api.RawCombineInputs(**{name: point(tensor(each)) for name, each in inputs.items()})
        out = c_api.RawCombineOutputs(**{name: point(tensor(each)) for name, each in outputs.items()})
        self.library.EpCombine(self.handle, raw, out, c_api.RawCombineConfig(**config), None)
        if config.get("send_only"):
            self.library.EpComplete(self.handle, None, None)

    def home(self) -> torch.Tensor:
        return torch.full_like(self.expected.combined[self.rank], 7)

    def demand(self) -> list[int]:
        """Rows of each expert here."""
        ids = torch.cat([given.topk_idx.flatten() for given in self.expected.inputs])
        return [int((ids == expert).sum()) for expert in range(self.experts.start, self.experts.stop)]

    def close(self) -> None:
        self.library.EpHandleDestroy(self.handle)
        self.library.EpGroupDestroy(self.group)
        self.library.EpxCommDestroy(self.comm)


def on_ranks(
    library: Library, expected: Expected, algorithm: int, body: Callable[[Program], None], **config: Any
) -> None:
    def run(group: ThreadGroup) -> None:
        program = Program(library, group, expected, algorithm, **config)
        body(program)
        program.close()

    run_ranks(RANKS, run)


def check_rows(got: torch.Tensor, want: torch.Tensor, valid: torch.Tensor) -> None:
    """Of rows that exist."""
    rows = len(valid)
    assert torch.equal(got.reshape(-1, *got.shape[-1:])[:rows][valid], want.reshape(rows, -1)[valid])


# ---- Low latency


@pytest.mark.parametrize("staged", [0, 1], ids=["fused", "staged"])
def test_low_latency_by_expert_is_weighted_at_home(library: Library, staged: int) -> None:
    def body(run: Program) -> None:
        run.create(c_api.EXPERT_MAJOR)
        for _ in range(2):
            rows, counts = torch.empty_like(run.result.x), torch.full((2,), -1, dtype=torch.int32)
            assert rows.shape == (EXPERTS // RANKS, RANKS * TOKENS, HIDDEN)
            run.dispatch({"tokens": run.x}, {"tokens": rows}, {"expert_counters": counts}, send_only=staged)
            assert torch.equal(counts, run.result.counts)
            check_rows(rows, run.result.x, run.result.valid)
            y, weights = run.home(), run.expected.case.rank_combine_kwargs(run.rank)["weights"]
            run.combine(
                {"tokens": run.expected.rows[run.rank]}, {"tokens": y, "topk_weights": weights}, send_only=staged
            )
            run.expected.check_combine(y, run.rank)

    on_ranks(library, case_of("expert_major"), c_api.LL, body)


@pytest.mark.parametrize("staged", [0, 1], ids=["fused", "staged"])
@pytest.mark.parametrize("kind", [0, LOCAL, GLOBAL], ids=["auto", "local", "global"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_low_latency_by_rank_gives_ids_as_they_are_asked_for(
    library: Library, kind: int, dtype: torch.dtype, staged: int
) -> None:
    def body(run: Program) -> None:
        run.create(c_api.RANK_MAJOR)
        rows, weights = torch.empty_like(run.result.x), torch.empty_like(run.result.weights)
        ids, counts = torch.full(weights.shape, 77, dtype=dtype), torch.full((RANKS,), -1, dtype=torch.int32)
        assert ids.shape == (RANKS, TOKENS, TOPK)
        outputs = {"tokens": rows, "topk_weights": weights, "topk_idx": ids}
        info = {"src_rank_counters": counts, "recv_topk_idx_kind": kind}
        run.dispatch({"tokens": run.x, "topk_weights": run.weights}, outputs, info, send_only=staged)
        local = run.result.topk_idx
        assert local is not None
        want = torch.where(local < 0, local, local + run.experts.start) if kind == GLOBAL else local
        assert torch.equal(counts, run.result.counts)
        assert torch.equal(ids.long(), want.long()) and torch.equal(weights, run.all_weights())
        check_rows(rows, run.result.x, run.result.valid)
        y = run.home()
        run.combine({"tokens": run.expected.rows[run.rank]}, {"tokens": y}, send_only=staged)
        run.expected.check_combine(y, run.rank)

    on_ranks(library, case_of("rank_major"), c_api.LL, body)


@pytest.mark.parametrize("rounded", [0, 1])
def test_low_latency_quantises(library: Library, rounded: int) -> None:
    expected = case_of("expert_major", quant="fp8_rounded" if rounded else "fp8", hidden=128)

    def body(run: Program) -> None:
        run.create(c_api.EXPERT_MAJOR)
        assert run.result.scales is not None
        rows, scales = torch.empty_like(run.result.x), torch.empty_like(run.result.scales)
        counts = torch.zeros(2, dtype=torch.int32)
        run.dispatch(
            {"tokens": run.x}, {"tokens": rows, "scales": scales}, {"expert_counters": counts}, quant_recipe=DS_FP8,
            round_scales=rounded,
        )  # fmt: skip
        check_rows(rows.view(torch.uint8), run.result.x.view(torch.uint8), run.result.valid)
        check_rows(scales, run.result.scales, run.result.valid)

    on_ranks(library, expected, c_api.LL, body)


# ---- High throughput


def test_high_throughput_in_order_of_tokens(library: Library) -> None:
    """Counters of either type, outputs longer than what comes, the backward pass."""
    expected = case_of("flat", capacity=RANKS * TOKENS)

    def body(run: Program) -> None:
        counts, total = torch.full((2,), -1, dtype=torch.int32), torch.full((1,), -1)
        run.create(c_api.FLAT, expert_counters=counts, recv_total_counter=total)
        received = int(run.result.valid.sum())
        assert total.item() == received and counts.tolist() == run.demand()
        long = RANKS * TOKENS * TOPK + 3
        rows, weights, ids = (
            torch.zeros(long, HIDDEN).bfloat16(),
            torch.zeros(long, TOPK),
            torch.zeros(long, TOPK).long(),
        )
        for kind in (LOCAL, GLOBAL):
            outputs = {"tokens": rows, "topk_weights": weights, "topk_idx": ids}
            run.dispatch({"tokens": run.x, "topk_weights": run.weights}, outputs, {"recv_topk_idx_kind": kind})
            assert run.result.topk_idx is not None
            want = run.result.topk_idx[:received].long()
            want = torch.where(want < 0, want, want + run.experts.start * (kind == GLOBAL))
            assert torch.equal(ids[:received], want)
            assert torch.equal(weights[:received], run.result.weights[:received])
            assert torch.equal(rows[:received], run.result.x[:received])
        y = run.home()
        run.combine({"tokens": pad(run.expected.rows[run.rank], long)}, {"tokens": y})
        run.expected.check_combine(y, run.rank)
        back = torch.zeros_like(rows)
        run.dispatch({"tokens": run.x + 1}, {"tokens": back}, pass_direction=BACKWARD)
        source = [run.expected.inputs[r].x + 1 for r in range(RANKS)]
        assert torch.equal(back[:received], sent_again(run.expected, source, run.rank)[:received])
        check_backward_combine(run, long)

    on_ranks(library, expected, c_api.HT, body)


def pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    more = torch.zeros(length, *rows.shape[1:], dtype=rows.dtype)
    more[: len(rows)] = rows[:length]
    return more


def sent_again(expected: Expected, tokens: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Rows of other tokens, along the same routes."""
    result = expected.results[rank]
    rows = torch.zeros(len(result.valid), *tokens[0].shape[1:], dtype=tokens[0].dtype)
    for source, mine in enumerate(tokens):
        for token in range(len(mine)):
            for row in set(result.row_of[source, token].tolist()) - {-1}:
                rows[row] = mine[token]
    return rows


def check_backward_combine(run: Program, length: int) -> None:
    """Rows and the numbers beside them come home."""
    y, home = run.home(), torch.full_like(run.expected.scalars[run.rank], 7)
    given = {
        "tokens": pad(run.expected.rows[run.rank], length),
        "topk_weights": pad(run.expected.values[run.rank], length),
    }
    run.combine(given, {"tokens": y, "topk_weights": home}, pass_direction=BACKWARD)
    run.expected.check_combine(y, run.rank)
    run.expected.check_scalars(home, run.rank)


@pytest.mark.parametrize("eager", [False, True], ids=["static", "eager"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_high_throughput_by_expert_has_aligned_experts(library: Library, eager: bool, dtype: torch.dtype) -> None:
    capacity = RANKS * TOKENS * TOPK + 8
    expected = case_of("packed", expert_alignment=4, capacity=capacity, zero_padding=True)

    def body(run: Program) -> None:
        counts, offsets, total = (torch.full((size,), -1, dtype=dtype) for size in (2, 2, 1))
        run.create(c_api.EXPERT_MAJOR, 4, expert_counters=counts, expert_offsets=offsets, recv_total_counter=total)
        padded = [-(-rows // 4) * 4 for rows in run.demand()]
        assert (counts.tolist(), offsets.tolist(), total.item()) == (padded, [0, padded[0]], sum(padded))
        length = sum(padded) if eager else capacity
        rows, weights = torch.full((length, HIDDEN), 7).bfloat16(), torch.full((length,), 7.0)
        run.dispatch({"tokens": run.x, "topk_weights": run.weights}, {"tokens": rows, "topk_weights": weights})
        here = run.result.valid[:length]
        assert (
            torch.equal(rows[here], run.result.x[:length][here]) and not rows[: sum(padded)][~here[: sum(padded)]].any()
        )
        assert torch.equal(weights[here], run.result.weights[:length][here])
        y = run.home()
        run.combine({"tokens": pad(run.expected.rows[run.rank], length)}, {"tokens": y})
        run.expected.check_combine(y, run.rank)
        check_backward_combine(run, length)

    config = {"max_recv_tokens_per_rank": 0, "num_topk": TOPK} if eager else {"max_recv_tokens_per_rank": capacity}
    on_ranks(library, expected, c_api.HT, body, **config)


def test_a_backward_pass_needs_no_forward_one(library: Library) -> None:
    expected = case_of("flat", capacity=RANKS * TOKENS)

    def body(run: Program) -> None:
        run.create(c_api.FLAT)
        back = torch.zeros(RANKS * TOKENS * TOPK, HIDDEN).bfloat16()
        run.dispatch({"tokens": run.x}, {"tokens": back}, pass_direction=BACKWARD)
        received = int(run.result.valid.sum())
        assert torch.equal(back[:received], run.result.x[:received])
        check_backward_combine(run, len(back))

    on_ranks(library, expected, c_api.HT, body)


@pytest.mark.parametrize("layout", [c_api.FLAT, c_api.EXPERT_MAJOR])
def test_high_throughput_forwards_scales(library: Library, layout: int) -> None:
    name = "flat" if layout == c_api.FLAT else "packed"
    expected = case_of(
        name, capacity=RANKS * TOKENS * TOPK, scales_dtype=torch.float32, scales_width=4, content="plain"
    )

    def body(run: Program) -> None:
        run.create(layout)
        scales = run.expected.inputs[run.rank].scales
        assert scales is not None and run.result.scales is not None
        length = RANKS * TOKENS * TOPK
        rows, out = torch.zeros(length, HIDDEN).bfloat16(), torch.zeros(length, 4)
        outputs = {"tokens": rows, "scales": out, "topk_weights": torch.zeros(length, TOPK)}
        if layout == c_api.FLAT:
            outputs["topk_idx"] = torch.zeros(length, TOPK).long()
        else:
            outputs["topk_weights"] = torch.zeros(length)
        given = {"tokens": run.x, "topk_weights": run.weights, "scales": scales.contiguous()}
        run.dispatch(given, outputs, quant_recipe=FORWARDED)
        check_rows(rows, run.result.x, run.result.valid)
        check_rows(out, run.result.scales, run.result.valid)

    on_ranks(library, expected, c_api.HT, body)


def test_a_handle_finds_the_routing_of_another_one_in_its_memory(library: Library) -> None:
    """Forward with one handle; backward and combine with others on the same memory, which were never updated."""
    expected = case_of("flat", capacity=RANKS * TOKENS)

    def body(run: Program) -> None:
        size = c.c_size_t()
        run.library.EpHandleMemSize(run.group, c_api.FLAT, None, size, TOPK)
        memory = torch.full((size.value + 64,), 0x77, dtype=torch.uint8)

        def init() -> None:
            run.library.EpInitHandle(run.handle, run.group, c_api.FLAT, None, TOPK, tensor(memory[: size.value]))

        length, received = RANKS * TOKENS * TOPK, int(run.result.valid.sum())
        init()
        run.library.EpUpdateHandle(run.handle, tensor(run.ids), None, None)
        run.library.EpHandleDestroy(run.handle)
        for direction in (0, BACKWARD):
            init()
            rows = torch.zeros(length, HIDDEN).bfloat16()
            outputs = {"tokens": rows}
            given = {"tokens": run.x}
            if direction == 0:
                given["topk_weights"] = run.weights
                outputs |= {"topk_weights": torch.zeros(length, TOPK), "topk_idx": torch.zeros(length, TOPK).long()}
            run.dispatch(given, outputs, pass_direction=direction)
            assert torch.equal(rows[:received], run.result.x[:received])
            run.library.EpHandleDestroy(run.handle)
        init()
        check_backward_combine(run, length)
        assert (memory[size.value :] == 0x77).all()

    on_ranks(library, expected, c_api.HT, body)


@pytest.mark.parametrize("policy", [c_api.TRAP, c_api.DROP], ids=["trap", "drop"])
def test_rows_that_do_not_fit(library: Library, policy: int) -> None:
    """Counters tell of all. Dropped ones are absent, and a trap is an error."""
    expected = case_of("flat", capacity=TOKENS, tokens=(TOKENS,) * RANKS)
    assert min(int(result.demand.sum()) for result in expected.results) > TOKENS

    def body(run: Program) -> None:
        total = torch.zeros(1, dtype=torch.int32)
        run.library.EpInitHandle(run.handle, run.group, c_api.FLAT, None, TOPK, None)
        info = c_api.LayoutInfo(recv_total_counter=point(tensor(total)))
        update = (run.handle, tensor(run.ids), info, None)
        if policy == c_api.TRAP:
            refused(c_api.OVERFLOW, "rows did not fit", run.library.EpUpdateHandle, *update)
        else:
            run.library.EpUpdateHandle(*update)
        assert total.item() == int(run.result.demand.sum())
        rows, weights = torch.zeros(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOPK)
        outputs = {"tokens": rows, "topk_weights": weights, "topk_idx": torch.zeros(TOKENS, TOPK).long()}
        run.dispatch({"tokens": run.x, "topk_weights": run.weights}, outputs)
        assert torch.equal(rows, run.result.x)
        y = run.home()
        run.combine({"tokens": run.expected.rows[run.rank]}, {"tokens": y})
        run.expected.check_combine(y, run.rank)

    on_ranks(library, expected, c_api.HT, body, max_recv_tokens_per_rank=TOKENS, overflow_policy=policy)


@pytest.mark.parametrize("algorithm", [c_api.LL, c_api.HT])
def test_a_group_grows_with_the_choices_of_a_token(library: Library, algorithm: int) -> None:
    """Without a num_topk; handles from before go on."""
    few = case_of("rank_major" if algorithm == c_api.LL else "flat", num_experts=24, capacity=None)
    many = case_of("rank_major" if algorithm == c_api.LL else "flat", num_experts=24, topk=12, capacity=None)
    layout = c_api.RANK_MAJOR if algorithm == c_api.LL else c_api.FLAT

    def body(run: Program) -> None:
        told, handles = c_api.GroupInfo(), {}
        for expected, topk in ((few, 8), (many, 12)):
            run.ids, run.handle = expected.inputs[run.rank].topk_idx, c.c_void_p()
            run.create(layout)
            handles[topk] = run.handle
            run.library.EpxGroupGetInfo(run.group, told)
            assert told.topk == topk
        for expected, topk in ((few, 8), (many, 12)):
            given, result, run.handle = expected.inputs[run.rank], expected.results[run.rank], handles[topk]
            choices = given.topk_idx.shape[1]
            shape = (RANKS, TOKENS) if algorithm == c_api.LL else (RANKS * TOKENS,)
            rows, weights = torch.zeros(*shape, HIDDEN).bfloat16(), torch.zeros(*shape, choices)
            outputs = {"tokens": rows, "topk_weights": weights, "topk_idx": torch.zeros(*shape, choices).long()}
            run.dispatch({"tokens": given.x, "topk_weights": given.topk_weights}, outputs)
            check_rows(rows, result.x, result.valid)
            y = torch.zeros_like(expected.combined[run.rank])
            run.combine({"tokens": expected.rows[run.rank]}, {"tokens": y})
            expected.check_combine(y, run.rank)
        run.library.EpHandleDestroy(handles[8])

    on_ranks(library, few, algorithm, body, num_experts=24, max_recv_tokens_per_rank=RANKS * TOKENS)


# ---- What is refused, and memory


def test_what_a_layout_has_not_got_is_refused_and_the_next_good_call_works(library: Library) -> None:
    expected = case_of("expert_major")

    def body(run: Program) -> None:
        init = run.library.EpInitHandle
        for layout, topk, text in (
            (c_api.UNSET, 2, "layout is not set"), (7, 2, "layout 7 is unknown"), (c_api.FLAT, 2, "layout is FLAT"),
            (c_api.EXPERT_MAJOR, 0, "num_topk is 0, must be 1 to 6"), (c_api.EXPERT_MAJOR, 9, "num_topk is 9"),
        ):  # fmt: skip
            refused(BAD, text, init, run.handle, run.group, layout, None, topk, None)
        small = tensor(torch.zeros(8, dtype=torch.uint8))
        refused(BAD, "handle_mem has 8 bytes", init, run.handle, run.group, c_api.EXPERT_MAJOR, None, 2, small)
        run.create(c_api.EXPERT_MAJOR)
        refused(
            BAD,
            "layout_info is given",
            run.library.EpUpdateHandle,
            run.handle,
            tensor(run.ids),
            c_api.LayoutInfo(),
            None,
        )
        rows, counts = torch.zeros_like(run.result.x), torch.zeros(2, dtype=torch.int32)
        good, out, info = {"tokens": run.x}, {"tokens": rows}, {"expert_counters": counts}
        for result, text, call in (
            (BAD, "expert_counters is not given", lambda: run.dispatch(good, out)),
            (BAD, "expert_counters is int64, must be int32",
             lambda: run.dispatch(good, out, {"expert_counters": counts.long()})),
            (BAD, "src_rank_counters is given", lambda: run.dispatch(good, out, {**info, "src_rank_counters": counts})),
            (BAD, "output tokens is not given", lambda: run.dispatch(good, {}, info)),
            (BAD, r"output tokens has shape \[2, 23, 64\], must be",
             lambda: run.dispatch(good, {"tokens": rows[:, :-1].contiguous()}, info)),
            (BAD, "scales are given, but quant_recipe is 0",
             lambda: run.dispatch({**good, "scales": run.x}, out, info)),
            (BAD, "scales are not given", lambda: run.dispatch(good, out, info, quant_recipe=FORWARDED)),
            (BAD, "multiple of 128", lambda: run.dispatch(good, out, info, quant_recipe=DS_FP8)),
            (BAD, "quant_recipe 3 is unknown", lambda: run.dispatch(good, out, info, quant_recipe=3)),
            (USAGE, "NCCL_EP_BWD_PASS", lambda: run.dispatch(good, out, info, pass_direction=BACKWARD)),
            (BAD, "pass_direction 2 is unknown", lambda: run.dispatch(good, out, info, pass_direction=2)),
        ):  # fmt: skip
            refused(result, text, call)
        run.dispatch(good, out, info)
        weights, y = run.expected.case.rank_combine_kwargs(run.rank)["weights"], run.home()
        mine = {"tokens": run.expected.rows[run.rank]}
        for result, text, call in (
            (BAD, "topk_weights is not given", lambda: run.combine(mine, {"tokens": y})),
            (BAD, "topk_weights of the inputs", lambda: run.combine({**mine, "topk_weights": weights}, {"tokens": y})),
            (BAD, "scales are given", lambda: run.combine({**mine, "scales": weights}, {"tokens": y})),
            (USAGE, "NCCL_EP_COMB_QUANT_NVFP4, which", lambda: run.combine(mine, {"tokens": y}, quant_recipe=1)),
            (USAGE, "of low latency", lambda: run.combine(mine, {"tokens": y}, pass_direction=BACKWARD)),
        ):  # fmt: skip
            refused(result, text, call)
        run.combine(mine, {"tokens": y, "topk_weights": weights})
        run.expected.check_combine(y, run.rank)

    on_ranks(library, expected, c_api.LL, body)


def test_what_high_throughput_has_not_got_is_refused(library: Library) -> None:
    expected = case_of("flat", capacity=RANKS * TOKENS)

    def body(run: Program) -> None:
        text = "num_topk is -1, and the group's config has none"
        refused(USAGE, text, run.library.EpInitHandle, run.handle, run.group, c_api.FLAT, None, -1, None)
        refused(BAD, "layout is RANK_MAJOR", lambda: run.create(c_api.RANK_MAJOR))
        refused(BAD, "alignment is 3, must be a power of two", lambda: run.create(c_api.EXPERT_MAJOR, 3))
        one = torch.zeros(2, dtype=torch.int32)
        refused(BAD, "expert_offsets is given, which layout FLAT", lambda: run.create(c_api.FLAT, expert_offsets=one))
        refused(BAD, "expert_counters is int64", lambda: run.create(c_api.FLAT, expert_counters=one.long()))
        run.create(c_api.FLAT)
        length = RANKS * TOKENS * TOPK
        rows, weights, ids = (
            torch.zeros(length, HIDDEN).bfloat16(),
            torch.zeros(length, TOPK),
            torch.zeros(length, TOPK).long(),
        )
        given, out = (
            {"tokens": run.x, "topk_weights": run.weights},
            {"tokens": rows, "topk_weights": weights, "topk_idx": ids},
        )
        for text, call in (
            ("topk_weights is not given, which a forward", lambda: run.dispatch({"tokens": run.x}, out)),
            ("output topk_idx is not given", lambda: run.dispatch(given, {**out, "topk_idx": None})),
            ("topk_weights is given, which a backward",
             lambda: run.dispatch(given, {"tokens": rows}, pass_direction=BACKWARD)),
            (r"output tokens has shape \[47, 64\], must have at least max_recv_tokens_per_rank, 48",
             lambda: run.dispatch(given, {**out, "tokens": rows[:-1]})),
            ("recv_topk_idx_kind 3 is unknown", lambda: run.dispatch(given, out, {"recv_topk_idx_kind": 3})),
            ("of low latency", lambda: run.dispatch(given, out, quant_recipe=DS_FP8)),
        ):  # fmt: skip
            refused(BAD, text, call)
        run.dispatch(given, out)
        y = run.home()
        values = {"tokens": rows, "topk_weights": weights}
        text = "output topk_weights is not given"
        refused(BAD, text, lambda: run.combine(values, {"tokens": y}, pass_direction=BACKWARD))
        run.combine({"tokens": pad(run.expected.rows[run.rank], length)}, {"tokens": y})
        run.expected.check_combine(y, run.rank)

    on_ranks(library, expected, c_api.HT, body)


def test_groups_that_are_refused(library: Library) -> None:
    comm, made = library.comm(0, 1, c_api.Allgather()), c.c_void_p()
    good = {"num_experts": 4, "max_dispatch_tokens_per_rank": 8, "max_token_bytes": 64, "algorithm": c_api.HT}
    one = c.cast(c.CFUNCTYPE(c.c_int)(lambda: 0), c.c_void_p)
    for result, text, changes in (
        (BAD, "num_experts is 4294967295", {"num_experts": 2**32 - 1}),
        (BAD, "max_recv_tokens_per_rank is 7, must be NCCL_EP_AUTO or at least", {"max_recv_tokens_per_rank": 7}),
        (BAD, "overflow_policy is DROP, but", {"overflow_policy": c_api.DROP}),
        (BAD, "zero_copy 3 is unknown", {"zero_copy": 3}),
        (USAGE, "alloc has one function", {"alloc_fn": one}),
    ):
        config = c_api.RawGroupConfig(**{**good, **changes})
        refused(result, text, library.EpCreateGroup, made, comm, config)
    refused(BAD, "comm is null", library.EpCreateGroup, made, None, c_api.RawGroupConfig(**good))
    library.EpCreateGroup(made, comm, c_api.RawGroupConfig(**good))
    refused(BAD, "is a communicator$", library.EpxCheck, comm)
    handle, ids = c.c_void_p(), torch.zeros(8, 2, dtype=torch.int64)
    refused(USAGE, "which needs num_topk in the group's", library.EpCreateHandle, handle, made, c_api.EXPERT_MAJOR,
            tensor(ids), None, None, None)  # fmt: skip
    library.EpGroupDestroy(made)
    library.EpxCommDestroy(comm)


def test_the_deadline_of_the_environment_goes_first(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    comm, made = (
        library.comm(0, 2, c_api.Allgather(lambda *given: deadlines.append(given[4]) or c_api.TIMEOUT)),
        c.c_void_p(),
    )
    deadlines: list[int] = []
    config = c_api.RawGroupConfig(
        num_experts=4, max_dispatch_tokens_per_rank=8, max_token_bytes=64, timeout_ns=5 * SECOND
    )
    for text, want in (("", 5 * SECOND), ("250", SECOND // 4)):
        monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", text)
        refused(c_api.TIMEOUT, "could not gather", library.EpCreateGroup, made, comm, config)
        assert deadlines.pop() == want
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "soon")
    refused(BAD, "NCCL_EP_TIMEOUT_MS is soon, must be a number", library.EpCreateGroup, made, comm, config)
    library.EpxCommDestroy(comm)


def test_memory_of_handles_is_of_the_callers_functions(library: Library) -> None:
    memory: dict[int, Any] = {}
    failing = [False]

    def allocate(place: Any, size: int, context: int) -> int:
        assert context == 77
        if failing[0]:
            return 2
        block = c.create_string_buffer(size + 64)
        place[0] = -(-c.addressof(block) // 64) * 64
        memory[place[0]] = block
        return 0

    def release(address: int, context: int) -> int:
        assert context == 77
        del memory[address]
        return 0

    allocator = c.CFUNCTYPE(c.c_int, c.POINTER(c.c_void_p), c.c_size_t, c.c_size_t)(allocate)
    freer = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_size_t)(release)
    comm, made, handle = library.comm(0, 1, c_api.Allgather()), c.c_void_p(), c.c_void_p()
    config = c_api.RawGroupConfig(
        num_experts=4, max_dispatch_tokens_per_rank=8, max_token_bytes=64, alloc_context=77,
        alloc_fn=c.cast(allocator, c.c_void_p), free_fn=c.cast(freer, c.c_void_p),
    )  # fmt: skip
    library.EpCreateGroup(made, comm, config)
    library.EpInitHandle(handle, made, c_api.RANK_MAJOR, None, 2, None)
    assert memory
    library.EpHandleDestroy(handle)
    assert not memory
    failing[0] = True
    refused(
        c_api.SYSTEM_ERROR, "alloc_fn returned 2", library.EpInitHandle, handle, made, c_api.RANK_MAJOR, None, 2, None
    )
    library.EpGroupDestroy(made)
    library.EpxCommDestroy(comm)


def test_descriptors_of_the_library(library: Library) -> None:
    sizes, made = (c.c_size_t * 2)(3, 4), c.POINTER(c_api.Tensor)()
    library.EpTensorAlloc(made, 2, 7, sizes, None)
    sizes[0] = 99
    assert (made.contents.ndim, made.contents.datatype, made.contents.data, made.contents.sizes[:2]) == (
        2,
        7,
        None,
        [3, 4],
    )
    size = c.c_size_t()
    library.EpxTensorBytes(made, size)
    assert size.value == 48
    refused(BAD, "tensor is not of ncclEpTensorAlloc", library.EpTensorDestroy, c_api.Tensor())
    library.EpTensorDestroy(made)
    library.EpTensorDestroy(None)
    for ndim in (0, 5):
        refused(BAD, f"ndim is {ndim}, must be 1 to 4", library.EpTensorAlloc, made, ndim, 7, sizes, None)
    version = c.c_int()
    library.EpGetVersion(version)
    assert version.value == 200
    packed = c_api.Tensor(2, 12, 16, (3, 8))  # two numbers of 4 bits in a byte
    library.EpxTensorBytes(packed, size)
    assert size.value == 24
    window = c_api.Tensor(2, 4, None, (8, 2))
    window.win_hdl = 16
    refused(
        BAD,
        "topk_idx has a window and no data",
        library.EpCreateHandle,
        c.c_void_p(),
        c.c_void_p(16),
        1,
        window,
        None,
        None,
        None,
    )
