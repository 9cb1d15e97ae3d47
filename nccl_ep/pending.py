"""Operations in two calls: what a send returns, and the sends of low latency that are still to be received."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from .checks import error_of
from .errors import OverflowError, UsageError
from .events import EventOverlap

T = TypeVar("T")


class SendsOf(Protocol):
    """What is asked of a ``nccl_ep.Buffer`` here."""

    name: str
    device: torch.device
    _seq: torch.Tensor
    _open_sends: dict[str, OpenSend]

    def require_usable(self) -> None: ...


class OpenSend:
    """An operation that was sent and is to be received. It keeps the tensors that this needs, and not the buffer.

    Args:
        op: what receives it. args: all that this takes; of an op the first is the buffer's ``_seq``.
    """

    __slots__ = ("_args", "_kind", "_op", "_owner")

    def __init__(self, kind: str, op: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        self._kind, self._op, self._args = kind, op, args
        self._owner: weakref.ref[Any] | None = None

    def open(self, buffer: SendsOf, owner: Any) -> None:
        """``owner``: who is to receive. If it is gone first, the send is lost."""
        self._owner = weakref.ref(owner)
        buffer._open_sends[self._kind] = self

    def receive(self, buffer: SendsOf | None, into: Callable[[], Any] | None = None) -> Any:
        """Waits for the other ranks. Where that fails, the send stays open.

        Args:
            into: receives in the place of ``op``.
        """
        received = self._op(*self._args) if into is None else into()
        if buffer is not None and buffer._open_sends.get(self._kind) is self:
            del buffer._open_sends[self._kind]
        return received

    def lose(self) -> None:
        """The owner cannot receive any more."""
        self._owner = None

    @property
    def is_lost(self) -> bool:
        return self._owner is None or self._owner() is None


def receive_lost(buffer: SendsOf, kind: str) -> None:
    """Before the next operation of the kind: receives what nobody can receive any more, and throws it away."""
    open_send = buffer._open_sends.get(kind)
    if open_send is None or not open_send.is_lost:
        return
    if buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a replay would receive what it has not sent
    discard(buffer, open_send)


def discard(buffer: SendsOf, open_send: OpenSend) -> None:
    """Receives it and throws it away. Its owner finds out when it receives."""
    open_send.lose()
    try:
        open_send.receive(buffer)
    except RuntimeError as error:
        raise error_of(buffer, error) from error


def _once(function: Callable[[], T]) -> Callable[[], T]:
    """As functools.cache, which a compiler does not trace."""
    made: list[T] = []

    def once() -> T:
        if not made:
            made.append(function())
        return made[0]

    return once


class Pending(Generic[T]):
    """An operation that was sent, or that runs on the buffer's own stream.

    Attributes:
        event: with ``async_finish``, of the end of the operation; else ``event.event`` is None.
    """

    def __init__(self, receive: Callable[[], T], event: EventOverlap | None = None, is_early: bool = False) -> None:
        """is_early: the result may be had before it is complete."""
        self._early = _once(receive) if is_early else None
        self._receive: Callable[[], T] | None = receive if self._early is None else self._early
        self._end = "this operation was received already"
        self._open_send: OpenSend | None = None  # of a split call, to be received
        self.event = event or EventOverlap()

    @classmethod
    def of_send(cls, buffer: SendsOf | None, open_send: OpenSend, receive: Callable[[], T]) -> Pending[T]:
        pending = cls(receive)
        if buffer is not None and not is_dynamo_compiling():
            pending._open_send = open_send
            open_send.open(buffer, pending)
        return pending

    @property
    def early_output(self) -> T:
        """The output of a dispatch with ``async_finish`` and ``arrivals``, whose rows are still coming. Counts, weights
        and the handle are complete after ``receive`` alone. UsageError for any other operation."""
        if self._early is None or self._receive is None:
            raise UsageError("early_output is of a dispatch with async_finish and arrivals that is not received yet")
        return self._early()

    def __repr__(self) -> str:
        return f"<nccl_ep.Pending: {'to be received' if self._receive is not None else self._end}>"

    if not TYPE_CHECKING:  # a type checker sees what there is

        def __getattr__(self, name: str) -> Any:
            """Called for what there is not, as the fields of the result."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}: receive() returns the result")

    def receive(self) -> T:
        """Waits for the other ranks and returns the result. UsageError if it was called already."""
        receive, self._receive = self._receive, None
        open_send, self._open_send = self._open_send, None
        if open_send is not None and open_send.is_lost:
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
            if open_send is not None:
                open_send.lose()  # if it is still open
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
