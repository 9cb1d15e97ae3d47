"""Serves requests while ranks are killed, and new processes take their places.

python -m examples.moe_lm.elastic --kills 2       2 CPU ranks, or a GPU each

A step in which a rank dies is done again when its place is taken, so the requests of the others get the tokens that
they would have got anyway, which --check 1 shows. Those of the dead rank are lost, and told.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep

from . import ranks, serve
from .arguments import Parser, above_0, whole
from .engine import Engine, fixed_shape_exchange
from .load import Request, make_load
from .ranks import Ranks
from .server import Server

PATIENCE = 100.0  # seconds, of ranks that are there for one another
_LEFT_OUT = {  # what serve.py has and this program has not
    "mode": "fixed", "overlap": ["off"], "rebalance": 0, "copies": 1, "gap": None, "profile": False, "go_on": False,
    "report": None, "log_every": None,
}  # fmt: skip
_context = multiprocessing.get_context("forkserver")


class RankDied(Exception):
    """``rank``: before it agreed to the step."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has died")
        self.rank = rank


class Council:
    """Ranks agree on steps through a store, whose owner tells when one has died.

    ``deaths``: of all ranks so far, which every rank counts alike: a rank that has agreed to a step died after it.
    """

    def __init__(self, store: Any, rank: int, size: int, deaths: int) -> None:
        self.store, self.rank, self.size, self.deaths = store, rank, size, deaths

    def agree(self, step: int, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which flags any rank has set. RankDied if one is gone."""
        keys = [f"step/{self.deaths}/{step}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(flags))
        deadline = time.monotonic() + PATIENCE
        while not self.store.check(keys):
            dead = self.dead()
            if dead is not None and not self.store.check([keys[dead]]):
                raise RankDied(dead)
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {PATIENCE} s for the others to agree to step {step}")
            time.sleep(0.0005)
        every = [json.loads(answer) for answer in self.store.multi_get(keys)]
        if step > 1:  # all have read the step before
            self.store.delete_key(f"step/{self.deaths}/{step - 2}/{self.rank}")
        return tuple(any(column) for column in zip(*every, strict=True))

    def dead(self) -> int | None:
        key = f"death/{self.deaths}"
        return int(self.store.get(key)) if self.store.check([key]) else None


class ElasticServer(Server):
    """A server whose only buffer is elastic: low latency for prefill, too."""

    def __init__(self, world: Ranks, options: argparse.Namespace, store: Any, deaths: int) -> None:
        super().__init__(world, options)
        self.council = Council(store, world.rank, world.size, deaths)
        tokens = max(self.room.prefill_batch * self.room.max_prompt, self.room.slots)
        self.buffer = nccl_ep.Buffer.for_shapes(
            world.experts, max_tokens=tokens, hidden=self.sizes.hidden, topk=self.sizes.topk,
            num_experts=self.sizes.experts, dtype=self.model.dtype, device=world.device, elastic=True, join=deaths > 0,
            timeout=PATIENCE,
        )  # fmt: skip
        prefiller, decoder = (
            fixed_shape_exchange(self.buffer, self.sizes.experts, "ll", count, self.grouped)
            for count in (self.room.prefill_batch * self.room.max_prompt, self.room.slots)
        )
        self.model.use(prefiller)
        self.engine: Engine = Engine(self.model, self.room, prefiller, [decoder], graphs=False)

    def serve_all(self, requests: list[Request], tell: Callable[[Request], None]) -> None:
        """``requests``: this rank's, in the order of their arrival. ``tell`` has each that is done. Collective."""
        store, council = self.council.store, self.council
        self.buffer.set_timeout(self.options.deadline)
        run = _Run(self, requests, float(store.get("start")))
        step = int(store.get(f"joined/{council.deaths}")) if council.deaths else 0
        if council.deaths:  # in the middle of a step, which the others do again
            run.work(*json.loads(store.get(f"plan/{council.deaths}")))
            step += 1
        plan: tuple[bool, ...] | None = None  # of the step that was done, and has not been agreed to
        while True:
            try:
                agreed = council.agree(step, run.wants())
            except RankDied as death:
                self._replace(death.rank, step - 1, plan)
                if plan is not None:
                    run.undo()
                    run.work(*plan)
                continue
            if self.buffer.masked:
                raise RuntimeError(f"ranks {self.buffer.masked} live and were late: give a longer --deadline")
            for request in run.take():
                tell(request)
            plan = agreed
            if not any(plan):
                return
            run.work(*plan)
            step += 1

    def _replace(self, rank: int, step: int, plan: tuple[bool, ...] | None) -> None:
        store, council = self.council.store, self.council
        council.deaths += 1
        store.set(f"plan/{council.deaths}", json.dumps(plan or (False, False, False)))
        store.set(f"joined/{council.deaths}", str(step))
        self.buffer.replace(rank, timeout=PATIENCE)


class _Run:
    """One rank's requests, step by step. A step can be undone until it is taken."""

    def __init__(self, server: ElasticServer, requests: list[Request], start: float) -> None:
        self.server, self.engine, self.room = server, server.engine, server.room
        self.waiting, self.start = requests, start
        self.serving: dict[int, Request] = {}
        self.free = list(range(self.room.slots))
        self.begun: list[int] = []  # slots of the step
        self.first: dict[int, int] = {}  # tokens that prefill has given them
        self.before: Any = None

    def wants(self) -> tuple[bool, ...]:
        """Has this rank a prompt to begin, a request to go on with, one to wait for, behind the step that was done?"""
        left = sum(len(each.tokens) + self._made(slot) < each.length for slot, each in self.serving.items())
        is_here = bool(self.waiting) and self.waiting[0].arrival <= time.monotonic() - self.start
        return is_here and left < self.room.slots, left > 0, bool(self.waiting)

    def _made(self, slot: int) -> int:
        return 0 if self.before is None else 1 + (slot in self.first)

    def work(self, can_begin: bool, is_serving: bool, _: bool) -> None:
        engine = self.engine
        self.before = engine.state()
        if can_begin:
            now = time.monotonic() - self.start
            while self.waiting and self.free and len(self.begun) < self.room.prefill_batch:
                if self.waiting[0].arrival > now:
                    break
                slot = self.free.pop(0)
                self.serving[slot] = self.waiting.pop(0)
                self.begun.append(slot)
            engine.prefill({slot: self.serving[slot].prompt for slot in self.begun})
            tokens = engine.tokens.tolist()
            self.first = {slot: tokens[slot] for slot in self.begun}
        if can_begin or is_serving:
            engine.decode()
        else:
            time.sleep(0.0005)

    def undo(self) -> None:
        """As if the step had not been done."""
        self.engine.restore(self.before)
        for slot in reversed(self.begun):
            self.waiting.insert(0, self.serving.pop(slot))
            self.free.insert(0, slot)
        self.begun, self.first, self.before = [], {}, None

    def take(self) -> list[Request]:
        """The requests that are done with the step."""
        if self.before is None:
            return []
        tokens = self.engine.tokens.tolist()
        for slot, request in self.serving.items():
            new = [self.first[slot]] if slot in self.first else []
            request.tokens += [*new, tokens[slot]][: request.length - len(request.tokens)]
        done = {slot: each for slot, each in self.serving.items() if each.is_done}
        for slot in done:
            del self.serving[slot]
            self.free.append(slot)
        self.engine.release(list(done))
        self.begun, self.first, self.before = [], {}, None
        return list(done.values())


# ---- Processes


def _rank(rank: int, size: int, deaths: int, port: int, numbers: list[int], options: Any, sender: Any) -> None:
    """A rank that serves requests of these ``numbers``. Sends ("ready", None), and ("done", (number, tokens))."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if ranks.device_type(options) == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.TCPStore("localhost", port, is_master=False)
    world = Ranks(rank, size, device, experts=nccl_ep.StoreGroup(store, rank=rank, size=size), replicas=None)
    server = ElasticServer(world, options, store, deaths)
    if rank == 0 and deaths == 0:
        store.set("start", str(time.monotonic()))
    sender.send(("ready", None))
    requests = [each for each in load_of(options, size) if each.number in numbers]
    server.serve_all(requests, lambda request: sender.send(("done", (request.number, request.tokens))))
    server.buffer.destroy()


def load_of(options: argparse.Namespace, size: int) -> list[Request]:
    """In the order of arrival."""
    return make_load(
        options.requests, options.rates[0], size, prompt=options.prompt, output=options.output, seed=options.seed
    )  # fmt: skip


class Supervisor:
    """Starts the ranks, kills some of them, and starts others in their place."""

    def __init__(self, options: argparse.Namespace, size: int) -> None:
        self.options, self.size = options, size
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.load = load_of(options, size)
        self.tokens: dict[int, list[int]] = {}  # of the requests that are done
        self.lost: dict[int, int] = {}  # request to the rank that died with it
        self.deaths = 0
        self.seconds_to_replace: list[float] = []
        homes = [[each.number for each in self.load if each.home == rank] for rank in range(size)]
        self.ranks = [self._start(rank, numbers) for rank, numbers in enumerate(homes)]
        self.ready: set[int] = set()

    def _start(self, rank: int, numbers: list[int]) -> tuple[Any, Any]:
        receiver, sender = _context.Pipe(duplex=False)
        arguments = (rank, self.size, self.deaths, self.store.port, numbers, self.options, sender)
        process = _context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        sender.close()
        return process, receiver

    def run(self, kills: int) -> None:
        """Serves all requests. RuntimeError if a rank ends by itself that was to go on."""
        draw = random.Random(self.options.seed)
        while True:
            self._hear()
            if all(process.exitcode == 0 for process, _ in self.ranks):
                return
            for rank, (process, _) in enumerate(self.ranks):
                if process.exitcode not in (None, 0):
                    raise RuntimeError(f"rank {rank} has ended with {process.exitcode}")
            share = len(self.tokens) / len(self.load)
            if self.deaths < kills and len(self.ready) == self.size and share >= (self.deaths + 1) / (kills + 2):
                self._kill(draw.randrange(self.size))
            time.sleep(0.002)

    def _kill(self, rank: int) -> None:
        process, _ = self.ranks[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        begin = time.monotonic()
        self._hear()
        now = begin - float(self.store.get("start"))
        mine = [each for each in self.load if each.home == rank and each.number not in {*self.tokens, *self.lost}]
        gone = [each.number for each in mine if each.arrival <= now]
        self.lost |= dict.fromkeys(gone, rank)
        print(f"rank {rank} was killed, and requests {gone} are lost with it", flush=True)
        self.store.set(f"death/{self.deaths}", str(rank))
        self.deaths += 1
        self.ready.discard(rank)
        self.ranks[rank] = self._start(rank, [each.number for each in mine if each.arrival > now])
        while rank not in self.ready and all(each.exitcode in (None, 0) for each, _ in self.ranks):
            self._hear()
            time.sleep(0.002)
        self.seconds_to_replace.append(time.monotonic() - begin)
        print(f"rank {rank} has a new process after {self.seconds_to_replace[-1]:.1f} s", flush=True)

    def _hear(self) -> None:
        for rank, (_, receiver) in enumerate(self.ranks):
            try:
                while receiver.poll():
                    kind, said = receiver.recv()
                    if kind == "ready":
                        self.ready.add(rank)
                    else:
                        self.tokens[said[0]] = said[1]
            except (EOFError, ConnectionResetError):
                pass

    def close(self) -> None:
        for process, _ in self.ranks:
            process.kill()
            process.join()


def serve_with(options: argparse.Namespace, kills: int) -> Supervisor:
    supervisor = Supervisor(options, ranks.num_ranks(options))
    try:
        supervisor.run(kills)
    finally:
        supervisor.close()
    return supervisor


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m examples.moe_lm.elastic", description=(__doc__ or " ").splitlines()[0], allow_abbrev=False,
        epilog="Sizes, loads and ranks are those of python -m examples.moe_lm.serve.",
    )  # fmt: skip
    parser.add_argument("--kills", type=whole(0), default=1, help="ranks that are killed, one after the other")
    parser.add_argument("--deadline", type=above_0, default=5.0, help="seconds until a rank is late")
    found, rest = parser.parse_known_args(argv)
    options = serve.parse([*rest, "--no-graphs"])
    options.kills, options.deadline = found.kills, found.deadline
    if "RANK" in os.environ:
        parser.error("RANK is set: this program starts its ranks by itself, without torchrun")
    count = ranks.num_ranks(options)
    if options.kills and count < 2:
        parser.error(f"--kills is {options.kills}, must be 0 for {count} rank: another one must live")
    if options.exchange != ["nccl_ep"]:
        parser.error(f"--exchange is {','.join(options.exchange)}, must be nccl_ep")
    if len(options.rates) > 1:
        parser.error(f"--rates is {','.join(f'{rate:g}' for rate in options.rates)}, must be one")
    for name, left_out in _LEFT_OUT.items():
        if getattr(options, name) != left_out:
            parser.error(f"--{name.replace('_', '-')} is there, but this program has it not: see --help")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # A new rank is there at once. This module itself is __main__, which the server cannot load by its name.
    _context.set_forkserver_preload([Server.__module__])
    what = f"{options.requests} requests on {ranks.num_ranks(options)} ranks"
    print(f"serving {what}, of which {options.kills} are killed ..", flush=True)
    found = serve_with(options, options.kills)
    if options.check:
        print(f"serving {what} again, of which none is killed ..", flush=True)
    expected = serve_with(options, 0).tokens if options.check else found.tokens
    missing = [each.number for each in found.load if each.number not in {*found.tokens, *found.lost}]
    changed = [number for number, tokens in found.tokens.items() if tokens != expected[number]]
    lost = f"{len(found.lost)} were lost with {found.deaths} ranks, {len(missing)} otherwise"
    compared = f"; {len(changed)} have other tokens" if options.check else ""
    print(f"{len(found.tokens)} of {len(found.load)} requests were served, {lost}{compared}")
    return 1 if missing or changed or found.deaths < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
