"""What no implementation can beat: the time that the wire takes, computed (docs/benchmarks.md, floors)."""

from __future__ import annotations

import torch

from nccl_ep import reference

from .workload import Given, Shape

# 1e9 bytes per second between an H200 and the others over NVSwitch, all of them busy, up to 4 GPUs and on 8
# (measured with stores and loads alone). Low latency pushes both ways; combine of high throughput pulls.
_PUSH_SMALL, _PUSH, _PULL = (350.0, 342.0), (352.0, 344.0), (331.0, 332.0)
_GBPS = {
    ("ll", "dispatch"): _PUSH_SMALL,
    ("ll", "combine"): _PUSH_SMALL,
    ("ht", "dispatch"): _PUSH,
    ("ht", "combine"): _PULL,
}


def wire_us(shape: Shape, inputs: list[Given]) -> dict[str, float]:
    """Remote bytes that leave or enter the busiest rank over the rate of its links, one row a token and rank, by
    operation. Ids, weights and counts are left out: routing has no floor here."""
    given = [reference.RankInput(i.x[:, :1], i.topk_idx, i.weights) for i in inputs]
    rows = reference.wire_rows(given, num_experts=shape.num_experts)
    remote = rows - torch.diag(torch.diag(rows))
    busiest = max(int(remote.sum(0).max()), int(remote.sum(1).max()))  # links carry as much each way

    def time(op: str, row_bytes: int) -> float:
        return busiest * row_bytes / (_GBPS[shape.mode, op][shape.num_ranks > 4] * 1e3)  # bytes a microsecond

    times = {"dispatch": time("dispatch", shape.row_bytes()), "combine": time("combine", shape.combined_bytes())}
    return times | {"pair": times["dispatch"] + times["combine"]}
