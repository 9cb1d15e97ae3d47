"""What the GPU tests share: how many GPUs there are, the marks of tests that need them, graphs, work that keeps one
busy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from tests.support import failures as failures  # is in force where it is imported

TEST_ALL = bool(os.environ.get("NCCL_EP_TEST_ALL"))
NUM_GPUS = torch.cuda.device_count() if _C.has_cuda() and torch.cuda.is_available() else 0
NUM_SMS = (4, 12, 132)
# Of all buffers of GPU tests that name no other.
nccl_ep.Buffer.__init__.__kwdefaults__["window"] = os.environ.get("NCCL_EP_TEST_WINDOW", "nccl")
# NCCL 2.30 and newer, and this library, let ranks of several processes share a GPU.
SHARED_GPUS = NUM_GPUS > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
WORLDS = [ranks for ranks in (2, 3, 4, 8) if ranks <= max(NUM_GPUS, 4 if SHARED_GPUS else 2)]  # in processes

_reason = "no GPU here" if not torch.cuda.is_available() else "nccl_ep was built without CUDA"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason=_reason)]
HAS_ONE_GPU_WORLDS = hasattr(_C, "set_gpu_testing")  # of several ranks: in builds with NCCL_EP_LAB
one_gpu_worlds = pytest.mark.skipif(
    NUM_GPUS > 0 and not HAS_ONE_GPU_WORLDS, reason="several ranks on one GPU: build with -DNCCL_EP_LAB=ON"
)
several_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"{NUM_GPUS} GPU here, two are needed")
ranks_on_gpus = pytest.mark.skipif(
    NUM_GPUS < 2 and not SHARED_GPUS, reason=f"{NUM_GPUS} GPU here: ranks in processes need one each"
)


# Where ranks in processes have their tensors: parameters of tests of frameworks, which take a GPU that is there.
CPU_OR_GPUS = [
    pytest.param("cpu", marks=pytest.mark.skipif(NUM_GPUS > 0, reason="frameworks take the GPU that is here")),
    pytest.param("cuda", marks=[pytest.mark.gpu, several_gpus]),
]


def device_of(rank: int, kind: str) -> torch.device:
    """Of a rank that is a process: "cpu", or with "cuda" a GPU of its own."""
    return on_gpu(rank) if kind == "cuda" else torch.device("cpu")


def on_one_gpu(*worlds: int) -> list[Any]:
    """Parameters: numbers of ranks on one GPU."""
    return [ranks if ranks == 1 else pytest.param(ranks, marks=one_gpu_worlds) for ranks in worlds]


def on_gpu(rank: int) -> torch.device:
    """The GPU of a rank that is a process, from now on the current one."""
    torch.cuda.set_device(rank % NUM_GPUS)
    return torch.device("cuda", rank % NUM_GPUS)


def num_replays(default: int) -> int:
    """Of captured graphs; the environment may ask for others."""
    return int(os.environ.get("NCCL_EP_GPU_REPLAYS", str(default)))


def in_processes(replays: int) -> int:
    """Of graphs whose ranks are processes: few of them where these take turns on one GPU, for milliseconds each."""
    return max(replays // 20, 1) if NUM_GPUS < 2 else replays


def num_cases(default: int) -> int:
    """Generated ones of a test, likewise."""
    return int(os.environ.get("NCCL_EP_GPU_CASES", str(default)))


def captured(work: Callable[[], None], device: str) -> Callable[[], None]:
    """On a GPU a graph of the work, to be replayed; the work has run once before. On "cpu" the work itself."""
    if device == "cpu":
        return work
    work()  # what a first call sets up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return lambda: graph.replay()


def busy(milliseconds: float) -> torch.cuda.Event:
    """Gives the current stream about so much work. Returns an event behind it."""
    event = torch.cuda.Event()
    torch.cuda._sleep(int(milliseconds * 2e6))
    event.record()
    return event
