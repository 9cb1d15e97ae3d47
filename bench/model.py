"""``python -m bench model``: what operations over several nodes would take, by arithmetic.

Nothing here is measured: the library has not yet run over a NIC. The model counts the bytes that leave a GPU's NIC and
its NVLink ports for random routing, divides by rates, and adds latencies. CONSTANTS (model_numbers.py) says where each
number is from. High throughput is in model_ht.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from math import ceil

from . import model_ht
from .model_ht import enough_sms, high_throughput, window_row
from .model_numbers import CONSTANTS, RECORD_BYTES, Cluster, Estimate, constant
from .options import ints, output, words
from .published_nodes import LATENCIES, Latency
from .records import columns

CHUNK = 16  # rows of a rail between two signals, LL


def low_latency(
    cluster: Cluster, tokens: int, op: str, path: str, dtype: str, proxy: bool = False, scale: float = 1.0
) -> Estimate:
    """path: "rail", or "mesh" with a put for each row."""
    dtype = dtype if op == "dispatch" else "bf16"  # sums travel as they are
    rows, row = tokens * cluster.rows(path), cluster.row_bytes(dtype)
    peers = cluster.nodes - 1 if path == "rail" else cluster.ranks - cluster.gpus
    routing = tokens * cluster.routing_bytes() if op == "dispatch" else 0
    nic_bytes = rows * row + peers * (RECORD_BYTES * (cluster.gpus if path == "rail" else 1) + routing)
    signals = peers * (1 + ceil(tokens / CHUNK)) if path == "rail" else 2 * peers
    messages = signals if path == "rail" else ceil(rows) + 2 * peers

    own_node = tokens * (cluster.gpus - 1) * cluster.hit(cluster.ranks) * row
    handed_out = rows * cluster.fan_out() * (cluster.gpus - 1) / cluster.gpus * row if path == "rail" else 0.0
    post = constant("post over a proxy", scale) if proxy else constant("post", scale)
    posters = 1 if proxy else constant("posters")
    times = {
        "wire": nic_bytes / constant("nic") / 1e3 * (1 + constant("tail")),
        "nvlink": (own_node + handed_out) / constant("nvlink") / 1e3,
        "posting": ceil(messages / posters) * post,
        "requests": messages * constant("request", scale) + signals * constant("signal", scale),
    }
    bound = max(times, key=lambda name: times[name])
    latency = constant(op) + (constant("put over a proxy") if proxy else constant("put"))
    latency += (rows if path == "rail" else tokens) * row / constant("staging") / 1e3
    if path == "rail":
        last = min(CHUNK, tokens) * cluster.fan_out() * row / constant("nvlink") / 1e3
        latency += constant("hop", scale) + last
    return Estimate(
        cluster.nodes, tokens, "ll", op, path, dtype, latency + times[bound], nic_bytes / constant("nic") / 1e3,
        nic_bytes / 1e6, cluster.rows(path), messages, bound,
    )  # fmt: skip


def memory_mb(cluster: Cluster, max_tokens: int) -> dict[str, float]:
    """MB of a rank's window for low latency over the rail: the slots of all ranks, and what the rail adds."""
    row = cluster.row_bytes("bf16") + 128
    slots = 2 * 2 * cluster.ranks * max_tokens * row
    rail = 2 * 2 * (2 * cluster.nodes) * max_tokens * row  # in and out, of both kinds
    return {"slots": slots / 1e6, "rail": rail / 1e6}


# ---- What it prints

_HEAD = "MODEL, not measured: the library has not run over a NIC yet."


def estimates(
    nodes: Sequence[int], tokens: Sequence[int], ht_tokens: Sequence[int], dtypes: Sequence[str], shape: Cluster,
    proxy: bool = False, scale: float = 1.0, ht_sms: Sequence[int] = (model_ht.NUM_SMS,),
) -> list[Estimate]:  # fmt: skip
    found = []
    for count in nodes:
        cluster = Cluster(count, shape.gpus, shape.hidden, shape.topk, shape.experts)
        for size in tokens:
            for path in ("rail", "mesh"):
                for dtype in dtypes:
                    found.append(low_latency(cluster, size, "dispatch", path, dtype, proxy, scale))
                found.append(low_latency(cluster, size, "combine", path, "bf16", proxy, scale))
        for size, sms in product(filter(None, ht_tokens), ht_sms):
            for dtype in dtypes:
                found.append(high_throughput(cluster, size, "dispatch", dtype, sms, scale))
            found.append(high_throughput(cluster, size, "combine", "bf16", sms, scale))
    return found


def _table(found: list[Estimate]) -> list[str]:
    lines = [
        ["nodes", "mode", "tokens", "operation", "path", "SMs", "us", "wire us", "MB/NIC", "rows", "messages",
         "bound by"]
    ]  # fmt: skip
    for each in found:
        name = f"{each.op} {each.dtype}" if each.op == "dispatch" else each.op
        lines.append([
            str(each.nodes), each.mode, str(each.tokens), name, each.path, str(each.num_sms or "-"), f"{each.us:.1f}",
            f"{each.wire_us:.1f}",
            f"{each.nic_mb:.2f}", f"{each.rows:.2f}", str(each.messages), each.bound,
        ])  # fmt: skip
    return columns(lines)


