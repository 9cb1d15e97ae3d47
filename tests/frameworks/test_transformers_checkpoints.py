"""Saving and loading models of transformers whose experts are shared out: all experts, or an error that says how."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

import safetensors.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import nccl_ep  # noqa: E402
from nccl_ep.integrations.transformers import (  # noqa: E402
    full_state_dict,
    save_pretrained,
    sharded_optimizer_state_dict,
    sharded_state_dict,
    use_expert_parallel,
)
from nccl_ep.testing import run_ranks  # noqa: E402
from tests.frameworks.tiny_models import EXPERTS, VOCABULARY, tiny_model  # noqa: E402
from tests.support.processes import run_processes  # noqa: E402

MIXTRAL, GPT_OSS, GEMMA = "MixtralExperts", "GptOssExperts", "Gemma4TextExperts"
OPTIONS = {"max_tokens": 32, "timeout": 60.0, "device": "cpu"}
IDS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


def changed(name: str) -> Any:
    """A model after a step of training, alone."""
    model = tiny_model(name)
    take_a_step(model)
    return model


def take_a_step(model: Any, ranks: int = 1) -> None:
    """All ranks have the same tokens; sums over them make the gradients of experts as many times larger."""
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.grad is not None:
                each -= each.grad / (ranks if ".experts." in name and "shared" not in name else 1)


def assert_same(found: dict[str, torch.Tensor], model: Any, exact: bool = False) -> None:
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[name], each, msg=lambda text, at=name: f"{at}: {text}", **tolerance)


@pytest.mark.parametrize("name", [MIXTRAL, GPT_OSS, GEMMA])
def test_train_save_and_load_at_other_numbers_of_ranks(name: str, tmp_path: Path) -> None:
    want = changed(name)

    def train(group: Any) -> dict[str, Any]:
        model = tiny_model(name)
        with use_expert_parallel(model, group, **OPTIONS):
            take_a_step(model, ranks=2)
            save_pretrained(model, tmp_path)
            return full_state_dict(model)

    first, second = run_ranks(2, train)
    assert second == {}
    assert_same(first, want)
    loaded = type(want).from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), want)

    def use(group: Any) -> torch.Tensor:
        model = copy.deepcopy(loaded)
        with use_expert_parallel(model, group, compute="eager", **OPTIONS), torch.no_grad():
            return model(IDS).logits

    with torch.no_grad():
        logits = want(IDS).logits
    for each in run_ranks(4, use):
        torch.testing.assert_close(each, logits, rtol=1e-3, atol=1e-4)


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "of a part": lambda model, _: model.model.layers[0].state_dict(),
    "get_model_state_dict": lambda model, _: get_model_state_dict(model),
    "full": lambda model, _: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    "safetensors": lambda model, folder: safetensors.torch.save_model(model, folder / "model.safetensors"),
    "compiled": lambda model, _: torch.compile(model).state_dict(),
}


@pytest.mark.parametrize("way", SAVES)
def test_what_would_lose_experts_says_what_to_call(way: str, tmp_path: Path) -> None:
    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        with use_expert_parallel(model, group, **OPTIONS):
            text = r"has experts [02] to [13] of 4: its state_dict would lack the others; call, on all ranks, save_pret"
            with pytest.raises(nccl_ep.UsageError, match=text):
                SAVES[way](model, tmp_path)

    run_ranks(2, body)


@pytest.mark.parametrize("call", [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_whole_model_is_neither_copied_nor_pickled(call: Callable[[Any], Any]) -> None:
    model, text = tiny_model(MIXTRAL), r"neither pickled nor copied.*: call, on all ranks, save_pretrained"
    with use_expert_parallel(model, None, **OPTIONS), pytest.raises(nccl_ep.UsageError, match=text):
        call(model)


def test_parameters_and_optimizers_are_not_pickled_without_the_other_ranks_experts() -> None:
    """A copy in the process is the caller's own."""

    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        with use_expert_parallel(model, group, **OPTIONS):
            optimizer = torch.optim.AdamW(model.parameters())
            text = r"has experts [02] to [13] of 4, and would be pickled without the others: call, on all ranks, save_"
            for each in (dict(model.named_parameters()), optimizer, list(model.parameters())):
                with pytest.raises(nccl_ep.UsageError, match=text):
                    torch.save(each, io.BytesIO())
                assert type(copy.deepcopy(each)) is type(each)
            torch.save(dict(model.model.embed_tokens.named_parameters()), io.BytesIO())

    run_ranks(2, body)


