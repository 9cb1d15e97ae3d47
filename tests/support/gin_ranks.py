"""A rank of tests/support/gin.py: a program that runs one of the bodies below and writes what it returned."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nccl_ep import _C
from nccl_ep.bootstrap import Rendezvous, rendezvous_of

SECONDS = 60.0  # of a meeting
WINDOW = 64 << 20
HALF = WINDOW // 2  # sources below, targets above
MESSAGES = ((1, 16), (1, 48), (3, 1008), (8, 14464), (64, 14464), (5, 1 << 18), (2, 1 << 20))


@dataclass
class World:
    rank: int
    num_ranks: int
    domain_size: int
    device: torch.device
    rendezvous: Rendezvous = field(init=False)

    def __post_init__(self) -> None:
        self.rendezvous = rendezvous_of(dist.group.WORLD)

    def barrier(self) -> None:
        self.rendezvous.allgather(b"", SECONDS)

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


BODIES = (probe_bytes, probe_times, probe_late, probe_dead, make_probe)


def main(folder: Path, task: dict[str, Any]) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=2 * SECONDS)
    )
    body = next(each for each in BODIES if each.__name__ == task["body"])
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
