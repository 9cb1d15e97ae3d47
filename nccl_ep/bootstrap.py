"""How ranks find one another before they share memory: small byte strings, gathered within a deadline."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .checks import require_int32
from .errors import MismatchError
from .log import logger
from .meeting import KeyStore, Replacement, StoreMeeting

_Backend = getattr(dist, "_Backend", ()) if dist.is_available() else ()
# Where torchrun, Open MPI, and MPICH and its relatives say how many processes they have started.
_SIZES_OF_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
Allgather: TypeAlias = Callable[[bytes, float], list[bytes]]  # as Rendezvous.allgather


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


class StoreRendezvous:
    """Ranks that meet through a store of torch.

    The store may still have keys of earlier buffers, tries and groups of the same name. So every collective is a
    ``StoreMeeting`` with a name that was never used before.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store = KeyStore(store, f"nccl_ep/{name}", rank)
        self._place = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        with self.meet() as allgather:
            return allgather(mine, timeout)

    @contextlib.contextmanager
    def meet(self) -> Iterator[Allgather]:
        """A collective of any number of rounds. Ranks that have made unequal numbers of tries meet all the same."""
        meeting = StoreMeeting(self._store, self._place, self._rank, self._size)
        with meeting.until_left():
            yield meeting.allgather
        # The buffer is there: what its ranks do together from now on is apart from what those of other buffers do.
        self._place = self._place or f"{meeting.name}/"

    @contextlib.contextmanager
    def meet_newcomer(
        self, newcomer: int, left_out: Sequence[int], timeout: float
    ) -> Iterator[tuple[Allgather, list[int]]]:
        """A collective of a new process, which takes the number ``newcomer`` in the world, and of the other ranks but
        those ``left_out``, which the newcomer hears from them. Bytes come in the order of the ranks returned.
        """
        meeting = Replacement(self._store, newcomer, left_out, self._rank, self._size)
        with meeting.until_left():
            places = [place.decode() for place in meeting.allgather(self._place.encode(), timeout)]
            for rank, place in zip(meeting.seats, places, strict=True):
                if rank != newcomer and place != places[0]:
                    raise MismatchError(
                        f"rank {newcomer} is to be replaced in two buffers: rank {rank} means another one than rank "
                        f"{meeting.seats[0]}"
                    )
            yield meeting.allgather, meeting.seats
        self._place = places[0]


class StoreGroup(StoreRendezvous):
    """Ranks that meet through a store of torch, without a process group: a world that a new process can join.

    Args:
        store: a ``torch.distributed.TCPStore``, ``FileStore`` or other store that all ranks reach. It must outlive the
            ranks: a ``TCPStore`` lives in one process, best that which starts the others.
        rank, size: of this process, and of the world. name: of the world, where a store serves several.
    """

    def __init__(self, store: Any, *, rank: int, size: int, name: str = "world") -> None:
        require_int32(rank=rank, size=size)
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank} and size {size}, must be 0 <= rank < size")
        if not isinstance(name, str):
            raise TypeError(f"name is a {type(name).__name__}, must be a str")
        if not isinstance(store, getattr(dist, "Store", ())):
            raise TypeError(f"store is a {type(store).__name__}, must be a torch.distributed.Store")
        self._given = store, rank, size, name
        super().__init__(store, name, rank, size)

    def of_a_buffer(self) -> StoreGroup:
        """The same world, for the meetings of one buffer."""
        store, rank, size, name = self._given
        return StoreGroup(store, rank=rank, size=size, name=name)


