"""Times of a layer whose experts begin while rows come, forward and backward, beside its parts and the same kernels one
behind the other.

    torchrun --nproc-per-node 2 -m examples.overlapped_moe.measure --json layer.json --variants plain,sorts+group+tma \\
        --others flashinfer,deepep_v1,nccl_ep_nvidia,flashinfer_fused,liger_fused --trace time_line

Checks that both ways give the same bits, and that they are close to torch's. Milliseconds: the median over repetitions
of the slowest rank's. --graphs measures the forward passes as replays of CUDA graphs, too: a call from Python has to
launch the GEMM behind the dispatch, and what the host takes for that no overlap hides. --compiled measures the forward
pass of high throughput by torch.compile, too. --others adds the layer over the
calls of other libraries and by fused kernels (others.py), and one table has all of it. --trace writes time lines of a
forward and a backward pass: for Perfetto, and as a picture (time_line.py). A variant is "plain", or some of these with
"+" between them:

    sorts, signals   as MoeLayer has them
    group            four blocks share the columns of the weights that are read
    tma              weights come by TMA
    stages3          pipelines of three stages, not four
    fp8              rows and experts in e4m3, blocks of 128 rows; forward alone
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import nccl_ep
from examples.overlapped_moe import by_torch, others, table, time_line
from examples.overlapped_moe.compiled import Forward, compiled_forward
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.inputs import Inputs, Shape
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.measure_backward import BackwardPass, gradients_by_torch
from examples.overlapped_moe.timing import captured, timed
from nccl_ep.triton import rows_of, wait_rows

TIMEOUT_NS = 10_000_000_000
VARIANTS = ("sorts", "signals", "group", "tma", "stages3", "fp8")
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@triton.jit
def note_time(times):
    tl.store(times, globaltimer().to(tl.int64))


@triton.jit
def note_arrivals(state, times, blocks, timeout_ns):
    """times[1 + place]: when the block at that place of the order came; 0: it has no rows."""
    place = tl.program_id(0)
    block = wait_rows(state, blocks, place, timeout_ns)
    now = globaltimer().to(tl.int64)
    rows = rows_of(state, blocks, tl.maximum(block, 0))
    if (block >= 0) & (rows > 0):
        tl.store(times + 1 + place, now)


def names_of(variant: str) -> list[str]:
    names = [] if variant == "plain" else variant.split("+")
    if unknown := set(names) - set(VARIANTS):
        raise SystemExit(f"{variant}: {unknown} is none of {VARIANTS}")
    return names


def how_of(variant: str) -> dict[str, Any]:
    """Of ``gemm.GroupedGemms``."""
    names = names_of(variant)
    return {"group": 4 if "group" in names else 1, "tma": "tma" in names, "stages": 3 if "stages3" in names else 4}


class Point:
    """One shape: inputs, buffer, experts, and what is timed."""

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        mode: Any = shape.mode
        hidden, tokens = shape.hidden, shape.tokens
        self.args, self.hidden, self.tokens, self.mode = args, hidden, tokens, mode
        self.block, self.num_sms = shape.block, shape.num_sms
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.local = args.experts // ranks
        self.rows = shape.capacity(ranks)
        self.buffer = nccl_ep.Buffer.for_shapes(
            dist.group.WORLD, max_tokens=tokens, hidden=hidden, topk=args.topk, num_experts=args.experts, mode=mode,
            timeout=20.0, late_weights=mode == "ll",
            **({"arena_bytes": 4 * self.rows * hidden * 2} if mode == "ht" else {}),
        )  # fmt: skip
        self.inputs = Inputs.random(shape, rank, "cuda")
        self.x, self.ids, self.weights = self.inputs.x, self.inputs.ids, self.inputs.weights
        self.experts = Experts.random(self.local, hidden, args.inner, "cuda", seed=rank)
        self.use("plain")
        out = self.dispatch(0)
        assert int(out.overflow) == 0
        self.by_torch = nccl_ep.combine(self.torch_gemms(out, self.experts), out.handle)
        self.gradient = torch.randn(tokens, hidden, generator=self.inputs.draw, device="cuda", dtype=torch.bfloat16)

    def use(self, variant: str) -> None:
        names, how = names_of(variant), how_of(variant)
        self.is_fp8 = "fp8" in names
        self.layer = MoeLayer(
            self.buffer, self.experts.in_fp8() if self.is_fp8 else self.experts, num_experts=self.args.experts,
            max_tokens=self.tokens, topk=self.args.topk, mode=self.mode, num_sms=self.num_sms,
            rows_per_block=self.block, capacity=self.rows if self.mode == "ht" else None, sorts="sorts" in names,
            signals="signals" in names or self.mode == "ll", how=how,
        )  # fmt: skip

    def sent(self) -> tuple[torch.Tensor, ...]:
        """x, ids, weights and the gradient in the order in which the layer's tokens go."""
        given = self.x, self.ids, self.weights, self.gradient
        if not self.layer.sorts:
            return given
        order = (self.ids % self.local).amin(1).argsort()
        return tuple(each[order] for each in given)

    def run(self, overlaps: bool) -> torch.Tensor:
        return self.layer(self.x, self.ids, self.weights, overlaps=overlaps)

    def dispatch(self, num_sms: int) -> nccl_ep.DispatchOutput:
        return self.layer.send(self.x, self.ids, self.weights, num_sms).receive()

    def communicate(self) -> None:
        out = self.dispatch(0)
        rows = out.x if out.scales is None else torch.empty(out.x.shape, dtype=torch.bfloat16, device="cuda")
        nccl_ep.combine(rows, out.handle, weights="dispatch" if self.mode == "ht" else self.weights)

    def multiply(self, out: nccl_ep.DispatchOutput) -> None:
        gemms = self.layer.forward_gemms(out)
        gemms.first(gemms.num_sms)
        gemms.second(gemms.num_sms)

    def torch_gemms(self, out: nccl_ep.DispatchOutput, experts: Experts) -> torch.Tensor:
        """expert_major rows: the same products by a batched GEMM."""
        if out.offsets is None:
            return by_torch.batched(out.x, experts)
        return by_torch.grouped(out.x, out.offsets[1:].contiguous(), experts)

    def one_behind_by_torch(self) -> torch.Tensor:
        """This library's calls and torch's GEMMs, one step behind the other."""
        out = self.dispatch(0)
        rows = self.torch_gemms(out, self.experts)
        return nccl_ep.combine(rows, out.handle, weights="dispatch" if self.mode == "ht" else self.weights)

    def arrival_times(self) -> list[float]:
        """Microseconds from the call of a dispatch on few SMs until these shares of the blocks have come."""
        layer, found = self.layer, []
        blocks, (x, ids, weights, _) = layer.blocks, self.sent()
        for _ in range(5):
            times = torch.zeros(1 + blocks, dtype=torch.int64, device="cuda")
            dist.barrier()
            torch.cuda.synchronize()
            note_time[(1,)](times)
            pending = layer.send(x, ids, weights, self.num_sms)
            pending.early_output  # noqa: B018
            note_arrivals[(blocks,)](layer.arrivals.state, times, layer.arrivals.blocks, TIMEOUT_NS, num_warps=1)
            pending.receive()
            came = times[1:]
            found.append((came[came > 0] - times[0]).double().quantile(torch.tensor(SHARES, device="cuda").double()))
        return [each / 1e3 for each in torch.stack(found).median(0).values.tolist()]

    def measure(self, variant: str) -> dict[str, Any]:
        self.use(variant)
        repetitions = self.args.repetitions
        one_behind, overlapped = self.run(False), self.run(True)
        replayed = [self.run(True) for _ in range(5)]
        error = ((one_behind - self.by_torch).float().abs().max() / self.by_torch.float().abs().max()).item()
        same = all(torch.equal(one_behind, each) for each in [overlapped, *replayed])
        found: dict[str, Any] = {
            "hidden": self.hidden, "tokens": self.tokens, "mode": self.mode, "num_sms": self.num_sms,
            "rows_per_block": self.block, "variant": variant, "same_bits": same, "relative_error_to_torch": error,
            "failed": self.layer.arrivals.has_failed(), "most_error": 0.1 if self.is_fp8 else 0.02,
        }  # fmt: skip
        found["overlapped_ms"] = timed(lambda: self.run(True), repetitions)
        found["one_behind_ms"] = timed(lambda: self.run(False), repetitions)
        found["communication_ms"] = timed(self.communicate, repetitions)
        found["dispatch_ms"] = timed(lambda: self.dispatch(0), repetitions)
        found["dispatch_on_few_sms_ms"] = timed(lambda: self.dispatch(self.num_sms), repetitions)
        if self.mode == "ht":
            found["arrived_us"] = dict(zip(map(str, SHARES), self.arrival_times(), strict=True))
        out = self.dispatch(0)
        found["gemms_ms"] = timed(lambda: self.multiply(out), repetitions)
        found["of_one_behind"] = found["overlapped_ms"] / found["one_behind_ms"]
        found["of_longer"] = found["overlapped_ms"] / max(found["communication_ms"], found["gemms_ms"])
        if not self.is_fp8:
            x, ids, weights, gradient = self.sent()
            wanted = gradients_by_torch(self.layer, x, ids, weights, gradient, self.torch_gemms)
            found |= BackwardPass(self.layer, x, ids, weights, gradient).measure(wanted, repetitions)
        if self.args.graphs:
            found |= self.measure_graphs(one_behind, out)
        if self.args.compiled and self.mode == "ht" and not (self.layer.sorts or self.layer.signals):
            found |= self.measure_compiled(one_behind)
        if self.args.trace:
            self.trace(variant)
        return found

    def measure_compiled(self, one_behind: torch.Tensor) -> dict[str, Any]:
        torch.compiler.reset()  # or sizes that change from layer to layer would be no constants, and the GEMM slower
        found: dict[str, Any] = {"compiled_same_bits": True}
        for name, overlaps in (("overlapped", True), ("one_behind", False)):
            forward = compiled_forward(self.layer, overlaps=overlaps)

            def call(forward: Forward = forward) -> torch.Tensor:
                return forward(self.x, self.ids, self.weights)

            same = all(torch.equal(call(), one_behind) for _ in range(3))
            found["compiled_same_bits"] = found["compiled_same_bits"] and same
            found[f"{name}_compiled_ms"] = timed(call, self.args.repetitions)
        return found

    def measure_graphs(self, one_behind: torch.Tensor, out: nccl_ep.DispatchOutput) -> dict[str, Any]:
        calls: dict[str, Callable[[], torch.Tensor | None]] = {
            "overlapped": lambda: self.run(True), "one_behind": lambda: self.run(False),
            "communication": self.communicate, "gemms": lambda: self.multiply(out),
        }  # fmt: skip
        found: dict[str, Any] = {"graph_same_bits": True}
        for name, call in calls.items():
            graph, made = captured(call)
            found[f"{name}_graph_ms"] = timed(graph.replay, self.args.repetitions)
            if made is not None:
                found["graph_same_bits"] = found["graph_same_bits"] and torch.equal(made, one_behind)
        longer = max(found["communication_graph_ms"], found["gemms_graph_ms"])
        found["graph_of_one_behind"] = found["overlapped_graph_ms"] / found["one_behind_graph_ms"]
        return found | {"graph_of_longer": found["overlapped_graph_ms"] / longer}

    def trace(self, variant: str) -> None:
        """A call of either way, and its backward pass. Every rank calls, and rank 0 writes: the traces, a picture, and
        a small trace of the kernels alone."""
        backward = None if self.is_fp8 else BackwardPass(self.layer, *self.sent())
        files: list[str] = []
        point = f"{self.args.trace}_{self.mode}_{self.hidden}_{self.tokens}_{variant}".replace("+", "_")
        activities = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        for name, overlaps in (("one_behind", False), ("overlapped", True)):
            with torch.profiler.profile(activities=activities) as profile:
                for is_shown in (False, False, True):  # the profiler takes its memory in the first
                    self.align()
                    with torch.profiler.record_function("forward" if is_shown else "warm-up"):
                        self.run(overlaps)
                    self.align()
                    if backward is not None:
                        with torch.profiler.record_function("backward" if is_shown else "warm-up"):
                            backward.run(overlaps)
                torch.cuda.synchronize()
            if dist.get_rank() == 0:
                files.append(f"{point}_{name}.json.gz")
                profile.export_chrome_trace(files[-1])
        if files:
            what = table.title_of((self.mode, self.hidden, self.tokens))
            try:
                time_line.make(files[0], files[1], f"{point}.svg", title=f"{what}: {variant}")
            except ValueError as error:
                print(f"no picture: {error}", flush=True)  # the times are worth more

    def align(self) -> None:
        dist.barrier()
        torch.cuda.synchronize()

    def measure_torch(self) -> dict[str, float]:
        out, repetitions = self.dispatch(0), self.args.repetitions
        layer = by_torch.layer(self.inputs, self.experts, self.args.experts)
        found = {
            "torch_gemms_ms": timed(lambda: self.torch_gemms(out, self.experts), repetitions),
            "one_behind_by_torch_ms": timed(self.one_behind_by_torch, repetitions),
            "torch_layer_ms": timed(layer, repetitions),
        }
        if self.args.graphs:
            graph, _ = captured(self.one_behind_by_torch)
            found["one_behind_by_torch_graph_ms"] = timed(graph.replay, repetitions)
        return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", default="layer.json")
    add(
        "--points", default="ht:4096:4096,ht:7168:4096,ht:7168:8192,ll:7168:128",
        help="mode:H:tokens of a rank, then rows of a block (128) and SMs of a dispatch beside a GEMM (16)",
    )  # fmt: skip
    add("--variants", default="plain", help="of each point, separated by commas")
    add("--graphs", action="store_true", help="times of replays of CUDA graphs, too")
    add("--compiled", action="store_true", help="times of compiled forward passes, too")
    add("--trace", help="files of time lines begin so")
    add("--inner", type=int, default=2048)
    add("--topk", type=int, default=8)
    add("--experts", type=int, default=256)
    add("--repetitions", type=int, default=10)
    add("--others", type=others.names, default=[], help=f"separated by commas, of {', '.join(others.NAMES)}")
    add("--only-others", action="store_true", help="nothing of this library")
    add(
        "--preload", action="append", default=[], metavar="SYSTEM=FILE",
        help="a library that the processes of one of --others load first, such as a newer NCCL; may be repeated",
    )  # fmt: skip
    add("--limit", type=float, default=240.0, help="seconds that each of --others has")
    args = parser.parse_args(argv)
    args.shapes = [Shape.parse(each, args.inner, args.topk, args.experts) for each in args.points.split(",")]
    args.preload = others.preloads(args.preload, args.others)
    for variant in args.variants.split(","):
        names_of(variant)
    return args


