"""Dispatch and combine on the ranks of a machine, against the oracle."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import reference

from .ranks import Launcher, join

_SECONDS = 180.0
_FAILURE_FILE = "NCCL_EP_DOCTOR_FAILURE"  # where ranks say what went wrong
_TOKENS, _HIDDEN, _TOPK, _LOCAL_EXPERTS = 8, 512, 2, 4


def check_rank(group: Any, device: torch.device) -> None:
    """Dispatch and combine of a rank against the oracle, on GPUs in a graph too. Raises what is wrong."""
    num_ranks = group.size()
    experts = _LOCAL_EXPERTS * num_ranks
    inputs = []
    for rank in range(num_ranks):
        rng = torch.Generator().manual_seed(rank)
        ids = torch.rand(_TOKENS, experts, generator=rng).topk(_TOPK).indices
        x = torch.randn(_TOKENS, _HIDDEN, generator=rng).to(torch.bfloat16)
        inputs.append(reference.RankInput(x, ids, torch.rand(_TOKENS, _TOPK, generator=rng)))
    common = {"num_experts": experts, "layout": "expert_major"}
    results = reference.dispatch(inputs, max_tokens=_TOKENS, **common)
    want = reference.combine([result.x for result in results], results, inputs, **common)
    with nccl_ep.Buffer.for_shapes(
        group, max_tokens=_TOKENS, hidden=_HIDDEN, topk=_TOPK, num_experts=experts, device=device, timeout=30.0
    ) as buffer:
        mine = inputs[buffer.rank]
        assert mine.topk_weights is not None
        x, ids, weights = mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device)

        def pair() -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=experts)
            return nccl_ep.combine(out.x, out.handle)

        ways = {"eager": pair()}
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                ways["graph"] = pair()
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        buffer.check()
        for way, y in ways.items():
            if difference := reference.first_difference(y, want[buffer.rank]):
                raise AssertionError(f"{way}: not the oracle's result: {difference}")


def run_rank(device_kind: str) -> int:
    try:
        device = join(device_kind)
        if device.type == "cpu":
            torch.set_num_threads(1)  # ranks share the cores
        check_rank(dist.group.WORLD, device)
        dist.destroy_process_group()
        return 0
    except Exception as error:
        text = f"rank {os.environ['RANK']}: {type(error).__name__}: {error}"
        with Path(os.environ[_FAILURE_FILE]).open("a") as file:
            file.write(text.splitlines()[0] + "\n")
        return 1


def self_test(device_kind: str, num_ranks: int, seconds: float = _SECONDS) -> str:
    """Ranks as processes, one a GPU. "" if all is well, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"
        deadline = time.monotonic() + seconds
        argv = ["--rank-of", device_kind]
        reason = Launcher(num_ranks).run("nccl_ep.doctor", argv, {_FAILURE_FILE: str(failures)}, deadline)
        said = failures.read_text().strip().replace("\n", "; ") if failures.exists() else ""
        return said or reason
