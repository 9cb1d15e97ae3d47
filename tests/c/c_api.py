"""nccl_ep.h in ctypes, as a caller of the C library writes it. Imports no torch: some tests start processes with it."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any, ClassVar

MAGIC, VERSION = 0x4E434550, 300
(SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, TIMEOUT, MISMATCH, SYSTEM_ERROR, NOT_SUPPORTED, OVERFLOW) = range(8)
ALGORITHM_AUTO, LOW_LATENCY, HIGH_THROUGHPUT = range(3)
EXACT = -1
LAYOUTS = {"expert_major": 1, "packed": 2, "rank_major": 3, "flat": 4}
WEIGHTS_DISPATCH, WEIGHTS_NONE, WEIGHTS_HOME = range(3)
HEAD = [("size", c.c_size_t), ("magic", c.c_uint32), ("version", c.c_uint32)]


class Struct(c.Structure):
    """Filled as by its INIT macro; fields by name."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=c.sizeof(self), magic=MAGIC, version=VERSION, **{**self.defaults, **fields})


class Tensor(Struct):
    _fields_ = [*HEAD, ("ndim", c.c_int32), ("dtype", c.c_int32), ("data", c.c_void_p), ("sizes", c.c_int64 * 4),
                ("strides", c.c_int64 * 4)]  # fmt: skip
    defaults = {"dtype": -1}


Extra = c.POINTER(Tensor) * 3


def pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.POINTER(Tensor)) for name in names]


def integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.c_int32) for name in names]


class GroupConfig(Struct):
    _fields_ = [*HEAD, *integers("algorithm", "device", "num_experts", "max_tokens", "topk", "domain_size"),
                ("max_token_bytes", c.c_size_t), ("max_combine_row_bytes", c.c_size_t), ("timeout_ns", c.c_uint64),
                *integers("overflow_policy", "max_num_sms"), ("arena_bytes", c.c_uint64),
                *integers("enable_mask", "ll_network")]  # fmt: skip
    defaults = {"device": -1}


class GroupInfo(Struct):
    _fields_ = [*HEAD, *integers("rank", "num_ranks", "domain_size", "algorithm"),
                *[(name, c.c_uint64) for name in (
                    "window_bytes", "num_dispatches", "num_combines", "dropped_rows", "num_ht_dispatches",
                    "num_ht_combines", "num_staged_dispatches", "num_staged_combines", "arena_bytes",
                    "arena_free_bytes")],
                *integers("ll_max_tokens", "reserved")]  # fmt: skip


class HandleConfig(Struct):
    _fields_ = [*HEAD, *integers("layout", "topk"), ("capacity", c.c_int64),
                *integers("expert_alignment", "algorithm", "max_tokens", "reserved")]  # fmt: skip


class HandleInfo(Struct):
    _fields_ = [*HEAD, *integers("layout", "topk", "max_tokens", "expert_alignment", "algorithm", "reserved"),
                ("capacity", c.c_int64)]  # fmt: skip


class DispatchInputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights", "scales"), ("extra", Extra)]


class DispatchOutputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "scales", "topk_weights", "topk_idx", "row_expert", "info"),
                ("extra", Extra)]  # fmt: skip


class DispatchConfig(Struct):
    _fields_ = [*HEAD, *integers("send_only", "quant", "zero_padding", "num_sms", "cached", "reserved")]


class CombineInputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights", "topk_idx", "bias0", "bias1", "values", "row_signals")]


class CombineOutputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "values")]


class CombineConfig(Struct):
    _fields_ = [
        *HEAD,
        *integers("send_only", "weights", "wire_dtype", "num_sms", "rows_per_signal", "signal_threshold"),
        ("scale", c.c_double),
    ]
    defaults = {"wire_dtype": -1}


STRUCTS = {
    struct.__name__: struct
    for struct in (
        Tensor,
        GroupConfig,
        GroupInfo,
        HandleConfig,
        HandleInfo,
        DispatchInputs,
        DispatchOutputs,
        DispatchConfig,
        CombineInputs,
        CombineOutputs,
        CombineConfig,
    )
}


class NewerGroupConfig(GroupConfig):
    """Of a header of the future."""

    _fields_ = [("new_option", c.c_int32), ("newer_option", c.c_int32)]


Allgather = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t, c.c_uint64)

_void, _tensor = c.c_void_p, c.POINTER(Tensor)
ARGUMENTS: dict[str, list[Any]] = {
    "GetVersion": [c.POINTER(c.c_int)],
    "TensorBytes": [_tensor, c.POINTER(c.c_size_t)],
    "CreateGroupFromCallback": [c.POINTER(_void), c.c_int, c.c_int, Allgather, _void, c.POINTER(GroupConfig)],
    "CreateGroup": [c.POINTER(_void), _void, c.POINTER(GroupConfig)],
    "GroupDestroy": [_void],
    "GroupSetTimeout": [_void, c.c_uint64],
    "Check": [_void],
    "GroupGetInfo": [_void, c.POINTER(GroupInfo)],
    "MemAlloc": [_void, c.POINTER(_void), c.c_size_t],
    "MemFree": [_void, _void],
    "MaskQuery": [_void, _tensor, _void],
    "MaskUpdate": [_void, c.c_int, _void],
    "MaskClean": [_void],
    "HandleMemSize": [_void, c.POINTER(HandleConfig), c.POINTER(c.c_size_t)],
    "InitHandle": [c.POINTER(_void), _void, c.POINTER(HandleConfig), _void],
    "UpdateHandle": [_void, _tensor],
    "CreateHandle": [c.POINTER(_void), _void, c.POINTER(HandleConfig), _tensor, _void],
    "RouteHandle": [_void, _tensor, _void],
    "HandleDestroy": [_void],
    "HandleGetInfo": [_void, c.POINTER(HandleInfo)],
    "DispatchShapes": [_void, c.POINTER(DispatchInputs), c.POINTER(DispatchConfig), c.POINTER(DispatchOutputs)],
    "Dispatch": [_void, c.POINTER(DispatchInputs), c.POINTER(DispatchOutputs), c.POINTER(DispatchConfig), _void],
    "Combine": [_void, c.POINTER(CombineInputs), c.POINTER(CombineOutputs), c.POINTER(CombineConfig), _void],
    "CombineWeights": [_void, _tensor, _tensor, _void],
    "Complete": [_void, _void, _void],
}


class Refused(Exception):
    """A call that did not succeed: its result, and what ncclEpGetLastError said."""

    def __init__(self, result: int, text: str) -> None:
        super().__init__(f"{result}: {text}")
        self.result, self.text = result, text


class Library:
    """The functions of libncclep.so by their names without ncclEp; what is no success is raised as Refused."""

    def __init__(self, path: Path | str) -> None:
        self.raw = c.CDLL(str(path))
        self.raw.ncclEpGetLastError.restype = c.c_char_p
        self.raw.ncclEpGetErrorString.restype = c.c_char_p
        for name, arguments in ARGUMENTS.items():
            getattr(self.raw, f"ncclEp{name}").argtypes = arguments

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.raw, f"ncclEp{name}")

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result != SUCCESS:
                raise Refused(result, self.raw.ncclEpGetLastError().decode())

        return call

    def last_error(self) -> str:
        return str(self.raw.ncclEpGetLastError().decode())

    def solo_group(self, **config: Any) -> c.c_void_p:
        """A world of one rank."""
        group = c.c_void_p()
        fields = {"num_experts": 2, "max_tokens": 4, "topk": 2, "max_token_bytes": 64, **config}
        self.CreateGroupFromCallback(group, 0, 1, Allgather(), None, GroupConfig(**fields))
        return group
