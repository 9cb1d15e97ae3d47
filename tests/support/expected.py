"""A generated case with all that the oracle says about it, to be run on buffers that live longer than one case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import nccl_ep
from nccl_ep import _C, reference
from nccl_ep.room import LlSizes, Room
from tests.support.cases import Case, generate
from tests.support.harness import (
    check_dispatch,
    combine_case,
    combine_options,
    dispatch_case,
    on_host,
    synchronize,
    to_device,
)
from tests.support.patience import of_living_ranks

Work = Callable[[], None]


class Expected:
    """What every rank puts in and must get out; every rank computes it from the seed, so that nothing is gathered."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs = case.inputs()
        self.results = reference.dispatch(self.inputs, **case.dispatch_kwargs())
        self.rows = [case.expert(result.x, result, rank) for rank, result in enumerate(self.results)]
        self.combined = reference.combine(self.rows, self.results, self.inputs, **case.combine_kwargs())
        self.values = [case.scalars(result, rank) for rank, result in enumerate(self.results)]
        self.scalars = reference.combine_weights(
            self.values, self.results, self.inputs, num_experts=case.num_experts, layout=case.layout
        )

    def where(self, rank: int) -> str:
        return f"{self.case.describe()} rank {rank}"

    def check_dispatch(self, out: nccl_ep.DispatchOutput, rank: int) -> None:
        check_dispatch(out, self.results[rank], self.where(rank))

    def check_combine(self, got: torch.Tensor, rank: int) -> None:
        difference = reference.first_difference(got, self.combined[rank])
        assert not difference, f"{self.where(rank)}: combined: {difference}"

    def check_scalars(self, got: torch.Tensor, rank: int) -> None:
        difference = reference.first_difference(got, self.scalars[rank])
        assert not difference, f"{self.where(rank)}: scalars: {difference}"

    def dispatch(self, buffer: nccl_ep.Buffer, *, staged: bool = False) -> nccl_ep.DispatchOutput:
        given = self.case.rank_input(buffer.rank) if staged else self.inputs[buffer.rank]  # staged overwrites them
        out = dispatch_case(self.case, given, buffer, staged=staged)
        self.check_dispatch(out, buffer.rank)
        return out

    def given_on(self, buffer: nccl_ep.Buffer) -> reference.RankInput:
        """The rank's inputs where the buffer is."""
        given = self.inputs[buffer.rank]
        x, ids, weights, scales = (
            to_device(each, buffer.device) for each in (given.x, given.topk_idx, given.topk_weights, given.scales)
        )
        assert x is not None and ids is not None
        return reference.RankInput(x, ids, weights, scales)

    def send(
        self, buffer: nccl_ep.Buffer, given: reference.RankInput | None = None, **options: Any
    ) -> nccl_ep.DispatchOutput:
        """A dispatch that is not checked, in mode "ht" if the options name no other. given: in place of the inputs."""
        given = given or self.given_on(buffer)
        how = {**self.case.dispatch_kwargs(), "mode": "ht", **options}
        return nccl_ep.dispatch(given.x, given.topk_idx, given.topk_weights, buffer=buffer, **how)

    def combine(self, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, *, staged: bool = False) -> None:
        rows = self.rows[buffer.rank].to(buffer.device, copy=True)
        self.combine_rows(buffer, handle, rows, staged=staged)

    def combine_rows(
        self, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle, rows: torch.Tensor, *, staged: bool = False
    ) -> None:
        """The same with the rows where the test wants them."""
        rank = buffer.rank
        self.check_combine(on_host(combine_case(self.case, rows, handle, rank, staged=staged)), rank)

    def combine_weights(self, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle) -> None:
        values = self.values[buffer.rank].to(buffer.device)
        self.check_scalars(on_host(nccl_ep.combine_weights(values, handle)), buffer.rank)

    def run(self, buffer: nccl_ep.Buffer, *, staged: bool = False) -> None:
        """One dispatch, one combine and one combine of weights; fails with the case's description."""
        out = self.dispatch(buffer, staged=staged)
        self.combine(buffer, out.handle, staged=staged)
        self.combine_weights(buffer, out.handle)


def run_case(case: Expected, buffer: nccl_ep.Buffer, *, mode: str = "ll", staged: bool = False, **options: Any) -> None:
    """All operations of a case, this rank's results against the oracle's once all have been called."""
    rank, device = buffer.rank, buffer.device
    given = case.case.rank_input(rank) if staged else case.inputs[rank]  # staged overwrites them, on the CPU
    # Before the operations: a large copy from pageable memory waits for the kernel before it, and may keep other
    # threads from the driver meanwhile, among them one that copies for a network (docs/network_tests.md).
    rows, values = case.rows[rank].to(device, copy=True), case.values[rank].to(device)
    how = combine_options(case.case, rank, device)
    out = dispatch_case(case.case, given, buffer, staged=staged, mode=mode, **options)
    y = combine_case(case.case, rows, out.handle, rank, staged=staged, given=how, **options)
    scalars = nccl_ep.combine_weights(values, out.handle)
    synchronize(device)
    buffer.require_usable()  # its error says more than a difference does
    case.check_dispatch(out, rank)
    case.check_combine(y.cpu(), rank)
    case.check_scalars(scalars.cpu(), rank)


