"""``python -m bench rivals``: each system in processes of its own, one after the other; then one table, one picture."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nccl_ep.choices import Mode
from nccl_ep.doctor.ranks import Launcher

from .. import measure, records
from ..measure import Effort
from ..memory import taken_by
from ..operations import Operations
from ..options import common_parser, ints, output, parse_device, set_defaults, words
from ..records import Record
from ..workload import Shape, make_inputs
from ..world import GRACE_SECONDS, BenchError, Skipped, World, is_rank
from . import NAMES, picture, table
from .interface import Rival

DESCRIPTION = f"""What is installed of {", ".join(NAMES)}, held against the tokens that were sent, then measured.
A system is a module of bench.rivals, or one of your own, whose name has a dot."""
_MODES: tuple[Mode, ...] = ("ll", "ht")
_EAGER_TOKENS = (1, 128)  # of low latency
_FIGURES = ("graph", "kernel", "event", "queued", "memory_total")


def parse(argv: list[str]) -> argparse.Namespace:
    """Exits where there is no GPU and nobody asked for CPU ranks."""
    parser = common_parser("rivals", DESCRIPTION)
    add = parser.add_argument
    add("--systems", type=lambda text: text.split(","), default=list(NAMES), help="list")
    add("--tokens", type=ints, help="of a rank in LL, list; default 128,1,8,32")
    add("--ht-tokens", type=int, help="of a rank in HT; default 4096")
    add("--mode", type=words(*_MODES), default=list(_MODES), help="list of ll, ht")
    add(
        "--preload", action="append", default=[], metavar="SYSTEM=FILE",
        help="a library that a system's processes load first (LD_PRELOAD), such as a newer NCCL; may be repeated",
    )  # fmt: skip
    add(
        "--limit", action="append", default=[], metavar="SYSTEM=SECONDS",
        help="after so long a system's processes are ended, and what they have measured counts; may be repeated",
    )  # fmt: skip
    add("--figures", type=words(*_FIGURES), default=list(_FIGURES), help=f"list of {', '.join(_FIGURES)}")
    add("--picture", type=output, metavar="FILE", help="for the picture, PNG or SVG")
    parser.set_defaults(alignment=1, dtype=["bf16", "fp8", "given_fp8"])
    options = parse_device(parser, argv)
    if options.device == "cpu" and "--device" not in " ".join(argv):
        parser.error("the systems need GPUs, and there is none here. --device cpu tries those that can do without")
    is_cuda = options.device == "cuda"
    more: dict[str, Any] = {
        "tokens": ([128, 1] if options.quick else [128, 1, 8, 32]) if is_cuda else [8, 1],
        "ht_tokens": 4096 if is_cuda else 32,
        "iterations": (10 if options.quick else 50) if is_cuda else 3,
    }
    set_defaults(parser, options, more)
    for each in options.preload:
        system, _, file = each.partition("=")
        if system not in options.systems or not Path(file).is_file():
            parser.error(f"--preload {each}: must be one of --systems, and a file")
    for each in options.limit:
        system, _, seconds = each.partition("=")
        if system not in options.systems or not _seconds(seconds) > 0:
            parser.error(f"--limit {each}: must be one of --systems, and seconds")
    return options


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def module_of(system: str) -> Any:
    return importlib.import_module(system if "." in system else f"{__package__}.{system}")


def shapes(options: argparse.Namespace, module: Any) -> Iterator[Shape]:
    for mode in options.mode:
        for tokens in options.tokens if mode == "ll" else [options.ht_tokens]:
            for dtype in options.dtype:
                for layout in module.layouts(mode, dtype):
                    yield Shape(
                        options.ranks, tokens, options.hidden, options.topk, options.experts, dtype, layout,
                        options.routing, options.seed, mode,
                    )  # fmt: skip


# ---- A rank


class _Rank:
    def __init__(self, world: World, options: argparse.Namespace, system: str) -> None:
        self.world, self.options, self.system = world, options, system
        self.found: list[Record] = []

    def run(self) -> None:
        begin = time.monotonic()
        for shape in shapes(self.options, module_of(self.system)):
            late = self.world.agree(lambda: time.monotonic() - begin > self.options.time_limit)[0]
            self._shape(shape, "the time limit left no time for it" if late else "")
            if self.world.rank == 0:
                what = f"{self.system}, {shape.mode}, {shape.tokens} tokens, {shape.dtype}, {shape.layout}"
                print(f"[{time.monotonic() - begin:5.1f} s] {what}", file=sys.stderr, flush=True)
                records.save(self.options.json, self.found)

    def _shape(self, shape: Shape, reason: str) -> None:
        common: Record = _common(self.options, self.system, shape, self.world.device_name())
        try:
            if reason:
                raise Skipped(reason)
            inputs = self.world.together(lambda: [each.to(self.world.device) for each in make_inputs(shape)])
            rival, lost = taken_by(lambda: self.world.together(lambda: self._made(shape, inputs)), self.world.device)
            self.world.together(rival.check)
        except (Skipped, BenchError) as error:
            self._note(common, op="pair", figure="graph" if self.world.is_cuda else "event", value=None,
                       skipped=str(error))  # fmt: skip
            return
        common |= {"version": rival.version} | ({"note": rival.note} if rival.note else {})
        if lost > 0 and "memory_total" in self.options.figures:
            self._note(common, op="pair", figure="memory_total", value=round(lost / 1e6, 1), unit="MB")
        self._measure(rival, shape, common)
        self.world.together(rival.close)

    def _made(self, shape: Shape, inputs: Any) -> Rival:
        try:
            rival: Rival = module_of(self.system).make(self.world, shape, inputs)
        except (ImportError, OSError) as error:
            raise Skipped(f"absent: {str(error).splitlines()[0]}") from error
        return rival

    def _measure(self, rival: Rival, shape: Shape, common: Record) -> None:
        quick = self.options.quick or not self.world.is_cuda
        warm_up, chain = (3, 10) if quick else (10, 40)
        effort = Effort(warm_up, self.options.iterations, min(chain, 10) if shape.tokens > 512 else chain, 0)
        for number, (api, way) in enumerate(rival.ways.items()):
            fields = common | {"api": api}
            if number == 0:
                self._on_device(rival, way, effort, fields)
            if shape.mode == "ht" or shape.tokens in _EAGER_TOKENS or not self.world.is_cuda:
                for figure, times in (("event", measure.event_times), ("queued", measure.queued_times)):
                    if figure not in self.options.figures:
                        continue
                    self._timed(lambda t=times, w=way: t(self.world, w.get("pair"), effort), fields, "pair", figure)

    def _on_device(self, rival: Rival, way: Operations, effort: Effort, fields: Record) -> None:
        if not self.world.is_cuda:
            return
        if rival.captures and "graph" in self.options.figures:
            for op in way.calls:
                call = way.in_graph(op)
                self._timed(lambda c=call: measure.graph_times(self.world, c, effort), fields, op, "graph")
        if not rival.kernels or "kernel" not in self.options.figures:
            return
        try:
            found = self.world.together(
                lambda: measure.kernel_times(self.world, way.get("pair"), effort, rival.kernels)
            )
        except (Skipped, BenchError) as error:
            self._note(fields, op="pair", figure="kernel", value=None, skipped=str(error))
            return
        for op, times in found.items():
            self._timed(lambda t=times: t, fields, op, "kernel")

    def _timed(self, sample: Any, fields: Record, op: str, figure: str) -> None:
        """A failure of one figure is not that of the others."""
        more = {"cached": True} if op == "cached" else {}
        named: Record = {"op": "dispatch" if op == "cached" else op, "figure": figure, **more}
        try:
            value, p99 = records.slowest(self.world.agree(sample))
        except (Skipped, BenchError) as error:
            self._note(fields, value=None, skipped=str(error), **named)
            return
        self._note(fields, value=value, p99=p99, **named)

    def _note(self, common: Record, **fields: Any) -> None:
        self.found.append(records.make(common, **fields))


def _common(options: argparse.Namespace, system: str, shape: Shape, device: str) -> Record:
    return {
        "bench": shape.mode, "system": system, "api": None, "ranks": shape.num_ranks, "tokens": shape.tokens,
        "hidden": shape.hidden, "topk": shape.topk, "experts": shape.num_experts, "dtype": shape.dtype,
        "layout": shape.layout, "routing": shape.routing, "num_sms": 0, "seed": shape.seed, "device": device,
        "revision": records.revision(), "date": records.today(),
    }  # fmt: skip


# ---- The process that starts them


def main(argv: list[str]) -> int:
    options = parse(argv)
    if is_rank():
        return _run_rank(options)
    found: list[Record] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for system in options.systems:
            mine = _of_system(options, argv, system, Path(folder) / f"{system}.json", begin)
            found += mine
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                records.save(options.json, found)
    print("\n".join(table.render(found)), flush=True)
    if options.picture is not None:
        picture.draw(found, options.picture)
    ours = [each for each in found if each["system"] == "nccl_ep"]
    return 1 if any(each["value"] is None for each in ours) or ("nccl_ep" in options.systems and not ours) else 0


def _of_system(options: argparse.Namespace, argv: list[str], system: str, path: Path, begin: float) -> list[Record]:
    """Its records; of one that cannot run, one that says why."""
    try:
        module = module_of(system)
    except ImportError as error:
        return [_absent(options, system, f"no such system: {error}")]
    if options.device == "cpu" and not module.ON_CPU:
        return [_absent(options, system, "needs GPUs")]
    records.save(path, [])
    left = options.time_limit - (time.monotonic() - begin)
    own = _seconds(dict(each.split("=", 1) for each in options.limit).get(system, "inf"))
    settings = dict(each.split("=", 1) for each in options.preload).get(system)
    environment = {"LD_PRELOAD": ":".join(filter(None, [settings, os.environ.get("LD_PRELOAD")]))} if settings else {}
    more = ["--systems", system, "--json", str(path), "--time-limit", str(left)]
    reason = "the time limit left no time for it"
    if left > 0:
        command = ["rivals", *_of_ranks(argv), "--device", options.device, *more]
        deadline = time.monotonic() + min(left + GRACE_SECONDS, own)
        reason = Launcher(options.ranks).run("bench", command, environment, deadline)
    found = records.load([path])
    if reason:
        print(f"{system}: {reason}", file=sys.stderr, flush=True)
        found.append(_absent(options, system, reason))
    return found


def _of_ranks(argv: list[str]) -> list[str]:
    """Without preloads and limits, which are of the process that starts ranks."""
    mine = ("--preload", "--limit")
    kept, skip = [], False
    for each in argv:
        if not skip and not each.startswith(mine):
            kept.append(each)
        skip = each in mine
    return kept


def _absent(options: argparse.Namespace, system: str, reason: str) -> Record:
    shape = Shape(
        options.ranks, options.tokens[0], options.hidden, options.topk, options.experts, options.dtype[0], "packed",
        options.routing, options.seed,
    )  # fmt: skip
    common = _common(options, system, shape, options.device)
    return records.make(common, op="pair", figure="event", value=None, skipped=reason)


def _run_rank(options: argparse.Namespace) -> int:
    world = World(options.device)
    try:
        _Rank(world, options, options.systems[0]).run()
    finally:
        world.close()
    sys.stdout.flush()
    os._exit(0)  # what other libraries do at the end of a process is none of what was measured
