"""The program ep_test of NVIDIA's nccl-extensions in Python, unchanged, over nccl_ep's ``nccl.ep`` on CPU ranks.

Whoever wants it fetches it; it is no part of this repository. NCCL_EXTENSIONS names a clone. Its option -c dispatches
forward without weights, which the header forbids, and NCCL EP 0.2 refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import runpy
import sys
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.processes import run_processes

PROGRAM = Path(os.environ.get("NCCL_EXTENSIONS", "/nowhere")) / "nccl_ep/ep_test.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason="NCCL_EXTENSIONS names no clone of NVIDIA/nccl-extensions"),
]
ARGUMENTS = {
    "ll": "-a ll", "ll-send-only": "-a ll -s both", "ll-random": "-a ll -r", "ht": "-a ht", "ht-random": "-a ht -r",
}  # fmt: skip


class World:
    """``MPI.COMM_WORLD``, of torch's default group."""

    def Get_rank(self) -> int:
        return dist.get_rank()

    def Get_size(self) -> int:
        return dist.get_world_size()

    def Split_type(self, _: Any) -> World:
        return self

    def bcast(self, value: Any, root: int) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=root)
        return values[0]


class Error(IntEnum):
    cudaSuccess = 0


class Copy(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class Stream:
    handle = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0

    def sync(self) -> None:
        """All is done at once."""


class Device:
    def __init__(self, number: int) -> None:
        del number

    def set_current(self) -> None:
        """There is one."""

    def create_stream(self) -> Stream:
        return Stream()


def packages() -> dict[str, types.ModuleType]:
    """mpi4py, cuda.bindings and cuda.core, as far as the program uses them. Device memory is the host's."""
    libc = ctypes.CDLL(None)
    libc.aligned_alloc.restype = ctypes.c_void_p

    def malloc(size: int) -> tuple[Error, int]:
        return Error.cudaSuccess, libc.aligned_alloc(ctypes.c_size_t(256), ctypes.c_size_t(-(-size // 256) * 256))

    def free(pointer: int) -> tuple[Error]:
        libc.free(ctypes.c_void_p(pointer))
        return (Error.cudaSuccess,)

    def copy(to: int, source: int, size: int, kind: Copy, stream: int) -> tuple[Error]:
        ctypes.memmove(to, source, size)
        return (Error.cudaSuccess,)

    runtime = types.SimpleNamespace(
        cudaMalloc=malloc, cudaFree=free, cudaMemcpyAsync=copy, cudaMemcpyKind=Copy, cudaError_t=Error
    )
    mpi = types.SimpleNamespace(COMM_WORLD=World(), COMM_TYPE_SHARED=None)
    names: dict[str, dict[str, Any]] = {
        "mpi4py": {"MPI": mpi}, "cuda": {}, "cuda.bindings": {"runtime": runtime}, "cuda.core": {"Device": Device},
    }  # fmt: skip
    made = {}
    for name, contents in names.items():
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(contents)
    return made


def run(rank: int, arguments: str) -> str:
    """What the program says."""
    import nccl_ep

    nccl_ep.install_as_nccl_ep()
    sys.modules.update(packages())
    sys.argv = [str(PROGRAM), *arguments.split(), "-t", "10", "-d", "512"]
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert code is None, f"the program ends with {code}:\n{said.getvalue()}"
    return said.getvalue()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_ep_test(arguments: str, num_ranks: int, tmp_path: Path) -> None:
    for rank, said in enumerate(run_processes(num_ranks, run, tmp_path, arguments)):
        assert f"[MPI Rank {rank}] Success" in said and "FAILED" not in said and "failed" not in said, said
        assert "-r" in arguments or "Combine verification PASSED" in said
