"""What a program's operations do, written down while it runs: a file a rank, for ``python -m nccl_ep.report``.

All operations of the process are seen, eager or compiled, of either mode, of DeepEP's methods and of backward passes,
because the library itself tells of them (csrc/runtime/observed.h). What a CUDA graph replays is not seen, for the host
does not call it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from . import _C
from ._version import __version__
from .buffer import Buffer, living, when_destroyed
from .checks import described
from .errors import SystemError, UsageError
from .log import logger

FORMAT = 1  # changes with the lines of a file
_READ_AFTER = 64  # operations on a GPU whose events and counts are looked at together
_recorder: _Recorder | None = None


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the operations of this process, in a ``with`` block: docs/report.md.

    ``NCCL_EP_RECORD=path`` in the environment records from the import of nccl_ep to the end of the process.

    Args:
        path: of a folder, which is made where there is none. Each rank writes ``rank0.jsonl``, ``rank1.jsonl``, ...
            there, over those of before. A process whose RANK in the environment is not its rank in the buffer's group
            writes ``process8.rank0.jsonl``.

    Raises: OSError where the folder cannot be written to. UsageError where the process records already. TypeError and
    ValueError for what is no path. Where the disk is full later, the file ends there, and the log says so.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {described(path)}, must be that of a folder")
    if not os.fspath(path):
        raise ValueError(f"path is {path!r}, must be that of a folder")
    _start(Path(path))
    try:
        yield
    finally:
        _stop()


def set_up() -> None:
    """Reads ``NCCL_EP_RECORD``. Called when the package is imported."""
    if path := os.environ.get("NCCL_EP_RECORD"):
        try:
            _start(Path(path))
        except OSError as error:
            raise SystemError(f"NCCL_EP_RECORD is {path!r}: {error}") from None
        atexit.register(_stop)


def _start(folder: Path) -> None:
    global _recorder
    if _recorder is not None:
        raise UsageError(f"this process records into {_recorder.folder} already")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no file can be written into {folder}")
    _recorder = _Recorder(folder)
    when_destroyed.append(_recorder.keep_stats)
    _C.set_observer(_recorder.begin, _recorder.end)


def _stop() -> None:
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is None:
        return
    _C.set_observer()
    when_destroyed.remove(recorder.keep_stats)
    recorder.close()


def _machine() -> str:
    """Whose clock times are of."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


class _File:
    """That of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        of_process = os.environ.get("RANK", "")
        name = f"rank{rank}.jsonl" if of_process in ("", str(rank)) else f"process{of_process}.rank{rank}.jsonl"
        self._stream: TextIO = (folder / name).open("w", encoding="utf-8")
        self._buffers: dict[str, int] = {}  # in the order of their first operations, which is that of all ranks
        self.write(
            {
                "nccl_ep_record": FORMAT, "version": __version__, "rank": rank, "host": platform.node(),
                "machine": _machine(), "process": os.getpid(), "torch": torch.__version__,
                "unix_ns": time.time_ns(), "clock_ns": time.monotonic_ns(),
            }
        )  # fmt: skip

    def write(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")

    def buffer(self, name: str, line: dict[str, Any]) -> int:
        """Its number, by which operations name it. line: what is said of it the first time."""
        if name not in self._buffers:
            self._buffers[name] = len(self._buffers)
            self.write({"buffer": self._buffers[name], "name": name, **line})
        return self._buffers[name]

    def stats(self, name: str, stats: dict[str, Any]) -> None:
        if name in self._buffers:
            self.write({"stats_of": self._buffers[name], "stats": stats})

    def flush(self) -> None:
        """A process that is killed leaves what it has recorded."""
        self._stream.flush()

    def end(self) -> None:
        self.write({"recording_ended_ns": time.monotonic_ns()})
        self.close()

    def close(self) -> None:
        self._stream.close()


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}  # by ranks
        self._gpus: dict[int, _Gpu] = {}
        self._waiting: list[_OnGpu] = []  # for their GPU
        self._stats: dict[tuple[int, str], dict[str, Any]] = {}  # by rank and buffer, for the end of the files
        self._process = os.getpid()  # a fork's operations are not recorded
        self._is_closed = False

    # ---- Called by csrc/torch/observer.cc

    def begin(self, call: tuple[int, int]) -> _OnGpu | None:
        """On a GPU, before the operation."""
        device, stream = call
        with self._lock:
            if device not in self._gpus:
                self._gpus[device] = _Gpu(device)
            return self._gpus[device].begin(stream)

    def end(self, call: tuple[Any, ...]) -> None:
        """After it: the line of the file; on a GPU also what ``begin`` has returned, and of what rows are counted."""
        line, *of_gpu = call
        with self._lock:
            if self._is_closed or os.getpid() != self._process:
                return
            if not of_gpu:
                self._write(line, "cpu")
                self._flush()
                return
            on_gpu, *counted = of_gpu
            if on_gpu is None:  # begin has failed
                return
            on_gpu.end(line, *counted)
            self._waiting.append(on_gpu)
            if len(self._waiting) >= _READ_AFTER and not on_gpu.is_captured:
                self._take_what_is_done()
                self._flush()

    # ----

    def keep_stats(self, buffer: Buffer) -> None:
        """Of a buffer that is about to go, or at the end."""
        with contextlib.suppress(RuntimeError):  # a destroyed buffer, a GPU that has failed
            self._stats[buffer.rank, buffer.name] = buffer.stats()

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        for buffer in living():
            self.keep_stats(buffer)
        with self._lock:
            try:
                for each in self._waiting:
                    each.wait()
                self._take_what_is_done()
            except RuntimeError as error:  # of a GPU that has failed
                logger.error("the last %d operations are not recorded: %s", len(self._waiting), error)
            for (rank, name), stats in self._stats.items():
                if rank in self._files:
                    self._put(rank, functools.partial(_File.stats, name=name, stats=stats))
            for rank in list(self._files):
                self._put(rank, _File.end)
            self._is_closed = True

    def _put(self, rank: int, write: Callable[[_File], None]) -> None:
        """Where the disk is full, the file ends: no operation and no program is to end with it."""
        try:
            write(self._files[rank])
        except OSError as error:
            logger.error("the recording of rank %d is cut off: %s", rank, error)
            self._is_closed = True
            file = self._files.pop(rank)
            with contextlib.suppress(OSError):
                file.close()

    def _flush(self) -> None:
        for rank in list(self._files):
            self._put(rank, _File.flush)

    def _take_what_is_done(self) -> None:
        """A GPU's figures follow one another, so that one that is not there keeps those behind it waiting."""
        while self._waiting and self._waiting[0].is_done():
            first = self._waiting.pop(0)
            self._write(first.whole_line(), f"cuda:{first.gpu.index}")

    def _write(self, line: dict[str, Any], device: str) -> None:
        rank, ranks = line.pop("rank"), line.pop("num_ranks")
        if rank not in self._files:
            try:
                self._files[rank] = _File(self.folder, rank)
            except OSError as error:
                logger.error("nothing is recorded of rank %d: %s", rank, error)
                self._is_closed = True
                return
        name, about = line.pop("buffer"), {"rank": rank, "num_ranks": ranks, "device": device}
        self._put(rank, lambda file: file.write({"in_buffer": file.buffer(name, about), **line}))


