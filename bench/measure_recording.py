"""What a recording costs: python -m bench.measure_recording RECORDS.json [--tokens 4096]; with torchrun, a GPU a rank.

A step is a dispatch and a combine of high throughput. Steps in a row are timed without a recording and with one, in
turns, in one process: on GPUs by events, on CPU ranks (where the time says nothing of a GPU's) by the clock. figure
"host": how long the host is kept by a step's calls, where the GPU has room for them all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import nccl_ep
from bench.measure_host import timing_events
from bench.records import revision, save, today
from bench.world import join_torchrun

ROUNDS = 9
HOST_STEPS = 32  # in a row: as many operations as a recording writes at a time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--tokens", type=int, help="of a rank; default 4096 (CPU: 32)")
    parser.add_argument("--steps", type=int, help="of a round; default 100 (CPU: 20)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_cuda = device == "cuda"
    tokens, steps = options.tokens or (4096 if is_cuda else 32), options.steps or (100 if is_cuda else 20)
    hidden, experts, topk = (7168, 256, 8) if is_cuda else (256, 16, 4)
    group, rank, ranks, barrier = join_torchrun(is_cuda)
    torch.manual_seed(rank)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    idx = torch.rand(tokens, experts, device=device).topk(topk)[1]
    times: dict[tuple[str, bool], list[float]] = {(f, r): [] for f in ("queued", "host") for r in (False, True)}
    with nccl_ep.Buffer.for_shapes(
        group, max_tokens=tokens, hidden=hidden, topk=topk, num_experts=experts, mode="ht", device=device
    ) as buffer:

        def step() -> None:
            out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=experts, mode="ht", layout="flat")
            nccl_ep.combine(out.x, out.handle)

        def timed() -> float:
            """us a step."""
            barrier()
            if not is_cuda:
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                return (time.perf_counter() - begin) / steps * 1e6
            start, end = timing_events()
            start.record()
            for _ in range(steps):
                step()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / steps * 1e3

        def on_host() -> float:
            """us a step that the calls take."""
            if is_cuda:
                torch.cuda.synchronize()
            barrier()
            begin = time.perf_counter()
            for _ in range(HOST_STEPS):
                step()
            taken = (time.perf_counter() - begin) / HOST_STEPS * 1e6
            if is_cuda:
                torch.cuda.synchronize()
            return taken

        for number in range(ROUNDS):
            for is_recorded in ((False, True), (True, False))[number % 2]:
                with tempfile.TemporaryDirectory() as folder:
                    with nccl_ep.record(folder) if is_recorded else nullcontext():
                        step()  # the first one makes what a recording needs
                        times["queued", is_recorded].append(timed())
                        times["host", is_recorded].append(on_host())
                    if is_recorded:
                        file = next(path for path in Path(folder).iterdir())
                        assert file.read_text().count("in_buffer") == 2 * (steps + HOST_STEPS + 1)
    if rank:
        return
    medians = {of: round(statistics.median(each), 3) for of, each in times.items()}
    records = [
        {
            "bench": "recording", "system": "nccl_ep", "api": "native", "op": "step", "figure": figure,
            "value": medians[figure, is_recorded], "unit": "us", "p99": None, "ranks": ranks,
            "tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts, "dtype": "bf16", "layout": "flat",
            "routing": "uniform", "num_sms": 0, "num_sms_used": None, "seed": 0,
            "device": torch.cuda.get_device_name() if is_cuda else "cpu", "revision": revision(), "date": today(),
            "mode": "ht", "is_recorded": is_recorded, "samples": [round(each, 1) for each in samples],
        }
        for (figure, is_recorded), samples in times.items()
    ]  # fmt: skip
    save(options.records, records)
    for figure, what in (("queued", "a step"), ("host", "its calls on the host")):
        without, recorded = medians[figure, False], medians[figure, True]
        percent = 100 * (recorded / without - 1)
        print(f"{what} of {tokens} tokens: {without} us, recorded {recorded} us, {percent:+.2f} %")


if __name__ == "__main__":
    main()
