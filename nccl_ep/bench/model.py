"""``python -m nccl_ep.bench model``: what operations over several nodes would take, by arithmetic.

Nothing here is measured: the library has not yet run over a NIC. The model counts the bytes that leave a GPU's NIC and
its NVLink ports for random routing, divides by rates, and adds latencies. CONSTANTS says where each number is from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, comb
from pathlib import Path

from .options import ints, words
from .published_nodes import LATENCIES, Latency
from .records import columns

# ---- Numbers that the arithmetic starts from


@dataclass(frozen=True)
class Constant:
    """kind: "measured" (by this project, in a record or on the page named), "published" (by others), "assumed"."""

    value: float
    unit: str
    kind: str
    source: str


CONSTANTS = {
    "nic": Constant(
        48.0, "GB/s", "published",
        "DeepEP V1's LL times on CX7 400 Gb/s (docs/legacy.md): bytes / 48 GB/s and a constant, at EP16, 32 and 64",
    ),
    "nvlink": Constant(344.0, "GB/s", "measured", "8 x H200, stores alone: nccl_ep/bench/floors.py"),
    "put": Constant(
        8.4, "us", "published", "arXiv 2511.15076: a round trip of a GIN put with signal takes 16.7 us with GDAKI"
    ),
    "put over a proxy": Constant(9.0, "us", "published", "arXiv 2511.15076: 18.0 us a round trip with the proxy"),
    "dispatch": Constant(
        4.2, "us", "measured", "LL dispatch of 1 token, 4 x H200: benchmarks/results/ll_4xh200_2026-11-22d.json"
    ),
    "combine": Constant(
        3.4, "us", "measured", "LL combine of 1 token, 4 x H200: benchmarks/results/ll_4xh200_2026-11-22d.json"
    ),
    "ht over nvlink": Constant(
        0.97, "of the floor", "measured",
        "HT dispatch and combine, 4 x H200: benchmarks/results/ht_4xh200_2026-11-22d.json",
    ),
    "ht over the nic": Constant(
        0.94, "of the wire", "published", "DeepEP V1's and V2's normal kernels reach up to 94 % of 50 GB/s"
    ),
    "hop": Constant(2.0, "us", "assumed", "a forwarder's poll of a signal, and one more store over NVLink"),
    "post": Constant(0.35, "us", "assumed", "one descriptor, by one thread"),
    "posters": Constant(16, "warps", "assumed", "that post at the same time (docs/network_protocol.md: 4 to 16)"),
    "post over a proxy": Constant(1.0, "us", "assumed", "one descriptor, by the proxy's one thread"),
    "request": Constant(0.02, "us", "assumed", "of a NIC for each request: 50 million a second"),
    "signal": Constant(0.10, "us", "assumed", "of a NIC for each signal that comes in: 10 million a second"),
    "staging": Constant(2000.0, "GB/s", "assumed", "of a copy in GPU memory"),
    "tail": Constant(0.06, "of the wire", "assumed", "what uneven senders and the last chunk add"),
}  # fmt: skip
CHUNK = 16  # rows of a rail between two signals, LL
RECORD_BYTES = 64  # an op header


def constant(name: str, scale: float = 1.0) -> float:
    """scale: of what is assumed, to see how much depends on it."""
    found = CONSTANTS[name]
    return found.value * (scale if found.kind == "assumed" and found.unit == "us" else 1.0)


# ---- What crosses


@dataclass(frozen=True)
class Cluster:
    nodes: int
    gpus: int = 8  # of a node, each with a NIC of its own
    hidden: int = 7168
    topk: int = 8
    experts: int = 256  # of all ranks

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def hit(self, share: int) -> float:
        """The chance that a token of random routing has an expert in a part of the world with 1/share of them: k
        different experts of all are drawn."""
        inside = self.experts // share
        return 1.0 - comb(self.experts - inside, self.topk) / comb(self.experts, self.topk)

    def rows(self, path: str) -> float:
        """Rows of a token that leave its node: one an "expert", a "mesh" rank, or a "rail" node."""
        if path == "expert":
            return self.topk * (self.nodes - 1) / self.nodes
        if path == "mesh":
            return (self.ranks - self.gpus) * self.hit(self.ranks)
        return (self.nodes - 1) * self.hit(self.nodes)

    def row_bytes(self, dtype: str) -> int:
        """fp8 has a float32 scale for each 128 values."""
        return self.hidden + self.hidden // 32 if dtype == "fp8" else 2 * self.hidden

    def routing_bytes(self) -> int:
        """Of a token: its ids and weights, and who of the node gets it."""
        return 8 + 8 * self.topk

    def fan_out(self) -> float:
        """Ranks of a node that get a token, if the node gets it."""
        return self.gpus * self.hit(self.ranks) / self.hit(self.nodes)


@dataclass(frozen=True)
class Estimate:
    """Of one operation of one rank. bound: what takes the longest of what runs at the same time."""

    nodes: int
    tokens: int
    mode: str
    op: str
    path: str
    dtype: str
    us: float
    wire_us: float  # the NIC's bytes alone
    nic_mb: float  # that leave this rank's NIC
    rows: float  # of a token, over the NIC
    messages: int
    bound: str


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


def high_throughput(cluster: Cluster, tokens: int, op: str, dtype: str) -> Estimate:
    """A row a node over the NIC, handed out over NVLink meanwhile. Latencies count little here, and are left out."""
    dtype = dtype if op == "dispatch" else "bf16"
    rows, row = tokens * cluster.rows("rail"), cluster.row_bytes(dtype)
    nic_bytes = rows * (row + cluster.routing_bytes())
    own_node = tokens * (cluster.gpus - 1) * cluster.hit(cluster.ranks)
    handed_out = rows * cluster.fan_out() * (cluster.gpus - 1) / cluster.gpus
    wire = nic_bytes / constant("nic") / 1e3
    times = {
        "wire": nic_bytes / 50.0 / 1e3 / constant("ht over the nic"),
        "nvlink": (own_node + handed_out) * row / constant("nvlink") / 1e3 / constant("ht over nvlink"),
    }
    bound = max(times, key=lambda name: times[name])
    chunks = (cluster.nodes - 1) * ceil(tokens / 64)
    return Estimate(
        cluster.nodes, tokens, "ht", op, "rail", dtype, times[bound] + constant("put") + constant("hop"), wire,
        nic_bytes / 1e6, cluster.rows("rail"), chunks, bound,
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
    nodes: Sequence[int], tokens: Sequence[int], ht_tokens: int, dtypes: Sequence[str], shape: Cluster,
    proxy: bool = False, scale: float = 1.0,
) -> list[Estimate]:  # fmt: skip
    found = []
    for count in nodes:
        cluster = Cluster(count, shape.gpus, shape.hidden, shape.topk, shape.experts)
        for size in tokens:
            for path in ("rail", "mesh"):
                for dtype in dtypes:
                    found.append(low_latency(cluster, size, "dispatch", path, dtype, proxy, scale))
                found.append(low_latency(cluster, size, "combine", path, "bf16", proxy, scale))
        if ht_tokens:
            for dtype in dtypes:
                found.append(high_throughput(cluster, ht_tokens, "dispatch", dtype))
            found.append(high_throughput(cluster, ht_tokens, "combine", "bf16"))
    return found


def _table(found: list[Estimate]) -> list[str]:
    lines = [
        ["nodes", "mode", "tokens", "operation", "path", "us", "wire us", "MB/NIC", "rows", "messages", "bound by"]
    ]
    for each in found:
        name = f"{each.op} {each.dtype}" if each.op == "dispatch" else each.op
        lines.append([
            str(each.nodes), each.mode, str(each.tokens), name, each.path, f"{each.us:.1f}", f"{each.wire_us:.1f}",
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
        prog="python -m nccl_ep.bench model",
        description="What dispatch and combine over several nodes would take, by arithmetic, beside what others have "
        "published. Nothing is measured.",
    )
    add = parser.add_argument
    add("--nodes", type=ints, default=[2, 4, 8], help="list; default 2,4,8")
    add("--tokens", type=ints, default=[1, 8, 32, 128], help="of a rank, low latency; list; default 1,8,32,128")
    add("--ht-tokens", type=int, default=4096, help="of a rank, high throughput; 0: without; default 4096")
    add("--gpus", type=int, default=8, help="of a node, each with a NIC; default 8")
    add("--hidden", type=int, default=7168)
    add("--topk", type=int, default=8)
    add("--experts", type=int, default=256, help="of all ranks")
    add("--dtype", type=words("fp8", "bf16"), default=["fp8", "bf16"], help="of dispatched rows; list of fp8, bf16")
    add("--proxy", action="store_true", help="NCCL's proxy posts the descriptors of low latency, not the GPU")
    add("--scale", type=float, default=1.0, help="of the times that are assumed, to see what depends on them")
    add("--json", type=Path, metavar="FILE", help="for the estimates")
    options = parser.parse_args(argv)
    for nodes in options.nodes:
        if nodes < 2 or options.experts % (nodes * options.gpus):
            parser.error(
                f"--nodes {nodes}: must be 2 or more, and {options.experts} experts must divide over "
                f"{nodes} x {options.gpus} ranks"
            )
    if (
        min([*options.tokens, options.gpus, options.hidden, options.topk]) < 1
        or options.topk > options.experts
        or options.ht_tokens < 0
        or options.scale <= 0
    ):
        parser.error("sizes must be positive, and --topk at most --experts")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    shape = Cluster(2, options.gpus, options.hidden, options.topk, options.experts)
    found = estimates(
        options.nodes, options.tokens, options.ht_tokens, options.dtype, shape, options.proxy, options.scale
    )
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
    print("\n128 tokens a rank, hidden 7168, top-8 (us):")
    print("\n".join(_beside(shape)))
    print("\nConstants:")
    lines = [[name, f"{each.value:g} {each.unit}", each.kind, each.source] for name, each in CONSTANTS.items()]
    print("\n".join(columns(lines)))
    if options.json is not None:
        options.json.write_text(json.dumps({"kind": "model", "estimates": [asdict(each) for each in found]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
