"""What no implementation can beat: the wire's time, and (measured) flags alone and pushes alone."""

from __future__ import annotations

from typing import Any

import torch

from nccl_ep import Buffer, reference

from .measure import Call
from .workload import Checked, Given, Shape
from .world import Skipped

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
        "combine": int(remote.sum(0).max()) * 2 * shape.hidden / rate,
    }
    return times | {"pair": times["dispatch"] + times["combine"]}


def floor_call(name: str, shape: Shape, buffer: Buffer, given: Given, checked: Checked, num_sms: int) -> Call:
    """torch.ops.nccl_ep.ll_``name``, its arguments found by the names in its schema. Raises Skipped."""
    op = getattr(torch.ops.nccl_ep, f"ll_{name}", None)
    if op is None:
        raise Skipped(f"this build has no torch.ops.nccl_ep.ll_{name}")
    handle = checked.out.handle
    known: dict[str, Any] = {
        "buffer": buffer.name, "seq": buffer._seq, "x": given.x, "x_scales": None, "topk_idx": given.topk_idx,
        "topk_weights": given.weights, "num_experts": shape.num_experts, "max_tokens": shape.tokens,
        "num_tokens": shape.tokens, "topk": shape.topk, "hidden": shape.hidden, "layout": int(handle.layout),
        "capacity": handle.capacity, "alignment": 1, "quant": 1 if shape.quant else 0, "zero_padding": False,
        "num_sms": num_sms, "handle": handle.tensor, "rows": checked.rows, "row_bytes": shape.row_bytes(),
    }  # fmt: skip
    arguments = op.default._schema.arguments
    if unknown := [a.name for a in arguments if a.name not in known and not a.has_default_value()]:
        raise Skipped(f"ll_{name} wants {', '.join(unknown)}, which the benchmark does not know")
    # By name where torch allows it; what the schema gives a default keeps it unless it is known.
    keywords = {a.name: known[a.name] for a in arguments if a.name in known}
    return lambda: op.default(**keywords)
