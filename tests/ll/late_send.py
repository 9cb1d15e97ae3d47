"""Split combines of which one rank's comes late: the other's send must not wait for it."""

from __future__ import annotations

from typing import Any

import torch

import nccl_ep
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import combine_options, on_host

LATE_SECONDS = 0.5
SHORT_MS = 0.1 * LATE_SECONDS * 1e3  # more, and a send has waited
POISON = 0x7F  # a NaN in each dtype


def weighted_case(num_ranks: int, **changes: Any) -> Expected:
    sizes = {"num_experts": 2 * num_ranks, "topk": min(4, 2 * num_ranks), "combine_weights": "masked"}
    return Expected(plain_case(num_ranks, **{**sizes, **changes}))


def late_send(group: Any, device: torch.device, wire: Any, **options: Any) -> float:
    """The last rank calls its send late. Returns the milliseconds of this rank's.

    Weights come from the home ranks: a send that waited for them would take as long as that rank is late.
    """
    rank, num_ranks = group.rank(), group.size()
    case = weighted_case(num_ranks, wire_dtype=wire, domain_size=options.get("domain_size"))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with shared_buffer(group, [case], device=device, timeout=20.0, **options) as buffer:
        out = case.dispatch(buffer)
        given, rows = combine_options(case.case, rank, device), case.rows[rank].to(device)
        case.check_combine(on_host(nccl_ep.combine_send(rows, out.handle, **given).receive()), rank)
        torch.cuda.synchronize()
        group.allgather(b"", 20.0)
        if rank == num_ranks - 1:
            torch.cuda._sleep(int(LATE_SECONDS * 1.5e9))  # cycles
        start.record()
        pending = nccl_ep.combine_send(rows, out.handle, **given)
        end.record()
        rows.view(torch.uint8).fill_(POISON)
        case.check_combine(on_host(pending.receive()), rank)
        torch.cuda.synchronize()
    return start.elapsed_time(end)
