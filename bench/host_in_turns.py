"""Host times of two trees: python -m bench.host_in_turns RECORDS.json OLD NEW --mode ll --tokens 1

OLD, NEW: folders of built trees. A process of each, on one core and one GPU, makes a call some times, then that of the
other tree does. What a host's clock does within minutes meets both, and what it does within a millisecond their median
leaves out. A record of each tree is the median of its turns; "ratio" is the median of a turn of the new tree over the
one of the old tree beside it. Each tree has several processes, one after the other: where one has its memory makes some
per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure_host import LOCAL_SIZES, common_of, of_call
from bench.records import make, save

WARM_UP, COUNT = 10, 40  # calls of a turn: the first ones find nothing in the caches
_TURN = Path(__file__).with_name("host_turn.py").read_text()


class Tree:
    """A process of a built tree, which has so many seconds for all it is asked."""

    def __init__(self, folder: Path, command: list[str], seconds: float) -> None:
        self._folder, self._seconds, self._deadline = folder, seconds, time.monotonic() + seconds
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def answer(self) -> Any:
        """RuntimeError: the process has ended. TimeoutError."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(self._deadline - time.monotonic(), 0))[0]:
            raise TimeoutError(f"the process of {self._folder} has not ended within {self._seconds} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._folder} has ended with {self.process.wait()}")
        return json.loads(line)

    def measure(self, name: str) -> float:
        print(json.dumps([name, WARM_UP, COUNT]), file=self.process.stdin)
        return float(self.answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Turns:
    """Microseconds of a call by the old and the new tree."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(new / old for old, new in zip(self.old, self.new, strict=True))


def take_turns(old: Tree, new: Tree, rounds: int, taken: dict[str, Turns]) -> None:
    """Adds to what was taken, by call, and ends both processes. RuntimeError, TimeoutError: as ``Tree.answer``."""
    try:
        known = set(old.answer())
        names = [name for name in new.answer() if name in known]
        for number in range(1 + rounds):  # the first one does not count
            for name in names:
                turns = taken.setdefault(name, Turns())
                sides = [(old, turns.old), (new, turns.new)]
                for tree, times in sides[:: 1 if number % 2 else -1]:
                    us = tree.measure(name)
                    if number:
                        times.append(us)
    finally:
        old.kill()
        new.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="the old one, the new one")
    parser.add_argument("--mode", choices=("ll", "ht"), default="ll")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=100, help="of a process")
    parser.add_argument("--processes", type=int, default=4, help="of a tree")
    parser.add_argument("--seconds", type=float, default=120, help="deadline of a process")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--revisions", nargs=2, default=("old", "new"), metavar="REVISION", help="of the trees")
    chosen = parser.parse_args()
    tokens, hidden, topk, experts = LOCAL_SIZES[chosen.device]
    tokens = int(chosen.tokens or tokens)
    command = ["taskset", "--cpu-list", str(chosen.core), sys.executable, "-c", _TURN, chosen.mode, str(tokens)]
    taken: dict[str, Turns] = {}
    for _ in range(chosen.processes):
        old, new = (Tree(each.resolve(), [*command, chosen.device], chosen.seconds) for each in chosen.trees)
        take_turns(old, new, chosen.rounds, taken)
    common = common_of((tokens, hidden, topk, experts), 1, chosen.device) | {"mode": chosen.mode}
    records = []
    for name, turns in taken.items():
        times, ratio = [round(median(each), 3) for each in (turns.old, turns.new)], round(turns.ratio, 4)
        print(f"{chosen.mode} {name:36} {times[0]:8.2f} {times[1]:8.2f} us  {ratio:6.3f}")
        for revision, us in zip(chosen.revisions, times, strict=True):
            records.append(make(common, **of_call(name), figure="host", value=us, revision=revision))
        of_new = {"figure": "ratio", "value": ratio, "unit": "x", "revision": chosen.revisions[1]}
        records.append(make(common, **of_call(name), **of_new))
    save(chosen.records, records)


if __name__ == "__main__":
    main()
