"""The enumerations."""

from nccl_ep.nvidia import (
    Algorithm,
    CombineQuantizationRecipe,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    Layout,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)

__all__ = [
    "Algorithm",
    "CombineQuantizationRecipe",
    "DispatchQuantizationRecipe",
    "ExpertIdKind",
    "Layout",
    "OverflowPolicy",
    "PassDir",
    "ZeroCopyMode",
]
