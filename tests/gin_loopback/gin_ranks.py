"""A rank of tests/gin_loopback/worlds.py: a program that runs one of the bodies below and writes what it returned."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import _C
from nccl_ep.bootstrap import Rendezvous, rendezvous_of
from tests.gpu.chains import CHAINS, HOWS, Chain, How, chain_buffer
from tests.gpu.ht_chains import HT_CHAINS, HtChain, ht_chain_buffer
from tests.gpu.ht_ranks import ExpectedHt, shared_ht_buffer, wide_cases
from tests.gpu.ranks import wide_case
from tests.ht.harness import ht_step
from tests.ll.late_send import late_send
from tests.ll.mask_ranks import LateRank
from tests.support.cases import Case, cases_of
from tests.support.expected import Expected, plain_case, run_case, shared_buffer
from tests.support.gpus import captured
from tests.support.patience import of_living_ranks

SECONDS = 60.0  # of a meeting
# Of a buffer: far below a test's limit, so that a wait that never ends is told by its own error.
DEADLINE = 20.0
# Of torch, in each rank. By default it takes as many as the host has cores: with those the oracle of four ranks took
# 50 s to get ready.
THREADS = 4
NUM_SMS = (0, 8, 24)  # of operations, in turn
WINDOW = 64 << 20
HALF = WINDOW // 2  # sources below, targets above
GRAPH_CALLS = 10  # calls of a graph that is timed, and its replays
MESSAGES = ((1, 16), (1, 48), (3, 1008), (8, 14464), (64, 14464), (5, 1 << 18), (2, 1 << 20))


@dataclass
class World:
    rank: int
    num_ranks: int
    domain_size: int
    device: torch.device
    given: Rendezvous | None = None  # in place of torch's group
    start: float = field(default_factory=time.monotonic)
    rendezvous: Rendezvous = field(init=False)

    def __post_init__(self) -> None:
        self.rendezvous = self.given or rendezvous_of(dist.group.WORLD)

    def say(self, *what: object) -> None:
        """A line of the log that a test shows when its time is up: how far this rank has come."""
        print(f"[{time.monotonic() - self.start:7.2f} s] rank {self.rank}:", *what, flush=True)

    @contextlib.contextmanager
    def tells(self, run: int) -> Iterator[None]:
        """An error of this run is a line of the log, too."""
        try:
            yield
        except Exception as error:
            self.say(f"{type(error).__name__} in run {run}: {error}")
            raise

    def largest(self, value: float) -> float:
        """Of all ranks."""
        return max(float(each) for each in self.rendezvous.allgather(repr(value).encode(), SECONDS))

    def barrier(self) -> None:
        self.rendezvous.allgather(b"", SECONDS)

    def topology(self) -> tuple[int, int]:
        """Domains, ranks of each."""
        return self.num_ranks // self.domain_size, self.domain_size

    def domain(self, rank: int) -> int:
        return rank // self.domain_size

    def rail(self) -> list[int]:
        """Ranks of the same place in the other domains."""
        others = range(self.rank % self.domain_size, self.num_ranks, self.domain_size)
        return [rank for rank in others if rank != self.rank]

    def mesh(self) -> list[int]:
        """All ranks of the other domains."""
        return [rank for rank in range(self.num_ranks) if self.domain(rank) != self.domain(self.rank)]

    def probe(self, contexts: int = 4, seconds: float = SECONDS) -> Any:
        return _C.NetworkProbe(
            rank=self.rank, num_ranks=self.num_ranks, allgather=lambda mine: self.rendezvous.allgather(mine, seconds),
            device=self.device.index, domain_size=self.domain_size, window_bytes=WINDOW, num_contexts=contexts,
            seconds=seconds,
        )  # fmt: skip


def content(sender: int, receiver: int, trial: int, size: int) -> bytes:
    return random.Random(f"{sender} {receiver} {trial}").randbytes(size)


def exchange_all(world: World, probe: Any, peers: list[int], trials: int) -> int:
    """Random bytes to the peers, in all sizes, and a look at what came. Returns the messages that came right."""
    right = 0
    for trial in range(trials):
        for count, size in MESSAGES:
            block, key = count * size, trial * 100 + count
            if block * world.num_ranks > HALF:
                continue
            for peer in peers:
                probe.write(peer * block, content(world.rank, peer, key, block))
                probe.write(HALF + peer * block, bytes(block))
            world.barrier()  # nobody sends before all targets are zeros
            probe.exchange(peers=peers, messages=count, bytes=size, source=0, target=HALF, seconds=20.0)
            for peer in peers:
                came, want = probe.read(HALF + peer * block, block), content(peer, world.rank, key, block)
                if came != want:
                    wrong = [
                        m for m in range(count) if came[m * size : (m + 1) * size] != want[m * size : (m + 1) * size]
                    ]
                    raise AssertionError(f"{count} x {size} bytes from rank {peer}: messages {wrong[:8]} are wrong")
                right += count
            world.barrier()
    return right


def probe_bytes(world: World, paths: list[str], trials: int) -> dict[str, Any]:
    """Puts and signals between all ranks of the paths ("rail", "mesh")."""
    begin = time.monotonic()
    right, found = 0, {}
    for path in paths:
        probe = world.probe()
        found = {"backend": probe.backend(), "versions": probe.versions()}
        right += exchange_all(world, probe, getattr(world, path)(), trials)
        del probe  # collective: all ranks let go of it here
        world.barrier()
    return found | {"right": right, "seconds": time.monotonic() - begin}


def probe_times(world: World, rounds: int) -> dict[str, float]:
    """Microseconds of a round in which every rank sends its rail peer so many messages, and waits for as many."""
    probe, peers = world.probe(), world.rail()[:1]
    times = {}
    for count, size in ((1, 16), (1, 14464), (1, 1 << 20), (128, 14464), (8, 16 * 14464), (1, 128 * 14464)):
        world.barrier()
        ns = probe.exchange(
            peers=peers, messages=count, bytes=size, source=0, target=HALF, rounds=rounds, warm_up=rounds // 4,
            seconds=20.0,
        )  # fmt: skip
        times[f"{count} x {size}"] = ns / 1e3
    return times


def probe_late(world: World, seconds: float) -> dict[str, Any]:
    """A network that loses messages: the wait ends, and says for whom it was."""
    probe = world.probe(contexts=2)
    begin, text = time.monotonic(), ""
    try:
        probe.exchange(peers=world.rail(), messages=8, bytes=4096, source=0, target=HALF, rounds=50, seconds=seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begin
    world.barrier()
    again = ""
    try:
        probe.exchange(peers=world.rail(), messages=8, bytes=4096, source=0, target=HALF)
    except Exception as error:
        again = f"{type(error).__name__}: {error}"
    return {"text": text, "seconds": took, "again": again}


def probe_dead(world: World, seconds: float) -> dict[str, Any]:
    """The last rank dies; those that wait for it hear of it."""
    probe = world.probe(contexts=2)
    probe.exchange(peers=world.mesh(), messages=2, bytes=4096, source=0, target=HALF, rounds=3)
    world.barrier()
    if world.rank == world.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin, text = time.monotonic(), ""
    try:
        probe.exchange(peers=world.mesh(), messages=2, bytes=4096, source=0, target=HALF, rounds=3, seconds=seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "seconds": time.monotonic() - begin}


def make_probe(world: World, seconds: float) -> dict[str, Any]:
    """What making one says, and how long that takes."""
    begin, text = time.monotonic(), ""
    try:
        world.probe(seconds=seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "seconds": time.monotonic() - begin}


# ---- Low latency


def _cases(world: World, count: int, first: int) -> list[Case]:
    """Generated cases, and some with more tokens than the rail has channels."""
    cases = cases_of(world.topology(), count, first)
    tokens = (96, 41, 0, 9)[: world.num_ranks]
    for layout, quant in (("expert_major", None), ("packed", "fp8"), ("rank_major", "fp8_ue8m0"), ("flat", None)):
        how = {"layout": layout, "quant": quant, "domain_size": world.domain_size, "tokens": tokens}
        cases.append(wide_case(world.num_ranks, **how))
    return cases


def _run_cases(world: World, cases: list[Expected], runs: int) -> dict[str, Any]:
    """So many runs of cases, forth and back, in one buffer; says which one it is at. What fails names its wait."""
    begin, slowest = time.monotonic(), 0.0
    options = {"device": world.device, "domain_size": world.domain_size, "timeout": of_living_ranks(DEADLINE)}
    with shared_buffer(world.rendezvous, cases, **options) as buffer:
        world.say("has made the buffer")
        for number, case in enumerate(itertools.islice(itertools.cycle([*cases, *reversed(cases)]), runs)):
            how: dict[str, Any] = {"staged": number % 3 == 1, "num_sms": NUM_SMS[number % 3]}
            world.say(f"run {number + 1} of {runs}, {how}: case {case.case.seed}, {case.case.layout}")
            start = time.monotonic()
            with world.tells(number + 1):
                run_case(case, buffer, **how)
            slowest = max(slowest, time.monotonic() - start)
        dispatches = int(buffer.stats()["dispatches"])
    world.say("has let go of the buffer")
    return {"dispatches": dispatches, "seconds": time.monotonic() - begin, "slowest": slowest}


def ll_cases(world: World, count: int, first: int) -> dict[str, Any]:
    """Every result to the bit, in one buffer; ranks may be a call ahead of others."""
    cases = [Expected(case) for case in _cases(world, count, first)]
    return {"cases": len(cases), **_run_cases(world, cases, 2 * len(cases))}


AHEAD = 16  # replays that are enqueued at most: a launch that waits for room holds up the network's copies, too


def _replay(chain: Chain, graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of all."""
    return sum(chain.replay(graph, min(AHEAD, count - done)) for done in range(0, count, AHEAD))