def _beside(shape: Cluster) -> list[str]:
    """128 tokens, FP8 dispatch unless said, beside what others have published."""
    lines = [["system", "hardware", "ranks", "dispatch us", "combine us", "both us", "source"]]
    for each in LATENCIES:
        lines.append([
            each.system, each.hardware, str(each.ranks), f"{each.dispatch:.0f} {each.dtype}", f"{each.combine:.0f}",
            f"{each.dispatch + each.combine:.0f}", each.source,
        ])  # fmt: skip
    for ranks in sorted({each.ranks for each in LATENCIES if each.ranks % shape.gpus == 0}):
        cluster = Cluster(ranks // shape.gpus, shape.gpus, 7168, 8, 256)
        for path in ("rail", "mesh"):
            dispatch = low_latency(cluster, 128, "dispatch", path, "fp8").us
            combine = low_latency(cluster, 128, "combine", path, "bf16").us
            lines.append([
                f"nccl_ep, {path} (MODEL)", "H100/H200, CX7 400G", str(ranks), f"{dispatch:.0f} fp8", f"{combine:.0f}",
                f"{dispatch + combine:.0f}", "this model",
            ])  # fmt: skip
    return columns(lines)


def fit(published: Latency, nic_gbps: float | None = None) -> float:
    """What a published dispatch and combine took beyond their bytes on the wire, a row an expert, in us each."""
    cluster = Cluster(published.ranks // 8)
    rate = nic_gbps or constant("nic")
    wire = [128 * cluster.rows(published.rows_by) * cluster.row_bytes(dtype) / rate / 1e3
            for dtype in (published.dtype, "bf16")]  # fmt: skip
    return (published.dispatch + published.combine - sum(wire)) / 2


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench model",
        description="What dispatch and combine over several nodes would take, by arithmetic, beside what others have "
        "published. Nothing is measured.",
    )
    add = parser.add_argument
    add("--nodes", type=ints, default=[2, 4, 8], help="list; default 2,4,8")
    add("--tokens", type=ints, default=[1, 8, 32, 128], help="of a rank, low latency; list; default 1,8,32,128")
    add("--ht-tokens", type=ints, default=[4096], help="of a rank, high throughput; list; 0: without; default 4096")
    add("--ht-sms", type=ints, default=[model_ht.NUM_SMS], help="of high throughput; list; default 16")
    add("--gpus", type=int, default=8, help="of a node, each with a NIC; default 8")
    add("--hidden", type=int, default=7168)
    add("--topk", type=int, default=8)
    add("--experts", type=int, default=256, help="of all ranks")
    add("--dtype", type=words("fp8", "bf16"), default=["fp8", "bf16"], help="of dispatched rows; list of fp8, bf16")
    add("--proxy", action="store_true", help="NCCL's proxy posts the descriptors of low latency, not the GPU")
    add("--scale", type=float, default=1.0, help="of the times that are assumed, to see what depends on them")
    add("--json", type=output, metavar="FILE", help="for the estimates")
    options = parser.parse_args(argv)
    for nodes in options.nodes:
        if nodes < 2 or options.experts % (nodes * options.gpus):
            parser.error(
                f"--nodes {nodes}: must be 2 or more, and {options.experts} experts must divide over "
                f"{nodes} x {options.gpus} ranks"
            )
    if (
        min([*options.tokens, *options.ht_sms, options.gpus, options.hidden, options.topk]) < 1
        or options.topk > options.experts
        or min(options.ht_tokens) < 0
        or options.scale <= 0
    ):
        parser.error("sizes must be positive, and --topk at most --experts")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    shape = Cluster(2, options.gpus, options.hidden, options.topk, options.experts)
    found = estimates(
        options.nodes, options.tokens, options.ht_tokens, options.dtype, shape, options.proxy, options.scale,
        options.ht_sms,
    )  # fmt: skip
    print(_HEAD)
    print(
        f"{options.gpus} GPUs a node, hidden {options.hidden}, top-{options.topk} of {options.experts} experts, "
        "uniform routing\n"
    )
    print("\n".join(_table(found)))
    print("\nThe window of low latency for 128 tokens a rank, MB:")
    for nodes in options.nodes:
        sizes = memory_mb(Cluster(nodes, options.gpus, options.hidden, options.topk, options.experts), 128)
        print(f"  {nodes} nodes: slots {sizes['slots']:.0f}, rail {sizes['rail']:.0f}")
    clusters = [Cluster(nodes, options.gpus, options.hidden, options.topk, options.experts) for nodes in options.nodes]
    if any(options.ht_tokens):
        most = max(options.ht_tokens)
        print(f"\nThe window of high throughput for {most} tokens a rank, bf16, without an arena, MB:")
        head = ["nodes", "ranks", "counts", "rail", "staged", "window"]
        print("\n".join(columns([head, *(window_row(each, most) for each in clusters)])))
        for each in clusters:
            print(f"  {each.nodes} nodes: with {enough_sms(each)} SMs or more, SMs are not what FP8 dispatch waits for")
    print("\n128 tokens a rank, hidden 7168, top-8 (us):")
    print("\n".join(_beside(shape)))
    if any(options.ht_tokens):
        print("\nHigh throughput, hidden 7168, top-8, FP8 dispatch (GB/s as DeepEP counts: with the own node's rows):")
        print("\n".join(model_ht.beside(shape, options.ht_sms[0])))
    print("\nConstants:")
    lines = [[name, f"{each.value:g} {each.unit}", each.kind, each.source] for name, each in CONSTANTS.items()]
    print("\n".join(columns(lines)))
    if options.json is not None:
        options.json.write_text(json.dumps({"kind": "model", "estimates": [asdict(each) for each in found]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
