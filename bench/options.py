"""The options of ``ll``, ``ht`` and ``fit``, and those that other measurements share with them."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nccl_ep import _C
from nccl_ep.handle import LAYOUTS

from .workload import DTYPES, ROUTINGS
from .world import is_rank

GPU_FIGURES = ("graph", "graph_pdl", "kernel", "event", "host", "memory")
HT_FIGURES = tuple(figure for figure in GPU_FIGURES if figure != "graph_pdl")  # its kernels have none
CPU_FIGURES = ("event", "host")
_STARTS = "Starts its ranks itself, or runs as one of them under torchrun. Lists are separated by commas."
DESCRIPTION = f"""Low-latency dispatch and combine, held against the oracle, then measured, beside torch's own ways.
{_STARTS}"""
HT_DESCRIPTION = f"""High-throughput dispatch (routing included) and combine, held against the oracle, then measured,
beside torch's sort and all-to-all. {_STARTS}"""
FIT_DESCRIPTION = f"""Where high throughput overtakes low latency: both modes over the tokens, with the same capacity
and layout. With FILEs, from what they have. {_STARTS}"""


def ints(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers, separated by commas") from None


def output(text: str) -> Path:
    """A file to write when all is measured, in a folder that is made where there is none."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {path.parent}: {error.strerror}") from None
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is there and no file")
    return path


def words(*allowed: str) -> Callable[[str], list[str]]:
    def split(text: str) -> list[str]:
        items = text.split(",")
        if unknown := [item for item in items if item not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(allowed)}")
        return items

    return split


def common_parser(command: str, description: str) -> argparse.ArgumentParser:
    """What all measurements of operations take."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {command}", description=description)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU and this build serves it")
    add("--ranks", type=int, help="processes to start, one a GPU; default: all GPUs, or 2 CPU ranks")
    add("--hidden", type=int, help="default 7168 (CPU: 256)")
    add("--topk", type=int, help="default 8 (CPU: 4)")
    add("--experts", type=int, help="of all ranks; default 256 (CPU: 16)")
    add(
        "--dtype", type=words(*DTYPES), default=["bf16", "fp8"], help=f"of dispatched rows, list of {', '.join(DTYPES)}"
    )
    add("--routing", choices=ROUTINGS, default="uniform")
    add("--seed", type=int, default=1)
    add("--iterations", type=int, help="timed calls or replays")
    add("--quick", action="store_true", help="less of everything: a look, not a figure to quote")
    add("--json", type=output, metavar="FILE", help="for the records, written after every configuration")
    add("--time-limit", type=float, default=480.0, metavar="SECONDS", help="no configuration is started after it")
    return parser


