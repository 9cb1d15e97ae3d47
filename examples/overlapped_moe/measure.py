"""Times of a layer whose experts begin while rows come, forward and backward, beside its parts and the same kernels one
behind the other.

    torchrun --nproc-per-node 2 examples/overlapped_moe/measure.py --json layer.json --variants plain,sorts+group+tma

Checks that both ways give the same bits, and that they are close to torch's. Milliseconds: the median over repetitions
of the slowest rank's. --trace writes time lines of a forward and a backward pass for Perfetto. A variant is "plain", or
some of these with "+" between them:

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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import nccl_ep
from examples.moe_lm.baseline import AllToAll
from examples.moe_lm.experts import Experts as TorchExperts
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.layer import MoeLayer
from examples.overlapped_moe.measure_backward import BackwardPass, gradients_by_torch
from examples.overlapped_moe.timing import timed
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


class Point:
    """One shape: inputs, buffer, experts, and what is timed."""

    def __init__(self, args: argparse.Namespace, text: str) -> None:
        mode: Any
        mode, *sizes = text.split(":")
        hidden, tokens, block, num_sms = map(int, sizes + ["128", "16"][len(sizes) - 2 :])
        self.args, self.hidden, self.tokens, self.mode = args, hidden, tokens, mode
        self.block, self.num_sms = block, num_sms
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.local = args.experts // ranks
        self.rows = tokens * args.topk * 5 // 4 + self.local * block
        self.buffer = nccl_ep.Buffer.for_shapes(
            dist.group.WORLD, max_tokens=tokens, hidden=hidden, topk=args.topk, num_experts=args.experts, mode=mode,
            timeout=20.0, late_weights=mode == "ll",
            **({"arena_bytes": 4 * self.rows * hidden * 2} if mode == "ht" else {}),
        )  # fmt: skip
        draw = torch.Generator("cuda").manual_seed(100 + rank)
        self.x = torch.randn(tokens, hidden, generator=draw, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(tokens, args.experts, generator=draw, device="cuda")
        self.weights, self.ids = scores.softmax(-1).topk(args.topk)
        self.experts = Experts.random(self.local, hidden, args.inner, "cuda", seed=rank)
        self.use("plain")
        out = self.dispatch(0)
        assert int(out.overflow) == 0
        self.by_torch = nccl_ep.combine(self.torch_gemms(out, self.experts), out.handle)
        self.gradient = torch.randn(tokens, hidden, generator=draw, device="cuda", dtype=torch.bfloat16)

    def use(self, variant: str) -> None:
        names = [] if variant == "plain" else variant.split("+")
        if unknown := set(names) - set(VARIANTS):
            raise SystemExit(f"{variant}: {unknown} is none of {VARIANTS}")
        self.is_fp8 = "fp8" in names
        how = {"group": 4 if "group" in names else 1, "tma": "tma" in names, "stages": 3 if "stages3" in names else 4}
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
        """expert_major rows: the same products by a batched GEMM, which multiplies rows that do not exist, too."""
        w13, w2 = experts.w13.transpose(1, 2), experts.w2.transpose(1, 2)
        if out.offsets is None:
            gate, up = torch.bmm(out.x, w13).chunk(2, -1)
            return torch.bmm(torch.nn.functional.silu(gate) * up, w2)
        ends = out.offsets[1:].contiguous()
        gate, up = torch._grouped_mm(out.x, w13, offs=ends).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2, offs=ends)

    @torch.no_grad()
    def torch_layer(self) -> Callable[[], torch.Tensor]:
        """all_to_all_single and torch's grouped GEMMs."""
        with torch.device("meta"):
            experts = TorchExperts(self.local, self.hidden, self.args.inner)
        experts.grouped_mm = True
        experts.up = torch.nn.Parameter(self.experts.w13.transpose(1, 2), requires_grad=False)
        experts.down = torch.nn.Parameter(self.experts.w2.transpose(1, 2), requires_grad=False)
        exchange = AllToAll(dist.group.WORLD, self.args.experts)
        return lambda: exchange(self.x, self.ids, self.weights, experts)

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
        if self.args.trace:
            self.trace(variant)
        return found

    def trace(self, variant: str) -> None:
        """For Perfetto: a call of either way, and its backward pass. Every rank calls, and rank 0 writes."""
        backward = None if self.is_fp8 else BackwardPass(self.layer, *self.sent())
        activities = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        for name, overlaps in (("overlapped", True), ("one_behind", False)):
            dist.barrier()
            with torch.profiler.profile(activities=activities) as profile:
                with torch.profiler.record_function("forward"):
                    self.run(overlaps)
                if backward is not None:
                    with torch.profiler.record_function("backward"):
                        backward.run(overlaps)
                torch.cuda.synchronize()
            if dist.get_rank() == 0:
                point = f"{self.mode}_{self.hidden}_{self.tokens}_{variant}".replace("+", "_")
                profile.export_chrome_trace(f"{self.args.trace}_{point}_{name}.json.gz")

    def measure_torch(self) -> dict[str, float]:
        out, found = self.dispatch(0), {}
        found["torch_gemms_ms"] = timed(lambda: self.torch_gemms(out, self.experts), self.args.repetitions)
        if self.mode == "ht":
            found["torch_layer_ms"] = timed(self.torch_layer(), self.args.repetitions)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="layer.json")
    parser.add_argument(
        "--points", default="ht:4096:4096,ht:7168:4096,ht:7168:8192,ll:7168:128",
        help="mode:H:tokens of a rank, then rows of a block (128) and SMs of a dispatch beside a GEMM (16)",
    )  # fmt: skip
    parser.add_argument("--variants", default="plain", help="of each point, separated by commas")
    parser.add_argument("--trace", help="files of traces begin so")
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    results, right = [], True
    for text in args.points.split(","):
        point = Point(args, text)
        by_torch = point.measure_torch()
        for variant in args.variants.split(","):
            found = point.measure(variant) | by_torch
            right = right and found["same_bits"] and not found["failed"]
            right = right and found["relative_error_to_torch"] < found["most_error"]
            right = right and found.get("backward_same_bits", True)
            right = right and found.get("backward_relative_error_to_torch", 0.0) < found["most_error"]
            results.append(found)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
                with open(args.json, "w") as file:
                    json.dump(
                        {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "points": results}, file
                    )
        point.buffer.destroy()
        del point
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    if not right:
        raise SystemExit("the bits differ, or are far from torch's")


if __name__ == "__main__":
    main()
