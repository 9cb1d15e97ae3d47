"""TokenSpeed's dispatcher, unchanged, over nccl_ep's ``deep_ep``, beside plain PyTorch: both modes in turn."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes

if importlib.util.find_spec("tokenspeed_kernel") is None:
    pytest.skip("tokenspeed-kernel is not installed: make frameworks", allow_module_level=True)

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 4, 256, 2, 8
LOCAL = EXPERTS // RANKS


def dispatcher_module() -> Any:
    """Of its packages only what calls ``deep_ep``. What it asks of the machine is answered as by one with NVIDIA's GPUs
    in one NVLink domain."""
    found = importlib.util.find_spec("tokenspeed_kernel")
    assert found is not None and found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations)))
    for name in ("tokenspeed_kernel", "tokenspeed_kernel.ops", "tokenspeed_kernel.ops.communication"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    answers: dict[str, dict[str, Any]] = {
        "tokenspeed_kernel.platform": {"current_platform": lambda: types.SimpleNamespace(is_nvidia=True)},
        "tokenspeed_kernel.ops.communication.fabric": {"fabric_allocation_supported": lambda device: False},
    }
    for name, contents in answers.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(contents)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: 0
        torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    return importlib.import_module("tokenspeed_kernel.ops.communication.deep_ep")


def normal(dispatcher: Any, rank: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, row_ids, row_weights, _, counts, _, _ = dispatcher.dispatch(x, ids, weights, low_latency=False)
    assert counts == [-(-int((row_ids == local).sum()) // 128) * 128 for local in range(LOCAL)]
    factors = torch.where(row_ids >= 0, (row_ids + rank * LOCAL + 1) * row_weights, 0).sum(1, keepdim=True)
    made = (rows.float() * factors).bfloat16()
    combined: torch.Tensor = dispatcher.combine(made, row_ids, row_weights, low_latency=False)
    return combined


def low_latency(dispatcher: Any, rank: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, row_ids, row_weights, _, _, _, counts = dispatcher.dispatch(x, ids, weights, low_latency=True)
    assert counts.shape == (LOCAL,)
    if isinstance(rows, tuple):
        values, scales = rows
        rows = (values.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2)
    experts = torch.arange(LOCAL).view(-1, 1, 1) + rank * LOCAL + 1
    made = (rows.float() * experts).bfloat16()
    combined: torch.Tensor = dispatcher.combine(made, row_ids, row_weights, low_latency=True)
    return combined


def run(rank: int) -> None:
    os.environ["NCCL_EP_HINT_TOKENS"] = "64"
    import nccl_ep

    nccl_ep.install_as_deep_ep()
    nccl_ep.Buffer.__init__.__kwdefaults__["timeout"] = 240.0  # the machine may be busy
    module = dispatcher_module()
    config = types.SimpleNamespace(
        group=dist.group.WORLD, top_k=TOPK, num_experts=EXPERTS, world_size=RANKS, hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, low_latency_max_num_tokens_per_gpu=MOST,
    )  # fmt: skip
    both = module.DeepEPDispatcher(config)
    waits = module.DeepEPDispatcher(config, async_finish=False, return_recv_hook=False)
    fp8 = module.DeepEPDispatcher(config, module.DeepEPMode.low_latency, use_fp8=True)
    module.prepare_deepep_buffer(
        group=dist.group.WORLD, hidden_size=HIDDEN, num_experts=EXPERTS, deepep_mode="auto",
        max_dispatch_tokens_per_rank=MOST,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(rank)
    for through, dispatcher, tolerance in (
        (normal, both, 1e-2), (low_latency, both, 1e-2), (low_latency, fp8, 0.1), (normal, waits, 1e-2),
        (low_latency, waits, 1e-2), (normal, both, 1e-2),
    ):  # fmt: skip
        count = 5 + rank
        x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
        weights, ids = torch.rand(count, EXPERTS, generator=draw).topk(TOPK)
        dist.barrier()
        got = through(dispatcher, rank, x, ids.int(), weights)
        want = x.float() * (weights * (ids + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * 4)


def test_both_modes_in_turn(tmp_path: Path) -> None:
    run_processes(RANKS, run, tmp_path)
