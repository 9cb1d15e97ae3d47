"""What stands for ``transformer_engine.pytorch.ep``, so that Megatron's dispatcher "ncclep" runs over nccl_ep.

``install()`` before Megatron is imported puts this module in its place. Transformer Engine itself needs no NCCL EP
then. There is one group a process, as there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .. import nvidia as ep
from ..buffer import Buffer
from ..checks import MAX_INT32, described, require_dtypes, require_tensors, require_within
from ..config import pack_dispatch
from ..errors import UsageError
from ..functional import combine, dispatch
from ..handle import Handle
from ..nvidia.communicator import get_nccl_comm_from_group
from ..nvidia.outputs import trap

NAME = "transformer_engine.pytorch.ep"

_BOOTSTRAPPED = False  # Megatron reads it
_group: ep.Group | None = None
_eager = _drops = False


def install() -> None:
    """``transformer_engine.pytorch.ep`` is this module from now on, in this process. Transformer Engine may be imported
    before or later; what has imported its ``ep`` already keeps that."""
    module = sys.modules[__name__]
    sys.modules[NAME] = module
    parent = sys.modules.get(NAME.rpartition(".")[0])
    if parent is not None:
        parent.ep = module  # type: ignore[attr-defined]


def ep_bootstrap(
    ep_group: Any,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int = 0,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Makes the group. Collective.

    Args:
        ep_group: as ``nccl_ep.Buffer`` takes it; no communicator of NCCL is needed. device: as ``nccl_ep.Buffer``.
        num_topk: choices of a token at most; 0: any number, in a somewhat larger window.
        recv_capacity_per_rank: rows that a rank receives at most, padding included. None: eager, results have the rows
            that come.
        zero_copy: ``symm_mem_alloc`` has room in the group's window.
        drop_on_overflow: rows past the capacity are dropped. Otherwise a dispatch raises ``nccl_ep.OverflowError``; the
            host waits for the count, if the capacity is less than what could come.

    Raises: UsageError for a second group before ``ep_finalize``; ValueError for ``zero_copy`` or ``drop_on_overflow``
    without a capacity; otherwise as ``nccl_ep.Buffer``.
    """
    global _BOOTSTRAPPED, _group, _eager, _drops
    if _BOOTSTRAPPED:
        raise UsageError("ep_bootstrap was called already: call ep_finalize first")
    for name, given in (("zero_copy", zero_copy), ("drop_on_overflow", drop_on_overflow)):
        if given and recv_capacity_per_rank is None:
            raise ValueError(f"{name} is {given!r} with recv_capacity_per_rank None, must have a capacity")
    require_within(1, MAX_INT32, max_tokens_per_rank=max_tokens_per_rank, hidden_dim=hidden_dim)
    if recv_capacity_per_rank is not None:
        require_within(0, MAX_INT32, recv_capacity_per_rank=recv_capacity_per_rank)
    require_dtypes(max_token_dtype=max_token_dtype)
    policy = ep.OverflowPolicy.DROP if drop_on_overflow else ep.OverflowPolicy.TRAP
    config = ep.GroupConfig(
        algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=num_experts, num_topk=num_topk,
        max_dispatch_tokens_per_rank=max_tokens_per_rank, max_num_sms=max_num_sms, overflow_policy=policy,
        max_recv_tokens_per_rank=recv_capacity_per_rank or 0,
        max_token_bytes=hidden_dim * max_token_dtype.itemsize,
        zero_copy=ep.ZeroCopyMode.ON if zero_copy else ep.ZeroCopyMode.OFF,
    )  # fmt: skip
    _group = ep.Group.create(get_nccl_comm_from_group(ep_group), config, device=device)
    _BOOTSTRAPPED, _eager, _drops = True, recv_capacity_per_rank is None, bool(drop_on_overflow)


def is_ep_bootstrapped() -> bool:
    """Whether there is a group."""
    return _BOOTSTRAPPED


def ep_finalize() -> None:
    """Ends the group. May be called twice, and without one."""
    global _BOOTSTRAPPED, _group
    if _group is not None:
        _group.destroy()
    _BOOTSTRAPPED, _group = False, None


def _buffer() -> Buffer:
    if _group is None:
        raise UsageError("there is no group: call ep_bootstrap first")
    return _group.buffer


def symm_mem_alloc(
    shape: Any, dtype: torch.dtype, ep_group: Any = None, device: Any = None, use_pool: bool = False
) -> torch.Tensor:
    """A tensor that other ranks reach, as ``nccl_ep.Buffer.empty``. The group is that of ``ep_bootstrap``."""
    return _buffer().empty(tuple(shape), dtype)


def release_symm_mem_pool() -> None:
    """Nothing: there is no pool, memory of the window is the group's."""


def is_symm_backed(t: torch.Tensor) -> bool:
    """Whether a tensor lies in the group's window."""
    return _buffer().runtime.arena_offset(t.data_ptr(), t.nbytes) is not None