def test_one_rank_has_them_all(tmp_path: Path) -> None:
    want, model = tiny_model(MIXTRAL), tiny_model(MIXTRAL)
    with use_expert_parallel(model, None, **OPTIONS):
        assert_same(model.state_dict(), want, exact=True)
        torch.save(dict(model.named_parameters()), io.BytesIO())
        model.save_pretrained(tmp_path)
    assert_same(type(want).from_pretrained(tmp_path).state_dict(), want, exact=True)


def test_load_state_dict() -> None:
    """Of a whole checkpoint: each rank takes its experts. Of a part of them: an error, and nothing is loaded."""
    want = changed(GPT_OSS)
    whole = want.state_dict()
    part = {name: each[:2] if ".experts." in name else each for name, each in whole.items()}

    def body(group: Any) -> dict[str, Any]:
        model = tiny_model(GPT_OSS)
        with use_expert_parallel(model, group, **OPTIONS):
            before = [each.clone() for module in experts_of(model) for each in module.parameters()]
            with pytest.raises(RuntimeError, match=r"gate_up_proj has 2 experts, must have all 4"):
                model.load_state_dict(part)
            after = [each for module in experts_of(model) for each in module.parameters()]
            assert all(map(torch.equal, before, after))
            with pytest.raises(RuntimeError, match=r"expected torch.Tensor .*ndarray"):
                model.load_state_dict({name: each.numpy() for name, each in whole.items()})
            given = dict(whole)
            assert not any(model.load_state_dict(given))
            assert given.keys() == whole.keys() and all(given[name] is each for name, each in whole.items())
            assert all(each.shape[0] == EXPERTS // 2 for module in experts_of(model) for each in module.parameters())
            model.load_state_dict(given, assign=True)
            for each in (each for module in experts_of(model) for each in module.parameters()):
                assert each.untyped_storage().nbytes() == each.nbytes
            return full_state_dict(model)

    assert_same(run_ranks(2, body)[0], want, exact=True)


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        with use_expert_parallel(model, group, **OPTIONS):
            rank = group.rank()
            if rank == 0:
                model.save_pretrained = refuse
            kind, text = (OSError, "no space") if rank == 0 else (nccl_ep.SystemError, "rank 0 could not .*no space")
            with pytest.raises(kind, match=text):
                save_pretrained(model, tmp_path)

    run_ranks(2, body)


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no space left on device")


def test_not_shared_out() -> None:
    model = tiny_model(MIXTRAL)
    for call in (full_state_dict, sharded_state_dict):
        with pytest.raises(nccl_ep.UsageError, match="are not shared out: call its state_dict"):
            call(model)
    with use_expert_parallel(model, None, **OPTIONS):
        assert_same(sharded_state_dict(model), tiny_model(MIXTRAL), exact=True)


def test_sharded_needs_a_process_group() -> None:
    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        text = "group is a ThreadGroup, must be a torch process group"
        with use_expert_parallel(model, group, **OPTIONS), pytest.raises(TypeError, match=text):
            sharded_state_dict(model)

    run_ranks(2, body)


# ---- Processes


def write_dcp(rank: int, folder: str) -> None:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        take_a_step(model, ranks=dist.get_world_size())
        dcp.save({"model": sharded_state_dict(model)}, checkpoint_id=folder)


def read_dcp(rank: int, folder: str) -> dict[str, Any]:
    """As a load in place, and by the function of torch that sets a state_dict."""
    found = []
    for sets in (False, True):
        model = tiny_model(MIXTRAL)
        with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
            state = sharded_state_dict(model)
            dcp.load({"model": state}, checkpoint_id=folder)
            if sets:
                set_model_state_dict(model, state)
            found.append({name: each.numpy() for name, each in full_state_dict(model).items()})
    for name, each in found[0].items():
        assert (each == found[1][name]).all(), name
    return found[0]


def test_dcp_at_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "write").mkdir()
    run_processes(2, write_dcp, tmp_path / "write", str(tmp_path / "dcp"))
    (tmp_path / "read").mkdir()
    found = run_processes(4, read_dcp, tmp_path / "read", str(tmp_path / "dcp"))
    assert_same({name: torch.from_numpy(each) for name, each in found[0].items()}, changed(MIXTRAL))


