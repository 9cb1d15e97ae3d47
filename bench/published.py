"""What others reach, for the plots: measured on one machine with 4 H200 (NVSwitch) for this project.

4 ranks, hidden 7168, top-8 of 256 experts, bf16 unless said, microseconds; "event": event time of the public call.
High throughput is in flat rows; dispatch of the others leaves the routing out.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "measured elsewhere on 4 x H200 with NCCL 2.30.7 and NVSHMEM 3.4.5"
SHAPE = {"ranks": 4, "hidden": 7168, "topk": 8, "experts": 256, "routing": "uniform"}


@dataclass(frozen=True)
class Published:
    bench: str
    system: str
    op: str
    figure: str
    tokens: int
    dtype: str
    us: float


_NCCL_EP_01 = "NCCL EP v0.1.0 expert-major"
_NCCL_EP_01_RANK = "NCCL EP v0.1.0 rank-major"
_NCCL_EP_02 = "NCCL EP v0.2 expert-major"
_DEEPEP = "DeepEP V1"
_NCCL_EP_HT = "NCCL EP v0.1.0 zero-copy, 16 SMs"
_NCCL_EP_HT_32 = "NCCL EP v0.1.0 zero-copy, 32 SMs"
_NCCL_EP_HT_STAGED = "NCCL EP v0.1.0 plain tensors"
_DEEPEP_HT = "DeepEP V1 cached, 24 SMs"

_LL = tuple(
    Published("ll", system, op, figure, tokens, dtype, us)
    for system, tokens, dtype, op, figure, us in (
        (_NCCL_EP_01, 1, "bf16", "dispatch", "kernel", 18.3),
        (_NCCL_EP_01, 8, "bf16", "dispatch", "kernel", 21.1),
        (_NCCL_EP_01, 32, "bf16", "dispatch", "kernel", 22.6),
        (_NCCL_EP_01, 128, "bf16", "dispatch", "kernel", 37.3),
        (_NCCL_EP_01, 128, "bf16", "dispatch", "event", 44.3),
        (_NCCL_EP_01, 1, "bf16", "combine", "kernel", 11.0),  # the fastest rank
        (_NCCL_EP_01, 8, "bf16", "combine", "kernel", 14.0),  # to 26
        (_NCCL_EP_01, 32, "bf16", "combine", "kernel", 23.9),
        (_NCCL_EP_01, 128, "bf16", "combine", "kernel", 58.2),
        (_NCCL_EP_01, 128, "bf16", "combine", "event", 63.7),
        (_NCCL_EP_01, 1, "bf16", "pair", "event", 52.9),
        (_NCCL_EP_01, 8, "bf16", "pair", "event", 56.9),
        (_NCCL_EP_01, 32, "bf16", "pair", "event", 67.9),
        (_NCCL_EP_01, 128, "bf16", "pair", "event", 114.8),
        (_NCCL_EP_01_RANK, 128, "bf16", "dispatch", "kernel", 41.4),
        (_NCCL_EP_01_RANK, 128, "bf16", "dispatch", "event", 48.8),
        (_NCCL_EP_01_RANK, 128, "bf16", "combine", "kernel", 33.2),
        (_NCCL_EP_01_RANK, 128, "bf16", "combine", "event", 38.7),
        (_NCCL_EP_01_RANK, 128, "bf16", "pair", "event", 94.3),
        (_NCCL_EP_02, 128, "bf16", "dispatch", "kernel", 37.0),
        (_NCCL_EP_02, 128, "bf16", "combine", "kernel", 58.7),
        (_NCCL_EP_02, 128, "bf16", "pair", "event", 118.3),
        (_DEEPEP, 128, "fp8", "dispatch", "kernel", 33.8),
        (_DEEPEP, 128, "fp8", "combine", "kernel", 56.0),  # to 58; rows of combine are bf16
        (_DEEPEP, 128, "fp8", "pair", "event", 95.9),
    )
)
_HT = tuple(
    Published("ht", system, op, figure, 4096, dtype, us)
    for system, dtype, op, figure, us in (
        (_NCCL_EP_HT, "bf16", "dispatch", "kernel", 534.0),
        (_NCCL_EP_HT, "bf16", "combine", "kernel", 497.0),
        (_NCCL_EP_HT, "bf16", "combine", "event", 507.0),
        (_NCCL_EP_HT, "bf16", "pair", "event", 1106.0),
        (_NCCL_EP_HT_32, "bf16", "dispatch", "kernel", 509.0),
        (_NCCL_EP_HT_32, "bf16", "combine", "kernel", 504.0),
        (_NCCL_EP_HT_32, "bf16", "pair", "event", 1096.0),
        (_NCCL_EP_HT_STAGED, "bf16", "dispatch", "kernel", 530.0),
        (_NCCL_EP_HT_STAGED, "bf16", "combine", "kernel", 496.0),
        (_NCCL_EP_HT_STAGED, "bf16", "combine", "event", 725.0),
        (_NCCL_EP_HT_STAGED, "bf16", "pair", "event", 1430.0),
        (_DEEPEP_HT, "bf16", "dispatch", "event", 809.0),
        (_DEEPEP_HT, "bf16", "combine", "event", 589.0),
        (_DEEPEP_HT, "fp8", "dispatch", "event", 428.0),
    )
)
RIVALS = _LL + _HT
