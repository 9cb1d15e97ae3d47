"""Starts the ranks: processes of this machine that meet in a file, or those of torchrun."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep

SECONDS = 120  # that torch's own collectives wait


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs, where there are some")
    group.add_argument("--ranks", type=int, help="default: 2 on the CPU, one a GPU; torchrun brings its own")


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
    if "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return options.ranks or (torch.cuda.device_count() if device_type(options) == "cuda" else 2)


def run(body: Callable[[Ranks, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Runs ``body`` on every rank. ``options`` has ``add_arguments``', and may have ``expert_parallel``."""
    if "RANK" in os.environ:
        _rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, body, options)
        return
    count = num_ranks(options)
    # Ranks are forks of a server that has loaded what they need, and has touched no GPU.
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([body.__module__, "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="moe_lm_") as folder:
        args = (count, f"{folder}/store", body, options)
        torch.multiprocessing.start_processes(_rank, args, nprocs=count, start_method="forkserver")


def world_of(options: argparse.Namespace, device: torch.device) -> Ranks:
    """Of the processes in torch's default group."""
    count = dist.get_world_size()
    own = getattr(options, "expert_parallel", None) or count
    if count % own:
        raise ValueError(f"--expert-parallel is {own}, must divide the {count} ranks")
    mesh = dist.init_device_mesh(device.type, (count // own, own), mesh_dim_names=("replicas", "experts"))
    return Ranks(dist.get_rank(), count, device, mesh.get_group("experts"), mesh.get_group("replicas"))


def _rank(rank: int, count: int, store: str | None, body: Callable[..., None], options: argparse.Namespace) -> None:
    kind = device_type(options)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's sums in one order
    else:
        torch.set_num_threads(1)  # ranks share the cores
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    how: dict[str, Any] = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": count}
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS), **how)
    try:
        body(world_of(options, device), options)
    finally:
        dist.destroy_process_group()
