"""What a buffer takes of a GPU, each kind in processes of its own: python -m bench.measure_memory RECORDS.json

"memory" is the window. "memory_total" is what the GPU has lost when the buffer is made and its first operations have
ended, without tensors; CUDA and torch had begun before. CPU ranks have the first figure alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.doctor.ranks import Launcher, join

from .memory import taken_by
from .options import output, parse_device
from .records import Record, make, revision, save, today
from .world import is_rank

SIZES: dict[str, Any] = {"max_tokens": 128, "hidden": 7168, "topk": 8, "num_experts": 256}
KINDS: dict[str, dict[str, Any]] = {
    "ll": {}, "ll, masks": {"enable_shrink": True}, "ll, late weights": {"late_weights": True},
    "ll, cumem": {"window": "cumem"}, "ll, cumem, masks": {"window": "cumem", "enable_shrink": True},
    "ht, 4096 tokens": {"mode": "ht", "max_tokens": 4096, "arena_bytes": 0},
    "ht, 4096 tokens, cumem": {"mode": "ht", "max_tokens": 4096, "arena_bytes": 0, "window": "cumem"},
}  # fmt: skip
_SECONDS = 180.0  # of a kind
_FOLDER = "NCCL_EP_MEMORY_FOLDER"  # of ranks that this program starts: for what each has found


def measure(options: dict[str, Any], group: Any, device: torch.device) -> dict[str, int]:
    """Bytes of this rank's buffer, by figure. Collective."""
    sizes = SIZES | options
    tokens, hidden, topk, experts = (sizes[name] for name in ("max_tokens", "hidden", "topk", "num_experts"))
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.rand(tokens, experts, device=device).topk(topk).indices

    def used_buffer() -> nccl_ep.Buffer:
        buffer = nccl_ep.Buffer.for_shapes(group, **sizes, device=device)
        mode = options.get("mode", "ll")
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=experts, mode=mode, layout="flat")
        nccl_ep.combine(out.x, out.handle)
        return buffer

    buffer, total = taken_by(used_buffer, device, lambda: dist.barrier(group), tensors=False)
    with buffer:
        found = {"memory": int(buffer.stats()["window_bytes"])}
    return found | ({"memory_total": total} if device.type == "cuda" else {})


def records_of(common: Record, kind: str, of_ranks: list[dict[str, int]]) -> list[Record]:
    """In MB, of the rank that lost most."""
    most = {figure: max(each[figure] for each in of_ranks) for figure in of_ranks[0]}
    fields = common | {"op": kind, "tokens": _tokens(kind)}
    return [make(fields, figure=figure, value=round(value / 1e6, 1)) for figure, value in most.items()]


def _tokens(kind: str) -> int:
    return int((SIZES | KINDS[kind])["max_tokens"])


def parse(argv: list[str]) -> argparse.Namespace:
    title = (__doc__ or " ").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.measure_memory", description=title)
    add = parser.add_argument
    add("records", type=output)
    add("--kind", action="append", choices=tuple(KINDS), help="may be given again; default: all")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU and this build serves it")
    add("--ranks", type=int, help="processes to start, one a GPU; default: all GPUs, or 2 CPU ranks")
    if is_rank():
        parser.error("it starts its ranks itself: run it without torchrun")
    options = parse_device(parser, argv)
    if options.ranks is None:
        options.ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}, must be 2 or more")
    options.kind = options.kind or list(KINDS)
    return options


def measure_on_rank(kind: str, device_kind: str) -> None:
    device = join(device_kind)
    group = dist.new_group(backend="gloo")  # whose barriers take nothing of a GPU
    found = measure(KINDS[kind], group, device)
    Path(os.environ[_FOLDER], str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Returns an exit code: 1 where a kind could not be measured, which has a record that says so."""
    if _FOLDER in os.environ:
        measure_on_rank(*argv)
        return 0
    options = parse(argv)
    records: list[Record] = []
    common = {
        "bench": "memory", "system": "nccl_ep", "api": "native", "unit": "MB", "ranks": options.ranks, "dtype": "bf16",
        "hidden": SIZES["hidden"], "topk": SIZES["topk"], "experts": SIZES["num_experts"], "layout": "flat",
        "routing": "uniform", "num_sms": 0, "num_sms_used": None, "seed": None, "revision": revision(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "date": today(),
    }  # fmt: skip
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as folder:
            deadline = time.monotonic() + _SECONDS
            own = [kind, options.device]
            reason = Launcher(options.ranks).run("bench.measure_memory", own, {_FOLDER: folder}, deadline)
            if reason:
                failed = {"value": None, "skipped": reason}
                records.append(make(common, op=kind, figure="memory", tokens=_tokens(kind), **failed))
                print(f"{kind:24} FAILED {reason}", file=sys.stderr, flush=True)
            else:
                of_ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(options.ranks)]
                found = records_of(common, kind, of_ranks)
                records += found
                for each in found:
                    print(f"{kind:24} {each['figure']:12} {each['value']:8.1f} MB", flush=True)
        save(options.records, records)
    return 1 if any(each["value"] is None for each in records) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
