"""Events, in DeepEP's terms: a point of a stream that another stream, or the caller's work, waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from . import _C

T = TypeVar("T")
E = TypeVar("E", bound="EventOverlap")


class EventHandle:
    """The present point of the current CUDA stream. Work on the CPU is done when a call returns: nothing to wait for.

    Args:
        stream: another stream than the current one.

    Source: DeepEP's ``EventHandle``.
    """

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | _C.StreamEvent | None = None
        # A process that has not used CUDA so far has nothing on its streams, and need not begin now.
        if stream is not None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream or torch.cuda.current_stream())

    @classmethod
    def completed(cls) -> EventHandle:
        """An event of work that is done: what CPU buffers give."""
        event = cls.__new__(cls)
        event._event = None
        return event

    @classmethod
    def unrecorded(cls) -> EventHandle:
        """An event of CUDA that is to be recorded."""
        event = cls.__new__(cls)
        event._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def current_stream_wait(self) -> None:
        """Work that is put on the current stream from now on waits for the event. The host does not."""
        if self._event is not None:
            self._event.wait()

    def query(self) -> bool:
        """Whether the point has been reached."""
        return self._event is None or bool(self._event.query())


class _CompiledEnd(EventHandle):
    """The end of an operation that a compiled program runs beside its own kernels; it keeps the operation's tensors."""

    __slots__ = ("_kept", "_seq")

    def __init__(self, seq: torch.Tensor, kept: list[torch.Tensor]) -> None:
        self._event, self._seq, self._kept = None, seq, kept

    def current_stream_wait(self) -> None:
        torch.ops.nccl_ep.await_beside.default(self._seq, self._kept)


class EventOverlap:
    """An event, and the tensors that must live until it was waited for; or no event (``event`` is None).

    As a context manager, what is in the ``with`` block overlaps with the operation, and its end waits for the event.
    ``with event(release_handle=True):`` gives up then what the event holds.

    Source: DeepEP's ``EventOverlap``, V2's too.
    """

    __slots__ = ("_hook", "_releases", "event", "extra_tensors")  # csrc/torch/call/types.cc sets them, too

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], object] | None = None
        self._releases: bool | None = None

    @property
    def cuda_event(self) -> torch.cuda.Event | _C.StreamEvent | None:
        """For ``stream.wait_event``; None on the CPU, and where there is no event."""
        return None if self.event is None else self.event._event

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """The current stream waits for the event. AssertionError if there is none.

        release_handle: the event gives up what it holds, itself included.
        """
        assert self.event is not None, "there is no event to wait for: the operation was not called with async_finish"
        self.event.current_stream_wait()
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """A function that the next wait calls. AssertionError if there is one already."""
        assert self._hook is None, "there is a hook already"
        self._hook = hook_after_wait

    def __call__(self: E, release_handle: bool = False) -> E:
        """For ``with event(release_handle=True):``."""
        self._releases = release_handle
        return self

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *_: Any) -> None:
        releases, self._releases = bool(self._releases), None
        if self.event is not None:
            self.current_stream_wait(releases)


class _HasStream(Protocol):
    device: torch.device

    def get_comm_stream(self) -> Any: ...


def run_on_comm_stream(
    buffer: _HasStream | None,
    call: Callable[[], T],
    inputs: tuple[Any, ...],
    is_async: bool,
    previous: EventOverlap | EventHandle | None = None,
    seq: torch.Tensor | None = None,
) -> tuple[T, EventOverlap]:
    """``call()`` on the current stream, without an event; or on the buffer's own, with an event of its end.

    The buffer's stream first waits for the current one; given ``previous``, for that event instead. Then the operation
    runs there also without ``is_async``, and the current stream waits for its end. The event holds the tensors of
    ``inputs`` and of the result. seq: the buffer's, of a call that a compiler traces: there is no stream in what it
    compiles, so that an op has the next operation run on the buffer's own.
    """
    if is_async and seq is not None and is_dynamo_compiling():
        torch.ops.nccl_ep.run_beside.default(seq)
        made = call()
        results = made if isinstance(made, tuple) else (made,)
        tensors = [each.detach() for each in (*inputs, *results) if isinstance(each, torch.Tensor)]
        return made, EventOverlap(_CompiledEnd(seq, tensors))
    before = previous.event if isinstance(previous, EventOverlap) else previous
    device = inputs[0].device if buffer is None else buffer.device
    if not is_async and (before is None or device.type == "cpu"):
        return call(), EventOverlap()
    if device.type == "cpu":
        return call(), EventOverlap(EventHandle.completed())
    if buffer is None or is_dynamo_compiling():
        raise NotImplementedError("a call with async_finish cannot be compiled on CUDA: its stream is the buffer's")
    event = EventHandle.unrecorded() if is_async else None
    result, kept = _C.run_on_stream(
        call,
        buffer.get_comm_stream(),
        inputs,
        None if before is None else before.current_stream_wait,
        None if event is None else event._event,
    )
    return result, EventOverlap() if event is None else EventOverlap(event, kept)
