"""Split combines on CUDA: sends that wait for no rank, and those that wait for signals of rows that other
kernels still write. tests/ll/test_split_combine.py and test_signals.py have the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup
from tests.ll.late_send import POISON, SHORT_MS, late_send, weighted_case
from tests.support.expected import Expected, shared_buffer
from tests.support.gpus import needs_gpu, on_gpu, ranks_on_gpus
from tests.support.harness import combine_options
from tests.support.processes import run_processes

pytestmark = needs_gpu


class Signalled:
    """A combine whose rows a second stream writes, block by block, in any order and late."""

    def __init__(self, case: Expected, buffer: nccl_ep.Buffer, rows_per_signal: int, num_sms: int) -> None:
        self.case, self.buffer, self.rows_per_signal, self.num_sms = case, buffer, rows_per_signal, num_sms
        self.made = case.rows[buffer.rank].to(buffer.device)
        local, capacity, _ = self.made.shape
        self.rows = torch.empty_like(self.made)
        self.signals = torch.zeros(local, -(-capacity // rows_per_signal), dtype=torch.int32, device=buffer.device)
        self.order = torch.randperm(self.signals.numel(), generator=torch.Generator().manual_seed(3)).tolist()
        self.options = combine_options(case.case, buffer.rank, buffer.device)
        self.stream = torch.cuda.Stream(buffer.device)

    def write(self) -> None:
        """All blocks, each with its signal behind it."""
        torch.cuda._sleep(2_000_000)
        for number in self.order:
            expert, block = divmod(number, self.signals.shape[1])
            here = slice(block * self.rows_per_signal, (block + 1) * self.rows_per_signal)
            torch.cuda._sleep(20_000)
            self.rows[expert, here].copy_(self.made[expert, here])
            self.signals[expert, block].add_(1)

    def run(self, handle: nccl_ep.Handle) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.rows.view(torch.uint8).fill_(POISON)
        self.signals.zero_()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.write()
        pending = nccl_ep.combine_send(
            self.rows, handle, **self.options, row_signals=self.signals, rows_per_signal=self.rows_per_signal,
            num_sms=self.num_sms,
        )  # fmt: skip
        current.wait_stream(self.stream)
        self.rows.view(torch.uint8).fill_(POISON)
        return pending.receive()


def run_signalled(group: Any, device: torch.device, cases: list[Expected]) -> None:
    """Eagerly, then in a graph that is replayed."""
    with shared_buffer(group, cases, device=device, timeout=20.0) as buffer:
        for case in cases:
            out = case.dispatch(buffer)
            for rows_per_signal, num_sms in ((1, 1), (3, 8), (1 << 20, 24)):
                signalled = Signalled(case, buffer, rows_per_signal, num_sms)
                case.check_combine(signalled.run(out.handle).cpu(), buffer.rank)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    y = signalled.run(out.handle)
                for _ in range(3):
                    y.fill_(7)
                    graph.replay()
                    case.check_combine(y.cpu(), buffer.rank)
                buffer.check()


CASES: list[dict[str, Any]] = [
    {},
    {"topk": 1},
    {"capacity": 3, "capacity_kind": "overflowing"},
    {"rows_dtype": torch.float32, "hidden": 96},
    {"rows_dtype": torch.float16, "hidden": 2600},
    {"rows_content": "special"},
    {"max_tokens": 96, "hidden": 1024},
]


def cases_of(num_ranks: int) -> list[Expected]:
    return [
        weighted_case(num_ranks, **each, **({"tokens": (96,) * num_ranks} if "max_tokens" in each else {}))
        for each in CASES
    ]


def test_rows_leave_when_their_signals_come() -> None:
    run_signalled(ThreadGroup.make(1)[0], torch.device("cuda", 0), cases_of(1))


def _signals_on_gpus(rank: int) -> None:
    run_signalled(rendezvous_of(dist.group.WORLD), on_gpu(rank), cases_of(2))


@ranks_on_gpus
def test_rows_leave_when_their_signals_come_over_nccl(tmp_path: Path) -> None:
    run_processes(2, _signals_on_gpus, tmp_path)


def test_a_signal_that_does_not_come_is_named_at_the_deadline() -> None:
    case = weighted_case(1, num_experts=3, topk=3, combine_weights="tensor")
    with shared_buffer(ThreadGroup.make(1)[0], [case], device="cuda", timeout=1.0) as buffer:
        out = case.dispatch(buffer)
        rows = case.rows[0].cuda()
        signals = torch.ones(3, 2, dtype=torch.int32, device="cuda")
        signals[2, 1] = 0
        options = combine_options(case.case, 0, buffer.device)
        want = (
            r"rank 0 waited 1 s for the signal of row block 1 of local expert 2's rows in combine 1 "
            r"\(expected 1, saw 0\)"
        )
        with pytest.raises(nccl_ep.TimeoutError, match=want):
            nccl_ep.combine_send(rows, out.handle, **options, row_signals=signals, rows_per_signal=4, num_sms=1)
            torch.cuda.synchronize()
            buffer.check()


def _late_on_gpus(rank: int, wire: Any, masks: bool) -> float:
    return late_send(rendezvous_of(dist.group.WORLD), on_gpu(rank), wire, enable_shrink=masks)


@ranks_on_gpus
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("wire", [None, "fp8", "logfmt"])
def test_a_send_ends_while_the_other_rank_is_late(wire: Any, masks: bool, tmp_path: Path) -> None:
    first, second = run_processes(2, _late_on_gpus, tmp_path, wire, masks)
    print(f"sends, {wire}, masks {masks}: {first * 1e3:.0f} us, and {second * 1e3:.0f} us on the late rank")
    assert first < SHORT_MS