class _Gpu:
    """The clock of a GPU: events, put onto that of the host by one that both have seen."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._last: Any = None  # the event whose time is known; a difference from a near one is precise
        self._last_ns = 0.0

    def begin(self, stream: int) -> _OnGpu:
        with torch.cuda.device(self.index):
            current = torch.cuda.current_stream()
            on: Any = current
            if current.cuda_stream != stream:
                on = torch.cuda.ExternalStream(stream, device=self.index)  # type: ignore[no-untyped-call]
            is_captured = _is_capturing(on)
            if not is_captured and self._last is None:
                self._last = _timing_event()
                self._last.record(on)
                self._last.synchronize()  # once, that the two clocks are known to one another
                self._last_ns = time.monotonic_ns()
            return _OnGpu(self, on, is_captured)

    def ns_of(self, event: Any) -> float:
        """Of an event that has passed, on the host's clock."""
        self._last_ns += self._last.elapsed_time(event) * 1e6
        self._last = event
        return self._last_ns


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _page_locked(shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, pin_memory=True)


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class _OnGpu:
    """An operation on a GPU: when it began and ended there, and its counts, which come when it is over. The host waits
    for none of it."""

    def __init__(self, gpu: _Gpu, stream: Any, is_captured: bool) -> None:
        self.gpu, self.is_captured = gpu, is_captured
        self._counts: torch.Tensor | None = None  # of page-locked memory, written by the GPU
        self._has_choices = self._has_row_per_choice = False
        self._stream = stream
        self._line: dict[str, Any] = {}
        self._begin: Any = None
        self._end: Any = None
        self._read: Any = None
        if not is_captured:
            self._begin, self._end, self._read = _timing_event(), _timing_event(), _timing_event()
            self._begin.record(stream)

    def end(
        self, line: dict[str, Any], rows: torch.Tensor | None, ids: torch.Tensor | None, has_row_per_choice: bool
    ) -> None:
        """rows: [R], or they are counted of ids [T, K]; neither: no rows travel."""
        self._line, self._has_row_per_choice = line, has_row_per_choice
        if self.is_captured:  # nothing may be added to the graph
            line["is_captured"] = True
            return
        self._end.record(self._stream)
        with torch.cuda.device(self.gpu.index), torch.cuda.stream(self._stream):
            counts, self._has_choices = rows, ids is not None
            if ids is not None:
                counts = torch.ops.nccl_ep.token_layout.default(ids, line["num_ranks"], 1, line["experts"])[0]
            if counts is not None:
                self._counts = _page_locked(counts.shape)
                self._counts.copy_(counts, non_blocking=True)
        self._read.record(self._stream)

    def is_done(self) -> bool:
        return self.is_captured or bool(self._read.query())

    def wait(self) -> None:
        if not self.is_captured:
            self._read.synchronize()

    def whole_line(self) -> dict[str, Any]:
        """Of an operation that is done."""
        line = self._line
        if self.is_captured or "has_failed" in line:
            return line
        line["device_begin_ns"] = round(self.gpu.ns_of(self._begin))
        line["device_us"] = round(self._begin.elapsed_time(self._end) * 1e3, 3)
        if self._counts is None:
            return line
        ranks = line["num_ranks"]
        counts = self._counts.tolist()
        line["rows"], choices = counts[:ranks], counts[ranks:]
        if self._has_row_per_choice:
            local = len(choices) // ranks
            line["rows"] = [sum(choices[r * local : (r + 1) * local]) for r in range(ranks)]
        if self._has_choices and not line["is_home_bound"]:
            line["choices"] = choices
        return line
