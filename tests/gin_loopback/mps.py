"""NVIDIA's Multi-Process Service: kernels of several processes run on one GPU at the same time. Without it they run in
turns, and one that waits for another process keeps the GPU for milliseconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = shutil.which("nvidia-cuda-mps-control") or shutil.which(
    "nvidia-cuda-mps-control", path="/usr/local/nvidia/bin"
)


@contextmanager
def sharing(num_ranks: int, num_gpus: int) -> Iterator[dict[str, str]]:
    """A daemon of its own while ranks share GPUs, an equal part of the SMs each. Yields what their environment needs:
    nothing if each has a GPU."""
    if num_ranks <= num_gpus:
        yield {}
        return
    assert CONTROL, "nvidia-cuda-mps-control is not here"
    with tempfile.TemporaryDirectory(prefix="mps_") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        daemon = {**os.environ, **places}
        subprocess.run([CONTROL, "-d"], env=daemon, check=True, timeout=30)
        try:
            share = 100 * num_gpus // num_ranks
            yield {**places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        finally:
            subprocess.run([CONTROL], input="quit\n", env=daemon, text=True, check=False, timeout=30)
