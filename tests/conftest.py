"""For all tests: their order; torch's threads; garbage; the C library, built and installed once where it is wanted."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.c.c_api import Library
from tests.c.case import run

# Ranks are threads and processes that share the cores; torch's own would mostly wait for one another.
if not torch.cuda.is_available():
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

# Files that take longest. They begin before all others: one that begins late keeps one core, and the rest have nothing.
LONGEST = (
    "examples/test_two_nodes.py",
    "docs/test_docs.py",
    "bench/test_bench.py",
    "ht/test_ht.py",
    "training/test_compile.py",
    "training/test_compile_tokens.py",
    "training/test_compiled_arrivals.py",
    "torch_events/test_stream_event.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))  # the rest stays as it was


def pytest_collection_finish() -> None:
    gc.freeze()  # a round over all that torch and the tests are takes half a second, and no test looks for that


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C library is installed. Built in a developers' build directory that has it, or in one of its own."""
    names = ("gpu", "dev") if torch.cuda.is_available() else ("dev", "gpu")
    caches = (ROOT / "build" / name / "CMakeCache.txt" for name in names)
    build = next((c.parent for c in caches if c.exists() and "BUILD_C_LIBRARY:BOOL=ON" in c.read_text()), None)
    if build is None:
        build = tmp_path_factory.mktemp("build")
        off = [f"-DNCCL_EP_{name}=OFF" for name in ("BUILD_PYTHON", "BUILD_TESTS")]
        cuda = f"-DNCCL_EP_CUDA={'AUTO' if torch.cuda.is_available() else 'OFF'}"
        python = f"-DPython_EXECUTABLE={sys.executable}"  # with NCCL's headers
        run("cmake", "-S", ROOT, "-B", build, "-DNCCL_EP_BUILD_C_LIBRARY=ON", cuda, python, *off)
    installed = tmp_path_factory.mktemp("installed")
    with open(build / "CMakeCache.txt") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of pytest-xdist come here at the same time
        run("cmake", "--build", build, "--target", "ncclep", "--parallel", str(os.cpu_count()))
        run("cmake", "--install", build, "--component", "c_library", "--prefix", installed)
    return installed


@pytest.fixture(scope="session")
def library_file(prefix: Path) -> Path:
    return next(prefix.glob("**/libnccl_ep.so"))


@pytest.fixture(scope="session")
def library(library_file: Path) -> Library:
    return Library(library_file)
