"""Where tests of ranks run: threads on the CPU, or, by ``on_gpus``, the same tests in processes with a GPU each.

A process of such a world collects the same tests in the same order as the others. A world of threads becomes the world
of processes, tensors that name no device are made on the GPU, and worlds of another size are skipped.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from nccl_ep import testing
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.buffer import living
from tests.support.failures import tell_failure
from tests.support.gpus import on_gpu

DEVICE = os.environ.get("NCCL_EP_TEST_DEVICE", "cpu")  # of tests of ranks; set in processes of on_gpus
MEETING = 60.0  # seconds
_threads = testing.run_ranks
_world: Any = None  # this process's rank of a world of processes


class _MakesOn(TorchFunctionMode):
    """As torch.set_default_device, and random numbers are those of a generator on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return function(*args, **kwargs).to(DEVICE)
        return function(*args, **{**kwargs, "device": DEVICE})


def run_ranks(num_ranks: int, body: Callable[[Any], Any], timeout: float = 300.0) -> list[Any]:
    """``testing.run_ranks``; in a process of a world, its own rank's part, and the results of all."""
    if _world is None:
        return _threads(num_ranks, body, timeout)
    if num_ranks == 1:
        return [body(testing.ThreadGroup.make(1)[0])]
    if num_ranks != _world.size():
        pytest.skip(f"{num_ranks} ranks, there are {_world.size()}")
    result, error = None, None
    try:
        result = body(_world)
    except BaseException as caught:  # pytest's own failures, too
        for buffer in living():
            tell_failure(buffer)
        error = caught
    texts = _world.allgather(pickle.dumps((result, "" if error is None else repr(error))), MEETING)
    found = [pickle.loads(text) for text in texts]
    if error is not None:
        raise error
    for rank, (_, said) in enumerate(found):
        assert not said, f"rank {rank}: {said}"
    return [each for each, _ in found]


def same_for_all(value: Any) -> Any:
    """Rank 0's, where each rank is a process that made one."""
    return value if _world is None else pickle.loads(_world.allgather(pickle.dumps(value), MEETING)[0])


def on_gpus(rank: int, arguments: list[str], folder: Path, device: str = "cuda") -> tuple[dict[str, int], str]:
    """Runs pytest with the arguments as a rank of torch's default group, for tests/support/processes.py.

    Returns how many tests ended how, and pytest's text where not all is well.
    """
    global DEVICE, _world
    DEVICE = os.environ["NCCL_EP_TEST_DEVICE"] = device
    if device == "cuda":
        on_gpu(rank)
    _world = rendezvous_of(dist.group.WORLD)
    testing.run_ranks = run_ranks
    counted: dict[str, int] = {}

    class Counts:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                counted[report.outcome] = counted.get(report.outcome, 0) + 1

    text = io.StringIO()
    options = ["-q", "--maxfail=4", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/rank{rank}"]
    with contextlib.redirect_stdout(text), _MakesOn():
        code = pytest.main([*options, *arguments], plugins=[Counts()])
    return counted, "" if code == 0 else text.getvalue()[-6000:]
