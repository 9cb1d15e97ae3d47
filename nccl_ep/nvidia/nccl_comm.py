"""Ranks of a communicator of NCCL itself, which meet through it."""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

import torch

from ..errors import SystemError
from ..meeting import late

_UINT8 = 1  # ncclDataType_t
_LENGTH_BYTES = 8


@functools.cache
def _nccl() -> Any:
    """The library that this process has: torch's."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise SystemError(f"a communicator of NCCL needs NCCL, which this process cannot load: {error}") from error


class NcclCommRendezvous:
    """Gathers bytes with ``ncclAllGather`` on the current GPU. The communicator must live while a group is made."""

    def __init__(self, pointer: int) -> None:
        self._comm = ctypes.c_void_p(pointer)
        self._rank, self._size = self._number("ncclCommUserRank"), self._number("ncclCommCount")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        """Lengths first, then as many bytes as the longest has. ``nccl_ep.TimeoutError`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        lengths = self._gather(len(mine).to_bytes(_LENGTH_BYTES, "little"), deadline, timeout)
        sizes = [int.from_bytes(each, "little") for each in lengths]
        longest = max(1, *sizes)
        padded = self._gather(mine.ljust(longest, b"\0"), deadline, timeout)
        return [each[:size] for each, size in zip(padded, sizes, strict=True)]

    def _gather(self, mine: bytes, deadline: float, timeout: float) -> list[bytes]:
        """Of one length on all ranks."""
        send = torch.frombuffer(bytearray(mine), dtype=torch.uint8).cuda()
        received = torch.empty((self._size, len(mine)), dtype=torch.uint8, device=send.device)
        stream = torch.cuda.current_stream()
        self._call(
            "ncclAllGather", ctypes.c_void_p(send.data_ptr()), ctypes.c_void_p(received.data_ptr()),
            ctypes.c_size_t(len(mine)), ctypes.c_int(_UINT8), self._comm, ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise late(self._rank, timeout, [rank for rank in range(self._size) if rank != self._rank])
            time.sleep(0.0005)
        return [bytes(row.tolist()) for row in received.cpu()]

    def _number(self, function: str) -> int:
        value = ctypes.c_int()
        self._call(function, self._comm, ctypes.byref(value))
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(_nccl(), function)(*arguments)
        if result != 0:
            raise SystemError(f"{function} of the given communicator returned {result}")
