"""The options of ``python -m nccl_ep.bench ll``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

from nccl_ep import _C
from nccl_ep.handle import LAYOUTS

from .workload import ROUTINGS
from .world import is_rank

GPU_FIGURES = ("graph", "graph_pdl", "kernel", "event", "host", "memory")
CPU_FIGURES = ("event", "host")
DESCRIPTION = """Low-latency dispatch and combine, held against the oracle, then measured, beside torch's own ways.
Starts its ranks itself, or runs as one of them under torchrun. Lists are separated by commas."""


def _ints(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def _words(*allowed: str) -> Callable[[str], list[str]]:
    def split(text: str) -> list[str]:
        items = text.split(",")
        if unknown := [item for item in items if item not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(allowed)}")
        return items

    return split


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.bench ll", description=DESCRIPTION)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU and this build serves it")
    add("--ranks", type=int, help="processes to start, one a GPU; default: all GPUs, or 2 CPU ranks")
    add("--tokens", type=_ints, help="tokens of a rank, list; default 1,8,32,128,512 (CPU: 1,8)")
    add("--hidden", type=int, help="default 7168 (CPU: 256)")
    add("--topk", type=int, help="default 8 (CPU: 4)")
    add("--experts", type=int, help="of all ranks; default 256 (CPU: 16)")
    add("--dtype", type=_words("bf16", "fp8"), default=["bf16", "fp8"], help="of dispatched rows, list")
    add("--layout", choices=tuple(LAYOUTS), default="expert_major")
    add("--num-sms", type=_ints, default=[0], help="list; 0: the library's choice")
    add("--api", type=_words("native", "ops", "deepep"), default=["native", "ops"], help="list of native, ops, deepep")
    add("--routing", choices=ROUTINGS, default="uniform")
    add("--seed", type=int, default=1)
    add("--figures", type=_words(*GPU_FIGURES), help=f"of {', '.join(GPU_FIGURES)}, list (CPU: event, host, memory)")
    add("--iterations", type=int, help="timed calls or replays; default 50")
    add("--quick", action="store_true", help="fewer tokens and iterations: a look, not a figure to quote")
    add("--floors", action="store_true", help="also flags alone and pushes alone, where the build has them")
    add("--no-rivals", action="store_true", help="without torch's all-to-alls")
    add("--json", type=Path, metavar="FILE", help="for the records, written after every configuration")
    add("--time-limit", type=float, default=480.0, metavar="SECONDS", help="no configuration is started after it")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with the defaults of the device. Exits where they make no sense."""
    parser = _parser()
    options = parser.parse_args(argv)
    has_gpu = _C.has_cuda() and torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: " + ("torch finds no GPU" if _C.has_cuda() else "this build has no CUDA backend"))
    if "deepep" in options.api and options.layout != "expert_major":
        parser.error(f"--api deepep: its layout is expert_major, not {options.layout}")
    options.device = options.device or ("cuda" if has_gpu else "cpu")
    is_cuda = options.device == "cuda"
    defaults = {
        "ranks": min(8, torch.cuda.device_count()),
        "tokens": [8, 128] if options.quick else [1, 8, 32, 128, 512],
        "hidden": 7168,
        "topk": 8,
        "experts": 256,
        "figures": GPU_FIGURES,
        "iterations": 10 if options.quick else 50,
    }
    if not is_cuda:
        defaults |= {"ranks": 2, "tokens": [1, 8], "hidden": 256, "topk": 4, "experts": 16, "figures": CPU_FIGURES}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if is_rank():
        options.ranks = int(os.environ["WORLD_SIZE"])
    if options.experts % options.ranks:
        parser.error(f"{options.experts} experts do not divide over {options.ranks} ranks")
    if not is_cuda and (wrong := set(options.figures) - {*CPU_FIGURES, "memory"}):
        parser.error(f"--figures {','.join(sorted(wrong))}: not on CPU ranks")
    return options
