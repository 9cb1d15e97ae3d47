"""What no implementation can beat: the wire's time, and (measured) flags alone and pushes alone."""

from __future__ import annotations

from functools import partial

import torch

from nccl_ep import Buffer, Handle, reference

from .measure import Call
from .workload import Given, Shape

# 1e9 bytes per second that leave an H200 when all push to all over NVSwitch: shared/facts/numbers.md, section 1.
NVLINK_GBPS_4 = 350.0
NVLINK_GBPS_8 = 342.0


def wire_us(shape: Shape, inputs: list[Given]) -> dict[str, float]:
    """Remote bytes that leave the busiest rank over the rate of its links, one row a token and rank, by operation."""
    narrow = [reference.RankInput(i.x[:, :1], i.topk_idx, i.weights) for i in inputs]
    rows = reference.wire_rows(narrow, num_experts=shape.num_experts)
    remote = rows - torch.diag(torch.diag(rows))
    rate = (NVLINK_GBPS_4 if shape.num_ranks <= 4 else NVLINK_GBPS_8) * 1e3  # bytes a microsecond
    times = {
        "dispatch": int(remote.sum(1).max()) * shape.row_bytes() / rate,
        "combine": int(remote.sum(0).max()) * shape.combined_bytes() / rate,
    }
    return times | {"pair": times["dispatch"] + times["combine"]}


def flags_call(buffer: Buffer) -> Call:
    """One flag of 8 bytes to and from every peer, nothing else."""
    return partial(torch.ops.nccl_ep.ll_floor_flags.default, buffer.name, buffer._seq)


def push_call(shape: Shape, op: str, buffer: Buffer, handle: Handle, num_sms: int) -> Call:
    """The rows that ``op`` ("dispatch", "combine" or "pair") stores to other ranks, which nobody receives."""
    push = torch.ops.nccl_ep.ll_floor_push.default
    common = (buffer.name, buffer._seq, handle.tensor, *handle.args())
    dispatch = partial(push, *common, shape.row_bytes(), False, num_sms)
    combine = partial(push, *common, shape.combined_bytes(), True, num_sms)

    def pair() -> None:
        dispatch()
        combine()

    calls: dict[str, Call] = {"dispatch": dispatch, "combine": combine, "pair": pair}
    return calls[op]
