"""What arguments are chosen from, each list once: type checkers refuse any other word, and so do the calls."""

from __future__ import annotations

from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["ll", "ht", "auto"]
LayoutName: TypeAlias = Literal["expert_major", "packed", "rank_major", "flat"]
QuantName: TypeAlias = Literal["fp8", "fp8_rounded", "fp8_ue8m0", "mxfp8", "mxfp8_swizzled", "nvfp4", "nvfp4_swizzled"]
WireFormat: TypeAlias = Literal["fp8", "logfmt"]  # of partial sums alone
Exact: TypeAlias = Literal["exact"]
Weighting: TypeAlias = Literal["dispatch"]
LlNetwork: TypeAlias = Literal["auto", "rail", "mesh"]
Window: TypeAlias = Literal["nccl", "cumem"]  # what makes a buffer's windows
OnOverflow: TypeAlias = Literal["count", "raise"]
OnInvalidIds: TypeAlias = Literal["count", "raise"]
