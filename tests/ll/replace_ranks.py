"""A world that loses one rank after another by SIGKILL, in the middle of its operations, and gets a new process for
each: CPU ranks, or GPUs that replay graphs. Run as a program, on GPUs:

python -m tests.ll.replace_ranks [ranks] [seconds] [cuda or cpu]    prints JSON: how often, how fast, what was left
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from bench.records import revision, today
from nccl_ep import reference
from tests.ll.mask_ranks import CaseOf
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.harness import check_dispatch
from tests.support.patience import PATIENCE, Late

_ROUNDS = 7  # of a phase: the rank dies in one of the first of them, and the last two are checked
_LATEST = 3
_MOST_SECONDS = 0.02  # from the beginning of a round to the death in it
_REPLAYS = 20  # of a round on a GPU

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "nccl_ep", "nccl_ep.reference"])


@dataclass(frozen=True)
class Lives:
    """A world in which the ranks of ``victims`` die, one in each phase, for so many ``seconds`` of rank 0 at most."""

    num_ranks: int
    victims: Sequence[int]
    deadline: float
    port: int
    device: str = "cpu"
    seconds: float = float("inf")

    def case(self) -> Case:
        sizes = {} if self.device == "cpu" else {"hidden": 1024, "max_tokens": 32, "tokens": (32,) * self.num_ranks}
        return plain_case(self.num_ranks, **sizes)


# ---- A rank


class _Oracle:
    """What a group of ranks gets: rows, and these rows combined as they are."""

    def __init__(self, case: Case) -> None:
        inputs = case.inputs()
        self.where = case.describe()
        self.results = reference.dispatch(inputs, **case.dispatch_kwargs())
        rows = [result.x for result in self.results]
        self.combined = reference.combine(rows, self.results, inputs, **case.combine_kwargs())

    def check(self, out: nccl_ep.DispatchOutput, y: torch.Tensor, rank: int) -> None:
        check_dispatch(out, self.results[rank], f"{self.where} rank {rank}")
        difference = reference.first_difference(y.cpu(), self.combined[rank])
        assert not difference, f"{self.where} rank {rank}: combined: {difference}"


class _Work:
    """A dispatch and a combine; on a GPU a graph of them, captured once."""

    def __init__(self, case: Case, buffer: nccl_ep.Buffer) -> None:
        given = case.rank_input(buffer.rank)
        x, ids, weights = (each.to(buffer.device) for each in (given.x, given.topk_idx, given.topk_weights))

        def both() -> None:
            self.out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.dispatch_kwargs())
            self.y = nccl_ep.combine(self.out.x, self.out.handle)

        self.buffer, self.go, self.graph = buffer, both, None
        if buffer.device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                both()
            self.go = self.graph.replay

    def load(self) -> None:
        for _ in range(1 if self.graph is None else _REPLAYS):
            self.go()

    def check(self, oracle: _Oracle) -> None:
        self.go()
        oracle.check(self.out, self.y, self.buffer.rank)


def things_of_this_process(device: torch.device) -> dict[str, Any]:
    """What a replaced rank may leave behind."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "windows": sum("nccl_ep_window" in line for line in maps),
        "free_bytes": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0,
    }


def live(rank: int, born: int, lives: Lives, sender: Any) -> None:
    """From phase ``born`` on; 0: from the beginning. Sends pairs: ("late", text), and ("phase", what it was like)."""
    try:
        _live(rank, born, lives, lambda phase: sender.send(("phase", phase)))
    except Late as late:
        sender.send(("late", str(late)))
        raise


