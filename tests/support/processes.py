"""Ranks as processes of their own, which meet over gloo through a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Children of a server that has torch loaded start at once, and like spawned ones inherit nothing of this process.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "nccl_ep"])


@dataclass
class Outcome:
    """How a rank ended: its exit code (negative: the signal), and what its body returned, or the text of its error."""

    exitcode: int | None
    value: Any = None
    error: str = ""


class Processes:
    """A world of processes that run ``body(rank, *args)``, a function of a module, in the default group of torch."""

    def __init__(self, num_ranks: int, body: Callable[..., Any], directory: Path, *args: Any) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        self._outcomes: dict[int, Outcome] = {}
        for rank in range(num_ranks):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run, args=(rank, num_ranks, str(directory / "store"), sender, body, args), daemon=True
            )
            process.start()
            sender.close()
            self._pipes.append(receiver)
            self._processes.append(process)

    def send_signal(self, rank: int, number: int) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, rank: int, timeout: float = 240.0) -> Outcome:
        """The outcome of a rank. One that hangs fails the test."""
        if rank in self._outcomes:
            return self._outcomes[rank]
        deadline = time.monotonic() + timeout
        said = None
        with contextlib.suppress(EOFError, ConnectionResetError):  # killed before it could say anything
            if not self._pipes[rank].poll(timeout):
                raise AssertionError(f"rank {rank} still runs after {timeout} s")
            said = pickle.loads(self._pipes[rank].recv_bytes())
        self._processes[rank].join(max(deadline - time.monotonic(), 60.0))
        if self._processes[rank].is_alive():
            raise AssertionError(f"rank {rank} is done but does not exit: {said}")
        value, error = said or (None, "")
        self._outcomes[rank] = Outcome(self._processes[rank].exitcode, value, error)
        return self._outcomes[rank]

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()  # ends a stopped process, too
            process.join()


@contextlib.contextmanager
def processes(num_ranks: int, body: Callable[..., Any], directory: Path, *args: Any) -> Iterator[Processes]:
    """Starts a world, and leaves nothing of it running."""
    world = Processes(num_ranks, body, directory, *args)
    try:
        yield world
    finally:
        world.close()


def run_processes(
    num_ranks: int, body: Callable[..., Any], directory: Path, *args: Any, timeout: float = 240.0
) -> list[Any]:
    """What ``body`` returned on every rank. Fails if one failed or did not exit with 0."""
    with processes(num_ranks, body, directory, *args) as world:
        outcomes = [world.wait(rank, timeout) for rank in range(num_ranks)]
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def run_program(code: str, directory: Path, cwd: Path, timeout: float) -> str:
    """What a program printed, which runs in a process of its own, in `cwd`. Fails if that did not exit with 0."""
    path = directory / "printed"
    process = _context.Process(target=_run_program, args=(code, path, cwd))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the program still runs after {timeout} s:\n{path.read_text()}")
    assert process.exitcode == 0, path.read_text()
    return path.read_text()


def _run_program(code: str, printed: Path, cwd: Path) -> None:
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.chdir(cwd)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def _run(rank: int, num_ranks: int, store: str, sender: Connection, body: Callable[..., Any], args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it, and so would its children
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can put GPUs that others share out of service
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, timeout=timedelta(seconds=240)
    )
    dist.barrier()  # a rank whose body returns at once would close connections that others are still making
    try:
        said = (body(rank, *args), "")
    except BaseException:
        said = (None, traceback.format_exc())
        raise
    finally:
        # Bytes of plain pickle: tensors that travel as descriptors are lost when their process exits.
        with contextlib.suppress(NameError):
            sender.send_bytes(pickle.dumps(said))
