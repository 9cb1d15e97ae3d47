"""What a program's operations do, written down while it runs: a file a rank, for ``python -m nccl_ep.report``.

All operations of the process are seen, eager or compiled, of either mode, of DeepEP's methods and of backward passes,
because the library itself tells of them (csrc/runtime/observed.h). csrc/runtime/recorder.cc makes the lines of files.
What a CUDA graph replays is not seen, for the host does not call it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import platform
import threading
import time
from collections.abc import Callable
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
_recorder: _Recorder | None = None


def record(path: str | os.PathLike[str]) -> _Recording:
    """Records the operations of this process, in a ``with`` block: docs/report.md.

    ``NCCL_EP_RECORD=path`` in the environment records from the import of nccl_ep to the end of the process. So it does
    in forks of a process that has recorded nothing so far; others are not recorded.

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
    return _Recording(Path(path))


class _Recording(contextlib.ContextDecorator):
    """What ``record`` returns: nothing is recorded before it is entered, and one that never is says so."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_used = folder, False

    def __call__(self, function: Any) -> Any:
        self._is_used = True
        return super().__call__(function)

    def __enter__(self) -> None:
        self._is_used = True
        _start(self._folder)
        atexit.register(_stop)  # where the program ends, and not the block

    def __exit__(self, *_: object) -> None:
        if _recorder is not None:
            atexit.unregister(_stop)
            _stop()

    def __del__(self) -> None:
        if not self._is_used:
            logger.warning(
                "nccl_ep.record(%r) alone records nothing: write 'with' in front; NCCL_EP_RECORD records a process",
                str(self._folder),
            )


def set_up() -> None:
    """Reads ``NCCL_EP_RECORD``. Called when the package is imported."""
    if path := os.environ.get("NCCL_EP_RECORD"):
        try:
            _start_until_the_end(Path(path))
        except OSError as error:
            raise SystemError(f"NCCL_EP_RECORD is {path!r}: {error}") from None
        os.register_at_fork(after_in_child=_go_on_in_fork)


def _start_until_the_end(folder: Path) -> None:
    _start(folder)
    _stop_at_the_end()
    # multiprocessing forgets it when a process that it has made begins to work, and then calls this.
    multiprocessing.util.register_after_fork(_recorder, _stop_at_the_end)


def _stop_at_the_end(_: object = None) -> None:
    """Some processes that multiprocessing has made end without atexit."""
    atexit.register(_stop)
    multiprocessing.util.Finalize(None, _stop, exitpriority=-1)


def _go_on_in_fork() -> None:
    """Ranks may be forks of a process that has imported nccl_ep for them all, and is none itself."""
    global _recorder
    if _recorder is not None and not _recorder.has_begun:
        when_destroyed.remove(_recorder.keep_stats)
        folder, _recorder = _recorder.folder, None
        _start_until_the_end(folder)


def _start(folder: Path) -> None:
    global _recorder
    if _recorder is not None and _recorder.is_of_this_process():
        raise UsageError(f"this process records into {_recorder.folder} already")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, must be a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no file can be written into {folder}")
    _recorder = _Recorder(folder)
    when_destroyed.append(_recorder.keep_stats)
    _C.start_recording(_recorder.write)


def _stop() -> None:
    global _recorder
    recorder = _recorder
    if recorder is None:
        return
    try:
        lost, error = _C.stop_recording()
        if error:  # of a GPU that has failed
            logger.error("%d operations are not recorded: %s", lost, error)
        recorder.close()
    finally:  # not before: another thread's recording would be stopped
        when_destroyed.remove(recorder.keep_stats)
        _recorder = None


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
            number = len(self._buffers)
            self.write({"buffer": number, "name": name, **line})
            self._buffers[name] = number  # the handler of a signal may raise before: to say it twice does no harm
        return self._buffers[name]

    def operation(self, name: str, about: dict[str, Any], text: str) -> None:
        self._stream.write(f'{{"in_buffer": {self.buffer(name, about)}, {text}}}\n')

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
        self._stats: dict[tuple[int, str], dict[str, Any]] = {}  # by rank and buffer, for the end of the files
        self._process = os.getpid()  # a fork's operations are not recorded
        self._is_closed = False

    @property
    def has_begun(self) -> bool:
        """A file."""
        return bool(self._files)

    def is_of_this_process(self) -> bool:
        return os.getpid() == self._process

    def write(self, operations: list[tuple[int, int, str, str, str]]) -> None:
        """Of csrc/torch/observer.cc, in order: rank, ranks, buffer, device, and what is in the line of the file."""
        with self._lock:
            for operation in operations:
                if self._is_closed or not self.is_of_this_process():
                    return
                self._write(*operation)
            self._flush()

    def keep_stats(self, buffer: Buffer) -> None:
        """Of a buffer that is about to go, or at the end."""
        with contextlib.suppress(RuntimeError):  # a destroyed buffer, a GPU that has failed
            self._stats[buffer.rank, buffer.name] = buffer.stats()

    def close(self) -> None:
        if not self.is_of_this_process():
            return
        for buffer in living():
            self.keep_stats(buffer)
        with self._lock:
            for (rank, name), stats in list(self._stats.items()):
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

    def _write(self, rank: int, ranks: int, name: str, device: str, text: str) -> None:
        if rank not in self._files:
            try:
                self._files[rank] = _File(self.folder, rank)
            except OSError as error:
                logger.error("nothing is recorded of rank %d: %s", rank, error)
                self._is_closed = True
                return
        about = {"rank": rank, "num_ranks": ranks, "device": device}
        self._put(rank, lambda file: file.operation(name, about, text))
