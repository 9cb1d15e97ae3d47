"""What others have published of low latency over several nodes: 128 tokens a rank, hidden 7168, top-8, 8 GPUs a node.

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
