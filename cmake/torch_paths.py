"""Prints a CMake list: torch's version, CUDA version or none, C++ ABI, library directory, include directories."""

import logging
import pathlib

logging.disable(logging.WARNING)  # cpp_extension warns where there is no GPU

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

lib_dir = pathlib.Path(torch.__file__).parent / "lib"
abi = int(torch.compiled_with_cxx11_abi())
paths = [str(lib_dir), *cpp_extension.include_paths()]
print(";".join([torch.__version__, torch.version.cuda or "none", str(abi), *paths]))