def adam_step(model: Any, optimizer: Any, ranks: int) -> None:
    model(IDS, labels=IDS).loss.backward()
    for name, each in model.named_parameters():
        if each.grad is not None and ".experts." in name and "shared" not in name:
            each.grad /= ranks
    optimizer.step()
    optimizer.zero_grad()


def adam_of(model: Any) -> torch.optim.Optimizer:
    """In two groups, experts in the first; a large eps, so that small differences of gradients stay small."""
    experts = [each for module in experts_of(model) for each in module.parameters()]
    ids = {id(each) for each in experts}
    rest = [each for each in model.parameters() if id(each) not in ids]
    return torch.optim.AdamW([{"params": experts, "lr": 0.01}, {"params": rest}], lr=0.02, eps=1e-3)


def write_optimizer(rank: int, folder: str) -> None:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        optimizer = adam_of(model)
        adam_step(model, optimizer, dist.get_world_size())
        optimizer.param_groups[0]["lr"] = 0.03
        state = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)


def read_optimizer(rank: int, folder: str) -> dict[str, Any]:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        optimizer = adam_of(model)
        state = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.03
        adam_step(model, optimizer, dist.get_world_size())
        return {name: each.numpy() for name, each in full_state_dict(model).items()}


def test_an_optimizer_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "write").mkdir()
    run_processes(2, write_optimizer, tmp_path / "write", str(tmp_path / "dcp"))
    (tmp_path / "read").mkdir()
    found = run_processes(4, read_optimizer, tmp_path / "read", str(tmp_path / "dcp"))
    want = tiny_model(MIXTRAL)
    optimizer = adam_of(want)
    adam_step(want, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.03
    adam_step(want, optimizer, 1)
    assert_same({name: torch.from_numpy(each) for name, each in found[0].items()}, want)


STATE_DICTS: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "its own": lambda _, optimizer: optimizer.state_dict(),
    "get_optimizer_state_dict": get_optimizer_state_dict,
    "full": lambda *both: get_optimizer_state_dict(*both, options=StateDictOptions(full_state_dict=True)),
}


@pytest.mark.parametrize("way", STATE_DICTS)
def test_what_would_lose_states_of_experts_says_what_to_call(way: str) -> None:
    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        with use_expert_parallel(model, group, **OPTIONS):
            optimizer = adam_of(model)
            adam_step(model, optimizer, 2)
            text = r"has experts [02] to [13] of 4: the optimizer's .* call, on all ranks, sharded_optimizer_state_dict"
            with pytest.raises(nccl_ep.UsageError, match=text):
                STATE_DICTS[way](model, optimizer)
            with pytest.raises(TypeError, match="group is a ThreadGroup, must be a torch process group"):
                sharded_optimizer_state_dict(model, optimizer)

    run_ranks(2, body)


def test_an_optimizer_takes_the_states_of_all_experts() -> None:
    alone = tiny_model(MIXTRAL)
    optimizer = adam_of(alone)
    adam_step(alone, optimizer, 1)
    whole, before = copy.deepcopy((optimizer.state_dict(), alone))
    adam_step(alone, optimizer, 1)

    def body(group: Any) -> dict[str, Any]:
        model = copy.deepcopy(before)
        with use_expert_parallel(model, group, **OPTIONS):
            mine = adam_of(model)
            if group.rank() == 0:  # the other's first step is after the load
                mine.step()
            mine.load_state_dict(copy.deepcopy(whole))  # torch keeps the tensors of the others
            adam_step(model, mine, 2)
            for each in experts_of(model)[0].parameters():
                kept = mine.state[each]["exp_avg"]
                assert kept.shape == each.shape and kept.untyped_storage().nbytes() == kept.nbytes
            part = copy.deepcopy(whole)
            part["state"][0]["exp_avg"] = part["state"][0]["exp_avg"][:2]
            with pytest.raises(nccl_ep.UsageError, match="exp_avg of gate_up_proj has 2 experts, must have all 4"):
                mine.load_state_dict(part)
            return full_state_dict(model)

    assert_same(run_ranks(2, body)[0], alone)


