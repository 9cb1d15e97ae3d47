"""DeepEP V2's methods on GPUs: layers in CUDA graphs, in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deep_ep.elastic_ranks import in_process, replay_new_routing
from tests.support.gpus import WORLDS, in_processes, needs_gpu, num_replays, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = needs_gpu
SMALL, LARGE = 8, 4096  # tokens with which calls take low latency, high throughput


@pytest.mark.parametrize("most", [SMALL, LARGE])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_replays_follow_new_routing(most: int, expand: bool, is_async: bool) -> None:
    replay_new_routing(None, "cuda", most, expand, is_async, num_replays(12))


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("most", [SMALL, LARGE])
def test_graphs_of_ranks_in_processes_follow_new_routing(num_ranks: int, most: int, tmp_path: Path) -> None:
    run_processes(num_ranks, in_process, tmp_path, most, in_processes(num_replays(40)), timeout=150.0)
