"""A MoE layer's exchange as DeepSpeed, torchtitan and Axolotl make it of ``deep_ep``, unchanged, beside plain torch.

Each rank has tokens of its own and some of the experts. The layer's sums, and the gradients of tokens, weights and
experts, are those of all experts on the tokens of each rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.gpus import CPU_OR_GPUS, device_of
from tests.support.processes import run_processes

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOPK, STEPS = 2, 7, 64, 32, 6, 2, 2
LOCAL = EXPERTS // RANKS
HALF = torch.bfloat16


class Experts(torch.nn.Module):
    """Gated experts in the form that transformers gives them: those of ``first`` to ``last``."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) * HIDDEN**-0.5
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) * INNER**-0.5
        self.gate_up_proj = torch.nn.Parameter(up[first:last].to(HALF))
        self.down_proj = torch.nn.Parameter(down[first:last].to(HALF))
        self.act_fn = torch.nn.functional.silu
        self.num_experts_global, self.num_experts, self.num_local_experts = EXPERTS, last - first, last - first

    def one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = (rows @ self.gate_up_proj[expert].T).chunk(2, -1)
        return (self.act_fn(gate) * up) @ self.down_proj[expert].T

    def grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Of rows expert after expert."""
        parts = rows.split(counts.tolist())
        return torch.cat([self.one(part, expert) for expert, part in enumerate(parts)])


Layer = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    each = torch.stack([experts.one(x, expert) for expert in range(EXPERTS)], 1)
    chosen = each.gather(1, ids.unsqueeze(2).expand(-1, -1, HIDDEN))
    return (chosen.float() * weights.unsqueeze(2)).sum(1)


def without_what_is_beside(name: str) -> None:
    """Modules of a package can be imported, and the package itself, which asks for all that the framework needs, is
    passed over."""
    above, _, last = name.rpartition(".")
    package = types.ModuleType(name)
    package.__path__ = [str(Path(each) / last) for each in importlib.import_module(above).__path__]
    sys.modules[name] = package


def of_deepspeed(_: torch.device) -> Layer:
    """deepspeed/module_inject/auto_ep_comm.py, called as its AutoEPMoELayer calls it."""
    from deepspeed.module_inject import auto_ep_comm as comm

    sizes = {"num_experts": EXPERTS, "top_k": TOPK, "hidden_size": HIDDEN, "num_max_tokens_per_rank": TOKENS}
    exchange = comm.shared_exchange(scope=comm.new_exchange_scope(), ep_group=dist.group.WORLD, **sizes)

    def layer(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, row_weights, _ = comm.deepep_dispatch(exchange, x, ids, weights, replay=comm.DeepEPCheckpointReplay())
        handle = exchange.last_handle
        assert rows.shape[0] == handle.num_expanded_tokens
        ends = handle.psum_num_recv_tokens_per_expert
        y = experts.grouped(rows, torch.diff(ends, prepend=ends.new_zeros(1)))
        return comm.deepep_combine(exchange, (y * row_weights.reshape(-1, 1)).to(HALF), handle)

    return layer


def of_torchtitan(_: torch.device) -> Layer:
    """torchtitan/distributed/deepep/deepep.py: its ops, which it has for CUDA alone, for the CPU too."""
    without_what_is_beside("torchtitan.distributed")
    deepep = importlib.import_module("torchtitan.distributed.deepep.deepep")
    torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl("deepep::combine", "CPU")(deepep._combine_op_impl)
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=TOKENS, num_topk=TOPK)

    def layer(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, counts, state = deepep.dispatch_tokens(
            x, ids, weights, LOCAL, EXPERTS, num_tokens_per_rank=TOKENS, cudagraphable=not torch.is_grad_enabled()
        )
        y = experts.grouped(rows[: int(counts.sum())], counts)
        y = torch.cat([y, y.new_zeros(len(rows) - len(y), HIDDEN)])  # without gradients: no sizes, the largest
        combined = deepep.combine_tokens(y, state)
        deepep.sync_combine()
        return combined

    return layer


def of_axolotl(device: torch.device) -> Layer:
    """axolotl/integrations/expert_parallel/experts_fn.py: its experts implementation."""
    name = "axolotl.integrations.expert_parallel"
    without_what_is_beside(name)
    if device.type == "cpu":
        os.environ["AXOLOTL_EP_NO_BARRIER"] = "1"  # which is one of GPUs
    buffer = importlib.import_module(f"{name}.buffer")
    functions = importlib.import_module(f"{name}.experts_fn")
    buffer.configure_buffer(dist.group.WORLD, num_nvl_bytes=1 << (22 if device.type == "cpu" else 28))
    functions.set_backend("deep_ep")
    functions.set_local_implementation("eager")
    layer: Layer = functions.expert_parallel_experts_forward
    return layer


FRAMEWORKS = {"deepspeed": of_deepspeed, "torchtitan": of_torchtitan, "axolotl": of_axolotl}


def compare(rank: int, framework: str, kind: str) -> None:
    import nccl_ep

    nccl_ep.install_as_deep_ep()
    device = device_of(rank, kind)
    if kind == "cpu":
        nccl_ep.Buffer.__init__.__kwdefaults__["timeout"] = 240.0  # the machine may be busy
    layer = FRAMEWORKS[framework](device)
    whole, own = Experts(0, EXPERTS).to(device), Experts(rank * LOCAL, (rank + 1) * LOCAL).to(device)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(TOKENS, HIDDEN, generator=draw).to(device, HALF)
        weights, ids = torch.rand(TOKENS, EXPERTS, generator=draw).to(device).softmax(1).topk(TOPK)
        grad = torch.randn(TOKENS, HIDDEN, generator=draw).to(device)
        made = []
        for experts, run in ((whole, plain), (own, layer)):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            experts.zero_grad()
            dist.barrier()
            out = run(experts, leaves[0], ids, leaves[1])
            (out.float() * grad).sum().backward()
            made.append([out.detach().float(), leaves[0].grad.float(), leaves[1].grad.float()])
        for parameter, part in zip(whole.parameters(), own.parameters(), strict=True):
            summed = parameter.grad.float().cpu()
            dist.all_reduce(summed)  # an expert's gradient is that of the tokens of all ranks
            made[0].append(summed[rank * LOCAL : (rank + 1) * LOCAL])
            made[1].append(part.grad.float().cpu())
        for expected, got in zip(*made, strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
        with torch.no_grad():
            torch.testing.assert_close(layer(own, x, ids, weights).float(), made[0][0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", CPU_OR_GPUS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_layer_over_nccl_ep_computes_what_torch_does(framework: str, kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make frameworks")
    run_processes(RANKS, compare, tmp_path, framework, kind)
