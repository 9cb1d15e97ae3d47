"""What a buffer takes of a GPU, each kind in processes of its own: python -m bench.measure_memory RECORDS.json

Ranks are processes with a GPU each, on which CUDA and torch have begun. "memory_total" is what the GPU has lost when
the buffer is made and its first operations have ended, without tensors; "memory" is the window's part.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nccl_ep
from bench.records import make, revision, save, today

SIZES: dict[str, Any] = {"max_tokens": 128, "hidden": 7168, "topk": 8, "num_experts": 256}
KINDS: dict[str, dict[str, Any]] = {
    "ll": {}, "ll, masks": {"enable_shrink": True}, "ll, late weights": {"late_weights": True},
    "ll, cumem": {"window": "cumem"}, "ll, cumem, masks": {"window": "cumem", "enable_shrink": True},
    "ht, 4096 tokens": {"mode": "ht", "max_tokens": 4096, "arena_bytes": 0},
    "ht, 4096 tokens, cumem": {"mode": "ht", "max_tokens": 4096, "arena_bytes": 0, "window": "cumem"},
}  # fmt: skip


def measure(rank: int, ranks: int, options: dict[str, Any], folder: str) -> None:
    """Writes bytes of the window, and of all, as a file of the rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    sizes = SIZES | options
    tokens, hidden, topk, experts = (sizes[name] for name in ("max_tokens", "hidden", "topk", "num_experts"))
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts, device="cuda").topk(topk).indices

    def lost() -> int:
        """Without what torch has reserved for tensors."""
        torch.cuda.synchronize()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    before = lost()
    with nccl_ep.Buffer.for_shapes(dist.group.WORLD, **sizes, device="cuda") as buffer:
        mode = options.get("mode", "ll")
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=experts, mode=mode, layout="flat")
        nccl_ep.combine(out.x, out.handle)
        found = {"memory": buffer.stats()["window_bytes"], "memory_total": lost() - before}
    Path(folder, str(rank)).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path)
    path, ranks, found = parser.parse_args().records, torch.cuda.device_count(), []
    if ranks < 2:
        parser.error(f"there are {ranks} GPUs, must be 2 or more")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    common = {
        "bench": "memory", "system": "nccl_ep", "api": "native", "unit": "MB", "ranks": ranks, "dtype": "bf16",
        "hidden": SIZES["hidden"], "topk": SIZES["topk"], "experts": SIZES["num_experts"], "layout": "flat",
        "routing": "uniform", "num_sms": 0, "num_sms_used": None, "seed": None, "revision": revision(),
        "device": torch.cuda.get_device_name(), "date": today(),
    }  # fmt: skip
    for kind, options in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (ranks, options, folder), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
            each = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
        for figure in ("memory", "memory_total"):
            value = round(max(of_rank[figure] for of_rank in each) / 1e6, 1)
            found.append(make(common, op=kind, figure=figure, value=value, tokens=(SIZES | options)["max_tokens"]))
            print(f"{kind:24} {figure:12} {value:8.1f} MB", flush=True)
    save(path, found)


if __name__ == "__main__":
    main()
