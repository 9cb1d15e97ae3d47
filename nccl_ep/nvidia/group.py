"""``nccl.ep``'s ``Group``: a buffer for one mode, made from a communicator."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..buffer import Buffer
from ..checks import MAX_INT32, MAX_TOPK, require_bools, require_within
from ..errors import UsageError
from .allocator import AllocConfig
from .communicator import rendezvous_of_communicator
from .enums import Algorithm, Layout, OverflowPolicy, ZeroCopyMode, member
from .handle import Handle
from .high_throughput import HighThroughput
from .low_latency import LowLatency
from .masks import Masks
from .mode import Sizes
from .structs import HandleConfig, LayoutInfo, Struct, require_struct
from .tensor import tensor_of

_LAYOUTS = {
    Algorithm.LOW_LATENCY: (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR),
    Algorithm.HIGH_THROUGHPUT: (Layout.FLAT, Layout.EXPERT_MAJOR),
}
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


@dataclass(kw_only=True)
class GroupConfig(Struct):
    """A group's sizes, equal on all ranks. 0 is the library's choice where it says so.

    Attributes:
        algorithm: the mode of all operations.
        num_experts: of all ranks, a multiple of their number.
        max_dispatch_tokens_per_rank: tokens that a rank sends at most.
        max_recv_tokens_per_rank: high throughput: rows that a rank receives at most, not less than it may send; 0: as
            many as the caller's tensors have.
        max_token_bytes: of a row with its scales, in either direction.
        max_num_sms: thread blocks of an operation; 0 chooses.
        enable_mask: low latency: a rank that misses a deadline is left out.
        timeout_ns: deadline of a wait; 0 is 100 s. NCCL_EP_TIMEOUT_MS in the environment comes before it.
        zero_copy: ON: ``Group.empty`` has room.
        overflow_policy: high throughput: of rows past ``max_recv_tokens_per_rank``.
        num_topk: choices of a token at most; 0: any number that the library serves, in a somewhat larger window.
        rdma_buffer_size, num_qp_per_rank, num_channels, alloc: accepted; they change nothing here.
    """

    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


class Group(Masks):
    """Made by ``Group.create``. ``buffer`` is the ``nccl_ep.Buffer`` behind it, for what this API has no name for."""

    def __init__(self, buffer: Buffer, sizes: Sizes, algorithm: Algorithm) -> None:
        super().__init__(buffer)
        self._sizes, self._algorithm = sizes, algorithm
        _groups[id(self)] = self

    @classmethod
    def create(cls, comm: Any, config: GroupConfig, *, device: str | torch.device | None = None) -> Group:
        """Collective over the ranks of a communicator.

        Args:
            comm: what ``nccl.ep.interop.torch.get_nccl_comm_from_group`` returned, a ``nccl.core.Communicator``, or
                another object whose ``ptr`` is an ``ncclComm_t``. The group does not need it any more afterwards.
            device: as of ``nccl_ep.Buffer``: "cpu" for CPU ranks on a machine with GPUs.

        Raises: ValueError for sizes that make no sense; otherwise as ``nccl_ep.Buffer``.
        """
        require_struct("config", config, GroupConfig)
        algorithm = member(Algorithm, "algorithm", config.algorithm)
        zero_copy = member(ZeroCopyMode, "zero_copy", config.zero_copy)
        require_bools(enable_mask=config.enable_mask)
        is_ht = algorithm is Algorithm.HIGH_THROUGHPUT
        sizes = _sizes_of(config, is_ht)
        rendezvous = rendezvous_of_communicator(comm)
        options: dict[str, Any] = {"timeout": _timeout_of(config)}
        if is_ht and zero_copy is not ZeroCopyMode.ON:
            options["arena_bytes"] = 0  # the caller's tensors lie elsewhere
        buffer = Buffer.for_shapes(
            rendezvous, max_tokens=sizes.max_tokens, hidden=(config.max_token_bytes + 15) // 16 * 8,
            topk=config.num_topk or min(sizes.num_experts, MAX_TOPK), num_experts=sizes.num_experts,
            mode="ht" if is_ht else "ll", enable_shrink=bool(config.enable_mask) and not is_ht, device=device,
            late_weights=True, **options,
        )  # fmt: skip
        return cls(buffer, sizes, algorithm)

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Any,
        *,
        layout_info: LayoutInfo | None = None,
        config: HandleConfig | None = None,
        stream: Any,
    ) -> Handle:
        """A handle with a first routing, as ``Handle.update`` takes it.

        Raises: ValueError for a layout that the group's algorithm has not got, and for an alignment that is no power of
        two; otherwise as ``Handle.update``.
        """
        handle = Handle(self.mode_of(layout, config))
        tensor_of(topk_idx, "topk_idx", self.buffer.device)
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def mode_of(self, layout: Layout, config: HandleConfig | None = None) -> LowLatency | HighThroughput:
        """The operations of a handle, without a routing. Raises as ``create_handle``."""
        buffer, known = self._valid(), _LAYOUTS[self._algorithm]
        layout, config = member(Layout, "layout", layout), HandleConfig() if config is None else config
        require_struct("config", config, HandleConfig)
        if layout not in known:
            raise ValueError(
                f"layout is {layout!r}, must be {' or '.join(each.name for each in known)} in {self._algorithm.name}"
            )
        if self._algorithm is Algorithm.LOW_LATENCY:
            return LowLatency(buffer, self._sizes, layout)
        return HighThroughput(buffer, self._sizes, layout, config.dispatch_output_per_expert_alignment)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor in the group's window, as ``nccl_ep.Buffer.empty``: rows reach it, and leave it, without a copy.

        For ``zero_copy`` ON; without it the tensor lies in other memory, and works as well.
        """
        return self._valid().empty(shape, dtype)

    @property
    def ptr(self) -> int:
        """A number of this object. (There is no C struct behind it.)"""
        self._valid()
        return id(self)

    def destroy(self) -> None:
        """May be called twice."""
        self.buffer.destroy()
        self._is_destroyed = True

    def __repr__(self) -> str:
        return "<Group destroyed>" if self._is_destroyed else f"<Group {self._algorithm.name} of {self.buffer!r}>"


