"""Operations in two calls: what a send returns, and the sent halves of low latency that are still to be received."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from .checks import error_of
from .errors import OverflowError, UsageError
from .events import EventOverlap

T = TypeVar("T")


class Buffer(Protocol):
    """What is asked of a ``nccl_ep.Buffer`` here."""

    name: str
    device: torch.device
    _seq: torch.Tensor
    _halves: dict[str, Half]

    def require_usable(self) -> None: ...


class Half:
    """The receiving half of an operation that was sent. It keeps the tensors that half needs, and not the buffer.

    Args:
        op: its op. args: behind the buffer's name and ``_seq``.
    """

    __slots__ = ("_args", "_kind", "_op", "_owner")

    def __init__(self, kind: str, op: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._kind, self._op, self._args = kind, op, args
        self._owner: weakref.ref[Any] | None = None

    def open(self, buffer: Buffer, owner: Any) -> None:
        """``owner``: who is to receive. If it is gone first, the half is lost."""
        self._owner = weakref.ref(owner)
        buffer._halves[self._kind] = self

    def receive(self, buffer: Buffer) -> Any:
        """Waits for the other ranks. Where that fails, the half stays open."""
        received = self._op(buffer.name, buffer._seq, *self._args)
        if buffer._halves.get(self._kind) is self:
            del buffer._halves[self._kind]
        return received

    def lose(self) -> None:
        """The owner cannot receive any more."""
        self._owner = None

    @property
    def is_lost(self) -> bool:
        return self._owner is None or self._owner() is None


def receive_lost(buffer: Buffer, kind: str) -> None:
    """Before the next operation of the kind: receives a half that nobody can receive any more, and throws it away."""
    half = buffer._halves.get(kind)
    if half is None or not half.is_lost:
        return
    if buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a replay would receive what it has not sent
    discard(buffer, half)


def discard(buffer: Buffer, half: Half) -> None:
    """Receives the half and throws it away. Its owner finds out when it receives."""
    half.lose()
    try:
        half.receive(buffer)
    except RuntimeError as error:
        raise error_of(buffer, error) from error


class Pending(Generic[T]):
    """An operation whose first half is done, or that runs on the buffer's own stream.

    Attributes:
        event: with ``async_finish``, of the end of the operation; else ``event.event`` is None.
    """

    def __init__(self, receive: Callable[[], T], event: EventOverlap | None = None) -> None:
        self._receive: Callable[[], T] | None = receive
        self._end = "this operation was received already"
        self._half: Half | None = None  # of a split call, to be received
        self.event = event or EventOverlap()

    @classmethod
    def of_half(cls, buffer: Buffer, half: Half, receive: Callable[[], T]) -> Pending[T]:
        pending = cls(receive)
        if not is_dynamo_compiling():
            pending._half = half
            half.open(buffer, pending)
        return pending

    def receive(self) -> T:
        """The other half: waits for the other ranks and returns the result. UsageError if it was called already."""
        receive, self._receive = self._receive, None
        half, self._half = self._half, None
        if half is not None and half.is_lost:
            self._end = "this operation was dropped"
            raise UsageError(self._end)
        if receive is None:
            raise UsageError(self._end)
        try:
            if self.event.event is not None:
                self.event.current_stream_wait()
            return receive()
        except OverflowError:  # of what was received
            raise
        except BaseException as error:  # of which the text is kept: the error itself would keep the buffer
            if half is not None:
                half.lose()  # if it is still open
            self._end = f"this operation has failed with {type(error).__name__}: {error}"
            raise

    def drop(self) -> None:
        """Receives the result and throws it away. Waits for the other ranks as ``receive`` does; may be called twice.

        The way out where an exception came between send and receive: the next operation of the kind does it by itself
        once the ``Pending`` is gone.
        """
        if self._receive is not None:
            with contextlib.suppress(OverflowError):
                self.receive()
            self._end = "this operation was dropped"
