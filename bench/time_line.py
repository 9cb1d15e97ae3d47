"""``python -m bench time-line``: when the warps of rank 0 pass the phases of each kernel, in builds with
-DNCCL_EP_LAB=ON. Each operation runs by itself, with nothing before it that it could overlap."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nccl_ep import _C, Buffer, DispatchOutput, combine, dispatch, dispatch_cached
from nccl_ep.handle import LAYOUTS
from nccl_ep.testing import ThreadGroup, run_ranks

from . import records
from .operations import Call
from .options import common_parser, parse_device, set_defaults
from .records import Record
from .stamps import KERNELS, Stamps, Summary, over_calls, render
from .workload import Shape, arena_bytes_for, fitted, make_buffer, make_inputs
from .world import World, is_rank, run_on_ranks

DESCRIPTION = """When the first, the median and the last warp of rank 0 pass each phase of a kernel, in ns from the
kernel's start: medians over the iterations. Needs a build with -DNCCL_EP_LAB=ON. csrc/cuda/*.cuh say what a phase
is, where they stamp it."""
_NO_STAMPS = "this build has no time line: configure it with -DNCCL_EP_LAB=ON"
_FROM_OPTIONS = ("ranks", "tokens", "hidden", "topk", "experts", "layout", "routing", "num_sms", "seed", "mode")
_WARM_UP = 5
_SECONDS = 15.0  # deadline of the operations


def parse(argv: list[str]) -> argparse.Namespace:
    """Exits where this build, or this machine, has no time line."""
    parser = common_parser("time-line", DESCRIPTION)
    add = parser.add_argument
    add("--mode", choices=tuple(KERNELS), default="ll", help="low latency or high throughput")
    add("--tokens", type=int, help="of a rank; default 128, ht 4096")
    add("--layout", choices=tuple(LAYOUTS), help="default expert_major, ht flat")
    add("--alignment", type=int, default=128, help="of experts in packed, ht; default 128")
    add("--num-sms", type=int, default=0, help="0: the library's choice")
    add(
        "--domain-size", type=int,
        help="ranks of an NVLink domain, default all: with fewer, the kernels of ht that cross domains",
    )  # fmt: skip
    add("--one-gpu", action="store_true", help="all ranks on one GPU, as threads: a launch has the blocks of all")
    options = parse_device(parser, argv)
    if options.device == "cpu":
        parser.error("kernels of GPUs alone have a time line, and torch finds no GPU, or this build serves none")
    if not is_rank() and not _C.time_line("ll_dispatch"):  # a rank asks when it has its GPU
        parser.error(_NO_STAMPS)
    is_ht = options.mode == "ht"
    options.layout = options.layout or ("flat" if is_ht else "expert_major")
    set_defaults(parser, options, {"tokens": 4096 if is_ht else 128, "iterations": 5 if options.quick else 20})
    if options.domain_size is not None:
        if options.domain_size < 1 or options.ranks % options.domain_size:
            parser.error(f"--domain-size {options.domain_size}: {options.ranks} ranks do not divide into such domains")
        if not is_ht and options.domain_size < options.ranks:
            parser.error("--domain-size: low latency's kernels that cross domains have no time line")
    return options


def take_time_lines(
    shape: Shape, buffer: Buffer, iterations: int, num_sms: int, align: Call, take: Callable[[str], Stamps]
) -> list[tuple[str, str, dict[str, Summary]]]:
    """Operation, kernel and its stamps; nothing but on rank 0. align: queues what makes all ranks go on together."""
    given = make_inputs(shape)[buffer.rank].to(buffer.device)
    kwargs: dict[str, Any] = {"buffer": buffer, "num_sms": num_sms, "quant": shape.quant, "scales": given.scales}
    kwargs |= shape.dispatch_kwargs()

    def run_dispatch() -> DispatchOutput:
        return dispatch(given.x, given.topk_idx, given.weights, **kwargs)

    out = run_dispatch()
    like = torch.zeros(*out.x.shape[:-1], shape.hidden, dtype=shape.payload.combined, device=buffer.device)
    rows = buffer.empty(like.shape, like.dtype).copy_(like) if shape.mode == "ht" else like
    how: dict[str, Any] = {"scales": given.scales, "quant": shape.quant, "num_sms": num_sms}
    calls: dict[str, Call] = {
        "dispatch": run_dispatch,
        "cached": partial(dispatch_cached, given.x, out.handle, **how),
        "combine": partial(combine, rows, out.handle, num_sms=num_sms),
    }
    found = []
    for op, kernels in KERNELS[shape.mode].items():
        call = calls[op]
        taken: dict[str, list[Stamps]] = {kernel: [] for kernel in kernels}
        for number in range(_WARM_UP + iterations):
            align()
            call()
            if buffer.device.type == "cuda":
                torch.cuda.synchronize()
            buffer.check()
            for kernel in taken if buffer.rank == 0 else ():
                stamps = take(kernel)  # also clears them
                if number >= _WARM_UP:
                    taken[kernel].append(stamps)
        found += [(op, kernel, over_calls(each)) for kernel, each in taken.items() if each]
    return found


def measure(options: argparse.Namespace, dtype: str, device: torch.device, group: Any, align: Call) -> list[Record]:
    """On every rank, together; rank 0 has the records, whose value is the median warp's time."""
    is_ht = options.mode == "ht"
    shape = Shape(
        options.ranks, options.tokens, options.hidden, options.topk, options.experts, dtype, options.layout,
        options.routing, options.seed, options.mode, options.alignment if is_ht and options.layout == "packed" else 1,
    )  # fmt: skip
    arena_bytes = None
    if is_ht:
        shape = fitted(shape, make_inputs(shape))
        arena_bytes = arena_bytes_for(shape, device)
    with make_buffer(shape, device, _SECONDS, arena_bytes, group, options.domain_size) as buffer:
        found = take_time_lines(shape, buffer, options.iterations, options.num_sms, align, _C.time_line)
    common = {
        "bench": "time_line", "system": "nccl_ep", "api": "native", "figure": "time_line", "unit": "ns",
        **{name: getattr(options, name) for name in _FROM_OPTIONS}, "dtype": dtype, "alignment": shape.alignment,
        "device": torch.cuda.get_device_name(device), "revision": records.revision(), "date": records.today(),
    }  # fmt: skip
    if options.domain_size is not None:
        common["domain_size"] = options.domain_size
    return [
        records.make(common, op=op, kernel=kernel, stamp=stamp, first=first, value=middle, last=last)
        for op, kernel, stamps in found
        for stamp, (first, middle, last) in stamps.items()
    ]


def main(argv: list[str]) -> int:
    options = parse(argv)
    if is_rank():
        return _run_rank(options)
    if not options.one_gpu:
        return run_on_ranks(["time-line", *argv], options, render)
    found = [record for dtype in options.dtype for record in _on_one_gpu(options, dtype)]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        records.save(options.json, found)
    print(render(found), flush=True)
    return 0


def _on_one_gpu(options: argparse.Namespace, dtype: str) -> list[Record]:
    def body(group: ThreadGroup) -> list[Record]:
        torch.cuda.set_device(0)
        return measure(options, dtype, torch.device("cuda", 0), group, lambda: None)  # they start in one launch

    return run_ranks(options.ranks, body)[0]


def _run_rank(options: argparse.Namespace) -> int:
    world = World(options.device)
    found: list[Record] = []
    try:
        if not _C.time_line("ll_dispatch"):
            raise SystemExit(_NO_STAMPS)
        for dtype in options.dtype:
            found += measure(options, dtype, world.device, None, world.align)
            if world.rank == 0 and options.json is not None:
                records.save(options.json, found)
    finally:
        world.close()
    return 0
