"""A caller's NCCL communicator, and groups of the C library over it."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nccl_ep import _C
from tests.c import c_api
from tests.c.c_api import Library


class _UniqueId(c.Structure):
    _fields_ = [("internal", c.c_char * 128)]


class Nccl:
    """What a program does with the library that torch has loaded."""

    def __init__(self) -> None:
        torch.cuda.nccl.version()
        self._library = c.CDLL(_C.nccl_info()["path"])

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} returned {result}"

    def make(self, rank: int, num_ranks: int) -> c.c_void_p:
        mine = _UniqueId()
        self._call("ncclGetUniqueId", c.byref(mine))
        shared = [bytes(mine)]
        if num_ranks > 1:
            dist.broadcast_object_list(shared, 0)
        comm = c.c_void_p()
        self._call("ncclCommInitRank", c.byref(comm), num_ranks, _UniqueId.from_buffer_copy(shared[0]), rank)
        return comm

    def destroy(self, comm: c.c_void_p) -> None:
        self._call("ncclCommDestroy", comm)


def over(comm: c.c_void_p) -> Callable[..., c.c_void_p]:
    """What CaseRun makes its group with."""

    def make(library: Library, group: Any, **config: Any) -> c.c_void_p:
        made = c.c_void_p()
        library.CreateGroup(made, comm, c_api.GroupConfig(**config))
        return made

    return make
