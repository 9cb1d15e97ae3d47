"""Host times of two trees: python -m bench.host_in_turns [--seconds 240] RECORDS.json OLD NEW -- --tokens 1

OLD, NEW: folders of built trees. Both run measure_host with what follows ``--``, on one core and one GPU, 20 ms
each in turn: what a host's clock does meets both. The least of many rounds leaves out those that were stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.records import Record, load, save

TURN = 0.02  # seconds


def start(tree: Path, revision: str | None, records: Path, arguments: list[str], core: int) -> subprocess.Popen[bytes]:
    package = "bench" if (tree / "bench/measure_host.py").exists() else "benchmarks"  # which it was called
    named = {} if revision is None else {"NCCL_EP_REVISION": revision}
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), sys.executable, "-m", f"{package}.measure_host", str(records), *arguments],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)} | named, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def take_turns(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until one has ended. TimeoutError, with all of them killed, after so many seconds."""
    deadline, turn = time.monotonic() + seconds, 0
    try:
        while all(each.poll() is None for each in processes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"measure_host of two trees has not ended within {seconds} s")
            for number, each in enumerate(processes):
                each.send_signal(signal.SIGCONT if number == turn % len(processes) else signal.SIGSTOP)
            time.sleep(TURN)
            turn += 1
        for each in processes:
            each.send_signal(signal.SIGCONT)
        for each in sorted(processes, key=lambda each: each.poll() is None):  # that one first
            if each.wait(max(deadline - time.monotonic(), 1)) != 0:
                raise RuntimeError(f"{each.args!r} has ended with {each.returncode}")
    finally:
        for each in processes:
            each.kill()


def measure(
    trees: list[tuple[Path, str | None]], arguments: list[str], seconds: float, core: int
) -> list[list[Record]]:
    """The records of each tree, of which each has a revision; None: its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(trees))]
        take_turns([start(*each, file, arguments, core) for each, file in zip(trees, files, strict=True)], seconds)
        return [load([each]) for each in files]


def table(old: list[Record], new: list[Record]) -> list[str]:
    def by_call(records: list[Record]) -> dict[tuple[Any, ...], float]:
        named = ("mode", "default_device", "api", "op")
        return {tuple(each[name] for name in named): each["value"] for each in records if each["figure"] == "host"}

    before, after = by_call(old), by_call(new)
    return [
        f"{mode} {api + ' ' + op:58} {before[call]:8.2f} {after[call]:8.2f} us  default device: {default}"
        for call in after
        if call in before
        for mode, default, api, op in [call]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="the old one, the new one")
    parser.add_argument("--seconds", type=float, default=240, help="deadline")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--revisions", nargs=2, default=(None, None), help="of trees that are no clones")
    parser.add_argument("arguments", nargs="*", help="of measure_host, behind --")
    chosen = parser.parse_args()
    trees = [(tree.resolve(), revision) for tree, revision in zip(chosen.trees, chosen.revisions, strict=True)]
    old, new = measure(trees, chosen.arguments, chosen.seconds, chosen.core)
    print("\n".join(table(old, new)))
    save(chosen.records, old + new)


if __name__ == "__main__":
    main()
