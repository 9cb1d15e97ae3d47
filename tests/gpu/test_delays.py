"""Kernels under delays: what is right stays right, and what is planted in them is found.

Needs a build with the switch, which nothing else needs, best in a copy of the tree: the extension lands in nccl_ep/
like any other, and a build directory that made one before does not notice that it was replaced.

    cmake -S . -B build/lab -G Ninja -DNCCL_EP_CUDA=ON -DNCCL_EP_LAB=ON -DNCCL_EP_BUILD_TESTS=OFF
    cmake --build build/lab && python3 -m pytest -m gpu tests/gpu/test_delays.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nccl_ep import _C
from nccl_ep.testing import ThreadGroup
from tests.gpu import chains, delays, ranks
from tests.gpu.delays import SEARCHES, Found
from tests.gpu.watched_arrivals import watch
from tests.ht.harness import check_ht_case
from tests.support.gpus import WORLDS, in_processes, needs_gpu, num_cases, num_replays, ranks_on_gpus
from tests.support.harness import check_case
from tests.support.processes import run_processes

NUM_CASES, NUM_REPLAYS = num_cases(60), num_replays(1500)
# Of a chain, in the search for a planted bug; half as many of high throughput; on one GPU, without graphs, a fifth.
RUNS = 600
PATIENCE = 150.0  # seconds for a world of processes

_reason = "no delays in the kernels: build with -DNCCL_EP_LAB=ON"
pytestmark = [*needs_gpu, pytest.mark.skipif(not hasattr(_C, "set_gpu_testing"), reason=_reason)]
WORLD = WORLDS[-1]
ON_ONE_GPU = [name for name, search in SEARCHES.items() if search.on_one_gpu]


@pytest.fixture(autouse=True)
def _leaves_no_delay() -> Iterator[None]:
    yield
    delays.set_testing()


def _expect_found(found: Found, name: str) -> None:
    print(f"{name}: {found.planted}")
    assert not found.without, f"{name}: wrong without the bug"
    assert found.planted, f"{name}: not noticed"


# ---- The switch itself


def test_a_bug_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r'no kernel can have the bug "two_banks": there are one_bank, '):
        _C.set_gpu_testing(0, bugs=["one_bank", "two_banks"])


def test_delays_make_calls_longer() -> None:
    """A world of one rank, whose calls take about 10 us: nearly all have a block or a warp that is late for longer."""

    def milliseconds(chain: chains.Chain, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(50):
            graph.replay()
        end.record()
        end.synchronize()
        chain.buffer.check()
        assert int(chain.wrong) == 0
        return float(start.elapsed_time(end))

    with chains.chain_buffer(None, torch.device("cuda", 0)) as buffer:
        chain = chains.Chain("dcddccc", buffer)
        graph = chain.capture()
        plain = milliseconds(chain, graph)
        with delays.delays(seed=3):
            delayed = milliseconds(chain, graph)
        with delays.delays(seed=3, percent=10):
            short = milliseconds(chain, graph)
        again = milliseconds(chain, graph)
    print(f"50 chains of 7: {plain:.1f} ms, delayed {delayed:.1f}, a tenth of it {short:.1f}, afterwards {again:.1f}")
    assert delayed > plain + 50 * 7 * 0.02
    assert short < plain + (delayed - plain) / 2
    assert again < plain + (delayed - plain) / 2


# ---- The world on one GPU


def test_delays_change_no_bit_on_one_gpu() -> None:
    for seed in range(NUM_CASES):
        with delays.delays(seed=seed + 1):
            check_case(ranks.cuda_case(seed), device="cuda", staged=seed % 3 == 1)


def test_delays_change_no_bit_of_high_throughput_on_one_gpu() -> None:
    for seed in range(NUM_CASES):
        with delays.delays(seed=seed + 1):
            check_ht_case(ranks.cuda_case(seed), device="cuda", num_sms=seed % 4)


def test_delays_keep_arrivals_behind_their_rows() -> None:
    pytest.importorskip("triton")
    with delays.delays(seed=11):
        watch(ThreadGroup.make(1)[0], torch.device("cuda", 0), NUM_REPLAYS // 5)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """In another process: planted bugs must not reach this one."""
    folder = tmp_path_factory.mktemp("one_gpu")
    found: list[dict[str, Found]] = run_processes(
        1, delays.search_on_one_gpu, folder, ON_ONE_GPU, RUNS // 5, timeout=2 * PATIENCE
    )
    return found[0]


@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_planted_bugs_on_one_gpu_are_found(name: str, one_gpu: dict[str, Found]) -> None:
    _expect_found(one_gpu[name], name)


# ---- Ranks in processes, each with a GPU of its own


@ranks_on_gpus
@pytest.mark.parametrize(
    ("body", "graphs"),
    [(delays.run_with_delays, "plain and with PDL"), (delays.run_ht_with_delays, "staged and given")],
    ids=["ll", "ht"],
)
def test_delays_change_no_bit_over_nccl(body: Any, graphs: str, tmp_path: Path) -> None:
    count = max(NUM_CASES // 3, 1)
    got: list[Any] = run_processes(WORLD, body, tmp_path, WORLD, count, in_processes(NUM_REPLAYS), timeout=PATIENCE)
    for rank, found in enumerate(got):
        print(f"rank {rank}: us a replay, {graphs}: {[round(each) for _, each in found.values()]}")
        assert [wrong for wrong, _ in found.values()] == [0, 0]


@ranks_on_gpus
def test_delays_keep_arrivals_behind_their_rows_over_nccl(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_processes(2, delays.watch_with_delays, tmp_path, in_processes(NUM_REPLAYS // 5), timeout=PATIENCE)


@pytest.fixture(scope="module")
def over_nccl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("over_nccl")
    found: list[dict[str, Found]] = run_processes(
        WORLD, delays.search_over_nccl, folder, list(SEARCHES), RUNS, timeout=2 * PATIENCE
    )
    return found[0]


@ranks_on_gpus
@pytest.mark.parametrize("name", list(SEARCHES))
def test_planted_bugs_over_nccl_are_found(name: str, over_nccl: dict[str, Found]) -> None:
    _expect_found(over_nccl[name], name)
