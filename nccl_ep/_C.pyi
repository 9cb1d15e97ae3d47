"""The extension, csrc/torch/binding/module.cc. Loading it registers ``torch.ops.nccl_ep``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")

EMULATES_GPU: bool  # its "cpu" runs the kernels of CUDA: tests/gpu_emulator

def has_cuda() -> bool: ...
def nccl_info() -> dict[str, str]: ...

# The op without torch's parser of arguments (csrc/torch/binding/fast_call.h); `usual` is torch's way of calling it.
# packed_results: small results share an allocation.
def fast_op(name: str, usual: Callable[..., Any], packed_results: bool = False) -> Callable[..., Any]: ...
def op_names() -> list[str]: ...

# Whether the others are None, or plain tensors (no subclass, strided) on the device of the first.
def on_same_device(first: torch.Tensor, /, *others: object) -> bool: ...

# (T, K) of x [T, H] and topk_idx [.., K]; None: not of two dimensions each, or not all of them are beside the first.
def sizes_on_same_device(
    first: torch.Tensor, x: object, topk_idx: object, /, *others: object
) -> tuple[int, int] | None: ...

# Whole operations in one call (csrc/torch/binding/eager.h); None: not that plain, and nothing was done.
def set_eager_types(handle: type, output: type, overlap: type, event: type) -> None: ...
def set_default_device_mode(mode: type, /) -> None: ...
def eager_buffer(seq: torch.Tensor, num_ranks: int, open_sends: dict[str, Any], raises_overflow: bool) -> object: ...
def remember_dispatch(eager: object, key: tuple[Any, ...], config: object) -> None: ...
def dispatch_eager(
    buffer: object,
    x: object,
    topk_idx: object,
    topk_weights: object,
    scales: object,
    num_experts: object,
    mode: object,
    layout: object,
    max_tokens: object,
    capacity: object,
    expert_alignment: object,
    quant: object,
    zero_padding: object,
    num_sms: object,
    /,
) -> Any: ...
def combine_eager(
    rows: object,
    handle: object,
    weights: object,
    topk_idx: object,
    bias: object,
    out_dtype: object,
    wire_dtype: object,
    out: object,
    num_sms: object,
    /,
) -> Any: ...
def low_latency_dispatch_eager(
    view: object,
    x: object,
    topk_idx: object,
    max_tokens: object,
    num_experts: object,
    recv_stats: object,
    wait_cost: object,
    use_fp8: object,
    round_scale: object,
    use_ue8m0: object,
    async_finish: object,
    return_recv_hook: object,
    /,
) -> Any: ...
def low_latency_combine_eager(
    view: object,
    x: object,
    topk_idx: object,
    topk_weights: object,
    handle: object,
    use_logfmt: object,
    zero_copy: object,
    async_finish: object,
    return_recv_hook: object,
    out: object,
    wait_cost: object,
    /,
) -> Any: ...
def get_dispatch_layout_eager(seq: object, topk_idx: object, num_experts: object, /) -> Any: ...
def normal_dispatch_eager(
    seq: object,
    fitting: object,
    x: object,
    per_rank: object,
    is_token_in_rank: object,
    per_expert: object,
    topk_idx: object,
    topk_weights: object,
    expert_alignment: object,
    num_worst_tokens: object,
    num_sms: object,
    /,
) -> Any: ...
def normal_dispatch_cached_eager(
    seq: object, fitting: object, x: object, handle: object, num_sms: object, /
) -> Any: ...
def normal_combine_eager(
    seq: object, fitting: object, x: object, handle: object, topk_weights: object, num_sms: object, /
) -> Any: ...

class StreamEvent:  # csrc/torch/binding/stream_event.cc
    def wait(self, stream: Any = None, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...

def current_stream_id(tensor: torch.Tensor, /) -> int | None: ...
def call_on_stream(tensor: torch.Tensor, stream_id: int | None, call: Callable[[], object], /) -> object: ...
def run_on_stream(
    call: Callable[[], T], stream: Any, inputs: tuple[Any, ...], previous: Callable[[], object] | None, event: Any, /
) -> tuple[T, tuple[torch.Tensor, ...]]: ...

# What its operations return may lie in the arena under capture too (csrc/torch/ops/arena_pool.h: GraphOutputsScope).
def call_with_graph_outputs(call: Callable[[], T], /) -> T: ...
def normal_row_bytes(hidden: int, element_bytes: int, scale_bytes: int) -> int: ...
def time_line(kernel: str) -> list[list[int]]: ...

# Rules of the library (csrc/torch/binding/policy.cc). config: what nccl_ep.config packs. Sizes may be SymInts.
AUTO_LL_BYTES: int
AUTO_LL_SLOTS: int
AUTO_LL_TOKENS: int
DEFAULT_CAPACITY: int

class Option:  # a line of a table of csrc/runtime/options.h
    name: str
    kind: Literal["flag", "integer", "float", "choice"]
    modes: Literal["ll", "ht", "both"]
    default: bool | int | float
    least: bool | int | float
    most: bool | int | float
    def number(self, value: object, /) -> int: ...  # that travels for a value, which is checked

def float_number(value: float, /) -> int: ...
def dispatch_options() -> tuple[Option, ...]: ...
def combine_options() -> tuple[Option, ...]: ...
def most_auto_ll_tokens(row_bytes: int, topk: int, num_ranks: int, auto_bytes: int = ...) -> int: ...
def default_capacity(config: Sequence[int], num_ranks: int, /) -> int: ...
def dtype_code(dtype: torch.dtype, /) -> int: ...
def wire_formats() -> dict[str, int]: ...
def carries_extra(quant: int, has_scales: bool, /) -> bool: ...
def dispatch_outputs(
    config: Sequence[int],
    num_ranks: int,
    capacity: int,
    dtype: torch.dtype,
    hidden: int,
    num_scales: int,
    scale_dtype: torch.dtype,
    is_idx64: bool,
    /,
) -> list[tuple[list[int], torch.dtype]]: ...
def handle_size(config: Sequence[int], num_ranks: int, num_tokens: int, /) -> int: ...
def ht_handle_sizes(config: Sequence[int], num_ranks: int, domain_size: int, num_tokens: int, /) -> tuple[int, int]: ...
def ht_route_parts(
    num_ranks: int, domain_size: int, num_experts: int, num_tokens: int, max_tokens: int, topk: int, /
) -> tuple[int, int, int, int, int]: ...
def source_size(config: Sequence[int], num_ranks: int, num_tokens: int, /) -> int: ...
def info_parts(layout: int, num_ranks: int, num_experts: int, /) -> tuple[int, int, int, int, int, int]: ...
def combine_out_dtype(config: Sequence[int], /) -> torch.dtype: ...
def combine_topk(config: Sequence[int], /) -> int: ...

# Bytes of (routing, dispatched rows, combined rows, unweighted rows) in a bank.
def sizes_for(
    num_ranks: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    /,
) -> tuple[int, int, int, int]: ...

# Words of a call; bytes of routes, rows, crossing routes, crossing rows, arena.
def ht_sizes_for(
    num_ranks: int,
    domain_size: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    arena_bytes: int,
    /,
) -> tuple[int, int, int, int, int, int]: ...

# Bytes of a window of high throughput alone.
def ht_window_bytes(num_ranks: int, ht_sizes: tuple[int, int, int, int, int, int], /) -> int: ...
def sizes_for_window(num_ranks: int, window_bytes: int, /) -> tuple[int, int, int, int]: ...
def window_for(num_ranks: int, sizes: tuple[int, int, int, int], /) -> int: ...

class GroupConfig:
    def __init__(
        self,
        *,
        device_index: int,
        domain_size: int,
        tagged_bytes: int,
        dispatch_row_bytes: int,
        combine_row_bytes: int,
        further_row_bytes: int,
        timeout_seconds: float,
        network_seed: int,
        ht_sizes: tuple[int, int, int, int, int, int],
        masks_late_ranks: bool,
        ll_network: str,
    ) -> None: ...

class Group:
    def __init__(
        self,
        name: str,
        rank: int,
        num_ranks: int,
        allgather: Callable[[bytes], Sequence[bytes]],
        config: GroupConfig,
    ) -> None: ...
    def check(self) -> None: ...
    def require_usable(self) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def set_pdl(self, enabled: bool, /) -> None: ...
    def last_blocks(self) -> list[int]: ...
    def last_plans(self) -> list[str]: ...
    def mask(self, rank: int, stream: int) -> None: ...
    def query_masks(self, status: int, stream: int) -> None: ...
    def clean_masks(self, allgather: Callable[[bytes], Sequence[bytes]]) -> None: ...
    def check_opaque_rows(self, num_experts: int, topk: int, max_tokens: int, row_bytes: int) -> None: ...
    def id(self) -> int: ...
    def domain_size(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def arena_offset(self, address: int, bytes: int) -> int | None: ...
    def wire_bytes(self) -> dict[str, list[int]]: ...
    def destroy(self) -> None: ...
