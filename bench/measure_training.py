"""What gradients cost: python -m bench.measure_training RECORDS.json [--tokens 4096]; with torchrun, a GPU a rank.

host: how long an eager call keeps the host, without and with gradients (one rank and more). backward: device time of
the backward pass of a pair in high throughput, beside the same two calls by hand, alternating.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import nccl_ep
from bench.measure_host import host_mean, timing_events
from bench.records import revision, save, today
from bench.world import join_torchrun
from nccl_ep.choices import Mode

HIDDEN, EXPERTS, TOPK = 7168, 256, 8
_sleep: Callable[[int], None] = torch.cuda._sleep


def host_times(call: Callable[[], Any], count: int = 100, rounds: int = 15) -> list[float]:
    return [host_mean(call, torch.cuda.synchronize, count)[""] for _ in range(rounds)][3:]


def device_times(call: Callable[[], Any], barrier: Callable[[], Any], iterations: int = 60) -> list[float]:
    times = []
    for _ in range(iterations):
        barrier()
        _sleep(2_000_000)  # a millisecond, in which the host gets ahead: what is timed is the device's
        start, end = timing_events()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[10:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    group, rank, ranks, barrier = join_torchrun(is_cuda=True)
    records: list[dict[str, Any]] = []

    def note(op: str, figure: str, values: Sequence[float], **more: Any) -> None:
        records.append(
            {
                "bench": "training", "system": "nccl_ep", "api": "native", "op": op, "figure": figure,
                "value": round(statistics.median(values), 3), "unit": "us", "p99": None, "ranks": ranks,
                "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": "bf16", "routing": "uniform",
                "num_sms": 0, "num_sms_used": None, "seed": 0, "device": torch.cuda.get_device_name(),
                "revision": revision(), "date": today(), "least": round(min(values), 3), **more,
            }
        )  # fmt: skip

    torch.manual_seed(0)
    kinds: tuple[tuple[Mode, str, int], ...] = (("ll", "packed", 8), ("ht", "flat", 8))
    for mode, layout, tokens in kinds:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode=mode, device="cuda"
        ) as buffer:
            x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
            idx = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK)[1]
            weights = torch.rand(tokens, TOPK, device="cuda")
            args: dict[str, Any] = {"buffer": buffer, "num_experts": EXPERTS, "mode": mode, "layout": layout}
            for wants in (False, True, False, True):
                x.requires_grad_(wants)
                weights.requires_grad_(wants)
                out = nccl_ep.dispatch(x, idx, weights, **args)
                gradients = "with gradients" if wants else "without"
                barrier()
                note("dispatch", "host", host_times(lambda: nccl_ep.dispatch(x, idx, weights, **args)),  # noqa: B023
                     mode=mode, layout=layout, tokens=tokens, gradients=gradients)  # fmt: skip
                barrier()
                note("combine", "host", host_times(lambda: nccl_ep.combine(out.x, out.handle)),  # noqa: B023
                     mode=mode, layout=layout, tokens=tokens, gradients=gradients)  # fmt: skip
                barrier()

    tokens = options.tokens
    with nccl_ep.Buffer.for_shapes(
        group, max_tokens=tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, mode="ht", device="cuda"
    ) as buffer:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
        idx = torch.rand(tokens, EXPERTS, device="cuda").topk(TOPK)[1]
        grad = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS, mode="ht", layout="flat")
        y = nccl_ep.combine(out.x, out.handle)

        def backward() -> torch.Tensor:
            return torch.autograd.grad(y, x, grad, retain_graph=True)[0]

        def by_hand() -> torch.Tensor:
            rows = nccl_ep.dispatch_cached(grad, out.handle, zero_padding=True).x
            return nccl_ep.combine(rows, out.handle, weights=None)

        assert torch.equal(backward(), by_hand())
        for _ in range(3):
            for name, call in (("by hand", by_hand), ("backward", backward)):
                note("backward of a pair", "device", device_times(call, barrier),
                     mode="ht", layout="flat", tokens=tokens, way=name)  # fmt: skip
    if rank == 0:
        save(options.records, records)
        for each in records:
            shown = ("op", "figure", "value", "least", "mode", "gradients", "way")
            print({name: each[name] for name in shown if name in each})


if __name__ == "__main__":
    main()
