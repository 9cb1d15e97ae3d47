"""Blocks of rows that announce themselves on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup
from tests.gpu.cuda_consumer import CudaConsumer, has_nvcc
from tests.gpu.watched_arrivals import Layer, make_buffer, outlive, watch
from tests.support.gpus import in_processes, needs_gpu, num_replays, on_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytest.importorskip("triton")
pytestmark = needs_gpu
REPLAYS = num_replays(60)
needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc here")


def test_words_come_behind_their_rows() -> None:
    watch(ThreadGroup.make(1)[0], torch.device("cuda", 0), REPLAYS)


def _watch_on_gpus(rank: int, replays: int) -> None:
    watch(rendezvous_of(dist.group.WORLD), on_gpu(rank), replays)


@ranks_on_gpus
def test_words_come_behind_their_rows_over_nccl(tmp_path: Path) -> None:
    run_processes(2, _watch_on_gpus, tmp_path, in_processes(REPLAYS))


@needs_nvcc
def test_words_come_behind_their_rows_in_cuda(tmp_path: Path) -> None:
    consumer = CudaConsumer(CudaConsumer.made(tmp_path))
    watch(ThreadGroup.make(1)[0], torch.device("cuda", 0), REPLAYS, consumer)


@needs_nvcc
@ranks_on_gpus
def test_a_rank_that_stays_away_ends_the_consumer_in_cuda(tmp_path: Path) -> None:
    run_processes(2, outlive, tmp_path, "ht", "packed", CudaConsumer.made(tmp_path))


@ranks_on_gpus
@pytest.mark.parametrize(("mode", "layout"), [("ll", "packed"), ("ll", "expert_major"), ("ht", "packed")])
def test_a_rank_that_stays_away_ends_the_consumer(mode: str, layout: str, tmp_path: Path) -> None:
    run_processes(2, outlive, tmp_path, mode, layout)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(("mode", "layout"), [("ll", "expert_major"), ("ht", "packed")])
def test_a_compiled_layer_has_the_eager_ones_bits(mode: Any, layout: Any, is_beside: bool) -> None:
    """Its consumer is a kernel of Triton's between dispatch and combine, which waits for each block's word."""
    torch._dynamo.reset()
    with make_buffer(ThreadGroup.make(1)[0], torch.device("cuda", 0), 20.0) as buffer:
        layer = Layer(buffer, mode, layout, is_beside)
        compiled = torch.compile(layer, fullgraph=True, options=nccl_ep.KEEP_PROGRAM_ORDER)
        for turn in range(3):
            layer.watched.draw(turn)
            x, ids = layer.watched.x, layer.watched.ids
            plain = nccl_ep.dispatch(x, ids, **layer.watched.options)
            want = nccl_ep.combine(plain.x, plain.handle, weights=None)
            assert torch.equal(layer(x, ids), want)
            assert torch.equal(compiled(x, ids), want)
        buffer.check()
