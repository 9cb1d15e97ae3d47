"""The names of NVIDIA's ``nccl.ep`` 0.2 over this library's functions. See docs/migrating_from_nccl_ep.md.

``nccl_ep.install_as_nccl_ep()`` makes ``import nccl.ep`` find them. They are for programs of that API; a new program
calls ``nccl_ep.dispatch`` and ``nccl_ep.combine``.
"""

from .allocator import AllocConfig, AllocFn, FreeFn
from .enums import (
    Algorithm,
    CombineQuantizationRecipe,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    Layout,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from .group import Group, GroupConfig
from .handle import Handle
from .library import get_lib_path, get_lib_version
from .structs import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    HandleConfig,
    LayoutInfo,
)
from .tensor import Tensor

__all__ = [
    "Algorithm",
    "AllocConfig",
    "AllocFn",
    "CombineConfig",
    "CombineInputs",
    "CombineOutputs",
    "CombineQuantizationRecipe",
    "DispatchConfig",
    "DispatchInputs",
    "DispatchOutputs",
    "DispatchQuantizationRecipe",
    "ExpertIdKind",
    "FreeFn",
    "Group",
    "GroupConfig",
    "Handle",
    "HandleConfig",
    "Layout",
    "LayoutInfo",
    "OverflowPolicy",
    "PassDir",
    "Tensor",
    "ZeroCopyMode",
    "get_lib_path",
    "get_lib_version",
]
