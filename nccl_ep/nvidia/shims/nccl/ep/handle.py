"""Where callers look for handles and their structs."""

from nccl_ep.nvidia import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    Handle,
    HandleConfig,
    LayoutInfo,
)

__all__ = [
    "CombineConfig",
    "CombineInputs",
    "CombineOutputs",
    "DispatchConfig",
    "DispatchInputs",
    "DispatchOutputs",
    "Handle",
    "HandleConfig",
    "LayoutInfo",
]
