"""Ranks as processes of their own, which meet over gloo through a file."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nccl_ep.doctor import ranks as launching


class _Fork(multiprocessing.context.ForkServerProcess):
    """Of a server that has loaded what most need. As if spawned, it has streams, environment and folder of its starter.

    What it starts by multiprocessing or a Launcher is such a fork, too, of the same server: Python would start another.
    """

    streams: ClassVar = ("", "")  # files of this process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inherits = (self.streams, dict(os.environ), os.getcwd())

    def run(self) -> None:
        _Fork.streams, environment, cwd = self.inherits
        for number, path in enumerate(filter(None, _Fork.streams), 1):
            with open(path, "a") as file:
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None
        for method in ("forkserver", "spawn"):
            multiprocessing.context._concrete_contexts[method] = _context  # type: ignore[attr-defined]
        launching.subprocess = types.SimpleNamespace(Popen=_Python)  # type: ignore[assignment]
        super().run()


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Fork


_context = _Context()
# torch._dynamo, which the first fake tensor brings, has FSDP and more of torch with it.
_context.set_forkserver_preload(["torch._dynamo", "nccl_ep.reference", "pytest", "tests.support.harness"])


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
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not errors, "\n".join(errors)  # of all: one rank's error is often only that another had one
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


# ---- Programs


def run_python(
    *arguments: str, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` (-c, -m, or a file), and what it printed, in a process that has torch and nccl_ep already.

    So have the ranks that a Launcher starts there. It suits whatever does not ask how these two are imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = (f"{folder}/stdout", f"{folder}/stderr")
        program = _Python([sys.executable, *arguments], dict(environment), streams, cwd)
        code = program.wait(timeout)
        out, err = (Path(each).read_text() if os.path.exists(each) else "" for each in streams)
    assert code is not None, f"the program still runs after {timeout} s:\n{out}{err}"
    return subprocess.CompletedProcess(arguments, code, out, err)


class _Python:
    """As a subprocess.Popen of this Python."""

    def __init__(
        self, command: list[str], env: dict[str, str], streams: tuple[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        assert command[0] == sys.executable, command
        self._process = _Fork(target=_as_python, args=command[1:])
        self._process.inherits = (streams or _Fork.streams, env, str(cwd or os.getcwd()))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            return None
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _as_python(*arguments: str) -> None:
    how, *rest = arguments
    first = os.path.dirname(os.path.abspath(how))
    if how in ("-c", "-m"):
        how, first = arguments[1], "" if how == "-c" else os.getcwd()
        rest = arguments[2:]
    folders = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:0] = [first, *folders]
    for start in filter(os.path.exists, (f"{folder}/sitecustomize.py" for folder in folders)):
        runpy.run_path(start)
    sys.argv = ["-c" if arguments[0] == "-c" else how, *rest]
    try:
        if arguments[0] == "-m":
            runpy.run_module(how, run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            exec(compile(how, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(how, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _run(rank: int, num_ranks: int, store: str, sender: Connection, body: Callable[..., Any], args: Any) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can put GPUs that others share out of service
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
