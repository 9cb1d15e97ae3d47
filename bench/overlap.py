"""``python -m bench overlap``: what an operation and a GEMM cost one another, for overlap of two batches.

Fused: operations in a row on a few SMs, GEMMs in a row on the others, at the same time. Together: an operation on a few
SMs and the experts' GEMMs, until both have ended. Staged: a split call, send, GEMM, receive in one stream (high
throughput has no split calls: the operation runs on the buffer's own stream, concurrently with the GEMM). CPU ranks run
the same code with threads for streams: their figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from nccl_ep import Buffer, combine_send, dispatch_send
from nccl_ep.handle import LAYOUTS

from . import beside, records
from .lanes import Lanes, SplitTimer, make_lanes
from .operations import Call, native_operations
from .options import common_parser, ints, parse_device, set_defaults, words
from .records import Record
from .workload import Checked, Shape, arena_bytes_for, fitted, make_buffer, make_inputs
from .world import BenchError, Skipped, World, is_rank, run_on_ranks

OPS = ("dispatch", "combine")
_BUFFER_SECONDS = 15.0
_SPIN_CYCLES = 80_000  # some 40 us
_LONGER = 1.5  # the other lane is given work for so much longer than the one that is timed, and
_TRIES = 5  # twice as much each time that it was not enough, since both are slower together
DESCRIPTION = """An operation and a GEMM at the same time: what each takes, alone and together. Targets: the GEMM within
5 % of its share of SMs (share <= 1.05), the operation at most 1.1 times as long as alone on as many SMs (slowdown <=
1.1). The slowdown of "spin", which waits for a number of cycles of its SM, is that of the clock under the GEMM's
power."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common_parser("overlap", DESCRIPTION)
    add = parser.add_argument
    add("--mode", choices=("ll", "ht"), default="ll", help="low latency or high throughput")
    add("--tokens", type=int, help="of a rank; default 128, ht 4096 (CPU: 8)")
    add("--layout", choices=tuple(LAYOUTS), help="default expert_major, ht flat")
    add("--alignment", type=int, default=128, help="of experts in packed, ht; default 128")
    add("--num-sms", type=ints, help="of the operation, list; default what leaves multiples of 8 SMs: 12,20,36")
    partitions = ("green", "carveout", "none")
    add("--partition", type=words(*partitions), default=[*partitions],
        help="list; GEMMs: green, in a green context of the SMs that are left; carveout, laid out for so many; "
        "none, as if alone")  # fmt: skip
    add(
        "--gemm",
        type=ints,
        metavar="M,N,K",
        help="bf16; default 16384,8192,4096, LL staged with M / 16 (CPU: 128,128,64)",
    )
    options = parse_device(parser, argv)
    is_cuda = options.device == "cuda"
    is_ht = options.mode == "ht"
    options.layout = options.layout or ("flat" if is_ht else "expert_major")
    tokens = 4096 if is_ht else 128
    defaults = {"tokens": tokens, "num_sms": [12, 20, 36], "gemm": [16384, 8192, 4096], "iterations": 15}
    if options.quick:
        defaults |= {"num_sms": [20], "iterations": 5}
    if not is_cuda:
        defaults |= {"tokens": 8, "num_sms": [0], "gemm": [128, 128, 64], "iterations": 3}
        options.partition = ["none"]
    set_defaults(parser, options, defaults)
    if len(options.gemm) != 3 or min(options.gemm) < 1:
        parser.error(f"--gemm {','.join(map(str, options.gemm))}: must be M,N,K")
    if is_cuda and (wrong := [n for n in options.num_sms if n < 1]):
        parser.error(f"--num-sms {wrong[0]}: must be 1 or more")
    return options


