"""What stands for a ``nccl.core.Communicator``: how its ranks find one another. No communicator of NCCL is made."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import struct
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..bootstrap import Rendezvous, SoloRendezvous, StoreRendezvous, rendezvous_of
from ..checks import require_within
from ..errors import SystemError, UsageError
from .nccl_comm import NcclCommRendezvous

_ID_BYTES = 128
_TOKEN_BYTES, _HOST_BYTES = 16, 102
_ID = struct.Struct(f"8s{_TOKEN_BYTES}sH{_HOST_BYTES}s")  # mark, token, port, host
_MARK = b"nccl_ep\0"
_WAIT = timedelta(seconds=100)

_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


@functools.cache
def _server(pid: int) -> Any:
    """The store that a process serves for as long as it lives, for all that it makes ids for."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class UniqueId:
    """Where ranks meet: 128 bytes that one rank makes and sends to the others, by whatever means."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = bytes(data).ljust(_ID_BYTES, b"\0")
        if len(self._data) != _ID_BYTES:
            raise ValueError(f"a unique id has {len(self._data)} bytes, must have {_ID_BYTES}")

    @staticmethod
    def from_bytes(b: Any) -> UniqueId:
        return UniqueId(bytes(b))

    @property
    def as_bytes(self) -> bytes:
        return self._data

    def __bytes__(self) -> bytes:
        return self._data

    def __repr__(self) -> str:
        return f"<UniqueId {self._data[8:16].hex()}>"


def get_unique_id(empty: bool = False) -> UniqueId:
    """A new place to meet, which this process serves until it ends. ``empty``: one to be filled, of no place."""
    if empty:
        return UniqueId()
    host = socket.gethostname().encode()[:_HOST_BYTES]
    return UniqueId(_ID.pack(_MARK, secrets.token_bytes(_TOKEN_BYTES), _server(os.getpid()).port, host))


class Communicator:
    """Ranks that make groups of ``nccl.ep`` together. ``ptr`` is a number of it, not an ``ncclComm_t``.

    ``Communicator.init`` makes one of a unique id, ``get_nccl_comm_from_group`` one of a process group.
    ``Communicator(ptr)`` is the one of that ``ptr``, or stands for an ``ncclComm_t`` of somebody else.
    """

    def __init__(self, ptr: int | None = None, *, _rendezvous: Rendezvous | None = None) -> None:
        known = _communicators.get(ptr or 0)
        if _rendezvous is None and ptr:
            _rendezvous = NcclCommRendezvous(ptr) if known is None else known._rendezvous
        self._rendezvous: Rendezvous | None = _rendezvous
        self._ptr = ptr or id(self)
        if known is None:
            _communicators[self._ptr] = self

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId, config: Any = None) -> Communicator:
        """Of ``nranks`` ranks that have the same unique id. ``config`` is of NCCL, and changes nothing here.

        Raises: ValueError for a rank that is none, or an id of another library; SystemError where the process that made
        the id cannot be reached.
        """
        require_within(1, 1 << 20, nranks=nranks)
        require_within(0, nranks - 1, rank=rank)
        mark, token, port, host = _ID.unpack(bytes(unique_id))
        if mark != _MARK:
            raise ValueError(f"unique_id is {unique_id!r}, must be what nccl_ep's get_unique_id() returned")
        if nranks == 1:
            return cls(_rendezvous=SoloRendezvous())
        name = host.rstrip(b"\0").decode()
        where = "localhost" if name == socket.gethostname() else name
        try:
            store = TCPStore(where, port, is_master=False, timeout=_WAIT)
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise SystemError(
                f"rank {rank} cannot reach {name}:{port}, where its unique id was made: {reason}"
            ) from error
        return cls(_rendezvous=StoreRendezvous(store, token.hex(), rank, nranks))

    def _valid(self) -> Rendezvous:
        if self._rendezvous is None:
            raise UsageError("the communicator was destroyed, or never made")
        return self._rendezvous

    @property
    def ptr(self) -> int:
        return self._ptr

    @property
    def is_valid(self) -> bool:
        return self._rendezvous is not None

    @property
    def rank(self) -> int:
        return self._valid().rank()

    @property
    def nranks(self) -> int:
        return self._valid().size()

    def finalize(self) -> None:
        """Nothing: no operation is in flight."""

    def destroy(self) -> None:
        """May be called twice. Groups that were made of it live on."""
        self._rendezvous = None

    abort = destroy

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nccl_ep's Communicator only makes groups of nccl.ep, and has no {name}: install nccl4py")

    def __repr__(self) -> str:
        valid = self._rendezvous
        return "<Communicator destroyed>" if valid is None else f"<Communicator rank {valid.rank()} of {valid.size()}>"


def get_nccl_comm_from_group(group: Any = None) -> Communicator:
    """The ranks of a group as a communicator, without NCCL.

    Args:
        group: as ``nccl_ep.Buffer`` takes it: a torch process group of any backend, gloo among them, a ``DeviceMesh``
            of one dimension, or an object with ``rank()``, ``size()`` and ``allgather()``. None: the default process
            group.

    Raises: RuntimeError for None where torch.distributed is not initialized; otherwise as ``nccl_ep.Buffer``.
    """
    if group is None:
        if not dist.is_initialized():
            raise UsageError("torch.distributed is not initialized: call init_process_group, or give a group")
        group = dist.group.WORLD
    return Communicator(_rendezvous=rendezvous_of(group))


def rendezvous_of_communicator(comm: Any) -> Rendezvous:
    """Of a ``Communicator`` of ours, of nccl4py's, or of another object whose ``ptr`` is an ``ncclComm_t``."""
    if isinstance(comm, Communicator):
        return comm._valid()
    pointer = getattr(comm, "ptr", None)
    if not isinstance(pointer, int) or pointer == 0:
        raise TypeError(f"comm is a {type(comm).__name__}, must be a Communicator of nccl.core or of nccl.ep.interop")
    known = _communicators.get(pointer)
    return NcclCommRendezvous(pointer) if known is None else known._valid()
