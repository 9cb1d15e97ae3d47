"""Allocators of device memory as ``nccl.ep`` takes them. This library's window is memory of its own kind."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .structs import Struct

# cudaError_t (void** ptr, size_t size, void* context), and cudaError_t (void* ptr, void* context)
AllocFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p)
FreeFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(kw_only=True)
class AllocConfig(Struct):
    """Addresses of functions that allocate. Accepted, and never called: peers map the window, so it has its own."""

    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0