def gemm_call(sizes: Sequence[int], device: torch.device) -> Call:
    m, n, k = sizes
    a, b = (torch.randn(*size, device=device).to(torch.bfloat16) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return partial(torch.mm, a, b, out=out)


def spin_call(device: torch.device) -> Call:
    if device.type == "cuda":
        return partial(torch.cuda._sleep, _SPIN_CYCLES)
    return lambda: sum(range(10_000))


def over_share(beside: float, alone: float, all_sms: int, taken_sms: int) -> float:
    """A GEMM's time beside an operation on so many SMs, over what it would take on the others alone, without loss."""
    return beside / (alone * all_sms / (all_sms - taken_sms))


class Overlap:
    """Measures one shape. All ranks call everything here together. ``note`` takes each record, on every rank."""

    def __init__(self, world: World, options: argparse.Namespace, dtype: str, note: Callable[[Record], None]) -> None:
        self.world, self.options, self._note = world, options, note
        self.shape = Shape(
            options.ranks, options.tokens, options.hidden, options.topk, options.experts, dtype, options.layout,
            options.routing, options.seed, options.mode,
            options.alignment if options.mode == "ht" and options.layout == "packed" else 1,
        )  # fmt: skip
        self.chain = 10 if world.is_cuda else 2
        self.failures: list[str] = []
        self._common: Record = {
            "bench": "overlap", "api": "native", "ranks": options.ranks, "tokens": options.tokens,
            "hidden": options.hidden, "topk": options.topk, "experts": options.experts, "dtype": dtype,
            "layout": options.layout, "routing": options.routing, "num_sms": 0, "seed": options.seed,
            "device": world.device_name(), "revision": records.revision(), "date": records.today(),
            "mode": options.mode, "gemm": "x".join(map(str, options.gemm)),
        }  # fmt: skip

    def run(self) -> None:
        """Raises BenchError when results are wrong, or nothing can follow."""
        world, options = self.world, self.options
        inputs = world.together(lambda: make_inputs(self.shape))
        given = inputs[world.rank].to(world.device)
        arena_bytes = None
        if options.mode == "ht":
            self.shape = world.together(lambda: fitted(self.shape, inputs))
            arena_bytes = arena_bytes_for(self.shape, world.device)
        shape = self.shape
        buffer = world.together(lambda: make_buffer(shape, world.device, world.patience(_BUFFER_SECONDS), arena_bytes))
        try:
            checked = world.together(lambda: Checked(shape, world.rank, inputs, buffer))
            gemm = world.together(lambda: gemm_call(options.gemm, world.device))
            # Of an operation's own length, more or less.
            rows = options.gemm[0] if options.mode == "ht" else -(-options.gemm[0] // 16)
            between = world.together(lambda: gemm_call([rows, *options.gemm[1:]], world.device))
            experts = world.together(lambda: beside.experts_call(shape, world.device))
            for num_sms in options.num_sms:
                make = partial(native_operations, shape, buffer, given, checked, num_sms)
                operations = world.together(make)
                for op in OPS:
                    for partition in options.partition:
                        self._measure_fused(op, operations.in_graph(op), gemm, num_sms, partition)
                    self._measure_together(op, operations.in_graph(op), experts, num_sms)
                self._measure_fused("spin", spin_call(world.device), gemm, num_sms, options.partition[0])
            whole = world.together(partial(native_operations, shape, buffer, given, checked, 0))
            for op in OPS:
                self._measure_split(op, whole.in_graph(op), self._sender(op, buffer, given, checked), between)
            world.together(buffer.check)
        finally:
            buffer.destroy()

    def _sender(self, op: str, buffer: Buffer, given: Any, checked: Checked) -> Callable[[], Any]:
        """High throughput has no split calls: it runs on the buffer's own stream, on the SMs that GEMMs leave it."""
        shape = self.shape
        how: dict[str, Any] = {}
        if shape.mode == "ht":
            how = {"async_finish": True, "num_sms": self.options.num_sms[0]}
        if op == "combine":
            return lambda: combine_send(checked.rows, checked.out.handle, **how)
        return lambda: dispatch_send(
            given.x, given.topk_idx, given.weights,
            buffer=buffer, quant=shape.quant, scales=given.scales, **shape.dispatch_kwargs(), **how,
        )  # fmt: skip

    # ---- Records

    def _record(self, **fields: Any) -> None:
        self._note(records.make(self._common, **fields))

    def _slowest(self, samples: list[float], **fields: Any) -> float:
        """A record of what all ranks sampled. Returns the slowest rank's median."""
        value, p99 = records.slowest(self.world.agree(lambda: samples))
        self._record(value=value, p99=p99, **fields)
        return value

    def _guarded(self, body: Callable[[], None], **fields: Any) -> None:
        """``body`` agrees with the other ranks at every step; what keeps it from running becomes the record."""
        try:
            body()
        except (Skipped, BenchError) as reason:
            self._record(value=None, skipped=str(reason), **fields)
            if isinstance(reason, BenchError):
                self.failures.append(f"{fields['op']} {fields['figure']}: {reason}")
                self.world.together(self.world.synchronize)

    # ---- At the same time, in two lanes

    def _measure_fused(self, op: str, call: Call, gemm: Call, num_sms: int, partition: str) -> None:
        fields = {"op": op, "num_sms": num_sms, "partition": partition}
        body = partial(self._fused, call, gemm, num_sms, partition, fields)
        self._guarded(body, system="nccl_ep", figure="overlapped", **fields)

    def _fused(self, call: Call, gemm: Call, num_sms: int, partition: str, fields: dict[str, Any]) -> None:
        world, iterations = self.world, self.options.iterations
        lanes: Lanes = world.together(lambda: make_lanes(world, call, gemm, self.chain, num_sms, partition))

        def sample(ops: int, gemms: int) -> list[tuple[float, float]]:
            return world.together(lambda: [lanes.run(ops, gemms) for _ in range(iterations + 1)][1:])

        def run(ops: int, gemms: int, system: str, figure: str) -> float:
            samples = [pair[0 if system == "nccl_ep" else 1] for pair in sample(ops, gemms)]
            return self._slowest(samples, system=system, figure=figure, **fields)

        def run_on_comm_stream(chains: int, gemms: int, system: str) -> float:
            """The timed lane's figure, of samples in which the other one was busy until it was done.

            CPU ranks share cores with whatever else runs there, and their figures mean nothing: the last try counts.
            """
            timed = 0 if system == "nccl_ep" else 1
            tries = _TRIES if world.is_cuda else 2
            for number in range(tries):
                samples = sample(chains, gemms)
                took = [median(pair[lane] for pair in samples) * (chains * self.chain, gemms)[lane] for lane in (0, 1)]
                lasts = all(world.agree(lambda took=took: took[1 - timed] >= took[timed]))  # type: ignore[misc]
                if lasts or (number + 1 == tries and not world.is_cuda):
                    mine = [pair[timed] for pair in samples]
                    return self._slowest(mine, system=system, figure="overlapped", **fields)
                chains, gemms = (chains, 2 * gemms) if timed == 0 else (2 * chains, gemms)
            raise Skipped(f"{gemms} GEMMs and {chains} chains did not last alike: {took[0]:.0f} and {took[1]:.0f} us")

        op_alone = run(4, 0, "nccl_ep", "alone")
        on_rest = run(0, 4, "gemm", "alone_on_rest")
        world.together(lambda: lanes.widen(True))
        gemm_alone = run(0, 4, "gemm", "alone")
        world.together(lambda: lanes.widen(False))
        chain_us = op_alone * self.chain
        op_overlapped = run_on_comm_stream(4, math.ceil(_LONGER * 4 * chain_us / on_rest) + 1, "nccl_ep")
        gemm_overlapped = run_on_comm_stream(math.ceil(_LONGER * 2 * on_rest / chain_us) + 1, 2, "gemm")
        ratio = {"unit": "x", **fields}
        self._record(system="nccl_ep", figure="slowdown", value=round(op_overlapped / op_alone, 3), **ratio)
        if lanes.num_sms:  # those of the device
            share = over_share(gemm_overlapped, gemm_alone, lanes.num_sms, num_sms)
            self._record(system="gemm", figure="share", value=round(share, 3), **ratio)

    # ---- One operation and the experts' GEMMs, begun together

    def _measure_together(self, op: str, call: Call, experts: Call, num_sms: int) -> None:
        fields = {"op": op, "num_sms": num_sms}

        def run(timed: Call, system: str, figure: str) -> float:
            samples = self.world.together(lambda: beside.times(self.world, timed))
            return self._slowest(samples, system=system, figure=figure, **fields)

        def body() -> None:
            longer = max(run(call, "nccl_ep", "op"), run(experts, "gemm", "experts"))
            both = run(beside.together(self.world, call, experts), "nccl_ep", "both")
            self._record(system="nccl_ep", figure="of_longer", value=round(both / longer, 3), unit="x", **fields)

        self._guarded(body, system="nccl_ep", figure="both", **fields)

    # ---- One after the other, as split calls

    def _measure_split(self, op: str, whole: Call, send: Callable[[], Any], gemm: Call) -> None:
        def body() -> None:
            timer = SplitTimer(self.world, self.chain, self.options.iterations)

            def staged(between: Call | None) -> None:
                pending = send()
                if between is not None:
                    between()
                pending.receive()

            def run(call: Call, system: str, figure: str) -> list[float]:
                samples = self.world.together(lambda: timer.run(call))
                self._slowest(samples, system=system, op=op, figure=figure)
                return samples

            run(whole, "nccl_ep", "fused")
            run(lambda: staged(None), "nccl_ep", "halves")
            alone = run(gemm, "gemm", "between")
            total = run(lambda: staged(gemm), "nccl_ep", "staged")
            exposed = [value - median(alone) for value in total]
            self._slowest(exposed, system="nccl_ep", op=op, figure="exposed")

        self._guarded(body, system="nccl_ep", op=op, figure="staged")


# ---- Text

_FUSED = ("alone", "overlapped", "slowdown", "gemm alone", "gemm alone_on_rest", "gemm overlapped", "gemm share")
_TOGETHER = ("op", "gemm experts", "both", "of_longer")
_STAGED = ("fused", "halves", "gemm between", "staged", "exposed")


def render(found: Sequence[Record]) -> str:
    """Modes one after the other."""
    by_mode: dict[str, list[Record]] = {}
    for record in found:
        by_mode.setdefault(record.get("mode", "ll"), []).append(record)  # low latency's once had no such field
    return "\n".join(_render(mine, mode) for mode, mine in sorted(by_mode.items())) or "nothing was measured"


def _render(found: Sequence[Record], mode: str) -> str:
    lines: list[str] = []
    for title, figures in (
        ("at the same time (gemm share: time over that of all SMs, scaled to those that are left)", _FUSED),
        ("one and the experts' GEMMs, begun together (of_longer: both, over the longer one alone)", _TOGETHER),
        ("send, GEMM, receive in one stream (exposed: what the operation adds to the GEMM)", _STAGED),
    ):
        rows: dict[tuple[Any, ...], dict[str, str]] = {}
        for record in found:
            name = ("gemm " if record["system"] == "gemm" else "") + record["figure"]
            if name in figures and record["value"] is not None:
                key = (record["op"], record["dtype"], record["num_sms"], record.get("partition", ""))
                rows.setdefault(key, {})[name] = f"{record['value']:.2f}"
        if rows:
            table = [["op", "dtype", "num_sms", "partition", *figures]]
            table += [[*map(str, key), *(row.get(name, "-") for name in figures)] for key, row in rows.items()]
            lines += [title, *records.columns(table)]
    lines += [f"not measured: {r['op']} {r['figure']} {r.get('partition', '')}: {r['skipped']}"
              for r in found if "skipped" in r]  # fmt: skip
    first = found[0]
    head = (
        f"{mode}: {first['ranks']} ranks, {first['device']}; {first['tokens']} tokens, hidden {first['hidden']}, "
        f"top-{first['topk']} of {first['experts']} experts; GEMM {first['gemm']} bf16; us"
    )
    return "\n".join([head, *lines])


# ---- Ranks, and the process that starts them


def main(argv: list[str]) -> int:
    options = parse(argv)
    if is_rank():
        return _run_rank(options)
    return run_on_ranks(["overlap", *argv], options, render)


def _run_rank(options: argparse.Namespace) -> int:
    world = World(options.device)
    begin = time.monotonic()
    found: list[Record] = []
    failures: list[str] = []
    try:
        for dtype in options.dtype:
            if world.agree(lambda: time.monotonic() - begin > options.time_limit)[0]:
                failures.append(f"{dtype}: the time limit left no time for it")
                continue
            overlap = Overlap(world, options, dtype, found.append)
            try:
                overlap.run()
            except BenchError as error:
                failures.append(f"{dtype}: {error}")
            failures += [f"{dtype}: {failure}" for failure in overlap.failures]
            if world.rank == 0:
                print(f"[{time.monotonic() - begin:5.1f} s] {dtype}: {len(found)} records", file=sys.stderr)
                if options.json is not None:
                    records.save(options.json, found)
        if world.rank == 0:
            for failure in failures:
                print(json.dumps({"failed": failure}), file=sys.stderr)
    finally:
        world.close()
    return 1 if failures else 0
