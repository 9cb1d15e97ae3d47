"""Who can reach the ranks of the benchmark's Launcher, and their starter? ``python -m tests.bench.listening_ranks``.

The starter is a process of its own: one that runs tests may listen for another test.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bench.world import World, is_rank
from nccl_ep.doctor.ranks import STORE, Launcher

_SECONDS = 120  # for both ranks

_LISTENS = "0A"  # the state in /proc/net/tcp
_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listeners(pid: int | str) -> list[str]:
    """Addresses other than the loopback interface's, at which the process waits for connections."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if link.is_symlink() and (name := os.readlink(link)).startswith("socket:["):
            sockets.add(name[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and rest[5] in sockets and local.split(":")[0] not in _LOOPBACK:
                found.append(local)
    return found


def start() -> str:
    return Launcher(2).run("tests.bench.listening_ranks", [], {}, time.monotonic() + _SECONDS)


def main() -> None:
    world = World("cpu")
    assert world.agree(lambda: {"rank": world.rank, "figures": [0.5, None, "text"]}) == [
        {"rank": rank, "figures": [0.5, None, "text"]} for rank in range(world.num_ranks)
    ]
    world.gate.wait()
    for pid in ("self", os.getppid()):
        assert not listeners(pid), (pid, listeners(pid))
    folder = Path(os.environ[STORE]).parent
    assert folder.stat().st_mode & 0o777 == 0o700, oct(folder.stat().st_mode)
    world.close()


if __name__ == "__main__":
    sys.exit(main() if is_rank() else start() or None)
