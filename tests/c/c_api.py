"""nccl_ep.h and nccl_epx.h in ctypes, as a caller of the C library writes them. Imports no torch: some tests start
processes with it.

The structs are those of the headers. Beside them are calls with what belongs together in one: ``GroupConfig`` is a
config, options and a device, ``DispatchInputs`` are inputs and extra ones.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

MAGIC, TENSOR_MAGIC, VERSION = 0xC00FFFEE, 0xCAFECAFE, 300
(NO_ERROR, INVALID_ARGUMENT, INVALID_USAGE, TIMEOUT, MISMATCH, SYSTEM_ERROR, NOT_SUPPORTED, OVERFLOW) = range(8)
RESULTS = (0, 4, 5, 6, 5, 2, 4, 5)  # ncclResult_t of each
ALGORITHM_AUTO, LOW_LATENCY, HIGH_THROUGHPUT = range(3)
LL, HT = range(2)  # ncclEpAlgorithm_t
UNSET, EXPERT_MAJOR, RANK_MAJOR, FLAT = range(4)  # ncclEpLayout_t
EXACT = -1
LAYOUTS = {"expert_major": 1, "packed": 2, "rank_major": 3, "flat": 4}  # ncclEpxLayout_t
WEIGHTS_AUTO, WEIGHTS_DISPATCH, WEIGHTS_NONE, WEIGHTS_HOME = range(4)
TRAP, DROP = 1, 2
WINDOW_NCCL, WINDOW_CUMEM = range(2)
HEAD = [("size", c.c_uint), ("magic", c.c_uint)]


class Struct(c.Structure):
    """Filled as by its INIT macro; fields by name."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=c.sizeof(self), magic=MAGIC)
        for name, value in fields.items():
            setattr(self, name, value)


def integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.c_int32) for name in names]


def numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.c_uint) for name in names]


class Tensor(Struct):
    """With room for its sizes. ``strides``: of elements, for scales; none are contiguous."""

    _fields_ = [*HEAD, *numbers("ndim", "datatype"), ("data", c.c_void_p), ("win_hdl", c.c_void_p),
                ("win_offset", c.c_uint64), ("sizes", c.POINTER(c.c_size_t))]  # fmt: skip

    def __init__(self, ndim: int = 0, dtype: int = 0, data: int | None = None, sizes: Any = ()) -> None:
        super().__init__(magic=TENSOR_MAGIC, ndim=ndim, datatype=dtype & 0xFFFFFFFF, data=data)
        self.room = (c.c_size_t * 4)(*sizes)
        self.sizes = c.cast(self.room, c.POINTER(c.c_size_t))
        self.strides: tuple[int, int] = (0, 0)

    @property
    def dtype(self) -> int:
        return int(self.datatype)

    def shape(self) -> list[int]:
        return list(self.room[: self.ndim])


_tensor = c.POINTER(Tensor)
Three = _tensor * 3


def pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, _tensor) for name in names]


def point(tensor: Tensor | None) -> Any:
    return None if tensor is None else c.pointer(tensor)


class TensorAllocConfig(Struct):
    _fields_ = HEAD


class RawGroupConfig(Struct):
    _fields_ = [
        *HEAD,
        *numbers("version", "algorithm", "num_experts", "max_dispatch_tokens_per_rank", "max_recv_tokens_per_rank",
                 "max_token_bytes"),
        ("rdma_buffer_size", c.c_ulong),
        *numbers("num_qp_per_rank", "num_channels", "max_num_sms"),
        ("alloc_fn", c.c_void_p), ("free_fn", c.c_void_p), ("alloc_context", c.c_void_p),
        *numbers("enable_mask"), ("timeout_ns", c.c_uint64),
        *numbers("zero_copy", "overflow_policy", "num_topk"), ("padding_v2", c.c_ubyte * 4),
    ]  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        super().__init__(version=2, **fields)


class RawHandleConfig(Struct):
    _fields_ = [*HEAD, ("dispatch_output_per_expert_alignment", c.c_size_t)]


class LayoutInfo(Struct):
    _fields_ = [*HEAD, *pointers("expert_counters", "src_rank_counters", "expert_offsets", "recv_total_counter"),
                *numbers("recv_topk_idx_kind"), ("padding_v2", c.c_ubyte * 4)]  # fmt: skip


class RawDispatchInputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights", "scales")]


class RawDispatchOutputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights", "scales", "topk_idx")]


class RawDispatchConfig(Struct):
    _fields_ = [*HEAD, *numbers("send_only", "round_scales", "pass_direction", "quant_recipe")]


class RawCombineInputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights", "scales")]


class RawCombineOutputs(Struct):
    _fields_ = [*HEAD, *pointers("tokens", "topk_weights")]


class RawCombineConfig(Struct):
    _fields_ = [*HEAD, *numbers("send_only", "pass_direction", "quant_recipe")]


class CompleteConfig(Struct):
    _fields_ = HEAD


class GroupOptions(Struct):
    _fields_ = [*HEAD, *integers("both_algorithms", "domain_size"), ("max_combine_row_bytes", c.c_size_t),
                ("arena_bytes", c.c_uint64), *integers("ll_network", "window")]  # fmt: skip


class GroupInfo(Struct):
    _fields_ = [*HEAD, *integers("rank", "num_ranks", "domain_size", "algorithm"),
                *[(name, c.c_uint64) for name in (
                    "window_bytes", "num_dispatches", "num_combines", "dropped_rows", "num_ht_dispatches",
                    "num_ht_combines", "num_staged_dispatches", "num_staged_combines", "arena_bytes",
                    "arena_free_bytes")],
                *integers("ll_max_tokens", "topk")]  # fmt: skip


class HandleOptions(Struct):
    _fields_ = [*HEAD, *integers("layout", "algorithm"), ("capacity", c.c_int64), *integers("max_tokens", "reserved")]


class HandleInfo(Struct):
    _fields_ = [*HEAD, *integers("layout", "topk", "max_tokens", "alignment", "algorithm", "reserved"),
                ("capacity", c.c_int64)]  # fmt: skip


class DispatchExtra(Struct):
    _fields_ = [*HEAD, *integers("quant", "zero_padding", "num_sms", "cached"), ("scale_strides", c.c_int64 * 2),
                ("extra", Three), ("extra_outputs", Three), *pointers("row_expert", "info")]  # fmt: skip


class CombineExtra(Struct):
    _fields_ = [*HEAD,
                *integers("weights", "wire_dtype", "num_sms", "rows_per_signal", "signal_threshold", "reserved"),
                ("scale", c.c_double), *pointers("topk_weights", "topk_idx"), ("bias", _tensor * 2),
                *pointers("row_signals")]  # fmt: skip


STRUCTS: dict[str, tuple[type[Struct], int]] = {  # by their names in C, with the sizes of their first versions
    "ncclEpTensor_t": (Tensor, 48),
    "ncclEpTensorAllocConfig_t": (TensorAllocConfig, 8),
    "ncclEpGroupConfig_t": (RawGroupConfig, 96),
    "ncclEpHandleConfig_t": (RawHandleConfig, 16),
    "ncclEpLayoutInfo_t": (LayoutInfo, 40),
    "ncclEpDispatchInputs_t": (RawDispatchInputs, 32),
    "ncclEpDispatchOutputs_t": (RawDispatchOutputs, 40),
    "ncclEpDispatchConfig_t": (RawDispatchConfig, 20),
    "ncclEpCombineInputs_t": (RawCombineInputs, 24),
    "ncclEpCombineOutputs_t": (RawCombineOutputs, 24),
    "ncclEpCombineConfig_t": (RawCombineConfig, 16),
    "ncclEpCompleteConfig_t": (CompleteConfig, 8),
    "ncclEpxGroupOptions_t": (GroupOptions, 48),
    "ncclEpxGroupInfo_t": (GroupInfo, 112),
    "ncclEpxHandleOptions_t": (HandleOptions, 32),
    "ncclEpxHandleInfo_t": (HandleInfo, 40),
    "ncclEpxDispatchExtra_t": (DispatchExtra, 104),
    "ncclEpxCombineExtra_t": (CombineExtra, 80),
}

Allgather = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t, c.c_uint64)

