"""Builds the plugin, and calls it from Python as NCCL would, with host memory."""

from __future__ import annotations

import ctypes as c
import functools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_P, _I, _U64 = c.c_void_p, c.c_int, c.c_uint64
_REFERENCE = c.POINTER(_P)
HOST_MEMORY, NEVER_RESET, INCREMENT, ADD = 1, 2, 1, 2


@functools.cache
def build() -> Path | str:
    """The plugin's file, compiled once for this process, or why there is none."""
    out = Path(tempfile.mkdtemp(prefix="gin_loopback_")) / "libgin_loopback.so"
    done = subprocess.run([FOLDER / "build.sh", out], capture_output=True, text=True)
    if done.returncode == 2 and "no cuda.h" in done.stderr:
        return done.stderr.strip()
    assert done.returncode == 0, done.stderr
    return out


class Config(c.Structure):
    _fields_ = [("num_contexts", _I), ("traffic_class", _I), ("rank_stride", _I)]


def _function(*args: Any) -> Any:
    return c.CFUNCTYPE(_I, *args)


_PUT = (_P, _I, _U64, _P, c.c_size_t, _U64, _P, c.c_uint32)


class Table(c.Structure):
    """RmaPlugin of rma_abi.h."""

    _fields_ = [
        ("name", c.c_char_p),
        ("init", _function(_REFERENCE, _U64, _P)),
        ("devices", _function(c.POINTER(_I))),
        ("get_properties", _P),
        ("listen", _function(_P, _I, _P, _REFERENCE)),
        ("connect", _function(_P, c.POINTER(_P), _I, _I, _P, _REFERENCE)),
        ("create_context", _function(_P, c.POINTER(Config), _REFERENCE)),
        ("register_memory", _function(_P, _P, c.c_size_t, _I, _U64, _REFERENCE)),
        ("register_dma_buf", _P),
        ("deregister_memory", _function(_P, _P)),
        ("destroy_context", _function(_P)),
        ("close_coll", _function(_P)),
        ("close_listen", _function(_P)),
        ("put", _function(*_PUT, _REFERENCE)),
        ("put_signal", _function(*_PUT, _U64, _P, _U64, c.c_uint32, c.c_bool, _REFERENCE)),
        ("get", _P),
        ("flush", _P),
        ("test", _function(_P, _P, c.POINTER(_I))),
        ("progress", _P),
        ("query_last_error", _function(_P, c.POINTER(c.c_bool))),
        ("finalize", _function(_P)),
    ]


class Failed(Exception):
    """A call that did not return ncclSuccess."""


def _check(result: int, call: str) -> None:
    if result != 0:
        raise Failed(f"{call}: {result}")


class Rank:
    """One rank of a world of the plugin, with a window and signals in host memory."""

    def __init__(self, table: Table, rank: int, num_ranks: int, window_bytes: int, contexts: int) -> None:
        self.table, self.rank, self.num_ranks, self.contexts = table, rank, num_ranks, contexts
        self.window = (c.c_char * window_bytes)()
        self.signals = (_U64 * 64)()

    def meet(self, handles: list[bytes], barrier: threading.Barrier) -> None:
        listener, handle = _P(), c.create_string_buffer(128)
        _check(self.table.listen(None, 0, handle, listener), "listen")
        handles[self.rank] = handle.raw
        barrier.wait(60)
        buffers = [c.create_string_buffer(each, 128) for each in handles]
        pointers = (_P * self.num_ranks)(*(c.cast(each, _P) for each in buffers))
        self.coll = _P()
        _check(self.table.connect(None, pointers, self.num_ranks, self.rank, listener, self.coll), "connect")
        _check(self.table.close_listen(listener), "closeListen")
        self.context = _P()
        config = Config(self.contexts, 0, 1)
        _check(self.table.create_context(self.coll, config, self.context), "createContext")
        self.window_region, self.signals_region = (
            self.register(self.window, 0),
            self.register(self.signals, NEVER_RESET),
        )

    def register(self, memory: Any, flags: int) -> c.c_void_p:
        region = _P()
        _check(
            self.table.register_memory(self.coll, c.addressof(memory), c.sizeof(memory), HOST_MEMORY, flags, region),
            "regMrSym",
        )
        return region

    def put(self, target: int, source: int, size: int, destination: int, context: int = 0) -> c.c_void_p:
        request = _P()
        _check(
            self.table.put(
                self.context,
                context,
                source,
                self.window_region,
                size,
                destination,
                self.window_region,
                target,
                request,
            ),
            "iput",
        )
        return request

    def put_signal(
        self, target: int, source: int, size: int, destination: int, signal: int, add: int = 1, *, strong: bool = False,
        context: int = 0,
    ) -> c.c_void_p:  # fmt: skip
        request = _P()
        _check(
            self.table.put_signal(
                self.context, context, source, self.window_region, size, destination, self.window_region, target,
                8 * signal, self.signals_region, add, ADD, strong, request,
            ),
            "iputSignal",
        )  # fmt: skip
        return request

    def is_done(self, request: c.c_void_p) -> bool:
        done = _I()
        _check(self.table.test(self.coll, request, done), "test")
        return bool(done.value)

    def wait(self, *requests: c.c_void_p, seconds: float = 30.0) -> None:
        wait_until(lambda: all(self.is_done(each) for each in requests), seconds)

    def has_error(self) -> bool:
        error = c.c_bool()
        _check(self.table.query_last_error(self.context, error), "queryLastError")
        return error.value

    def close(self) -> None:
        for region in (self.window_region, self.signals_region):
            _check(self.table.deregister_memory(self.coll, region), "deregMrSym")
        _check(self.table.destroy_context(self.context), "destroyContext")
        _check(self.table.close_coll(self.coll), "closeColl")


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.0002)


def on_all(ranks: list[Rank], body: Callable[[Rank], None]) -> None:
    """Runs the body of each rank in a thread of its own; raises the first error."""
    errors: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def environment(**options: Any) -> Iterator[None]:
    """GIN_LOOPBACK_ variables, which an endpoint reads when it connects."""
    named = {f"GIN_LOOPBACK_{name.upper()}": str(value) for name, value in options.items()}
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def table_of(file: Path) -> Table:
    return Table.in_dll(c.CDLL(str(file)), "ncclRmaPlugin_v14")


@contextmanager
def world(
    table: Table, num_ranks: int, *, window_bytes: int = 1 << 20, contexts: int = 4, **options: Any
) -> Iterator[list[Rank]]:
    """Ranks as threads of this process."""
    ranks = [Rank(table, rank, num_ranks, window_bytes, contexts) for rank in range(num_ranks)]
    handles, barrier = [b""] * num_ranks, threading.Barrier(num_ranks)
    with environment(**options):
        on_all(ranks, lambda rank: rank.meet(handles, barrier))
    try:
        yield ranks
    finally:
        on_all(ranks, Rank.close)
