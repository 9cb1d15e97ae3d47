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
    """The C library (``libnccl_ep.so.0``) that lies in the package's folder, or None.

    The operations here are in nccl_ep's extension, and a wheel has no C library: it is for programs that link it.
    """
    path = Path(__file__).parent.parent / "libnccl_ep.so.0"
    return path if path.exists() else None
