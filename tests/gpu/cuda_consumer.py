"""signals_consumer.cu as a consumer of a dispatch: what a user's own kernel in CUDA does with nccl_ep_signals.cuh."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

import nccl_ep
from nccl_ep.arrivals import Arrivals

SOURCE = Path(__file__).with_name("signals_consumer.cu")
INCLUDE = Path(nccl_ep.__file__).parent / "include"


def compiled(source: Path, out: Path, *options: str | Path) -> Path:
    """By nvcc, without warnings."""
    how = ["nvcc", "-std=c++17", "-Werror", "all-warnings", f"-I{INCLUDE}", *options, source, "-o", out]
    done = subprocess.run([str(each) for each in how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def has_nvcc() -> bool:
    return shutil.which("nvcc") is not None


class CudaConsumer:
    """Copies blocks as they arrive. library: of ``made``. signals: of the last call, one a block of the arrivals."""

    def __init__(self, library: Path) -> None:
        self.launch = ctypes.CDLL(str(library)).launch_copy_blocks
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.launch.argtypes = [*[pointer] * 5, *[number] * 3, ctypes.c_uint64, pointer]

    @staticmethod
    def made(folder: Path, device: int = 0) -> Path:
        major, minor = torch.cuda.get_device_capability(device)
        how = (f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC")
        return compiled(SOURCE, folder / "libsignals_consumer.so", *how)

    def __call__(
        self, x: torch.Tensor, seen: torch.Tensor, experts: torch.Tensor, arrivals: Arrivals, here: int, words: int,
        timeout_ns: int,
    ) -> None:  # fmt: skip
        """As ``copy_blocks`` of arrivals_consumer.py, on the current stream."""
        self.signals = torch.zeros(arrivals.blocks, dtype=torch.int32, device=x.device)
        tensors = [each.data_ptr() for each in (x, seen, experts, self.signals, arrivals.state)]
        stream = torch.cuda.current_stream().cuda_stream
        assert self.launch(*tensors, arrivals.blocks, here, words, timeout_ns, stream) == 0

    def check(self, arrivals: Arrivals, here: int, where: str) -> None:
        assert torch.equal(self.signals[:here], (arrivals.rows[:here] > 0).int()), where
