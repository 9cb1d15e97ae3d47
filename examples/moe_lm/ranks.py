"""Starts the ranks: processes of this machine that meet in a file, or those of torchrun.

If a rank fails, all end at once, and its words are told. The others fail too, as their peer is gone: that is no news.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep

from .arguments import whole

SECONDS = 120  # that torch's own collectives wait
GRACE = 1.0  # seconds in which the reason of a failure becomes known, if another rank noticed it first


@dataclass
class Ranks:
    """This process among the others. ``experts``: the group over which experts are spread; ``replicas``: the ranks that
    have the same experts."""

    rank: int
    size: int
    device: torch.device
    experts: Any
    replicas: Any

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def say(world: Ranks, text: str) -> None:
    """Once, at once."""
    if world.rank == 0:
        print(text, flush=True)


def described(world: Ranks) -> str:
    return f"{world.size} {'CPU rank' if world.device.type == 'cpu' else 'GPU'}{'s' if world.size > 1 else ''}"


def say_what_times_mean(world: Ranks) -> None:
    if world.device.type == "cpu":
        say(world, "CPU ranks share the cores of this machine: their times say nothing about GPUs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs, where there are some")
    group.add_argument("--ranks", type=whole(1), help="default: 2 on the CPU, one a GPU; torchrun brings its own")


def add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cudnn-attention", action="store_true", help="also cuDNN's, whose bits change between runs of a decode step"
    )


def choose_attention(options: argparse.Namespace) -> None:
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn_attention)


def device_type(options: argparse.Namespace) -> str:
    has_gpus = torch.cuda.is_available() and nccl_ep._C.has_cuda()
    return options.device or ("cuda" if has_gpus else "cpu")


def num_ranks(options: argparse.Namespace) -> int:
    """Of the world that there is, or that ``run`` makes."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" in os.environ:
        return _from_launcher("WORLD_SIZE")
    return options.ranks or (torch.cuda.device_count() if device_type(options) == "cuda" else 2)


def _from_launcher(name: str) -> int:
    """ValueError where a variable that comes with RANK is missing, or no number."""
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"RANK is set and {name} is {text!r}: torchrun sets both, without it neither must be there")
    return int(text)


def check(options: argparse.Namespace) -> None:
    """ValueError if there is no such device, or another number of ranks than was asked for."""
    count = num_ranks(options)
    if "RANK" in os.environ and not _from_launcher("RANK") < count:
        raise ValueError(f"RANK is {os.environ['RANK']}, must be less than WORLD_SIZE, {count}")
    if options.ranks not in (None, count) and "RANK" in os.environ:
        raise ValueError(f"--ranks is {options.ranks}, torchrun has started {count}")
    if device_type(options) == "cuda":
        if not nccl_ep._C.has_cuda():
            raise ValueError("--device is cuda, but this nccl_ep was built without CUDA")
        gpus = torch.cuda.device_count()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        if here > gpus:
            raise ValueError(f"--device is cuda, and {here} ranks need a GPU each; torch finds {gpus}")


# ---- The ranks' processes


def run(body: Callable[[Ranks, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Runs ``body`` on every rank. ``options`` has ``add_arguments``', and may have ``expert_parallel``.

    SystemExit with 1 if a rank fails.
    """
    if "RANK" in os.environ:
        _rank(_from_launcher("RANK"), _from_launcher("WORLD_SIZE"), None, body, options)
        return
    count = num_ranks(options)
    # Ranks are forks of a server that has loaded what they need, and has touched no GPU.
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([body.__module__, "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="moe_lm_") as folder:
        context = torch.multiprocessing.start_processes(
            _rank, (count, folder, body, options), nprocs=count, join=False, start_method="forkserver"
        )
        assert context is not None
        try:
            failed = _wait(context.processes)
        finally:
            _end(context.processes)
        if failed:
            print(_first_words(Path(folder), context.processes), file=sys.stderr, flush=True)
            raise SystemExit(1)


def _wait(processes: list[Any]) -> bool:
    """Until all are done, or one has failed."""
    while running := [each.sentinel for each in processes if each.exitcode is None]:
        wait(running)
        if any(each.exitcode for each in processes):
            until = time.monotonic() + GRACE
            for each in processes:
                each.join(max(0.0, until - time.monotonic()))
            return True
    return any(each.exitcode for each in processes)


def _end(processes: list[Any]) -> None:
    for end in ("terminate", "kill"):
        for each in processes:
            if each.is_alive():
                getattr(each, end)()
        for each in processes:
            each.join(5.0)


def _first_words(folder: Path, processes: list[Any]) -> str:
    """Why the world has ended: a rank that is gone without a word, or else the first one that failed."""
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.failed")}
    for rank, each in enumerate(processes):
        if rank not in found and each.exitcode not in (0, None, -signal.SIGTERM):  # that is _end's
            how = f"exit code {each.exitcode}" if each.exitcode > 0 else signal.Signals(-each.exitcode).name
            return f"rank {rank} has ended without a word: {how}"
    if not found:
        return "a rank has ended without a word"
    return str(min(found.values(), key=lambda each: each["time"])["words"])


def world_of(options: argparse.Namespace, device: torch.device) -> Ranks:
    """Of the processes in torch's default group."""
    count = dist.get_world_size()
    own = getattr(options, "expert_parallel", None) or count
    mesh = dist.init_device_mesh(device.type, (count // own, own), mesh_dim_names=("replicas", "experts"))
    return Ranks(dist.get_rank(), count, device, mesh.get_group("experts"), mesh.get_group("replicas"))


def _rank(rank: int, count: int, folder: str | None, body: Callable[..., None], options: argparse.Namespace) -> None:
    try:
        _run_rank(rank, count, folder, body, options)
    except Exception as error:
        # Told before anything is closed: then others notice later, and what they say comes after.
        words = f"rank {rank} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        if folder is None:
            print(words, file=sys.stderr)
        else:
            beside = Path(folder, f"{rank}.new")
            beside.write_text(json.dumps({"time": time.monotonic_ns(), "words": words}))
            beside.rename(Path(folder, f"{rank}.failed"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # whatever else would be awaited


def _run_rank(rank: int, count: int, folder: str | None, body: Callable[..., None], options: Any) -> None:
    kind = device_type(options)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's sums in one order
    else:
        torch.set_num_threads(1)  # ranks share the cores
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # or it warns of missing GPUs
    how: dict[str, Any] = {}
    if folder is not None:
        how = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": count}
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS), **how)
    body(world_of(options, device), options)
    dist.destroy_process_group()