def _live(rank: int, born: int, lives: Lives, tell: Callable[[dict[str, Any]], None]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if lives.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    case = lives.case()
    everyone = set(range(lives.num_ranks))
    whole = _Oracle(case)
    parts = {victim: _Oracle(CaseOf.make(case, frozenset(everyone - {victim}))) for victim in set(lives.victims)}
    store = dist.TCPStore("localhost", lives.port, is_master=False)
    group = nccl_ep.StoreGroup(store, rank=rank, size=lives.num_ranks)
    options = {"elastic": True, "join": born > 0, "timeout": PATIENCE, "device": device}
    with shared_buffer(group, [Expected(case)], **options) as buffer:
        work = _Work(case, buffer)
        end = time.monotonic() + lives.seconds
        for phase in range(born, len(lives.victims) + 1):
            told: dict[str, Any] = {"phase": phase}
            if phase > born:
                told["lost_at"] = time.monotonic()
                buffer.replace(lives.victims[phase - 1], timeout=PATIENCE)
            assert buffer.masked == []
            for _ in range(2):
                work.check(whole)
            tell(told | {"good_at": time.monotonic(), **things_of_this_process(device)})
            if phase == len(lives.victims) or _is_over(store, rank, phase, end):
                break
            _lose(lives, phase, parts[lives.victims[phase]], work)


def _is_over(store: Any, rank: int, phase: int, end: float) -> bool:
    """The same for all ranks."""
    if end == float("inf"):
        return False
    if rank == 0:
        store.set(f"is_over/{phase}", str(time.monotonic() > end))
    return bool(store.get(f"is_over/{phase}") == b"True")


def _lose(lives: Lives, phase: int, part: _Oracle, work: _Work) -> None:
    victim, drawn, buffer = lives.victims[phase], random.Random(phase), work.buffer
    turn_of_death, seconds = drawn.randint(1, _LATEST), drawn.uniform(0, _MOST_SECONDS)
    buffer.set_timeout(lives.deadline)
    for turn in range(_ROUNDS):
        if buffer.rank == victim and turn == turn_of_death:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if buffer.rank == victim and turn > _LATEST:
            os.kill(os.getpid(), signal.SIGKILL)
        if turn < _ROUNDS - 2:
            work.load()
            continue
        if work.graph is not None:
            torch.cuda.synchronize()
        if buffer.masked != [victim]:
            raise Late(f"rank {buffer.rank} has masked {buffer.masked}, rank {victim} has gone")
        buffer.set_timeout(PATIENCE)
        work.check(part)


# ---- All ranks


class World:
    """Processes of a world whose ranks die and are started again."""

    def __init__(self, num_ranks: int, victims: Sequence[int], deadline: float, **options: Any) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.lives = Lives(num_ranks, victims, deadline, self.store.port, **options)
        self.started: list[tuple[Any, Any]] = []  # process, pipe
        self.ranks = [self._start(rank, 0) for rank in range(num_ranks)]
        self.told: list[list[dict[str, Any]]] = [[] for _ in range(num_ranks)]  # by rank, of all its processes
        self.died_at: list[float] = []

    def _start(self, rank: int, born: int) -> tuple[Any, Any]:
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=live, args=(rank, born, self.lives, sender), daemon=True)
        process.start()
        sender.close()
        self.started.append((process, receiver))
        return self.started[-1]

    def run(self) -> None:
        """To the end of all phases. Raises Late where a living rank was taken for a dead one."""
        for phase, victim in enumerate(self.lives.victims):
            if self._await(victim) == 0:
                break
            self.died_at.append(time.monotonic())
            self.ranks[victim] = self._start(victim, phase + 1)
        for rank in range(self.lives.num_ranks):
            assert self._await(rank) == 0, f"rank {rank} ended with {self.ranks[rank][0].exitcode}"

    def _await(self, rank: int) -> int:
        """0, or that the rank was killed."""
        process, limit = self.ranks[rank][0], time.monotonic() + 3 * PATIENCE
        while process.exitcode is None:
            assert time.monotonic() < limit, f"rank {rank} hangs"
            process.join(0.01)
            self._hear()
        self._hear()
        assert process.exitcode in (0, -signal.SIGKILL), f"rank {rank} ended with {process.exitcode}"
        return int(process.exitcode)

    def _hear(self) -> None:
        for rank, (_, receiver) in enumerate(self.ranks):
            with contextlib.suppress(EOFError, ConnectionResetError):
                while receiver.poll():
                    kind, said = receiver.recv()
                    if kind == "late":
                        raise Late(said)
                    self.told[rank].append(said)

    def close(self) -> None:
        for process, _ in self.started:
            process.kill()
            process.join()


def lose(num_ranks: int, victims: Sequence[int], deadline: float, **options: Any) -> World:
    world = World(num_ranks, victims, deadline, **options)
    try:
        world.run()
    finally:
        world.close()
    return world


def main(num_ranks: int, seconds: float, device: str) -> None:
    victims = [1 + number % (num_ranks - 1) for number in range(50)]
    world = lose(num_ranks, victims, 0.5, device=device, seconds=seconds)
    survivor = world.told[0]
    joined = []
    for number, died_at in enumerate(world.died_at):
        new = next(each for each in world.told[victims[number]] if each["phase"] == number + 1)
        joined.append(new["good_at"] - died_at)
    kinds = ("descriptors", "threads", "free_bytes")
    report = {
        "what": "ranks that are killed while graphs replay, and replaced", "ranks": num_ranks,
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu", "revision": revision(), "date": today(),
        "replaced": len(joined), "seconds_to_join": joined,
        "most_seconds_to_join": max(joined, default=None),
        "rank_0": [{kind: each[kind] for kind in kinds} for each in survivor],
        "free_bytes_of_new_ranks": [
            next(each for each in world.told[victims[n]] if each["phase"] == n + 1)["free_bytes"]
            for n in range(len(joined))
        ],
        "grew": {kind: survivor[-1][kind] - survivor[min(2, len(survivor) - 1)][kind] for kind in kinds},
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    ranks, time_for_it, kind, *_ = [*sys.argv[1:], *("2", "45", "cuda")[len(sys.argv) - 1 :]]
    main(int(ranks), float(time_for_it), kind)
