"""The library behind ``nccl.ep``, as callers ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

API_VERSION = "0.2.0"  # whose names and meanings these are


def get_lib_version() -> Any:
    """The version of NVIDIA's API, a ``packaging.version.Version``. ``nccl_ep.__version__`` is this library's own."""
    from packaging.version import Version

    return Version(API_VERSION)


def get_lib_path() -> Path | None:
    """None: the operations are in nccl_ep's extension. The C library is for programs that link it."""
    return None
