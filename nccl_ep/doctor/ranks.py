"""Ranks as processes of this host, one a GPU: what starts them, and how one joins the others."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STORE = "NCCL_EP_RANKS_STORE"  # set by Launcher: the file in which the ranks meet
COLLECTIVE_SECONDS = 120  # of torch's own collectives: then the process ends, and its starter goes on
# NVLink multicast can put GPUs that others share out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_ROOT = str(Path(__file__).resolve().parents[2])  # from which nccl_ep is imported


def join(device_kind: str) -> torch.device:
    """This rank's device, which is current then; torch's default group serves it (NCCL or gloo)."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    device, backend = torch.device("cpu"), "gloo"
    if device_kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise SystemExit(f"rank {rank} has no GPU: there are {torch.cuda.device_count()}")
        device, backend = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    if path := os.environ.get(STORE):
        store = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]  # public, but not in its stub
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=num_ranks)
    else:  # torchrun's
        dist.init_process_group(backend, timeout=timeout)
    return device


class Launcher:
    """Starts worlds of ranks as processes of this host, one after the other.

    They meet in a file that only this user can read: a server would listen to every process of the host.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def run(self, module: str, argv: list[str], settings: dict[str, str], deadline: float) -> str:
        """``python -m module`` with ``argv`` on every rank. "" if all ended well, else what happened.

        The first rank that fails ends the others, as does the deadline (of time.monotonic).
        """
        # A store of its own for each world: nothing is left from the world before.
        with tempfile.TemporaryDirectory(prefix="nccl_ep_ranks_") as folder:  # of mode 0700
            return self._run([sys.executable, "-m", module, *argv], settings | {STORE: f"{folder}/store"}, deadline)

    def _run(self, command: list[str], settings: dict[str, str], deadline: float) -> str:
        common = NO_MULTICAST | os.environ | settings
        common |= {
            "WORLD_SIZE": str(self.num_ranks),
            "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }
        if any(name == "lo" for _, name in socket.if_nameindex()):
            common.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(self.num_ranks):
                ranks.append(subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            return _wait(ranks, deadline)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> str:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watch(rank: int) -> None:
        ranks[rank].wait()
        ended.put(rank)

    for rank in range(len(ranks)):
        threading.Thread(target=watch, args=(rank,), daemon=True).start()
    for _ in ranks:
        try:
            rank = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            running = [str(rank) for rank, process in enumerate(ranks) if process.poll() is None]
            return f"the time limit ended rank {', '.join(running)}"
        if code := ranks[rank].returncode:
            return f"rank {rank} ended with code {code}"
    return ""
