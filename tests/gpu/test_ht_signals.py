"""High-throughput combines on CUDA that wait for signals of rows that another stream still writes, eagerly and in
graphs. tests/ht/test_signals.py has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup
from tests.ht.test_signals import CASES, case_of
from tests.support.expected import Expected
from tests.support.gpus import needs_gpu, on_gpu, ranks_on_gpus
from tests.support.harness import combine_options, make_buffer
from tests.support.processes import run_processes

pytestmark = needs_gpu
POISON = 0x7F


class Signalled:
    """A combine whose rows a second stream writes, block by block, in any order and late."""

    def __init__(self, case: Expected, buffer: nccl_ep.Buffer, rows_per_signal: int, is_async: bool) -> None:
        self.rows_per_signal, self.is_async = rows_per_signal, is_async
        made = case.rows[buffer.rank].to(buffer.device)
        self.rows = torch.empty_like(made)
        self.made, self.written = (each.view(-1, *each.shape[-2:]) for each in (made, self.rows))
        self.per_expert = -(-self.made.shape[1] // rows_per_signal)
        self.signals = torch.zeros(len(self.made) * self.per_expert, dtype=torch.int32, device=buffer.device)
        self.order = torch.randperm(len(self.signals), generator=torch.Generator().manual_seed(3)).tolist()
        self.options = combine_options(case.case, buffer.rank, buffer.device)
        self.stream = torch.cuda.Stream(buffer.device)
        self.write()  # loads its kernels: at a first launch behind a kernel that waits, copies wait for that one's end
        torch.cuda.synchronize()

    def write(self) -> None:
        """All blocks, each with its signal behind it."""
        torch.cuda._sleep(2_000_000)
        for number in self.order:
            expert, block = divmod(number, self.per_expert)
            here = slice(block * self.rows_per_signal, (block + 1) * self.rows_per_signal)
            torch.cuda._sleep(10_000)
            self.written[expert, here].copy_(self.made[expert, here])
            self.signals[number].add_(1)

    def run(self, handle: nccl_ep.Handle) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.rows.view(torch.uint8).fill_(POISON)
        self.signals.zero_()
        self.stream.wait_stream(current)
        pending = nccl_ep.combine_send(
            self.rows, handle, **self.options, row_signals=self.signals, rows_per_signal=self.rows_per_signal,
            num_sms=8, async_finish=self.is_async,
        )  # fmt: skip
        with torch.cuda.stream(self.stream):
            self.write()
        combined = pending.receive()
        current.wait_stream(self.stream)
        self.rows.view(torch.uint8).fill_(POISON)
        return combined


def run_signalled(group: Any, device: torch.device, cases: list[Expected]) -> None:
    for case in cases:
        with make_buffer(case.case, group, mode="ht", device=device, timeout=20.0) as buffer:
            out = case.send(buffer)
            for rows_per_signal, is_async in ((4, False), (8, True)):
                signalled = Signalled(case, buffer, rows_per_signal, is_async)
                case.check_combine(signalled.run(out.handle).cpu(), buffer.rank)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    y = signalled.run(out.handle)
                for _ in range(3):
                    y.fill_(7)
                    graph.replay()
                    case.check_combine(y.cpu(), buffer.rank)
                buffer.check()


def cases_of(num_ranks: int) -> list[Expected]:
    return [case_of(num_ranks, **each) for name, each in CASES.items() if name != "no tokens here"]


def test_rows_are_read_when_their_signals_come() -> None:
    run_signalled(ThreadGroup.make(1)[0], torch.device("cuda", 0), cases_of(1))


def _signals_on_gpus(rank: int) -> None:
    run_signalled(rendezvous_of(dist.group.WORLD), on_gpu(rank), cases_of(2))


@ranks_on_gpus
def test_rows_are_read_when_their_signals_come_over_nccl(tmp_path: Path) -> None:
    run_processes(2, _signals_on_gpus, tmp_path)


def test_a_signal_that_does_not_come_is_named_at_the_deadline() -> None:
    case = case_of(1, topk=2, max_tokens=8, tokens=(8,))
    with make_buffer(case.case, ThreadGroup.make(1)[0], mode="ht", device="cuda", timeout=1.0) as buffer:
        out = case.send(buffer)
        rows = case.rows[0].cuda()
        signals = torch.ones(-(-len(rows) // 4), dtype=torch.int32, device="cuda")
        signals[2] = 0
        want = r"rank 0 waited 1 s for the signal of row block 2 in high-throughput combine 1 \(expected 1, saw 0\)"
        with pytest.raises(nccl_ep.TimeoutError, match=want):
            nccl_ep.combine_send(rows, out.handle, row_signals=signals, rows_per_signal=4, num_sms=1)
            torch.cuda.synchronize()
            buffer.check()