def plain_case(num_ranks: int = 2, **changes: Any) -> Case:
    """A small ordinary case: bf16, expert_major, every rank full."""
    plain: dict[str, Any] = {
        "seed": num_ranks, "num_ranks": num_ranks, "num_experts": 2 * num_ranks, "topk": 2, "hidden": 64,
        "max_tokens": 8, "tokens_kind": "full", "tokens": (8,) * num_ranks, "routing": "uniform", "idx_dtype":
        torch.int64, "dtype": torch.bfloat16, "content": "plain", "quant": None, "scales_dtype": None, "scales_width":
        1, "scales_strides": "row", "layout": "expert_major", "capacity_kind": "default", "capacity": None,
        "expert_alignment": 1, "zero_padding": False, "with_weights": True, "weights_content": "plain",
        "rows_dtype": torch.bfloat16, "rows_content": "plain", "out_dtype": None, "wire_dtype": None,
        "combine_weights": "dispatch", "biases": 0, "domain_size": None, "keep_nan": False,
    }  # fmt: skip
    return Case(**{**plain, **changes})


def large_cases() -> list[Case]:
    """Of sizes that generated cases do not reach: hundreds of experts on a rank, rows of up to 64 KiB."""
    many: list[dict[str, Any]] = [
        {"num_ranks": 2, "num_experts": 516, "topk": 16, "hidden": 16384},
        {"num_ranks": 4, "num_experts": 516, "topk": 32, "hidden": 64, "max_tokens": 24, "quant": "fp8"},
        {"num_ranks": 3, "num_experts": 1200, "topk": 32, "hidden": 512, "max_tokens": 5},
        {"num_ranks": 2, "num_experts": 16, "topk": 16, "hidden": 32768},
        {"num_ranks": 2, "num_experts": 16, "topk": 16, "hidden": 32768, "quant": "fp8_ue8m0"},
    ]
    layouts: list[dict[str, Any]] = [
        {"layout": "expert_major", "capacity": 1}, {"layout": "packed"}, {"layout": "rank_major"}, {"layout": "flat"}
    ]  # fmt: skip
    sizes = [{**size, **layout} for size in many for layout in layouts]
    packed = {"layout": "packed", "num_experts": 1200, "topk": 16}
    sizes += [
        {**packed, "num_ranks": 4, "hidden": 32768, "quant": "fp8", "routing": "skewed"},
        {**packed, "num_ranks": 2, "hidden": 256, "max_tokens": 7, "routing": "duplicates", "expert_alignment": 8},
        {**packed, "num_ranks": 3, "hidden": 128, "max_tokens": 40, "expert_alignment": 4},
    ]
    return [
        plain_case(**{"max_tokens": 2, **size}, tokens=(size.get("max_tokens", 2),) * size["num_ranks"])
        for size in sizes
    ]


def expected_cases(
    count: int, *, num_ranks: int, domain_size: int | None = None, first: int = 0,
    fits: Callable[[Case], bool] = lambda case: True,
) -> list[Expected]:  # fmt: skip
    """The first `count` generated cases that fit, from seed `first` on, of these ranks and domains (None: a single
    one)."""
    found: list[Expected] = []
    seed = first
    while len(found) < count:
        case = generate(seed)
        is_there = case.num_ranks == num_ranks and (case.domain_size or num_ranks) == (domain_size or num_ranks)
        if is_there and fits(case):
            found.append(Expected(case))
        seed += 1
    return found


def shared_buffer(group: Any, cases: Sequence[Expected], **options: Any) -> nccl_ep.Buffer:
    """A buffer in which the operations of all the cases fit. Between domains it has the rail."""
    sizes = [
        _C.sizes_for(
            group.size(),
            case.num_experts,
            case.topk,
            case.max_tokens,
            case.hidden * case.dtype.itemsize + -(-case.scales_width * 8 // 16) * 16,
            case.hidden * 4,
        )
        for case in (each.case for each in cases)
    ]
    largest = tuple(max(column) for column in zip(*sizes, strict=True))
    by_default = {
        "_room": Room(LlSizes(*largest)),
        "timeout": of_living_ranks(60.0),
        "device": "cpu",
        "ll_network": "rail",
        "on_invalid_ids": "count",
    }
    return nccl_ep.Buffer(group, **{**by_default, **options})