class ProcessGroupRendezvous(StoreRendezvous):
    """Ranks of a torch process group, of any backend, which meet through the group's store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            name: str = group.group_name
        except RuntimeError:  # it has none
            name = ""
        # By the group itself: torch's world need not know of it.
        super().__init__(group.get_group_store(), name, group.rank(), group.size())


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


def meeting_of(rendezvous: Rendezvous) -> contextlib.AbstractContextManager[Allgather]:
    """How the ranks gather in one collective. It is over at the end of the ``with``."""
    if isinstance(rendezvous, StoreRendezvous):
        return rendezvous.meet()

    def allgather(mine: bytes, timeout: float) -> list[bytes]:
        try:
            every = list(rendezvous.allgather(mine, timeout))
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"group is a {type(rendezvous).__name__}, whose allgather(bytes, seconds) must return the bytes of all "
                f"ranks, but raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        if len(every) != rendezvous.size() or not all(isinstance(each, bytes) for each in every):
            kinds = ", ".join(sorted({type(each).__name__ for each in every}))
            raise TypeError(
                f"group.allgather() returned {len(every)} of {kinds}, must return bytes of {rendezvous.size()} ranks"
            )
        return every

    return contextlib.nullcontext(allgather)


def process_group_of(group: Any) -> Any:
    """The process group of a DeviceMesh of one dimension; what is no DeviceMesh, as it is."""
    if not dist.is_available() or not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        one = f'mesh["{names[-1]}"]' if names else f"mesh.get_group({group.ndim - 1})"
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions, {', '.join(names) if names else 'without names'}: "
            f"pass the one whose ranks share experts, as {one}"
        )
    if group.get_coordinate() is None:
        raise ValueError(f"this process, rank {dist.get_rank()}, is no member of the group: it is not in {group}")
    return group.get_group()


def rendezvous_of(group: Any, comm: Any = None) -> Rendezvous:
    """The rendezvous of what a user calls a group: None, a process group, a DeviceMesh of one dimension, an MPI
    communicator, or a rendezvous of its own."""
    group = process_group_of(group)
    if group is None and comm is None:
        _require_alone()
        return SoloRendezvous()
    if group is None:
        if not hasattr(comm, "Get_rank"):
            raise TypeError(f"comm is a {type(comm).__name__}, must be an mpi4py communicator")
        return MpiRendezvous(comm)
    if isinstance(group, type):
        raise TypeError(f"group is the class {group.__name__}, must be one of its objects")
    if hasattr(group, "Get_rank"):
        return MpiRendezvous(group)
    if isinstance(group, StoreGroup):
        return group.of_a_buffer()
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _rendezvous_of_process_group(group)
    if callable(getattr(group, "get_group_store", None)):  # an object that hands calls on to a process group
        _require_place(group.rank(), group.size())
        return _rendezvous_of_process_group(group)
    if dist.is_available() and isinstance(group, _Backend):
        raise TypeError(
            f"group is a {type(group).__name__}, the backend of a process group, which has no store through which the "
            "ranks could meet: pass the process group, as torch.distributed.new_group returns it"
        )
    if isinstance(group, Rendezvous) and callable(group.rank) and callable(group.size):
        _require_place(group.rank(), group.size())
        return group
    no_member = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    if type(group) is type(no_member) and group == no_member:
        raise TypeError(
            "this process is no member of the group: torch.distributed.new_group gave it "
            "GroupMember.NON_GROUP_MEMBER; only the members of a group make a buffer"
        )
    raise TypeError(
        f"group is a {type(group).__name__}: must be a torch process group, a DeviceMesh of one dimension, None, or an "
        "object with rank(), size() and allgather()"
    )


def _require_place(rank: Any, size: Any) -> None:
    require_int32(**{"rank()": rank, "size()": size})
    if not 0 <= rank < size:
        raise ValueError(f"the group's rank() is {rank} and its size() {size}, must be 0 <= rank() < size()")


def _require_alone() -> None:
    """ValueError where a launcher has started several processes that have no group yet: each would be rank 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            logger.warning(
                "a buffer without a group is a world of one rank, and this process is one of %d: pass group=",
                dist.get_world_size(),
            )
        return
    for name in _SIZES_OF_LAUNCHERS:
        started = os.environ.get(name, "")
        if started.isdecimal() and int(started) > 1:
            raise ValueError(
                f"group is None, and {name} is {started}: call torch.distributed.init_process_group() first and give "
                "torch.distributed.group.WORLD (a world of each process alone is nccl_ep.bootstrap.SoloRendezvous())"
            )


def _rendezvous_of_process_group(group: dist.ProcessGroup) -> Rendezvous:
    if group.size() == 1:
        return SoloRendezvous()
    if _is_fake(group):
        raise ValueError(
            f"group is of the fake backend: of its {group.size()} ranks only this one exists, and an exchange with the "
            "others would wait for them in vain"
        )
    if group.get_group_store() is None:
        raise TypeError(
            f"group is a {type(group).__name__}, a process group without a store (get_group_store() is None), through "
            "which the ranks would meet: pass one of torch.distributed, or an object with rank(), size() and "
            "allgather()"
        )
    return ProcessGroupRendezvous(group)


def _is_fake(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_backend(group) == "fake")
    except (RuntimeError, ValueError):  # torch's world does not know it
        return False