_void, _size, _int = c.c_void_p, c.POINTER(c.c_size_t), c.POINTER(c.c_int)
_config, _handle_config, _info = c.POINTER(RawGroupConfig), c.POINTER(RawHandleConfig), c.POINTER(LayoutInfo)
_options = c.POINTER(HandleOptions)
_dispatch = [c.POINTER(RawDispatchInputs), c.POINTER(RawDispatchOutputs)]
_combine = [c.POINTER(RawCombineInputs), c.POINTER(RawCombineOutputs), c.POINTER(RawCombineConfig)]
_mem_size: list[Any] = [_void, c.c_uint, _handle_config, _size, c.c_int]
_init: list[Any] = [c.POINTER(_void), _void, c.c_uint, _handle_config, c.c_int, _tensor]
FUNCTIONS: dict[str, list[Any]] = {  # that return a result, without "nccl"
    "EpGetVersion": [_int],
    "EpTensorAlloc": [c.POINTER(_tensor), c.c_uint, c.c_uint, _size, c.POINTER(TensorAllocConfig)],
    "EpTensorDestroy": [_tensor],
    "EpCreateGroup": [c.POINTER(_void), _void, _config],
    "EpGroupDestroy": [_void],
    "EpHandleMemSize": _mem_size,
    "EpInitHandle": _init,
    "EpUpdateHandle": [_void, _tensor, _info, _void],
    "EpCreateHandle": [c.POINTER(_void), _void, c.c_uint, _tensor, _info, _handle_config, _void],
    "EpHandleDestroy": [_void],
    "EpDispatch": [_void, *_dispatch, _info, c.POINTER(RawDispatchConfig), _void],
    "EpCombine": [_void, *_combine, _void],
    "EpComplete": [_void, c.POINTER(CompleteConfig), _void],
    "EpMaskQuery": [_void, _void, _void],
    "EpMaskUpdate": [_void, _int, _void],
    "EpMaskClean": [_void, _void],
    "EpGetAsyncError": [_void, _int],
    "EpErrorClear": [_void],
    "EpxGetVersion": [_int],
    "EpxTensorBytes": [_tensor, _size],
    "EpxCommFromCallback": [c.POINTER(_void), c.c_int, c.c_int, c.c_int, Allgather, _void],
    "EpxCommDestroy": [_void],
    "EpxCreateGroup": [c.POINTER(_void), _void, _config, c.POINTER(GroupOptions)],
    "EpxGroupSetTimeout": [_void, c.c_uint64],
    "EpxCheck": [_void],
    "EpxGroupGetInfo": [_void, c.POINTER(GroupInfo)],
    "EpxMemAlloc": [_void, c.POINTER(_void), c.c_size_t],
    "EpxMemFree": [_void, _void],
    "EpxHandleMemSize": [*_mem_size, _options],
    "EpxInitHandle": [*_init, _options],
    "EpxRouteHandle": [_void, _tensor, _void],
    "EpxHandleGetInfo": [_void, c.POINTER(HandleInfo)],
    "EpxDispatchShapes": [_void, *_dispatch, c.POINTER(RawDispatchConfig), c.POINTER(DispatchExtra)],
    "EpxDispatch": [_void, *_dispatch, _info, c.POINTER(RawDispatchConfig), c.POINTER(DispatchExtra), _void],
    "EpxCombine": [_void, *_combine, c.POINTER(CombineExtra), _void],
    "EpxCombineWeights": [_void, _tensor, _tensor, _void],
}
TEXTS = {"EpxGetLastError", "EpxGetErrorString", "EpxGetLastErrorKind"}


class Refused(Exception):
    """A call that did not succeed: the kind of its error, and what ncclEpxGetLastError said."""

    def __init__(self, result: int, text: str) -> None:
        super().__init__(f"{result}: {text}")
        self.result, self.text = result, text


# ---- What belongs together in one


class GroupConfig:
    """A config, options, and the device of the communicator."""

    def __init__(
        self, *, algorithm: int = ALGORITHM_AUTO, device: int = -1, max_tokens: int = 0, topk: int = 0,
        overflow_policy: int = 0, domain_size: int = 0, max_combine_row_bytes: int = 0, arena_bytes: int = 0,
        ll_network: int = 0, window: int = 0, **rest: Any,
    ) -> None:  # fmt: skip
        number = {ALGORITHM_AUTO: LL, LOW_LATENCY: LL, HIGH_THROUGHPUT: HT}.get(algorithm, algorithm)
        policy = {0: DROP, 1: TRAP}.get(overflow_policy, overflow_policy)
        self.device = device
        self.config = RawGroupConfig(
            algorithm=number, max_dispatch_tokens_per_rank=max_tokens, num_topk=topk, overflow_policy=policy,
            max_recv_tokens_per_rank=max_tokens, **rest,
        )  # fmt: skip
        self.options = GroupOptions(
            both_algorithms=algorithm == ALGORITHM_AUTO, domain_size=domain_size, ll_network=ll_network,
            window=window,
            max_combine_row_bytes=max_combine_row_bytes, arena_bytes=arena_bytes,
        )  # fmt: skip


