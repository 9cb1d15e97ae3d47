"""The same layer over the calls of other libraries, and by fused kernels, for measure.py --others: same tokens, same
experts, one step behind the other, with the faster of the GEMMs that there are. Each library runs in processes of its
own. A result that is far from torch's layer is not timed.

A library that gives rows by token leaves it to its caller to bring them into the order of experts and to weight and add
them behind the experts (order.py): that is part of its time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import rivals
from bench.rivals.interface import Received, Rival
from bench.workload import Given
from bench.workload import Shape as BenchShape
from bench.world import BenchError, Skipped, World
from examples.overlapped_moe import by_torch, fused, on_host
from examples.overlapped_moe.came import Came
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs, Shape
from examples.overlapped_moe.order import ExpertOrder
from examples.overlapped_moe.timing import timed
from nccl_ep.doctor.ranks import Launcher

EXCHANGES = tuple(each for each in rivals.NAMES if each not in ("nccl_ep", "torch_all_to_all"))
NAMES = (*EXCHANGES, *fused.KERNELS)
TIMEOUT = 30.0
Found = dict[str, Any]
Call = Callable[[], torch.Tensor]


# ---- The layer


class OtherLayer:
    """Dispatch by ``rival``, experts, its combine. capacity: rows that have room in the order of experts.

    how: of ``gemm.GroupedGemms``, or None: torch's GEMMs.
    """

    def __init__(
        self, rival: Rival, experts: Experts, capacity: int, block: int, how: dict[str, Any] | None
    ) -> None:  # fmt: skip
        self.rival, self.experts, self.block, self.how = rival, experts, block, how
        self.capacity = -(-capacity // block) * block

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        received = self.rival.receive()
        room = self.rival.room(received)
        if received.counts is not None:
            return self.rival.send_home(self.by_expert(received.rows, received.counts, room), received)
        assert received.ids is not None and received.weights is not None
        order = self.order(received)
        rows = self.packed(order.gather(received.rows), order)
        return self.rival.send_home(order.add(rows, received.weights, room), received)

    def order(self, received: Received) -> ExpertOrder:
        assert received.ids is not None
        return ExpertOrder(received.ids, len(self.experts.w2), self.capacity, self.block)

    def require_room(self) -> None:
        """AssertionError where rows were left out."""
        received = self.rival.receive()
        if received.ids is not None:
            most = int(self.order(received).ends[-1])
            assert most <= self.capacity, f"{most} rows came, and there is room for {self.capacity}"
        self.rival.send_home(self.rival.room(received), received)  # which some libraries want behind each dispatch

    def by_expert(self, rows: torch.Tensor, counts: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """rows [L, C, H] -> room, of the same shape."""
        if self.how is None:
            return by_torch.batched(rows, self.experts, room)
        return self.multiply(rows, Came.by_expert(counts, rows.shape[1], self.block), room)

    def packed(self, rows: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
        if self.how is None:
            return by_torch.grouped(rows, order.ends, self.experts)
        came = Came.packed(order.firsts, order.counts, self.capacity, self.block)
        return self.multiply(rows, came, torch.empty_like(rows))

    def multiply(self, rows: torch.Tensor, came: Came, out: torch.Tensor) -> torch.Tensor:
        """By the kernels of this layer, or what CPU ranks have for them."""
        if rows.device.type == "cpu":
            on_cpu = on_host.Forward(rows, self.experts, False, came.blocks)
            on_cpu.rows = out
            for block in came.await_blocks():
                on_cpu.block(block)
            return out
        from examples.overlapped_moe import on_gpu

        blocks: Any = came
        gemms = on_gpu.Forward(rows, None, self.experts, False, blocks, came.blocks, TIMEOUT, **(self.how or {}))
        gemms.rows = out
        gemms.first(gemms.num_sms)
        gemms.second(gemms.num_sms)
        return out


# ---- A rank


class _Rank:
    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self.world, self.args, self.device = world, args, world.device.type
        self.found: list[Found] = []

    def run(self) -> None:
        for shape in self.args.points:
            inputs = [Inputs.random(shape, rank, self.world.device) for rank in range(self.world.num_ranks)]
            local = shape.experts // self.world.num_ranks
            experts = Experts.random(local, shape.hidden, shape.inner, self.world.device, seed=self.world.rank)
            wanted = by_torch.layer(inputs[self.world.rank], experts, shape.experts)()
            for layout in self.layouts(shape):
                common = {
                    "system": self.args.system, "mode": shape.mode, "hidden": shape.hidden, "tokens": shape.tokens,
                    "layout": layout,
                }  # fmt: skip
                try:
                    self.measure(shape, layout, inputs, experts, wanted, common)
                except (Skipped, BenchError) as error:
                    self.note(common | {"skipped": str(error)})
            del inputs, experts, wanted
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def note(self, found: Found) -> None:
        self.found.append(found)
        if self.world.rank == 0:
            print(json.dumps(found), flush=True)
            Path(self.args.json).write_text(json.dumps(self.found))

    def layouts(self, shape: Shape) -> tuple[str, ...]:
        if self.args.system in fused.KERNELS:
            return ("fused",)
        layouts: tuple[str, ...] = module_of(self.args.system).layouts(shape.mode, "bf16")
        return layouts

    def measure(
        self, shape: Shape, layout: str, inputs: list[Inputs], experts: Experts, wanted: torch.Tensor, common: Found
    ) -> None:  # fmt: skip
        """Collective; what a rank raises, all raise."""
        world, rank = self.world, self.world.rank
        if layout == "fused":
            points = self.args.points
            largest = replace(shape, tokens=max(p.tokens for p in points), hidden=max(p.hidden for p in points))
            make = fused.KERNELS[self.args.system]
            kernel = world.together(lambda: installed(lambda: make(shape, largest, experts, inputs[rank])))
            self.time(kernel, wanted, common | {"version": kernel.version, "gemm": "its own"}, kernel.most_error)
            world.together(world.synchronize)
            world.together(kernel.close)
            return
        mode: Any = shape.mode
        given = [Given(each.x, each.ids, each.weights) for each in inputs]
        whole = BenchShape(
            world.num_ranks, shape.tokens, shape.hidden, shape.topk, shape.experts, "bf16", layout, "uniform", 1, mode
        )
        module = module_of(self.args.system)
        rival: Rival = world.together(lambda: installed(lambda: module.make(world, whole, given)))
        try:
            world.together(rival.check)
            for name, how in {"torch": None, **self.args.hows}.items():
                layer = OtherLayer(rival, experts, shape.capacity(world.num_ranks), shape.block, how)
                world.together(layer.require_room)
                self.time(layer, wanted, common | {"version": rival.version, "gemm": name})
        finally:
            world.together(rival.close)

    def time(self, call: Call, wanted: torch.Tensor, common: Found, most_error: float = fused.BF16_ERROR) -> None:
        errors = self.world.agree(lambda: distance(call(), wanted))
        if not max(errors) < most_error:
            self.note(common | {"skipped": f"it differs by {max(errors):.3g} from torch's layer"})
            return
        ms = self.world.together(lambda: timed(call, self.args.repetitions, self.device))
        self.note(common | {"relative_error_to_torch": max(errors), "layer_ms": ms})


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest value that is wanted."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))


def installed(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ImportError, OSError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise Skipped(f"absent: {str(error).splitlines()[0]}{cause}") from error


def module_of(system: str) -> Any:
    return importlib.import_module(system if "." in system else f"bench.rivals.{system}")


# ---- What starts the ranks


def names(text: str) -> list[str]:
    """For argparse: some of NAMES, or modules of one's own, whose names have a dot."""
    found = text.split(",")
    if wrong := [each for each in found if each not in NAMES and "." not in each]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(wrong)}: must be of {', '.join(NAMES)}, or a module like those of bench.rivals with a dot"
        )
    return found


