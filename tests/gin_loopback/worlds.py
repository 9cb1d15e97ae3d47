"""Worlds of processes over NCCL's own network (GIN), between the GPUs of one host that has no NIC.

The loopback plugin (tests/gin_loopback) carries the bytes. A rank is a program of its own, because the NCCL that it
loads, and what NCCL reads from the environment, are fixed when it starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_ep import _C
from tests.gin_loopback import mps
from tests.gin_loopback.library import build
from tests.support.gpus import NUM_GPUS

ROOT = Path(__file__).parent.parent.parent
# An NCCL for several domains, preloaded beside torch's; several, separated by ":". The loaded one, if it is new enough.
LIBRARIES = [Path(each) for each in os.environ.get("NCCL_EP_TEST_GIN_NCCL", "").split(":") if each]
GRACE = 5.0  # seconds in which ranks end after another one failed
_PLUGIN = os.environ.get("NCCL_EP_TEST_GIN_PLUGIN", "")

# NCCL's other users of the plugin's interface, and of networks, must not take it.
_NCCL = {
    "NCCL_NET_PLUGIN": "none", "NCCL_RMA_DISABLE": "1", "NCCL_SYM_GIN_KERNELS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "1",
    "NCCL_DEBUG": "WARN",
    # The network's copies must not stand behind what waits for them: neither behind the first launch of a kernel, which
    # would load it, nor in the queue of a stream whose copy waits for a kernel.
    "CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32",
}  # fmt: skip


def why_not(num_ranks: int = 2) -> str:
    """Why there is no such world here; "" if there is one."""
    if num_ranks > NUM_GPUS and not mps.CONTROL:
        return f"{num_ranks} ranks share {NUM_GPUS} GPUs, for which nvidia-cuda-mps-control (MPS) is needed"
    if NUM_GPUS < 2:
        return f"{NUM_GPUS} GPU here, two are needed"
    info = _C.nccl_info()
    if not info["network"]:
        return "built without kernels for several NVLink domains (NCCL_EP_GIN_NCCL_INCLUDE_DIRS)"
    if not LIBRARIES and info["network_problem"]:
        return f"{info['network_problem']}; NCCL_EP_TEST_GIN_NCCL=.../libnccl.so.2 preloads one in these tests"
    plugin = _PLUGIN or build()
    return "" if _PLUGIN or isinstance(plugin, Path) else str(plugin)


@dataclass
class Ended:
    """How a rank ended: what its body returned, or the text of its error."""

    exitcode: int
    value: Any
    error: str
    output: str


def environment_of(
    *, domain_size: int, library: Path | None = None, plugin: dict[str, Any] | None = None
) -> dict[str, str]:
    """What a program needs for this network. library: an NCCL to preload. plugin: its variables, in lower case without
    GIN_LOOPBACK_."""
    given = {
        **os.environ, **_NCCL, "NCCL_RMA_PLUGIN": _PLUGIN or str(build()), "NCCL_LSA_TEAM_SIZE": str(domain_size),
    }  # fmt: skip
    if library is not None:
        given["LD_PRELOAD"] = str(library)
    return given | {f"GIN_LOOPBACK_{name.upper()}": str(value) for name, value in (plugin or {}).items()}


def run_world(
    folder: Path,
    num_ranks: int,
    domain_size: int,
    body: str,
    *args: Any,
    library: Path | None = None,
    plugin: dict[str, Any] | None = None,
    lsa_size: int | None = None,
    seconds: float = 120.0,
    environment: dict[str, str] | None = None,
    kill: Sequence[int] = (),
) -> list[Ended]:
    """Runs ``body(world, *args)`` of tests/gin_loopback/gin_ranks.py on every rank; args go through JSON.

    library, plugin: as of environment_of(). lsa_size: what NCCL is told, default domain_size. kill: ranks that are
    expected to die.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = environment_of(domain_size=lsa_size or domain_size, library=library, plugin=plugin)
    given |= {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(num_ranks)}
    given |= environment or {}
    task = json.dumps({"body": body, "args": args, "domain_size": domain_size, "seconds": seconds})
    with mps.sharing(num_ranks, NUM_GPUS) as shared:
        ranks = [_start(folder, rank, task, given | shared) for rank in range(num_ranks)]
        late = _await(ranks, seconds, kill)
        for rank in late:
            ranks[rank].send_signal(signal.SIGKILL)
            ranks[rank].wait()
    ended = []
    for rank, process in enumerate(ranks):
        said = folder / f"said_{rank}.json"
        value, error = json.loads(said.read_text()) if said.exists() else (None, "")
        ended.append(Ended(process.returncode, value, error, (folder / f"log_{rank}").read_text()))
    failed = [rank for rank, each in enumerate(ended) if each.exitcode != 0 and rank not in kill]
    if late or failed:
        stopped = [rank for rank in failed if rank not in late]
        what = f"ranks {stopped} failed" if stopped else f"ranks {late} still ran after {seconds} s"
        raise AssertionError("\n".join([what, *(_told(rank, each) for rank, each in enumerate(ended))]))
    return ended


def _start(folder: Path, rank: int, task: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.gin_loopback.gin_ranks", str(folder), task]
    with (folder / f"log_{rank}").open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
        )


def _await(ranks: list[subprocess.Popen[bytes]], seconds: float, kill: Sequence[int]) -> list[int]:
    """Those that still run after so many seconds, or GRACE after another one failed, for which they may wait."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return []
        if any(code not in (None, 0) for rank, code in enumerate(codes) if rank not in kill):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.02)
    return [rank for rank, process in enumerate(ranks) if process.poll() is None]


def _told(rank: int, ended: Ended) -> str:
    """Of any rank, as one that fails may have waited for another that failed before it."""
    return f"--- rank {rank} ended with {ended.exitcode}: {ended.error}\n{ended.output[-3000:]}"


def values(ended: list[Ended]) -> list[Any]:
    for rank, each in enumerate(ended):
        assert not each.error, f"rank {rank}: {each.error}\n{each.output[-2000:]}"
    return [each.value for each in ended]