def measure_points(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Of this library and torch; whether all of it was right."""
    results, right = [], True
    for shape in args.shapes:
        point = Point(args, shape)
        torchs = point.measure_torch()
        for variant in args.variants.split(","):
            found = point.measure(variant) | torchs
            right = right and found["same_bits"] and not found["failed"]
            right = right and found["relative_error_to_torch"] < found["most_error"]
            right = right and all(found.get(f"{way}_same_bits", True) for way in ("backward", "graph", "compiled"))
            right = right and found.get("backward_relative_error_to_torch", 0.0) < found["most_error"]
            results.append(found)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
                save(args, results, [])
        point.buffer.destroy()
        del point
        torch.cuda.empty_cache()
    return results, right


def save(args: argparse.Namespace, points: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    results = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": int(os.environ["WORLD_SIZE"]),
        "topk": args.topk, "experts": args.experts, "points": points, "others": found,
    }  # fmt: skip
    with open(args.json, "w") as file:
        json.dump(results, file)


def others_argv(args: argparse.Namespace) -> list[str]:
    """Of others.py: the same points, and each way of the GEMM that a variant of BF16 has."""
    hows = {}
    for variant in args.variants.split(","):
        if "fp8" not in names_of(variant):
            ways = [each for each in names_of(variant) if each in ("group", "tma", "stages3")]
            hows["+".join(["triton", *ways])] = how_of(variant)
    argv = ["--points", args.points, "--hows", json.dumps(hows)]
    for name in ("inner", "topk", "experts", "repetitions"):
        argv += [f"--{name}", str(getattr(args, name))]
    return argv


def main(argv: list[str]) -> None:
    args = parse(argv)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    points: list[dict[str, Any]] = []
    right = True
    if not args.only_others:
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        points, right = measure_points(args)
        dist.destroy_process_group()
    if rank == 0:  # the GPUs are the others' now
        save(args, points, others.measure(ranks, args.others, args.preload, args.limit, others_argv(args)))
        with open(args.json) as file:
            print("\n".join(table.lines(json.load(file))), flush=True)
    if not right:
        raise SystemExit("the bits differ, or are far from torch's")


if __name__ == "__main__":
    main(sys.argv[1:])