def preloads(texts: list[str], systems: list[str]) -> dict[str, str]:
    """SYSTEM=FILE each: LD_PRELOAD by system. SystemExit, with what is wrong."""
    found: dict[str, list[str]] = {}
    for text in texts:
        system, _, file = text.partition("=")
        if system not in systems or not Path(file).is_file():
            raise SystemExit(f"--preload {text}: must be one of --others, and a file")
        found.setdefault(system, []).append(file)
    return {system: ":".join(files) for system, files in found.items()}


def measure(
    ranks: int, systems: list[str], preload: dict[str, str], seconds: float, argv: list[str], device: str = "cuda"
) -> list[Found]:  # fmt: skip
    """What was found, of all systems; of one that ended early also why. argv: of ``parse``, without what is below."""
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        for system in systems:
            if device == "cpu" and (system in fused.KERNELS or not module_of(system).ON_CPU):
                found.append({"system": system, "skipped": "needs GPUs"})
                continue
            path = Path(folder) / "found.json"
            path.write_text("[]")
            settings = {}
            if system in preload:
                settings["LD_PRELOAD"] = ":".join(filter(None, [preload[system], os.environ.get("LD_PRELOAD")]))
            more = ["--system", system, "--json", str(path), "--device", device]
            reason = Launcher(ranks).run(__name__, [*argv, *more], settings, time.monotonic() + seconds)
            found += json.loads(path.read_text())
            if reason:
                found.append({"system": system, "skipped": reason})
                print(f"{system}: {reason}", file=sys.stderr, flush=True)
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    """hows: by name, the JSON of keywords of ``gemm.GroupedGemms``."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--system", required=True)
    add("--points", required=True)
    add("--hows", type=json.loads, default={"triton": {}})
    add("--json", required=True)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ("inner", "topk", "experts", "repetitions"):
        add(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    args.points = [Shape.parse(each, args.inner, args.topk, args.experts) for each in args.points.split(",")]
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    world = World(args.device)
    try:
        _Rank(world, args).run()
    finally:
        world.close()
    sys.stdout.flush()
    os._exit(0)  # what other libraries do at the end of a process is none of what was measured


if __name__ == "__main__":
    main(sys.argv[1:])
