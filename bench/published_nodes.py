"""What others have published of several nodes: hidden 7168, top-8, 8 GPUs a node; low latency of 128 tokens a rank.

Each system's own measurement, on its own machines, by its own method; none was repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """Microseconds. dtype: of dispatched rows; sums of combine are bf16. rows_by: what gets a row of its own over the
    NIC, an "expert" or a "mesh" rank."""

    system: str
    hardware: str
    ranks: int
    dispatch: float
    combine: float
    dtype: str
    source: str
    rows_by: str = "expert"


_DEEPEP = "DeepEP docs/legacy.md"
_PPLX = "pplx-garden README"
_NCCL_EP = "arXiv 2603.13606"
_UCCL = "uccl ep/README.md"
LATENCIES = (
    Latency("DeepEP V1", "H800, CX7 400G", 16, 118, 195, "fp8", _DEEPEP),
    Latency("DeepEP V1", "H800, CX7 400G", 32, 155, 273, "fp8", _DEEPEP),
    Latency("DeepEP V1", "H800, CX7 400G", 64, 173, 314, "fp8", _DEEPEP),
    Latency("pplx-garden", "H100, CX7 400G", 16, 110, 186, "fp8", _PPLX),
    Latency("pplx-garden", "H100, CX7 400G", 32, 154, 266, "fp8", _PPLX),
    Latency("pplx-garden", "H100, CX7 400G", 64, 178, 309, "fp8", _PPLX),
    Latency("NCCL EP", "H100, CX7 400G", 16, 190, 199, "bf16", _NCCL_EP, "mesh"),
    Latency("NCCL EP", "H100, CX7 400G", 32, 271, 291, "bf16", _NCCL_EP, "mesh"),
    Latency("NCCL EP", "H100, CX7 400G", 64, 298, 332, "bf16", _NCCL_EP, "mesh"),
    Latency("UCCL-EP", "MI300X, CX7", 16, 136, 207, "fp8", _UCCL),
    Latency("UCCL-EP", "MI300X, CX7", 32, 224, 341, "fp8", _UCCL),
    Latency("UCCL-EP", "H200, EFA 2x200G", 16, 226, 293, "fp8", _UCCL),
    Latency("UCCL-EP", "H200, EFA 2x200G", 32, 465, 694, "fp8", _UCCL),
    Latency("UCCL-EP", "B200, EFA 400G", 16, 228, 318, "fp8", _UCCL),
    Latency("UCCL-EP", "B200, EFA 400G", 32, 406, 617, "fp8", _UCCL),
)


@dataclass(frozen=True)
class Throughput:
    """GB/s of a GPU's network, counted with the rows of the own node, which no NIC carries; dispatch of FP8 rows,
    combine of BF16. us: of both, where they are published. num_sms 0: not said."""

    system: str
    hardware: str
    ranks: int
    tokens: int
    dispatch: float
    combine: float
    source: str
    num_sms: int = 0
    us: str = ""


_DEEPEP_V2 = "DeepEP README"
_GROUPS = "; a token goes to 4 groups of experts at most"
THROUGHPUTS = (
    Throughput("DeepEP V1", "H800, CX7 400G", 16, 4096, 43, 43, _DEEPEP + _GROUPS, 24),
    Throughput("DeepEP V1", "H800, CX7 400G", 32, 4096, 58, 57, _DEEPEP + _GROUPS, 24),
    Throughput("DeepEP V1", "H800, CX7 400G", 64, 4096, 51, 50, _DEEPEP + _GROUPS, 24),
    Throughput("DeepEP V2", "SM90, CX7", 16, 8192, 90, 81, _DEEPEP_V2, 12),
    Throughput("DeepEP V2", "SM90, CX7", 32, 8192, 61, 61, _DEEPEP_V2, 6),
    Throughput("DeepEP V2", "SM100, CX7", 16, 8192, 90, 91, _DEEPEP_V2, 12),
    Throughput("UCCL-EP", "H200, EFA 2x200G", 16, 4096, 50, 18, _UCCL + _GROUPS, 0, "1196 / 6379"),
    Throughput("UCCL-EP", "H200, EFA 2x200G", 32, 4096, 54, 43, _UCCL + _GROUPS, 0, "2022 / 4899"),
    Throughput("UCCL-EP", "B200, EFA 400G", 16, 4096, 53, 60, _UCCL + _GROUPS, 0, "1141 / 1965"),
    Throughput("UCCL-EP", "B200, EFA 400G", 32, 4096, 53, 57, _UCCL + _GROUPS, 0, "2072 / 3724"),
    Throughput("UCCL-EP", "MI300X, CX7", 16, 4096, 74, 78, _UCCL),
    Throughput("UCCL-EP", "MI300X, CX7", 32, 4096, 60, 60, _UCCL),
    Throughput("UCCL-EP", "MI300X, CX7", 64, 4096, 52, 51, _UCCL),
)
