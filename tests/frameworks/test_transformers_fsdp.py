"""FSDP around a model whose experts are shared out: rank 0 saves all experts, or is told what to call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402

import nccl_ep  # noqa: E402
from nccl_ep.integrations.transformers import full_state_dict, save_pretrained, use_expert_parallel  # noqa: E402
from tests.frameworks.test_transformers_checkpoints import IDS, MIXTRAL, OPTIONS, assert_same, experts_of  # noqa: E402
from tests.frameworks.tiny_models import tiny_model  # noqa: E402
from tests.support.processes import run_processes  # noqa: E402


def parameters_of_experts(model: Any) -> set[torch.nn.Parameter]:
    return {each for module in experts_of(model) for each in module.parameters()}


def as_arrays(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert all(type(each) is torch.Tensor and each.device.type == "cpu" for each in state.values())
    return {name: each.numpy() for name, each in state.items()}


def as_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(each) for name, each in state.items()}


def around_experts(rank: int) -> dict[str, Any]:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        ignored = parameters_of_experts(model)
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=ignored)
        fully_shard(model, ignored_params=ignored)
        with pytest.raises(nccl_ep.UsageError, match="would lack the others; call"):
            model.state_dict()
        return as_arrays(full_state_dict(model))


def test_fsdp2_around_the_experts(tmp_path: Path) -> None:
    first, second = run_processes(2, around_experts, tmp_path)
    assert second == {}
    assert_same(as_tensors(first), tiny_model(MIXTRAL), exact=True)


def over_experts(rank: int) -> None:
    """Its shards would be of different experts."""
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        fully_shard(model)
        text = r"is sharded over ranks \[0, 1\], .* must leave experts out"
        with pytest.raises(nccl_ep.UsageError, match=text):
            full_state_dict(model)
        with pytest.raises(nccl_ep.UsageError, match=text):
            model(IDS)


def test_fsdp2_over_different_experts_is_refused(tmp_path: Path) -> None:
    run_processes(2, over_experts, tmp_path)


def over_replicas(rank: int, folder: str) -> dict[str, Any]:
    """Two ranks share experts out, and two such pairs shard theirs, as what all four have alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, mesh["experts"].get_group(), **OPTIONS):
        ignored = parameters_of_experts(model)
        for module in experts_of(model):
            fully_shard(module, mesh=mesh["data"])
        fully_shard(model, ignored_params=ignored)
        with torch.no_grad():
            model(IDS)
        save_pretrained(model, folder, is_main_process=rank == 0)
        return as_arrays(full_state_dict(model))


def test_fsdp2_over_replicas_of_experts(tmp_path: Path) -> None:
    """The first rank of each group has all; one of them writes."""
    found = run_processes(4, over_replicas, tmp_path, str(tmp_path / "saved"))
    assert [len(each) > 0 for each in found] == [True, False, True, False]
    stock = tiny_model(MIXTRAL)
    for each in (found[0], found[2]):
        assert_same(as_tensors(each), stock, exact=True)
    assert_same(type(stock).from_pretrained(tmp_path / "saved").state_dict(), stock, exact=True)


def fsdp1(rank: int, leaves_out: bool) -> dict[str, Any]:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        ignored = parameters_of_experts(model) if leaves_out else None
        wrapped = FullyShardedDataParallel(model, ignored_states=ignored, device_id=torch.device("cpu"))
        found = {}
        if leaves_out:
            found = as_arrays(full_state_dict(wrapped))
        else:
            with pytest.raises(nccl_ep.UsageError, match="is no parameter any more: wrappers must leave experts out"):
                full_state_dict(wrapped)
        with pytest.raises(nccl_ep.UsageError, match="would lack the others; call"):  # FSDP is broken afterwards
            wrapped.state_dict()
        return found


def test_fsdp1_around_the_experts(tmp_path: Path) -> None:
    first, second = run_processes(2, fsdp1, tmp_path, True)
    assert second == {}
    assert_same(as_tensors(first), tiny_model(MIXTRAL), exact=True)


def test_fsdp1_over_different_experts_is_refused(tmp_path: Path) -> None:
    run_processes(2, fsdp1, tmp_path, False)


def zero_redundancy(rank: int) -> None:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        model(IDS, labels=IDS).loss.backward()
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(nccl_ep.UsageError, match="ZeroRedundancyOptimizer would give all ranks the experts of one"):
            optimizer.step()
        assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))
        experts = parameters_of_experts(model)
        dense = [each for each in model.parameters() if each not in experts]
        ZeroRedundancyOptimizer(dense, optimizer_class=torch.optim.SGD, lr=0.1).step()


def test_an_optimizer_that_hands_parameters_on_is_refused(tmp_path: Path) -> None:
    run_processes(2, zero_redundancy, tmp_path)
