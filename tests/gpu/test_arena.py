"""Tensors of ``buffer.empty`` on a GPU: the rules of torch's allocator hold for them.

Needs one GPU and no kernels of high throughput: ``pytest tests/gpu/test_arena.py``.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import nccl_ep
from tests import ROOT
from tests.support.gpus import busy, needs_gpu

pytestmark = needs_gpu
MB = 1 << 20
ROWS = (8 * MB, torch.uint8)  # a block of 8 MiB


def _buffer(arena_mb: int = 128) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        None, max_tokens=4, hidden=64, topk=2, num_experts=2, mode="ht", arena_bytes=arena_mb * MB, device="cuda"
    )


def _empty(buffer: nccl_ep.Buffer, size: int = ROWS[0], dtype: torch.dtype = ROWS[1]) -> torch.Tensor:
    return buffer.empty([size], dtype)


def _is_inside(buffer: nccl_ep.Buffer, tensor: torch.Tensor) -> bool:
    return buffer.runtime.arena_offset(tensor.data_ptr(), tensor.nbytes) is not None


def test_memory_is_used_again_in_the_streams_order() -> None:
    """The same block at once, although the GPU has not got there: its stream writes it later."""
    with _buffer() as buffer:
        first = _empty(buffer)
        assert first.is_cuda and _is_inside(buffer, first)
        address = first.data_ptr()
        busy(100)
        kept = first.fill_(3).clone()
        del first
        second = _empty(buffer).fill_(7)
        assert second.data_ptr() == address
        assert int(kept.min()) == int(kept.max()) == 3 and int(second.min()) == 7


def test_memory_of_another_stream_is_left_alone() -> None:
    """A side stream still reads what the host has freed: after record_stream that block is nobody's."""
    with _buffer() as buffer:
        side = torch.cuda.Stream()
        out = torch.zeros(ROWS[0], dtype=torch.uint8, device="cuda")
        first = _empty(buffer).fill_(3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy(200)
            out.copy_(first)
        first.record_stream(side)
        address = first.data_ptr()
        del first
        second = _empty(buffer).fill_(7)
        assert second.data_ptr() != address and _is_inside(buffer, second)
        torch.cuda.synchronize()
        assert int(out.min()) == int(out.max()) == 3
        torch.empty(1 << 22, device="cuda")  # an ordinary allocation: torch looks what has become free
        third = _empty(buffer)
        assert third.data_ptr() == address


def test_each_stream_has_its_own() -> None:
    """What one stream has freed is not given to another, which would write it too early."""
    with _buffer() as buffer:
        side = torch.cuda.Stream()
        first = _empty(buffer)
        address = first.data_ptr()
        busy(100)
        kept = first.fill_(3).clone()
        del first
        with torch.cuda.stream(side):
            second = _empty(buffer).fill_(7)
            assert second.data_ptr() != address and _is_inside(buffer, second)
        torch.cuda.synchronize()
        assert int(kept.min()) == 3 and int(second.max()) == 7


def test_blocks_of_many_sizes_stay_in_the_arena() -> None:
    """Sizes that change from call to call, as those of exact dispatches do, stay inside for ever."""
    with _buffer(256) as buffer:
        made = torch.Generator().manual_seed(1)
        for _ in range(400):
            sizes = torch.randint(1, 40 * MB, (2,), generator=made).tolist()
            tensors = [_empty(buffer, size) for size in sizes]
            assert all(_is_inside(buffer, each) for each in tensors), sizes
            assert tensors[0].data_ptr() % 512 == 0
            del tensors


def test_what_does_not_fit_lies_elsewhere() -> None:
    """What does not fit lies elsewhere, and torch's other memory is not flushed for it."""
    with _buffer(64) as buffer:
        cached = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
        del cached
        reserved, retries = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_alloc_retries"]
        tensors = [_empty(buffer).fill_(number) for number in range(12)]
        inside = [_is_inside(buffer, each) for each in tensors]
        assert inside[0] and not inside[-1]
        assert not _is_inside(buffer, _empty(buffer, 256 * MB).fill_(1))
        assert [int(each[-1]) for each in tensors] == list(range(12))
        assert torch.cuda.memory_reserved() >= reserved
        assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
        del tensors
        assert _is_inside(buffer, _empty(buffer))


def test_tensors_outlive_the_buffer() -> None:
    buffer = _buffer()
    tensor = _empty(buffer)
    free_before = torch.cuda.mem_get_info()[0]
    buffer.destroy()
    tensor.fill_(5)
    assert int(tensor.min()) == 5
    with pytest.raises(nccl_ep.UsageError, match="destroyed"):
        _empty(buffer)
    del tensor, buffer
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free_before + 100 * MB, "the window was not given back"


def test_destroy_gives_the_window_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        with _buffer(512) as buffer:
            _empty(buffer)
        del buffer
        assert torch.cuda.mem_get_info()[0] >= before - 64 * MB


def test_a_graphs_tensors_are_of_its_own_pool() -> None:
    """A graph's tensors are of its own pool; one made before keeps its place and may be written by the graph."""
    with _buffer() as buffer:
        given = _empty(buffer)
        seen: list[Any] = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = _empty(buffer)
            made.fill_(9)
            given.copy_(made)
            seen.append(_is_inside(buffer, made))
        assert seen == [False] and _is_inside(buffer, given)
        other = _empty(buffer).fill_(1)  # in the arena, and not where the graph writes
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert int(given.min()) == 9 and int(other.max()) == 1 and _is_inside(buffer, other)


def test_tensors_are_of_the_arena_in_a_pool_of_the_caller_too() -> None:
    """torch gives the innermost pool: inside use_mem_pool tensors come from the arena as everywhere, others do not."""
    with _buffer() as buffer:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            ours = _empty(buffer)
            theirs = torch.empty(ROWS[0], dtype=ROWS[1], device="cuda")
        assert _is_inside(buffer, ours) and not _is_inside(buffer, theirs)


def test_another_threads_tensors_are_not_of_the_arena() -> None:
    """What another thread allocates meanwhile is not of the arena."""
    with _buffer() as buffer:
        outside: list[bool] = []
        stop = threading.Event()

        def allocate() -> None:
            while not stop.is_set():
                outside.append(not _is_inside(buffer, torch.empty(3 * MB, device="cuda")))

        thread = threading.Thread(target=allocate)
        thread.start()
        inside = [_is_inside(buffer, _empty(buffer)) for _ in range(2000)]
        stop.set()
        thread.join()
        assert all(inside) and outside and all(outside)


@pytest.mark.parametrize("conf", ["expandable_segments:True", "max_split_size_mb:32", "backend:cudaMallocAsync"])
def test_the_arena_serves_every_setting_of_the_allocator(conf: str) -> None:
    """cudaMallocAsync has no such pools: there, tensors lie elsewhere."""
    program = f"""
import torch
from tests.gpu import test_arena as t
with t._buffer() as buffer:
    a = t._empty(buffer).fill_(3)
    b = t._empty(buffer).fill_(4)
    assert int(a.max()) == 3 and int(b.min()) == 4
    assert t._is_inside(buffer, a) == {conf != "backend:cudaMallocAsync"}, a.data_ptr()
print("fine")
"""
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stdout + done.stderr