def test_an_optimizer_that_was_made_before_the_experts_were_shared_out() -> None:
    def body(group: Any) -> None:
        model = tiny_model(MIXTRAL)
        optimizer = adam_of(model)
        with use_expert_parallel(model, group, **OPTIONS):
            model(IDS, labels=IDS).loss.backward()
            with pytest.raises(nccl_ep.UsageError, match=r"AdamW was made before use_expert_parallel.*make it after"):
                optimizer.step()

    run_ranks(2, body)


def save_beside_rank_0(rank: int, folder: str) -> None:
    group = dist.new_group([1, 2])
    if rank:
        with use_expert_parallel(model := tiny_model(MIXTRAL), group, **OPTIONS):
            save_pretrained(model, folder)


def test_a_group_without_rank_0_of_the_default_group(tmp_path: Path) -> None:
    """Its own rank 0 writes, which transformers alone would not do."""
    run_processes(3, save_beside_rank_0, tmp_path, str(tmp_path / "saved"))
    stock = tiny_model(MIXTRAL)
    assert_same(type(stock).from_pretrained(tmp_path / "saved").state_dict(), stock, exact=True)


def data_parallel(rank: int) -> list[Any]:
    """DDP leaves experts out: it would give all ranks those of rank 0."""
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        wrapped = DistributedDataParallel(model)
        wrapped(IDS, labels=IDS).loss.backward()
        return [[each.detach().numpy(), each.grad.numpy()] for each in experts_of(model)[0].parameters()]


def test_ddp_leaves_experts_alone(tmp_path: Path) -> None:
    alone = tiny_model(MIXTRAL)
    alone(IDS, labels=IDS).loss.backward()
    for rank, found in enumerate(run_processes(2, data_parallel, tmp_path)):
        for (weights, grad), each in zip(found, experts_of(alone)[0].parameters(), strict=True):
            own = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(torch.from_numpy(weights), each[own])
            torch.testing.assert_close(torch.from_numpy(grad), 2 * each.grad[own], rtol=1e-4, atol=1e-6)


class _Wrapped(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits  # type: ignore[no-any-return]


def data_parallel_around_a_wrapper(rank: int) -> list[Any]:
    model = tiny_model(MIXTRAL)
    with use_expert_parallel(model, dist.group.WORLD, **OPTIONS):
        wrapped = DistributedDataParallel(_Wrapped(model))
        with pytest.raises(nccl_ep.UsageError, match="DistributedDataParallel of a _Wrapped has given all"):
            wrapped(IDS)
    inside = _Wrapped(tiny_model(MIXTRAL))
    with use_expert_parallel(inside, dist.group.WORLD, **OPTIONS), torch.no_grad():
        return DistributedDataParallel(inside)(IDS).numpy()  # type: ignore[no-any-return]


def test_ddp_of_a_wrapper_is_told_to_share_out_the_wrapper(tmp_path: Path) -> None:
    """DDP asks nobody but the module that it is given which parameters it is to leave out."""
    with torch.no_grad():
        want = tiny_model(MIXTRAL)(IDS).logits
    for found in run_processes(2, data_parallel_around_a_wrapper, tmp_path):
        torch.testing.assert_close(torch.from_numpy(found), want, rtol=1e-4, atol=1e-5)


def test_a_file_in_the_place_of_the_folder_is_no_folder(tmp_path: Path) -> None:
    """transformers by itself says so in its log alone, and saves nothing."""
    (tmp_path / "saved").write_text("mine")

    def body(group: Any) -> None:
        with use_expert_parallel(model := tiny_model(MIXTRAL), group, **OPTIONS):
            kind = NotADirectoryError if group.rank() == 0 else nccl_ep.SystemError
            with pytest.raises(kind, match=f"{tmp_path}/saved"):
                save_pretrained(model, tmp_path / "saved")

    run_ranks(2, body)
    assert (tmp_path / "saved").read_text() == "mine"
