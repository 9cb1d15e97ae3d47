"""What callers use of the functions below ``nccl.ep``: a handle that has no routing yet, as CUDA graphs want one."""

from __future__ import annotations

from ..checks import MAX_TOPK, require_within
from ..errors import UsageError
from .enums import Layout
from .group import group_of
from .handle import number_of


def init_handle(ep_group: int, layout: int, config: int, num_topk: int, handle_mem: int) -> int:
    """A number that ``nccl.ep.Handle`` takes, once. ``Handle.update`` gives it a routing. Nothing is sent.

    Args:
        ep_group: the ``ptr`` of a group.
        layout: as of ``Group.create_handle``.
        config, handle_mem: 0.
        num_topk: choices of a token at most.

    Raises: UsageError for what is no group; ValueError for a layout that the group's algorithm has not got, or other
    numbers.
    """
    for name, value in (("config", config), ("handle_mem", handle_mem)):
        if value != 0:
            raise ValueError(f"{name} is {value}, must be 0: there is no C struct behind nccl_ep's handles")
    require_within(1, MAX_TOPK, num_topk=num_topk)
    group = group_of(ep_group)
    if group is None:
        raise UsageError(f"{ep_group:#x} is no group")
    return number_of(group.mode_of(Layout(layout)))