def group_of(ptr: int) -> Group | None:
    """That is alive, by its ``ptr``."""
    return _groups.get(ptr)


def _sizes_of(config: GroupConfig, is_ht: bool) -> Sizes:
    """ValueError for sizes that make no sense."""
    for name in ("num_experts", "max_dispatch_tokens_per_rank", "max_token_bytes"):
        require_within(1, MAX_INT32, **{name: getattr(config, name)})
    for name in ("max_recv_tokens_per_rank", "max_num_sms", "timeout_ns", "num_topk"):
        require_within(0, 1 << 63, **{name: getattr(config, name)})
    most, received = config.max_dispatch_tokens_per_rank, config.max_recv_tokens_per_rank
    policy = member(OverflowPolicy, "overflow_policy", config.overflow_policy)
    if is_ht and config.max_token_bytes % 16:
        raise ValueError(f"max_token_bytes is {config.max_token_bytes}, must be a multiple of 16 in HIGH_THROUGHPUT")
    if is_ht and 0 < received < most:
        raise ValueError(
            f"max_recv_tokens_per_rank is {received}, must be at least max_dispatch_tokens_per_rank, {most}, or 0"
        )
    if is_ht and received == 0 and policy is OverflowPolicy.DROP:
        raise ValueError("overflow_policy is DROP with max_recv_tokens_per_rank 0: there is nothing to drop at")
    require_struct("alloc", config.alloc, AllocConfig)
    if bool(config.alloc.alloc_fn) != bool(config.alloc.free_fn):
        raise ValueError("alloc has one of alloc_fn and free_fn, must have both or none")
    return Sizes(
        config.num_experts, most, received if is_ht else 0, config.max_num_sms, drops=policy is OverflowPolicy.DROP
    )


def _timeout_of(config: GroupConfig) -> float:
    """Seconds."""
    name = "NCCL_EP_TIMEOUT_MS"
    given = os.environ.get(name)
    if given is not None:
        if not given.isdigit() or int(given) == 0:
            raise UsageError(f"{name} is {given!r}, must be a positive number of milliseconds")
        return int(given) / 1e3
    return config.timeout_ns / 1e9 or 100.0
