"""The model of several nodes (model.py): the numbers that its arithmetic starts from, and what random routing sends."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

# ---- Numbers that the arithmetic starts from


@dataclass(frozen=True)
class Constant:
    """kind: "measured" (by this project, in a record or on the page named), "published" (by others), "assumed"."""

    value: float
    unit: str
    kind: str
    source: str


CONSTANTS = {
    "nic at most": Constant(50.0, "GB/s", "published", "400 Gb/s"),
    "nic": Constant(
        48.0, "GB/s", "published",
        "DeepEP V1's LL times on CX7 400 Gb/s (docs/legacy.md): bytes / 48 GB/s and a constant, at EP16, 32 and 64",
    ),
    "nvlink": Constant(344.0, "GB/s", "measured", "8 x H200, stores alone: bench/floors.py"),
    "put": Constant(
        8.4, "us", "published", "arXiv 2511.15076: a round trip of a GIN put with signal takes 16.7 us with GDAKI"
    ),
    "put over a proxy": Constant(9.0, "us", "published", "arXiv 2511.15076: 18.0 us a round trip with the proxy"),
    "dispatch": Constant(
        4.2, "us", "measured", "LL dispatch of 1 token, 4 x H200: records/ll_4xh200_2026-11-22d.json"
    ),
    "combine": Constant(
        3.4, "us", "measured", "LL combine of 1 token, 4 x H200: records/ll_4xh200_2026-11-22d.json"
    ),
    "ht over nvlink": Constant(
        0.97, "of the floor", "measured",
        "HT dispatch and combine, 4 x H200: records/ht_4xh200_2026-11-22d.json",
    ),
    "ht of an sm": Constant(
        46.0, "GB/s", "measured",
        "rows that HT dispatch stores, of 4 and of 8 SMs, 2 x H100: records/ht_2xh100_2026-11-24d.json",
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

    def own_rows(self) -> float:
        """Ranks of its own node that get a token, its own rank among them."""
        return self.gpus * self.hit(self.ranks)

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
    num_sms: int = 0  # of high throughput; 0: all
