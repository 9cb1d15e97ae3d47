"""The floors of the benchmark as operations of a rank, between real ones that they must not disturb."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import nccl_ep
from nccl_ep.config import combine_args
from tests.support.expected import Expected
from tests.support.harness import combine_case, dispatch_case, synchronize

_ops = torch.ops.nccl_ep


def flags(buffer: nccl_ep.Buffer) -> None:
    _ops.ll_floor_flags.default(buffer._seq)


def push(handle: nccl_ep.Handle, row_bytes: int, *, combine: bool = False, num_sms: int = 0) -> None:
    """As many rows as the dispatch of the handle sends to other ranks, or its combine."""
    _ops.ll_floor_push.default(handle.seq, handle.tensor, *combine_args(handle), row_bytes, combine, num_sms)


def run_between(cases: Sequence[Expected], buffer: nccl_ep.Buffer, rounds: int, seed: int) -> None:
    """Cases of all shapes in random order with bursts of floors before, between and inside them; all ranks draw alike.
    Rows of one shape lie where another shape has another rank's, so that a push too late or too early would be seen."""
    rng, rank, device = random.Random(seed), buffer.rank, buffer.device
    handles: list[tuple[nccl_ep.Handle, int]] = []

    def burst() -> None:
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            kind = rng.choice(("flags", "dispatch", "combine"))
            if kind == "flags" or not handles:
                flags(buffer)
            else:
                handle, row_bytes = rng.choice(handles)
                push(handle, row_bytes, combine=kind == "combine", num_sms=rng.choice((0, 4)))

    results = []
    for _ in range(rounds):
        case = rng.choice(cases)
        staged = rng.random() < 0.3
        burst()
        out = dispatch_case(case.case, case.case.inputs()[rank], buffer, staged=staged)
        handles = [*handles[-5:], (out.handle, case.case.hidden * 2)]
        burst()
        y = combine_case(case.case, case.rows[rank].to(device, copy=True), out.handle, rank, staged=staged)
        results.append((case, out, y))
    burst()
    synchronize(device)
    buffer.require_usable()
    for case, out, y in results:
        case.check_dispatch(out, rank)
        case.check_combine(y.cpu(), rank)
