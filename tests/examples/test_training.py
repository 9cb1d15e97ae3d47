"""The example model is trained: the same curve twice, the curve of one rank, of the baseline, and of every option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.moe_lm import checkpoint, ranks, train
from examples.moe_lm.a2sgd import Traffic, a2sgd_hook, rebuild, two_means
from examples.moe_lm.data import Corpus
from examples.moe_lm.model import load_balancing_loss
from examples.moe_lm.ranks import world_of
from tests.examples.ranks import COMPARED, SIZES, SMALL, STEPS, train_each
from tests.support.processes import run_processes

Reports = dict[str, dict[str, Any]]
SHORT = "--steps 8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Reports:
    runs = {
        "first": f"--steps {STEPS} --deterministic",
        "again": f"--steps {COMPARED} --deterministic",
        "baseline": f"--steps {COMPARED} --exchange all_to_all_single",
        "a2sgd": f"--steps {STEPS} --dense-grads a2sgd",
        "saved": f"{SHORT} --save {folder}/of_two",
        "on": f"{SHORT} --load {folder}/of_two",
        "checkpointed": f"{SHORT} --checkpoint-activations",
        "replicas": f"{SHORT} --expert-parallel 1 --save {folder}/of_replicas",
        "replicas, on": f"{SHORT} --expert-parallel 1 --load {folder}/of_replicas",
        "fsdp2": f"{SHORT} --dense-grads fsdp2 --save {folder}/of_fsdp2",
        "fsdp2, on": f"{SHORT} --dense-grads fsdp2 --load {folder}/of_two",
        "on, of fsdp2": f"{SHORT} --load {folder}/of_fsdp2 --save {folder}/of_fsdp2",
        "all rows": f"{SHORT} --rows all",
        "bf16": f"{SHORT} --dtype bf16",
        "fp8": f"{SHORT} --dtype bf16 --fp8",
        "arrivals": f"{SHORT} --exchange nccl_ep_arrivals",
        "compiled": f"{SHORT} --dtype bf16 --compile aot_eager",
    }
    directory = folder / "two"
    directory.mkdir()
    reports: list[Reports] = run_processes(2, train_each, directory, runs, timeout=900)
    for name, report in reports[0].items():
        assert report["losses"] == reports[1][name]["losses"], "they are averages over the ranks"
    return reports[0]


@pytest.fixture(scope="module")
def on_one(folder: Path, on_two: Reports) -> Reports:
    """After the two have saved."""
    runs = {
        "first": f"--steps {COMPARED}",
        "on": f"{SHORT} --load {folder}/of_two",
        "saved": f"{SHORT} --save {folder}/of_one",
    }
    directory = folder / "one"
    directory.mkdir()
    (reports,) = run_processes(1, train_each, directory, runs, timeout=900)
    return reports


def losses(report: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(report["losses"])


def test_two_runs_have_the_same_curve_bit_for_bit(on_two: Reports) -> None:
    assert len(on_two["first"]["losses"]) == STEPS
    assert on_two["first"]["losses"][:COMPARED] == on_two["again"]["losses"]


def test_the_model_learns(on_two: Reports) -> None:
    curve = losses(on_two["first"])
    assert curve[:10].mean() > 5.0 and curve[-10:].mean() < 3.2


def test_curve_is_that_of_one_rank_and_of_the_baseline(on_two: Reports, on_one: Reports) -> None:
    curve = losses(on_two["first"])[:COMPARED]
    torch.testing.assert_close(losses(on_one["first"]), curve, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses(on_two["baseline"]), curve, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_goes_on_where_it_was(on_two: Reports, on_one: Reports, folder: Path) -> None:
    """On as many ranks, on fewer, and on more."""
    straight = losses(on_two["first"])
    torch.testing.assert_close(losses(on_two["saved"]), straight[:8], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses(on_two["on"]), straight[8:16], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses(on_one["on"]), straight[8:16], rtol=1e-4, atol=1e-4)
    for name in ("fsdp2, on", "on, of fsdp2", "replicas, on"):
        torch.testing.assert_close(losses(on_two[name]), straight[8:16], rtol=1e-5, atol=1e-5)
    assert checkpoint.read_index(f"{folder}/of_fsdp2").step == 16, "saved where it was loaded from"
    directory = folder / "more"
    directory.mkdir()
    reports = run_processes(2, train_each, directory, {"on": f"{SHORT} --load {folder}/of_one"})
    torch.testing.assert_close(losses(reports[0]["on"]), straight[8:16], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["checkpointed", "replicas", "fsdp2", "all rows", "arrivals"])
def test_ways_to_train_that_change_nothing_have_the_same_losses(name: str, on_two: Reports) -> None:
    """Replicas: experts on each rank, whose gradients are averaged. All rows: room for what could come. Arrivals:
    experts begin while rows and gradients come."""
    torch.testing.assert_close(losses(on_two[name]), losses(on_two["first"])[:8], rtol=1e-5, atol=1e-5)


def test_training_in_bf16_and_fp8_stays_near_fp32(on_two: Reports) -> None:
    """A block that is compiled whole is that of eager bf16. FP8 is near it, and is not the same."""
    curve, half, eighth = losses(on_two["first"])[:8], losses(on_two["bf16"]), losses(on_two["fp8"])
    torch.testing.assert_close(half, curve, rtol=0.02, atol=0.02)
    torch.testing.assert_close(losses(on_two["compiled"]), half, rtol=0.01, atol=0.01)
    torch.testing.assert_close(eighth, half, rtol=0.03, atol=0.03)
    assert not torch.equal(eighth, half)


def test_the_report_tells_what_travelled(on_two: Reports) -> None:
    plain, two_numbers = on_two["first"], on_two["a2sgd"]
    bytes_of = "dense_gradient_bytes_a_step"
    assert plain[bytes_of]["given_to_all_reduce"] == plain[bytes_of]["plain"] > 10_000
    assert two_numbers[bytes_of]["plain"] == plain[bytes_of]["plain"]
    assert 8 <= two_numbers[bytes_of]["given_to_all_reduce"] <= 64
    assert plain["first_buffer"]["ht_combines"] > 0 and on_two["baseline"]["first_buffer"] is None


def test_a2sgd_converges_beside_plain_averaging(on_two: Reports) -> None:
    plain, two_numbers = losses(on_two["first"]), losses(on_two["a2sgd"])
    assert not torch.equal(plain, two_numbers)
    assert two_numbers[-20:].mean() < plain[-20:].mean() * 1.05


# ---- Parts


def test_two_means_and_what_is_rebuilt() -> None:
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.0, -4.0])
    means, is_positive = two_means(gradient)
    assert means.tolist() == [4 / 3, -3.0] or torch.allclose(means, torch.tensor([4 / 3, -3.0]))
    assert is_positive.tolist() == [True, False, True, True, False], "zero counts with the positive ones"
    assert torch.equal(rebuild(gradient, is_positive, means, means), gradient)
    other = torch.tensor([4 / 3 + 1.0, -3.0 - 0.5])
    torch.testing.assert_close(
        rebuild(gradient, is_positive, means, other), torch.tensor([2.0, -2.5, 4.0, 1.0, -4.5])
    )  # fmt: skip
    assert two_means(torch.ones(3))[0].tolist() == [1.0, 0.0], "no negative entry"


def _hook(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A gradient of this rank's own, and what DistributedDataParallel makes of it with the hook."""
    layer = torch.nn.Linear(3, 2, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer)
    traffic = Traffic(dist.group.WORLD)
    wrapped.register_comm_hook(traffic, a2sgd_hook)
    own = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
    (wrapped(torch.eye(3)) * own.t()).sum().backward()
    assert layer.weight.grad is not None
    return own, layer.weight.grad, traffic.sent


