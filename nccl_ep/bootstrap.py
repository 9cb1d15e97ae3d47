"""How ranks find one another before they share memory: small byte strings, gathered within a deadline."""

from __future__ import annotations

import itertools
import time
import weakref
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .checks import require_int32
from .errors import TimeoutError
from .log import logger

_instances: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


@runtime_checkable
class Rendezvous(Protocol):
    """What a buffer needs of a group. Ranks that are threads bring their own (``nccl_ep.testing.ThreadGroup``)."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        """Bytes of all ranks in rank order. Raises ``nccl_ep.TimeoutError`` after ``timeout`` seconds."""
        ...


class SoloRendezvous:
    """A world of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        return [mine]


def late(rank: int, timeout: float, missing: list[int]) -> TimeoutError:
    """The error of a rank that waited in vain for the others in ``allgather``."""
    return TimeoutError(
        f"rank {rank} waited {timeout} s for all ranks to make or grow the buffer, or to clean its masks; "
        f"nothing was heard from rank {', '.join(map(str, missing))}"
    )


class ProcessGroupRendezvous:
    """Ranks of a torch process group, of any backend. Goes through the group's store, which shows the missing ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # By the group itself: torch's world need not know of it.
        self._rank, self._size = group.rank(), group.size()
        store = group.get_group_store()
        # Buffers of one group are made in the same order everywhere, so that the number agrees between the ranks.
        count = _instances.setdefault(group, itertools.count())
        try:
            name: str = group.group_name
        except RuntimeError:  # it has none
            name = ""
        self._store = PrefixStore(f"nccl_ep/{name}/{next(count)}", store)
        self._rounds = itertools.count()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        prefix = next(self._rounds)
        self._store.set(f"{prefix}/{self._rank}", mine)  # type: ignore[arg-type]  # bytes are taken, the stub forgot them
        deadline = time.monotonic() + timeout
        texts = []
        for rank in range(self._size):
            try:
                self._wait(f"{prefix}/{rank}", deadline)
            except RuntimeError as error:  # too late, or a lost connection
                missing = [r for r in range(self._size) if not self._has(f"{prefix}/{r}")]
                raise late(self._rank, timeout, missing or [rank]) from error
            texts.append(self._store.get(f"{prefix}/{rank}"))
        return texts

    def _wait(self, key: str, deadline: float) -> None:
        """By polling: while a store waits, Python handles no signal."""
        pause = 0.0005
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key} did not come")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False


class MpiRendezvous:
    """An mpi4py communicator, which DeepEP's ``comm=`` allows. MPI has no deadline."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        return list(self._comm.allgather(mine))


def rendezvous_of(group: Any, comm: Any = None) -> Rendezvous:
    """The rendezvous of what a user calls a group: None, a process group, an MPI communicator, or one of its own."""
    if group is None and comm is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            logger.warning(
                "a buffer without a group is a world of one rank, and this process is one of %d: pass group=",
                dist.get_world_size(),
            )
        return SoloRendezvous()
    if group is None:
        if not hasattr(comm, "Get_rank"):
            raise TypeError(f"comm is a {type(comm).__name__}, must be an mpi4py communicator")
        return MpiRendezvous(comm)
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroupRendezvous(group)
    if isinstance(group, Rendezvous):
        rank, size = group.rank(), group.size()
        require_int32(**{"rank()": rank, "size()": size})
        if not 0 <= rank < size:
            raise ValueError(f"the group's rank() is {rank} and its size() {size}, must be 0 <= rank() < size()")
        return group
    raise TypeError(
        f"group is a {type(group).__name__}: must be a torch process group, None, or an object with rank(), size() and "
        "allgather()"
    )
