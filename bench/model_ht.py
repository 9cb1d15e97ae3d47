"""High throughput in the model of several nodes (model.py): times, the bytes of a window, and what others reach."""

from __future__ import annotations

from math import ceil

from nccl_ep import _C

from .model_numbers import Cluster, Estimate, constant
from .published_nodes import THROUGHPUTS
from .records import columns

CHUNK = 64  # rows of a rail between two signals
MAX_TOKENS, NUM_SMS = 4096, 16
_SCALE_BYTES = 32  # a float32 for so many values, room for which Buffer.for_shapes keeps beside a row


def moved_rows(cluster: Cluster) -> float:
    """Rows of a token that a rank's SMs store: for its own node, for the NIC, and those of other nodes that it hands
    out, of which there are as many as it sends."""
    return cluster.own_rows() + cluster.rows("rail") * (1 + cluster.fan_out())


def high_throughput(
    cluster: Cluster, tokens: int, op: str, dtype: str, num_sms: int = NUM_SMS, scale: float = 1.0
) -> Estimate:
    """A row a node over the NIC, handed out over NVLink meanwhile by ``num_sms`` SMs."""
    dtype = dtype if op == "dispatch" else "bf16"  # sums travel as they are
    rows, row = tokens * cluster.rows("rail"), cluster.row_bytes(dtype)
    nic_bytes = rows * (row + cluster.routing_bytes())
    own_node = tokens * (cluster.gpus - 1) * cluster.hit(cluster.ranks)
    handed_out = rows * cluster.fan_out() * (cluster.gpus - 1) / cluster.gpus
    times = {
        "wire": nic_bytes / constant("nic at most") / 1e3 / constant("ht over the nic"),
        "nvlink": (own_node + handed_out) * row / constant("nvlink") / 1e3 / constant("ht over nvlink"),
        "SMs": tokens * moved_rows(cluster) * row / (constant("ht of an sm") * num_sms) / 1e3,
    }
    bound = max(times, key=lambda name: times[name])
    chunks = (cluster.nodes - 1) * ceil(tokens / CHUNK)
    return Estimate(
        cluster.nodes, tokens, "ht", op, "rail", dtype, times[bound] + constant("put") + constant("hop", scale),
        nic_bytes / constant("nic") / 1e3, nic_bytes / 1e6, cluster.rows("rail"), chunks, bound, num_sms,
    )  # fmt: skip


def enough_sms(cluster: Cluster, op: str = "dispatch", dtype: str = "fp8") -> int:
    """The fewest with which SMs are not what an operation waits for."""
    return next(n for n in range(1, 1000) if high_throughput(cluster, MAX_TOKENS, op, dtype, n).bound != "SMs")


def logical_gbps(cluster: Cluster, estimate: Estimate) -> float:
    """As DeepEP counts: a row for each node of a token, its own among them, though no NIC carries that one."""
    rows = cluster.nodes * cluster.hit(cluster.nodes)
    return estimate.tokens * rows * cluster.row_bytes(estimate.dtype) / estimate.us / 1e3


def window_bytes(cluster: Cluster, max_tokens: int = MAX_TOKENS) -> dict[str, int]:
    """Of a rank's window for bf16 rows, without an arena: counts (of all ranks, in two banks, with signals), what is
    staged where an output is not in the arena, what crosses between nodes, and all of it."""
    row = 2 * cluster.hidden + -(-cluster.hidden // _SCALE_BYTES * 4 // 16) * 16
    shape = (cluster.ranks, cluster.gpus, cluster.experts, cluster.topk, max_tokens, row, 2 * cluster.hidden)
    words, slots, rows, routes, rail, _ = _C.ht_sizes_for(*shape, 0)
    whole = _C.ht_window_bytes(cluster.ranks, (words, slots, rows, routes, rail, 0))
    staged, crossing = slots + rows, 2 * (routes + rail)
    return {"counts": whole - staged - crossing, "staged": staged, "rail": crossing, "window": whole}


def window_row(cluster: Cluster, max_tokens: int = MAX_TOKENS) -> list[str]:
    """Of a table: nodes, ranks, then MB of counts, rail, staged rows and of all."""
    found = window_bytes(cluster, max_tokens)
    parts = [f"{found[name] / 1e6:.1f}" for name in ("counts", "rail", "staged", "window")]
    return [str(cluster.nodes), str(cluster.ranks), *parts]


def beside(shape: Cluster, num_sms: int) -> list[str]:
    """FP8 dispatch, BF16 combine, beside what others have published. GB/s: as DeepEP counts."""
    lines = [["system", "hardware", "ranks", "tokens", "SMs", "dispatch GB/s", "combine GB/s", "us", "source"]]
    for each in THROUGHPUTS:
        lines.append([
            each.system, each.hardware, str(each.ranks), str(each.tokens), str(each.num_sms or "-"),
            f"{each.dispatch:g}", f"{each.combine:g}", each.us or "-", each.source,
        ])  # fmt: skip
    for ranks in sorted({each.ranks for each in THROUGHPUTS if each.ranks % shape.gpus == 0}):
        cluster = Cluster(ranks // shape.gpus, shape.gpus, 7168, 8, 256 if 256 % ranks == 0 else 8 * ranks)
        made = [high_throughput(cluster, MAX_TOKENS, op, "fp8", num_sms) for op in ("dispatch", "combine")]
        lines.append([
            "nccl_ep (MODEL)", "H100/H200, CX7 400G", str(ranks), str(MAX_TOKENS), str(num_sms),
            *(f"{logical_gbps(cluster, each):.0f}" for each in made), " / ".join(f"{each.us:.0f}" for each in made),
            "this model, uniform routing",
        ])  # fmt: skip
    return columns(lines)