class HandleConfig:
    """Of a handle with options."""

    def __init__(self, *, topk: int = 0, expert_alignment: int = 0, **options: Any) -> None:
        self.num_topk, self.options = topk, HandleOptions(**options)
        self.config = RawHandleConfig(dispatch_output_per_expert_alignment=expert_alignment)


class Fields:
    """Tensors by name; those that are not given are None."""

    names: tuple[str, ...] = ()

    def __init__(self, **tensors: Any) -> None:
        assert set(tensors) <= {*self.names, "extra"}, tensors
        for name in self.names:
            setattr(self, name, tensors.get(name))
        self.extra: list[Tensor | None] = [*tensors.get("extra", ()), None, None, None][:3]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class DispatchInputs(Fields):
    names = ("tokens", "topk_weights", "scales")


class DispatchOutputs(Fields):
    names = ("tokens", "scales", "topk_weights", "topk_idx", "row_expert", "info")


class CombineInputs(Fields):
    names = ("tokens", "topk_weights", "topk_idx", "bias0", "bias1", "values", "row_signals")


class CombineOutputs(Fields):
    names = ("tokens", "values")


class DispatchConfig:
    def __init__(self, *, send_only: int = 0, **extra: Any) -> None:
        self.send_only, self.extra = send_only, extra


class CombineConfig:
    def __init__(self, *, send_only: int = 0, weights: int = WEIGHTS_DISPATCH, **extra: Any) -> None:
        self.send_only, self.extra = send_only, {"weights": weights, **extra}


