"""What sums in fewer bytes cost and save: torchrun --nproc-per-node N -m bench.measure_wire RECORDS.json

A combine of low latency (128 tokens, expert_major) and of high throughput (4,096 tokens, flat and packed) whose sums
travel as the outputs' bf16, "fp8" or "logfmt". graph: one combine of a captured chain, in turn for each format. The
result is held against that of bf16, within the bound of the format (docs/semantics.md, "Sums in fewer bytes").
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist

import nccl_ep
from bench import measure, records
from bench.measure import Effort
from bench.world import World
from nccl_ep.choices import LayoutName, Mode, WireFormat

HIDDEN, EXPERTS, TOPK = 7168, 256, 8
FORMATS: tuple[WireFormat | None, ...] = (None, "fp8", "logfmt")
SHAPES: tuple[tuple[Mode, LayoutName, int], ...] = (
    ("ll", "expert_major", 128), ("ll", "packed", 128), ("ht", "flat", 4096), ("ht", "packed", 4096),
)  # fmt: skip
# Of a sum of rows that came home in blocks: |difference| at most this part of the largest magnitude among its parts.
BOUNDS = {"fp8": 1 / 28, "logfmt": 1 / 44}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=("ll", "ht"), default=["ll", "ht"])
    parser.add_argument("--num-sms", nargs="+", type=int, default=[0], help="of a combine; 0: its own choice")
    options = parser.parse_args()
    world = World("cuda")
    made: list[records.Record] = []
    for mode, layout, tokens in (shape for shape in SHAPES if shape[0] in options.modes):
        torch.manual_seed(world.rank)
        x = torch.randn(tokens, HIDDEN, device=world.device).bfloat16()
        ids = torch.rand(tokens, EXPERTS, device=world.device).topk(TOPK)[1]
        weights = torch.rand(tokens, TOPK, device=world.device)
        common = {
            "bench": "wire", "system": "nccl_ep", "api": "native", "op": "combine", "figure": "graph",
            "ranks": dist.get_world_size(), "tokens": tokens, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS,
            "dtype": "bf16", "layout": layout, "routing": "uniform", "seed": world.rank,
            "device": world.device_name(), "revision": records.revision(), "date": records.today(), "mode": mode,
        }  # fmt: skip
        with nccl_ep.Buffer.for_shapes(
            dist.group.WORLD, max_tokens=tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode=mode,
            device=world.device, arena_bytes=(4 << 30) if mode == "ht" else None,
        ) as buffer:  # fmt: skip
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=EXPERTS, mode=mode, layout=layout)
            plain = nccl_ep.combine(out.x, out.handle).float()
            for number in range(options.rounds):
                for wire, num_sms in itertools.product(FORMATS, options.num_sms):

                    def combine(wire: WireFormat | None = wire, num_sms: int = num_sms) -> torch.Tensor:
                        return nccl_ep.combine(out.x, out.handle, wire_dtype=wire, num_sms=num_sms)  # noqa: B023

                    if wire is not None and number == 0:
                        # Of each rank's part, whose magnitude the weights (a flat one's: ones) and rows bound.
                        largest = (weights.sum(1, keepdim=True).clamp(min=1) * x.float().abs().amax()).expand_as(plain)
                        difference = (combine().float() - plain).abs()
                        assert bool((difference <= dist.get_world_size() * BOUNDS[wire] * largest).all()), wire
                    effort = Effort(10, 50, 10 if tokens > 512 else 40, 50)
                    sampled = world.agree(lambda: measure.graph_times(world, combine, effort))  # noqa: B023
                    value, p99 = records.slowest(sampled)
                    made.append(records.make(common, value=value, p99=p99, wire=wire or "bf16", num_sms=num_sms))
                    if world.rank == 0:
                        print(mode, layout, wire or "bf16", num_sms, value, flush=True)
            world.together(buffer.check)
    if world.rank == 0:
        records.save(options.records, made)
    world.close()


if __name__ == "__main__":
    main()
