"""The extension, csrc/torch/binding/module.cc. Loading it registers ``torch.ops.nccl_ep``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
def time_line(kernel: str) -> list[list[int]]: ...

# Bytes of (routing, dispatched rows, combined rows) in a bank.
def sizes_for(
    num_ranks: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    /,
) -> tuple[int, int, int]: ...

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
def sizes_for_window(num_ranks: int, window_bytes: int, /) -> tuple[int, int, int]: ...
def window_for(num_ranks: int, sizes: tuple[int, int, int], /) -> int: ...

class GroupConfig:
    def __init__(
        self,
        *,
        device_index: int,
        domain_size: int,
        tagged_bytes: int,
        dispatch_row_bytes: int,
        combine_row_bytes: int,
        timeout_seconds: float,
        network_seed: int,
        ht_sizes: tuple[int, int, int, int, int, int],
        masks_late_ranks: bool,
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
    def mask(self, rank: int, stream: int) -> None: ...
    def query_masks(self, status: int, stream: int) -> None: ...
    def clean_masks(self, allgather: Callable[[bytes], Sequence[bytes]]) -> None: ...
    def check_opaque_rows(self, num_experts: int, topk: int, max_tokens: int, row_bytes: int) -> None: ...
    def domain_size(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def arena_offset(self, address: int, bytes: int) -> int | None: ...
    def wire_bytes(self) -> dict[str, list[int]]: ...
    def destroy(self) -> None: ...