def test_the_hook_averages_the_means_of_the_ranks(tmp_path: Path) -> None:
    found = run_processes(2, _hook, tmp_path)
    averaged = torch.stack([two_means(own)[0] for own, _, _ in found]).mean(0)
    for own, got, sent in found:
        means, is_positive = two_means(own)
        torch.testing.assert_close(got, rebuild(own, is_positive, means, averaged))
        assert sent == 8


def test_the_load_balancing_loss_is_least_where_experts_are_even() -> None:
    experts = 4
    alike = torch.full((2, 8, experts), 1 / experts)
    spread = torch.arange(8).remainder(experts).view(1, 8, 1).expand(2, 8, 1)
    assert load_balancing_loss(alike, spread).item() == pytest.approx(1.0)
    one_hot = torch.nn.functional.one_hot(torch.zeros(2, 8, dtype=torch.int64), experts).float()
    assert load_balancing_loss(one_hot, torch.zeros(2, 8, 1, dtype=torch.int64)).item() == pytest.approx(experts)


def test_ranks_share_one_batch_without_overlap() -> None:
    corpus = Corpus(seed=3)
    whole = corpus.batch(5, 6, 10)
    assert whole.shape == (6, 11)
    parts = [corpus.batch(5, 6, 10, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole) and not torch.equal(corpus.batch(6, 6, 10), whole)
    with pytest.raises(ValueError, match="6 sequences is not a multiple of 4 ranks"):
        corpus.batch(5, 6, 10, 0, 4)


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    """Than the one for which the command line was checked."""
    with pytest.raises(AssertionError, match="--sequences is 4, must be a multiple of the 3 ranks"):
        run_processes(3, _refused, tmp_path)


def _refused(_: int) -> None:
    options = train.parse(f"{SIZES} --sequences 3 --experts 9".split())
    options.sequences = 4
    train.train(world_of(options, torch.device("cpu")), options)


def test_a_model_that_diverges_is_not_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = train.parse(f"{SMALL} --ranks 2 --steps 40 --lr 1e30 --save {tmp_path}/saved".split())
    with pytest.raises(SystemExit):
        ranks.run(train.body, options)
    said = capfd.readouterr().err.splitlines()[0]
    assert "ArithmeticError: the loss is nan: training has diverged, and is not saved" in said
    assert not any((tmp_path / "saved").iterdir())