class EpBuffer:
    """The state of one dispatch and its combine. L local experts.

    Attributes:
        tokens_per_expert: int64 [L] rows of each expert with padding, of the last dispatch or ``ep_prepare``.
        total_recv_tokens: int64 [1] their number before any is dropped.
    """

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ) -> None:
        self.device = _buffer().device
        require_within(
            1, MAX_INT32, top_k=top_k, max_tokens_per_rank=max_tokens_per_rank, hidden_dim=hidden_dim,
            num_local_experts=num_local_experts,
        )  # fmt: skip
        require_within(0, MAX_INT32, alignment=alignment)
        if recv_capacity_per_rank is not None:
            require_within(0, MAX_INT32, recv_capacity_per_rank=recv_capacity_per_rank)
        if alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}, must be 0 or a power of two")
        if recv_capacity_per_rank is None and not _eager:
            raise ValueError("recv_capacity_per_rank is None, must be a number: ep_bootstrap was given one")
        self.top_k, self.alignment, self.max_tokens_per_rank = top_k, alignment, max_tokens_per_rank
        self.recv_capacity_per_rank, self.hidden_dim = recv_capacity_per_rank or 0, hidden_dim
        self.num_local_experts, self.payload_dtype, self.eager = num_local_experts, payload_dtype, _eager
        self.tokens_per_expert = torch.zeros(num_local_experts, dtype=torch.int64, device=self.device)
        self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sent: Handle | None = None


def _require(buffer: EpBuffer, **tensors: torch.Tensor) -> None:
    """TypeError, ValueError or UsageError for what is no ``EpBuffer`` of a group, and no tensor with rows."""
    if not isinstance(buffer, EpBuffer):
        raise TypeError(f"buffer is {described(buffer)}, must be an EpBuffer")
    _buffer()
    require_tensors(**tensors)
    for name, each in tensors.items():
        if each.dim() < 1:
            raise ValueError(f"{name} has shape [], must have rows")


def ep_prepare(buffer: EpBuffer, topk_idx: torch.Tensor) -> torch.Tensor:
    """Fills the counts of a routing that is to come, and returns ``tokens_per_expert``. Collective."""
    _require(buffer, topk_idx=topk_idx)
    assert _group is not None
    info = ep.LayoutInfo(
        expert_counters=ep.Tensor(buffer.tokens_per_expert), recv_total_counter=ep.Tensor(buffer.total_recv_tokens)
    )
    config = ep.HandleConfig(dispatch_output_per_expert_alignment=buffer.alignment)
    stream = None if buffer.device.type == "cpu" else torch.cuda.current_stream(buffer.device)
    ids = ep.Tensor(topk_idx.reshape(-1, topk_idx.shape[-1]))
    _group.create_handle(ep.Layout.EXPERT_MAJOR, ids, layout_info=info, config=config, stream=stream)
    return buffer.tokens_per_expert


def ep_dispatch(
    buffer: EpBuffer,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    recv_tokens: torch.Tensor | None = None,
    recv_topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by expert, the weight of each row, and ``buffer.tokens_per_expert``. Rows and weights have gradients.

    Args:
        tokens: [.., H]. topk_idx: int32 or int64 [.., K]. topk_weights: float32 [.., K].
        recv_tokens, recv_topk_weights: get a copy of the first two results.

    Raises: as ``nccl_ep.dispatch``.
    """
    _require(buffer, tokens=tokens, topk_idx=topk_idx, topk_weights=topk_weights)
    core, step = _buffer(), max(1, buffer.alignment)
    out = dispatch(
        tokens.reshape(-1, tokens.shape[-1]), topk_idx.reshape(-1, topk_idx.shape[-1]),
        topk_weights.reshape(-1, topk_weights.shape[-1]), buffer=core,
        num_experts=buffer.num_local_experts * core.num_ranks, mode="ht", layout="packed",
        capacity="exact" if buffer.eager else buffer.recv_capacity_per_rank, expert_alignment=step,
        zero_padding=step > 1,
    )  # fmt: skip
    assert out.offsets is not None
    most = core.num_ranks * buffer.max_tokens_per_rank * min(buffer.top_k, buffer.num_local_experts)
    if not _drops and not buffer.eager and buffer.recv_capacity_per_rank < most + buffer.num_local_experts * (step - 1):
        trap(core, out._info, buffer.recv_capacity_per_rank, pack_dispatch(out.handle.routing()))
    buffer.sent = out.handle
    buffer.tokens_per_expert.copy_(out.offsets.diff())
    buffer.total_recv_tokens.copy_(((out.demand + (step - 1)) // step * step).sum(0, keepdim=True))
    for to, made in ((recv_tokens, out.x), (recv_topk_weights, out.weights)):
        if to is not None:
            to.detach().copy_(made.detach())
    return out.x, out.weights, buffer.tokens_per_expert


def ep_combine(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums of rows that the caller has weighted, [T, H]. It has a gradient.

    Args:
        num_local_tokens: T, those of the dispatch.
        grad_out: gets a copy of the gradient of ``expert_out``.

    Raises: UsageError before a dispatch; otherwise as ``nccl_ep.combine``.
    """
    _require(buffer, expert_out=expert_out)
    if buffer.sent is None:
        raise UsageError("ep_combine before ep_dispatch of this buffer")
    if num_local_tokens not in (None, buffer.sent.num_tokens):
        raise ValueError(f"num_local_tokens is {num_local_tokens}, the dispatch had {buffer.sent.num_tokens}")
    if grad_out is not None and expert_out.requires_grad:
        expert_out.register_hook(lambda grad: grad_out.detach().copy_(grad))  # type: ignore[no-untyped-call]
    return combine(expert_out, buffer.sent, weights=None)