def parse_device(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The options, with the device decided. Exits where it cannot be had."""
    options = parser.parse_args(argv)
    has_gpu = _C.has_cuda() and torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: " + ("torch finds no GPU" if _C.has_cuda() else "this build has no CUDA backend"))
    options.device = options.device or ("cuda" if has_gpu else "cpu")
    return options


def set_defaults(parser: argparse.ArgumentParser, options: argparse.Namespace, more: dict[str, Any]) -> None:
    """Those of the device, and ``more``, for what was not given. Exits where the shape makes no sense."""
    if options.device == "cuda":
        defaults = {"ranks": min(8, torch.cuda.device_count()), "hidden": 7168, "topk": 8, "experts": 256}
    else:
        defaults = {"ranks": 2, "hidden": 256, "topk": 4, "experts": 16}
    for name, value in (defaults | more).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if is_rank():
        options.ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: must be 1 or more")
    if not 1 <= options.topk <= min(32, options.experts):
        parser.error(f"--topk {options.topk} of {options.experts} experts: must be 1 to 32, and no more than experts")
    if options.hidden < 1 or options.hidden % 16:
        parser.error(f"--hidden {options.hidden}: must be a multiple of 16, so that rows of every dtype can be sent")
    if options.alignment < 1:
        parser.error(f"--alignment {options.alignment}: must be 1 or more")
    if options.experts % options.ranks:
        parser.error(f"--experts {options.experts}: {options.experts} experts do not divide over {options.ranks} ranks")


def _measuring_parser(command: str, description: str, layouts: list[str], figures: Sequence[str]) -> Any:
    """What ``ll``, ``ht`` and ``fit`` take; whatever one of them does not offer has its value all the same."""
    parser = common_parser(command, description)
    parser.set_defaults(
        cached=False, staged=False, fits_capacity=False, no_rivals=True, alignment=1, enable_shrink=False
    )
    add = parser.add_argument
    add("--layout", type=words(*LAYOUTS), default=layouts, help=f"list of {', '.join(LAYOUTS)}")
    add("--num-sms", type=ints, default=[0], help="list; 0: the library's choice")
    add("--figures", type=words(*figures), help=f"of {', '.join(figures)}, list (CPU: event, host, memory)")
    return parser


def _finish(parser: argparse.ArgumentParser, options: argparse.Namespace, more: dict[str, Any]) -> None:
    """Defaults, and a check of the figures."""
    is_cuda = options.device == "cuda"
    set_defaults(parser, options, {"iterations": 10 if options.quick else 50} | more)
    if not is_cuda and (wrong := set(options.figures) - {*CPU_FIGURES, "memory"}):
        parser.error(f"--figures {','.join(sorted(wrong))}: not on CPU ranks")


def _add_alignment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alignment", type=int, default=None, help="of experts in packed, default 128 (CPU: 8)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Options of ``ll``. Exits where they make no sense."""
    parser = _measuring_parser("ll", DESCRIPTION, ["expert_major"], GPU_FIGURES)
    add = parser.add_argument
    add("--tokens", type=ints, help="tokens of a rank, list; default 1,8,32,128,512 (CPU: 1,8)")
    add("--api", type=words("native", "ops", "deepep"), default=["native", "ops"], help="list of native, ops, deepep")
    add("--enable-shrink", action="store_true", help="buffers that mask ranks which are late")
    add("--no-rivals", action="store_true", default=False, help="without torch's all-to-alls")
    options = parse_device(parser, argv)
    if "deepep" in options.api and (
        options.layout != ["expert_major"] or not {"bf16", "fp8"}.issuperset(options.dtype)
    ):
        parser.error(f"--api deepep: expert_major of bf16 or fp8, not {options.layout} of {options.dtype}")
    is_cuda = options.device == "cuda"
    more: dict[str, Any] = {
        "tokens": [1, 8] if not is_cuda else [8, 128] if options.quick else [1, 8, 32, 128, 512],
        "figures": GPU_FIGURES if is_cuda else CPU_FIGURES,
    }
    _finish(parser, options, more)
    return options


def parse_ht(argv: list[str]) -> argparse.Namespace:
    """Options of ``ht``. Exits where they make no sense."""
    parser = _measuring_parser("ht", HT_DESCRIPTION, ["flat", "packed"], HT_FIGURES)
    _add_alignment(parser)
    add = parser.add_argument
    add("--tokens", type=ints, help="tokens of a rank, list; default 1024,4096,8192 (CPU: 8,32)")
    add("--api", type=words("native", "ops"), default=["native", "ops"], help="list of native, ops")
    add("--cached", action="store_true", help="also dispatch along the routes of an earlier one")
    add("--staged", action="store_true", help="also with nothing in the arena")
    add("--no-rivals", action="store_true", default=False, help="without torch's all-to-all")
    options = parse_device(parser, argv)
    is_cuda = options.device == "cuda"
    more: dict[str, Any] = {
        "tokens": [8, 32] if not is_cuda else [4096] if options.quick else [1024, 4096, 8192],
        "figures": HT_FIGURES if is_cuda else CPU_FIGURES,
        "alignment": 128 if is_cuda else 8,
    }
    _finish(parser, options, more)
    return options


def parse_fit(argv: list[str]) -> argparse.Namespace:
    """Options of ``fit``. Exits where they make no sense."""
    parser = _measuring_parser("fit", FIT_DESCRIPTION, ["flat", "packed"], GPU_FIGURES)
    _add_alignment(parser)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="records of both modes; then nothing is measured")
    add("--tokens", type=ints, help="tokens of a rank, list; default powers of two from 32 to 4096 (CPU: 1,4,16)")
    add("--api", type=words("native", "ops"), default=["native"], help="list of native, ops")
    options = parse_device(parser, argv)
    is_cuda = options.device == "cuda"
    more: dict[str, Any] = {
        "tokens": [1, 4, 16] if not is_cuda else [2**i for i in range(5, 13, 2 if options.quick else 1)],
        "figures": ("graph", "event") if is_cuda else ("event",),
        "alignment": 128 if is_cuda else 8,
    }
    options.fits_capacity = True
    _finish(parser, options, more)
    return options