def ll_chains(world: World, replays: int) -> dict[str, Any]:
    """Graphs with live routing: the elements that are wrong, of all replays."""
    begin, wrong = time.monotonic(), 0
    with chain_buffer(world.rendezvous, world.device, domain_size=world.domain_size) as buffer:
        chains = [(letters, How()) for letters in CHAINS] + [(CHAINS[0], how) for how in HOWS if not how.is_deepep]
        world.say("has made the buffer")
        for letters, how in chains:
            chain = Chain(letters, buffer, how=how)
            world.say(f"captures {letters}, {how}")
            graph = chain.capture()
            world.say(f"{replays} replays")
            _replay(chain, graph, replays)
            wrong += chain.finish()
    return {"chains": len(chains), "wrong": wrong, "seconds": time.monotonic() - begin}


def ll_late_send(world: World, network: str) -> float:
    """Milliseconds of this rank's send; the last rank's comes late."""
    options: dict[str, Any] = {"domain_size": world.domain_size, "ll_network": network.split(",")[0]}
    options["enable_shrink"] = "masks" in network
    return late_send(world.rendezvous, world.device, None, **options)


def ll_times(world: World, turns: int) -> dict[str, float]:
    """Microseconds of a dispatch, and of one with its combine, of 128 tokens, and of bare puts of their messages. Each
    is a kernel of a graph, and the graphs take turns: medians. "in one kernel": puts without the kernels' begin."""
    tokens, hidden, topk, experts = 128, 7168, 8, 256
    torch.manual_seed(world.rank)
    x = torch.randn(tokens, hidden, device=world.device).bfloat16()
    # All tokens have experts on both ranks, so that all messages of rows have one size.
    halves = [torch.rand(tokens, experts // 2, device=world.device).topk(topk // 2)[1] for _ in range(2)]
    ids = torch.cat([halves[0], halves[1] + experts // 2], 1)
    weights = torch.rand(tokens, topk, device=world.device)
    channels, header = 8, 32  # docs/network_protocol.md
    messages = {"peers": world.rail()[:1], "messages": 1 + channels, "bytes": tokens // channels * hidden * 2}
    messages |= {"source": 0, "target": HALF, "seconds": 20.0}
    records = {"dispatch": header + 2 * 4 * topk * tokens, "combine": header}
    shape = {"max_tokens": tokens, "hidden": hidden, "topk": topk, "num_experts": experts, "mode": "ll"}
    with nccl_ep.Buffer.for_shapes(
        world.rendezvous, device=world.device, domain_size=world.domain_size, **shape
    ) as buffer:
        probe = world.probe()

        def dispatch() -> nccl_ep.DispatchOutput:
            return nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=experts)

        def pair() -> None:
            out = dispatch()
            nccl_ep.combine(out.x, out.handle)

        def puts(*operations: str) -> None:
            for each in operations:
                stream = torch.cuda.current_stream().cuda_stream
                probe.enqueue(**messages, first_bytes=records[each], stream=stream)

        calls = {
            "dispatch": dispatch,
            "dispatch puts": partial(puts, "dispatch"),
            "pair": pair,
            "pair puts": partial(puts, "dispatch", "combine"),
        }
        replays = {name: captured(partial(repeated, GRAPH_CALLS, call), "cuda") for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(turns):
            for name, replay in replays.items():
                world.barrier()
                replay()
                start.record()
                repeated(GRAPH_CALLS, replay)
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / GRAPH_CALLS**2)
        buffer.check()
        probe.check()
    medians = {name: statistics.median(each) for name, each in times.items()}
    world.barrier()
    ns = probe.exchange(**messages, rounds=10 * GRAPH_CALLS, warm_up=GRAPH_CALLS)
    return medians | {"dispatch puts in one kernel": ns / 1e3}


def repeated(count: int, call: Callable[[], Any]) -> None:
    for _ in range(count):
        call()


def _dead(world: World, case: Expected, buffer: nccl_ep.Buffer, call: Any, seconds: float) -> dict[str, Any]:
    """The last domain dies, the others call: which rank they waited for; then the first makes a buffer of its own."""
    survivors = dist.new_group(list(range(world.domain_size)))
    torch.cuda.synchronize()
    world.barrier()
    if world.rank >= world.num_ranks - world.domain_size:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.set_timeout(seconds)
    begin, text = time.monotonic(), ""
    try:
        call()
        torch.cuda.synchronize()
        buffer.check()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begin
    begin = time.monotonic()
    buffer.destroy()
    destroyed = time.monotonic() - begin
    alone = Expected(plain_case(world.domain_size))
    with shared_buffer(rendezvous_of(survivors), [alone], device=world.device) as again:
        run_case(alone, again)
    return {"text": text, "seconds": took, "destroyed": destroyed, "again": True}


def ll_dead(world: World, phase: str, seconds: float) -> dict[str, Any]:
    case = Expected(plain_case(world.num_ranks, domain_size=world.domain_size))
    buffer = shared_buffer(world.rendezvous, [case], device=world.device, domain_size=world.domain_size)
    run_case(case, buffer)
    given, rows = case.given_on(buffer), case.rows[world.rank].to(world.device)
    out = case.send(buffer, given, mode="ll")
    calls = {
        "dispatch": lambda: case.send(buffer, given, mode="ll"),
        "combine": lambda: nccl_ep.combine(rows, out.handle),
    }
    return _dead(world, case, buffer, calls[phase], seconds)


def ll_masks(world: World, phase: str, seconds: float) -> int:
    """The last rank is late, is masked, and comes back. Returns how often the others called while it was masked."""
    late = LateRank(world.num_ranks, phase, 2, world.domain_size, patience=of_living_ranks(DEADLINE))
    late.tell = world.say
    late.run(world.rendezvous, seconds, world.device)
    return late.turns


# ---- High throughput


def ht_cases(world: World, count: int, first: int, seconds: float) -> dict[str, Any]:
    """Every result to the bit, in one buffer, forth and back; ranks may be a call ahead. Stops between two cases once
    so many seconds are over on any rank."""
    number = 0
    wide = [dataclasses.replace(case, domain_size=world.domain_size) for case in wide_cases(world.num_ranks)]
    cases = [ExpectedHt(case) for case in (*cases_of(world.topology(), count, first), *wide)]
    options = {"device": world.device, "domain_size": world.domain_size, "timeout": of_living_ranks(DEADLINE)}
    with shared_ht_buffer(world.rendezvous, [each.case for each in cases], **options) as buffer:
        world.say("has made the buffer")
        begin = time.monotonic()
        for case in (*cases, *reversed(cases)):
            world.say(f"run {number + 1} of {2 * len(cases)}: case {case.case.seed}, {case.case.layout}, {case.plan}")
            with world.tells(number + 1):
                case.run(buffer, num_sms=NUM_SMS[number % 3])
            number += 1
            if number % 4 == 0 and world.largest(time.monotonic() - begin) > seconds:
                break
        dispatches = int(buffer.stats()["ht_dispatches"])
    return {"cases": len(cases), "runs": number, "dispatches": dispatches, "seconds": time.monotonic() - begin}


def ht_chains(world: World, replays: int) -> dict[str, Any]:
    """Graphs with live routing: the elements that are wrong, of all replays."""
    begin, wrong, us = time.monotonic(), 0, []
    with ht_chain_buffer(world.rendezvous, world.device, domain_size=world.domain_size) as buffer:
        chains = [(letters, given) for given in (False, True) for letters in HT_CHAINS]
        for letters, given in chains:
            chain = HtChain(letters, buffer, given=given)
            world.say(f"captures {letters}, outputs given: {given}")
            graph = chain.capture()
            world.say(f"{replays} replays")
            us.append(_replay(chain, graph, replays) / replays * 1e6)
            wrong += chain.finish()
    return {"chains": len(chains), "wrong": wrong, "us": us, "seconds": time.monotonic() - begin}


def ht_dead(world: World, phase: str, seconds: float) -> dict[str, Any]:
    """phase: of HT_STEPS."""
    layout = "packed" if phase == "weighted combine" else "flat"
    case = Expected(plain_case(world.num_ranks, layout=layout, domain_size=world.domain_size))
    buffer = shared_ht_buffer(world.rendezvous, [case.case], device=world.device, domain_size=world.domain_size)
    out = case.send(buffer)
    case.check_dispatch(out, world.rank)
    return _dead(world, case, buffer, ht_step(phase, case, buffer, out), seconds)


def main(folder: Path, task: dict[str, Any]) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(THREADS)
    # torch makes all of its streams with the first, and asks the driver for memory when it has none: not beside a
    # kernel that waits.
    torch.cuda.Stream()
    torch.empty(1 << 30, dtype=torch.uint8, device=device)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=2 * SECONDS)
    )
    body = globals()[task["body"]]
    # Where Python stands when the test's time is nearly up.
    faulthandler.dump_traceback_later(max(task["seconds"] - 5.0, 1.0), file=sys.stdout, exit=False)
    value, error = None, ""
    try:
        value = body(World(rank, num_ranks, task["domain_size"], device), *task["args"])
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        (folder / f"said_{rank}.json").write_text(json.dumps((value, error)))
        sys.stdout.flush()
    os._exit(0)  # a communicator that was given up may have threads that do not end


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