class Library:
    """The functions of libnccl_ep.so by their names without nccl; what is no success is raised as Refused. Others take
    what belongs together in one."""

    def __init__(self, path: Path | str) -> None:
        self.raw = c.CDLL(str(path))
        self.raw.ncclEpxGetLastError.restype = c.c_char_p
        self.raw.ncclEpxGetErrorString.restype = c.c_char_p
        for name, arguments in FUNCTIONS.items():
            getattr(self.raw, f"nccl{name}").argtypes = arguments
        self.comms: dict[int, c.c_void_p] = {}  # of groups, by address

    def __getattr__(self, name: str) -> Any:
        full = name if name in FUNCTIONS else next((p + name for p in ("Ep", "Epx") if p + name in FUNCTIONS), None)
        if full is None:
            raise AttributeError(name)
        function = getattr(self.raw, f"nccl{full}")

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result != 0:
                kind = int(self.raw.ncclEpxGetLastErrorKind())
                assert result == RESULTS[kind], (result, kind)
                raise Refused(kind, self.last_error())

        return call

    def last_error(self) -> str:
        return str(self.raw.ncclEpxGetLastError().decode())

    def comm(self, rank: int, num_ranks: int, allgather: Any, device: int = -1) -> c.c_void_p:
        comm = c.c_void_p()
        self.EpxCommFromCallback(comm, rank, num_ranks, device, allgather, None)
        comm.allgather = allgather  # type: ignore[attr-defined]  # groups call it
        return comm

    def CreateGroupFromCallback(
        self, made: c.c_void_p, rank: int, num_ranks: int, allgather: Any, context: Any, config: GroupConfig | None
    ) -> None:
        comm = self.comm(rank, num_ranks, allgather, -1 if config is None else config.device)
        try:
            if config is None:
                self.EpCreateGroup(made, comm, None)
            else:
                self.EpxCreateGroup(made, comm, config.config, config.options)
        except Refused:
            self.EpxCommDestroy(comm)
            raise
        assert made.value is not None
        self.comms[made.value] = comm

    def CreateGroup(self, made: Any, comm: Any, config: GroupConfig) -> None:
        self.EpxCreateGroup(made, comm, config.config, config.options)

    def GroupDestroy(self, group: Any) -> None:
        address = group.value if isinstance(group, c.c_void_p) else group
        self.EpGroupDestroy(group)
        if comm := self.comms.pop(address, None):
            self.EpxCommDestroy(comm)

    def HandleMemSize(self, group: Any, config: HandleConfig, size: Any) -> None:
        self.EpxHandleMemSize(group, UNSET, config.config, size, config.num_topk, config.options)

    def InitHandle(self, handle: Any, group: Any, config: HandleConfig, memory: Any) -> None:
        """memory: an address; as large as it must be."""
        address = memory.value if isinstance(memory, c.c_void_p) else memory
        described = None if address is None else Tensor(1, 1, address, [1 << 40])
        self.EpxInitHandle(handle, group, UNSET, config.config, config.num_topk, described, config.options)

    def UpdateHandle(self, handle: Any, topk_idx: Any) -> None:
        self.EpUpdateHandle(handle, topk_idx, None, None)

    def CreateHandle(self, handle: Any, group: Any, config: HandleConfig, topk_idx: Any, memory: Any) -> None:
        self.InitHandle(handle, group, config, memory)
        try:
            self.UpdateHandle(handle, topk_idx)
        except Refused:
            self.EpHandleDestroy(handle)
            raise

    def MaskUpdate(self, group: Any, num_ranks: int, masked: Any, stream: Any = None) -> None:
        self.EpMaskUpdate(group, (c.c_int * num_ranks)(*[rank not in masked for rank in range(num_ranks)]), stream)

    def MaskClean(self, group: Any) -> None:
        self.EpMaskClean(group, None)

    @staticmethod
    def _dispatch(inputs: DispatchInputs, outputs: DispatchOutputs, config: DispatchConfig | None) -> tuple[Any, ...]:
        config = config or DispatchConfig()
        raw_inputs = RawDispatchInputs(
            tokens=point(inputs.tokens), topk_weights=point(inputs.topk_weights), scales=point(inputs.scales)
        )
        raw_outputs = RawDispatchOutputs(
            tokens=point(outputs.tokens), topk_weights=point(outputs.topk_weights), scales=point(outputs.scales),
            topk_idx=point(outputs.topk_idx),
        )  # fmt: skip
        recipe = 0 if inputs.scales is None else 1
        extra = DispatchExtra(
            extra=Three(*map(point, inputs.extra)), extra_outputs=Three(*map(point, outputs.extra)),
            row_expert=point(outputs.row_expert), info=point(outputs.info), **config.extra,
        )  # fmt: skip
        if inputs.scales is not None:
            extra.scale_strides[:] = inputs.scales.strides
        return raw_inputs, raw_outputs, RawDispatchConfig(send_only=config.send_only, quant_recipe=recipe), extra

    def DispatchShapes(self, handle: Any, inputs: Any, config: Any, outputs: Any) -> None:
        self.EpxDispatchShapes(handle, *self._dispatch(inputs, outputs, config))

    def Dispatch(self, handle: Any, inputs: Any, outputs: Any, config: Any, stream: Any) -> None:
        raw_inputs, raw_outputs, raw_config, extra = self._dispatch(inputs, outputs, config)
        self.EpxDispatch(handle, raw_inputs, raw_outputs, None, raw_config, extra, stream)

    def Combine(self, handle: Any, inputs: Any, outputs: Any, config: Any, stream: Any) -> None:
        config = config or CombineConfig()
        raw_inputs = RawCombineInputs(tokens=point(inputs.tokens), topk_weights=point(inputs.values))
        raw_outputs = RawCombineOutputs(tokens=point(outputs.tokens), topk_weights=point(outputs.values))
        is_backward = inputs.values is not None or outputs.values is not None
        extra = CombineExtra(
            topk_weights=point(inputs.topk_weights), topk_idx=point(inputs.topk_idx),
            bias=(_tensor * 2)(point(inputs.bias0), point(inputs.bias1)), row_signals=point(inputs.row_signals),
            **config.extra,
        )  # fmt: skip
        raw_config = RawCombineConfig(send_only=config.send_only, pass_direction=is_backward)
        self.EpxCombine(handle, raw_inputs, raw_outputs, raw_config, extra, stream)

    def solo_group(self, **config: Any) -> c.c_void_p:
        """A world of one rank."""
        group = c.c_void_p()
        fields = {"num_experts": 2, "max_tokens": 4, "topk": 2, "max_token_bytes": 64, **config}
        self.CreateGroupFromCallback(group, 0, 1, Allgather(), None, GroupConfig(**fields))
        return group
