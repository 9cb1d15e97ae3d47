"""The extension, csrc/torch/module.cc. Loading it registers ``torch.ops.nccl_ep``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")

BUILD: str  # "nccl_ep_build|torch=2.11.0|cuda=13.0|architectures=90a|", what it was built for
EMULATES_GPU: bool  # its "cpu" runs the kernels of CUDA: tests/gpu_emulator

def has_cuda() -> bool: ...
def why_no_cuda() -> str: ...
def nccl_info() -> dict[str, str]: ...

# The op without torch's parser of arguments (csrc/torch/ops/fast_call.h); `usual` is torch's way of calling it.
# packed_results: small results share an allocation.
def fast_op(name: str, usual: Callable[..., Any], packed_results: bool = False) -> Callable[..., Any]: ...
def op_names() -> list[str]: ...

# Whether the others are None, or plain tensors (no subclass, strided) on the device of the first.
def on_same_device(first: torch.Tensor, /, *others: object) -> bool: ...

# Operations, each in one call (csrc/torch/call, csrc/torch/deep_ep). What is wrong with an argument is raised.
def set_types(
    handle: type, output: type, layout: type, overlap: type, event: type, default_device_mode: type
) -> None: ...
def call_buffer(seq: torch.Tensor, num_ranks: int, open_sends: dict[str, Any], raises_overflow: bool) -> object: ...
def dispatch(
    x: object,
    topk_idx: object,
    topk_weights: object,
    scales: object,
    buffer: object,
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
def combine(
    rows: object,
    handle: object,
    weights: object,
    topk_idx: object,
    bias: object,
    out_dtype: object,
    wire_dtype: object,
    out: object,
    /,
    *options: object,  # those that are plain numbers: csrc/torch/call/combine.cc
) -> torch.Tensor: ...

# The received rows (with scales a pair), counts, handle, event, and what receives them (None: they are there).
def low_latency_dispatch(
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
    x_scales: object,
    /,
) -> Any: ...

# The result, event, and what receives it.
def low_latency_combine(
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
    row_signals: object,
    rows_per_signal: object,
    signal_threshold: object,
    num_sms: object,
    /,
) -> Any: ...

# DeepEP's normal mode, on the current stream. The last of the results is no event.
def get_dispatch_layout(view: object, seq: torch.Tensor, topk_idx: object, num_experts: object, /) -> Any: ...

# None: the window has grown, on all ranks, and nothing was sent.
def normal_dispatch(
    view: object,
    seq: torch.Tensor,
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
def normal_dispatch_cached(
    view: object,
    seq: torch.Tensor,
    x: object,
    handle: object,
    expert_alignment: object,
    num_worst_tokens: object,
    num_sms: object,
    /,
) -> Any: ...
def normal_combine(
    view: object, seq: torch.Tensor, x: object, handle: object, topk_weights: object, biases: object, num_sms: object, /
) -> Any: ...

class StreamEvent:  # csrc/torch/call/stream_event.cc
    def wait(self, stream: Any = None, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...

def current_stream_id(tensor: torch.Tensor, /) -> int | None: ...
def call_on_stream(tensor: torch.Tensor, stream_id: int | None, call: Callable[[], object], /) -> object: ...
def run_on_stream(
    call: Callable[[], T], stream: Any, inputs: tuple[Any, ...], previous: Callable[[], object] | None, event: Any, /
) -> tuple[T, tuple[torch.Tensor, ...]]: ...

# Who is given the operations of this process (csrc/torch/observer.cc): rank, ranks, buffer, device, JSON.
def start_recording(write: Callable[[list[tuple[int, int, str, str, str]]], object]) -> None: ...
def stop_recording() -> tuple[int, str]: ...  # operations that are lost, and why
def time_line(kernel: str) -> list[list[int]]: ...

# Rules of the library (csrc/torch/policy.cc). config: what nccl_ep.config packs. Sizes may be SymInts.
AUTO_LL_BYTES: int
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
def cached_numbers(*given: Any) -> tuple[int, ...]: ...
def dispatch_options() -> tuple[Option, ...]: ...
def combine_options() -> tuple[Option, ...]: ...
def auto_is_ht(
    max_tokens: int, row_bytes: int, topk: int, num_ranks: int, ll_max_tokens: int | None = None
) -> bool: ...
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
def ll_handle_parts(
    num_ranks: int, num_tokens: int, max_tokens: int, topk: int, map_k: int, /
) -> tuple[int, int, int, int]: ...
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
    on_gpu: bool = False,
) -> tuple[int, int, int, int]: ...
def auto_ll_tokens(
    num_ranks: int, num_experts: int, topk: int, max_tokens: int, row_bytes: int, on_gpu: bool, /
) -> int: ...

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

# Tokens a rank that the kernels of low latency serve, in the layout that needs least.
def most_ll_tokens_on_gpus(num_ranks: int, num_experts: int, topk: int, /) -> int: ...

# Bytes of a window of low latency alone, over the rail of such domains; 0: of one domain.
def ll_window_bytes(num_ranks: int, rail_domain_size: int, sizes: tuple[int, int, int, int], /) -> int: ...

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
        unweighted_row_bytes: int,
        timeout_seconds: float,
        network_seed: int,
        ht_sizes: tuple[int, int, int, int, int, int],
        masks_late_ranks: bool,
        ll_network: str,
        raises_invalid_ids: bool,
        max_experts: int,
        made_with: str,
        is_elastic: bool,
        uses_cumem: bool,
    ) -> None: ...

class Group:
    def __init__(
        self,
        name: str,
        rank: int,
        num_ranks: int,
        allgather: Callable[[bytes], Sequence[bytes]],
        config: GroupConfig,
        seats: Sequence[int],
    ) -> None: ...
    def check(self) -> None: ...
    def require_usable(self) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def set_pdl(self, enabled: bool, /) -> None: ...
    def last_blocks(self) -> list[int]: ...
    def last_plans(self) -> list[str]: ...
    def mask(self, rank: int, stream: int) -> None: ...
    def update_masks(self, ranks: Sequence[int], stream: int) -> None: ...
    def query_masks(self, status: int, stream: int) -> None: ...
    def clean_masks(self, allgather: Callable[[bytes], Sequence[bytes]]) -> None: ...
    def replace(
        self, rank: int, seats: Sequence[int], seconds: float, allgather: Callable[[bytes], Sequence[bytes]]
    ) -> None: ...
    def check_opaque_rows(self, num_experts: int, topk: int, max_tokens: int, row_bytes: int) -> None: ...
    def id(self) -> int: ...
    def domain_size(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def arena_offset(self, address: int, bytes: int) -> int | None: ...
    def wire_bytes(self) -> dict[str, list[int]]: ...
    def destroy(self) -> None: ...
