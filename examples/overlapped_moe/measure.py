"""Times of a layer whose experts begin while rows come, beside its parts and the same kernels one behind the other.

    torchrun --nproc-per-node 2 examples/overlapped_moe/measure.py --json layer.json

Checks that both ways give the same bits, and that they are close to torch's. Milliseconds: the median over repetitions
of the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from examples.overlapped_moe.gemm import Run
from examples.overlapped_moe.layer import TIMEOUT, Experts, MoeLayer


def timed(call: Callable[[], object], repetitions: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times)


class Point:
    """One shape: inputs, layer, and what is timed."""

    def __init__(self, args: argparse.Namespace, text: str) -> None:
        mode: Any
        mode, *sizes = text.split(":")
        hidden, tokens, block, num_sms = map(int, sizes + ["128", "16"][len(sizes) - 2 :])
        self.args, self.hidden, self.tokens, self.mode = args, hidden, tokens, mode
        self.block, self.num_sms = block, num_sms
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.local = args.experts // ranks
        rows = tokens * args.topk * 5 // 4 + self.local * block
        self.buffer = nccl_ep.Buffer.for_shapes(
            dist.group.WORLD, max_tokens=tokens, hidden=hidden, topk=args.topk, num_experts=args.experts, mode=mode,
            timeout=20.0, late_weights=mode == "ll", **({"arena_bytes": 3 * rows * hidden * 2} if mode == "ht" else {}),
        )  # fmt: skip
        draw = torch.Generator("cuda").manual_seed(100 + rank)
        self.x = torch.randn(tokens, hidden, generator=draw, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(tokens, args.experts, generator=draw, device="cuda")
        self.weights, self.ids = scores.softmax(-1).topk(args.topk)
        self.layer = MoeLayer(
            self.buffer, Experts.random(self.local, hidden, args.inner, "cuda", seed=rank), num_experts=args.experts,
            max_tokens=tokens, topk=args.topk, mode=mode, num_sms=num_sms,
            rows_per_block=block, capacity=rows if mode == "ht" else None,
        )  # fmt: skip

    def run(self, overlaps: bool) -> torch.Tensor:
        return self.layer(self.x, self.ids, self.weights, overlaps=overlaps)

    def dispatch(self, num_sms: int) -> nccl_ep.DispatchOutput:
        return self.layer.send(self.x, self.ids, self.weights, num_sms).receive()

    def communicate(self) -> None:
        out = self.dispatch(0)
        self.layer.combine(out.x, out, self.weights)

    def multiply(self, out: nccl_ep.DispatchOutput) -> None:
        run = Run(out.x, self.layer.experts.w13, self.layer.experts.w2, self.layer.arrivals, self.layer.blocks, TIMEOUT)
        run.gate_up(run.num_sms)
        run.down(run.num_sms)

    def torch_gemms(self, out: nccl_ep.DispatchOutput) -> torch.Tensor:
        """expert_major rows: the same products by a batched GEMM, which multiplies rows that do not exist, too."""
        experts = self.layer.experts
        w13, w2 = experts.w13.transpose(1, 2), experts.w2.transpose(1, 2)
        if out.offsets is None:
            gate, up = torch.bmm(out.x, w13).chunk(2, -1)
            return torch.bmm(torch.nn.functional.silu(gate) * up, w2)
        ends = out.offsets[1:].contiguous()
        gate, up = torch._grouped_mm(out.x, w13, offs=ends).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2, offs=ends)

    def measure(self) -> dict[str, Any]:
        repetitions = self.args.repetitions
        one_behind, overlapped = self.run(False), self.run(True)
        replayed = [self.run(True) for _ in range(5)]
        out = self.dispatch(0)
        assert int(out.overflow) == 0
        by_torch = self.layer.combine(self.torch_gemms(out), out, self.weights)
        error = ((one_behind - by_torch).float().abs().max() / by_torch.float().abs().max()).item()
        same = all(torch.equal(one_behind, each) for each in [overlapped, *replayed])
        found: dict[str, Any] = {
            "hidden": self.hidden, "tokens": self.tokens, "mode": self.mode, "num_sms": self.num_sms,
            "rows_per_block": self.block,
            "same_bits": same, "relative_error_to_torch": error, "failed": self.layer.arrivals.has_failed(),
        }  # fmt: skip
        found["overlapped_ms"] = timed(lambda: self.run(True), repetitions)
        found["one_behind_ms"] = timed(lambda: self.run(False), repetitions)
        found["communication_ms"] = timed(self.communicate, repetitions)
        found["dispatch_ms"] = timed(lambda: self.dispatch(0), repetitions)
        found["dispatch_on_few_sms_ms"] = timed(lambda: self.dispatch(self.num_sms), repetitions)
        out = self.dispatch(0)
        found["gemms_ms"] = timed(lambda: self.multiply(out), repetitions)
        found["torch_gemms_ms"] = timed(lambda: self.torch_gemms(out), repetitions)
        found["of_one_behind"] = found["overlapped_ms"] / found["one_behind_ms"]
        found["of_longer"] = found["overlapped_ms"] / max(found["communication_ms"], found["gemms_ms"])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="layer.json")
    parser.add_argument(
        "--points", default="ht:4096:4096,ht:7168:4096,ht:7168:8192,ll:7168:128",
        help="mode:H:tokens of a rank, then rows of a block (128) and SMs of a dispatch beside a GEMM (16)",
    )  # fmt: skip
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
        found = point.measure()
        right = right and found["same_bits"] and found["relative_error_to_torch"] < 0.02 and not found["failed"]
        results.append(found)
        point.buffer.destroy()
        del point
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
            with open(args.json, "w") as file:
                json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "points": results}, file)
    dist.destroy_process_group()
    if not right:
        raise SystemExit("the bits differ, or are far from torch's")


if __name__ == "__main__":
    main()
