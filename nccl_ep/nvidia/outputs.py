"""Where the results of a dispatch go: into the caller's tensors, by the operation itself where it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .. import _C
from ..buffer import Buffer
from ..config import dispatch_fields
from ..ops import scales_of

NAMES = ("tokens", "scales", "topk_weights", "topk_idx", "row_expert", "info")  # in the order of the ops' outputs


@dataclass
class Outputs:
    """``tensors``: what an op takes, by NAMES. ``copies``: (to, from), for tensors that it cannot write to."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, **given: torch.Tensor) -> Outputs:
        """The caller's tensors by name; what an op cannot write to is replaced."""
        made = cls()
        for name, to in given.items():
            made.add(name, to)
        return made

    def add(self, name: str, to: torch.Tensor) -> None:
        self.tensors[name] = to
        if not to.is_contiguous() or to.data_ptr() % 16:
            self.tensors[name] = torch.empty_like(to, memory_format=torch.contiguous_format)
            self.copies.append((to, self.tensors[name]))

    def deliver(self) -> None:
        """After the op."""
        for to, source in self.copies:
            to.copy_(source)


def exactly(given: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """ValueError for an output of another dtype or shape. Rows of one or two dimensions may be more."""
    if given.dtype == dtype and given.dim() == len(shape) and list(given.shape[1:]) == list(shape[1:]):
        if given.shape[0] == shape[0]:
            return given
        if given.dim() < 3 and given.shape[0] > shape[0]:
            return given[: shape[0]]
    raise ValueError(f"outputs.{name} is {given.dtype} {list(given.shape)}, must be {dtype} {list(shape)}")


def outputs_for(
    buffer: Buffer, numbers: tuple[int, ...], capacity: int, x: torch.Tensor, scales: torch.Tensor | None,
    topk_idx: torch.Tensor, given: Mapping[str, torch.Tensor | None],
) -> Outputs:  # fmt: skip
    """Of a dispatch of x. ``given``: the caller's tensors by NAMES; what is not given is made."""
    wanted = _C.dispatch_outputs(
        numbers, buffer.num_ranks, capacity, x.dtype, x.shape[1], *scales_of(scales), topk_idx.dtype == torch.int64
    )
    made = Outputs()
    for name, (shape, dtype) in zip(NAMES, wanted, strict=True):
        to = given.get(name)
        if to is None:
            made.tensors[name] = x.new_empty(shape, dtype=dtype)
            continue
        made.add(name, exactly(to, name, shape, dtype))
    return made


def new_handle(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """For an op to fill. On the CPU it is zero until then, so that what an op has not filled is refused."""
    return x.new_zeros(shape, dtype=torch.int32) if x.is_cpu else x.new_empty(shape, dtype=torch.int32)


def ids_as_wide(topk_idx: torch.Tensor, out: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """The routing with ids of the dtype in which they are to come. An id out of range stays out of range."""
    if out is None or topk_idx.dtype == out.dtype:
        return topk_idx
    return topk_idx.clamp(-1, num_experts).to(out.dtype)


def trap(buffer: Buffer, info: torch.Tensor, capacity: int, numbers: tuple[int, ...]) -> None:
    """OverflowError where rows were dropped: the host waits for the count. In a graph, where no host can raise it, the
    device stops.

    Args:
        info: that a dispatch has filled. numbers: its config.
    """
    if info.is_cuda and torch.cuda.is_current_stream_capturing():
        fields = dispatch_fields(numbers)
        overflow_at = _C.info_parts(fields["layout"], buffer.num_ranks, fields["num_experts"])[2]
        torch._assert_async(info[overflow_at] == 0)
        return
    torch.ops.nccl_ep.require_no_overflow.default(buffer._seq, info, capacity, numbers)
