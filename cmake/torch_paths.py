"""Prints a CMake list: torch's version, CUDA version or none, C++ ABI, directories of libraries, of NCCL's headers or
none, and of headers."""

import logging
import os
import pathlib
import sys

logging.disable(logging.WARNING)  # cpp_extension warns where there is no GPU
sys.path.extend(filter(None, [os.environ.get("NCCL_EP_TORCH_SITE")]))  # tools/build_backend.py

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

try:
    import nvidia.nccl

    nccl = next(iter(nvidia.nccl.__path__)) + "/include"
except ImportError:
    nccl = "none"
lib_dir = pathlib.Path(torch.__file__).parent / "lib"
abi = int(torch.compiled_with_cxx11_abi())
paths = [str(lib_dir), nccl, *cpp_extension.include_paths()]
print(";".join([torch.__version__, torch.version.cuda or "none", str(abi), *paths]))
