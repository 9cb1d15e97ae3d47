"""Imported first: tells where the extension _C is missing. Unbuilt sources hide an installed package from Python."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def _require_extension() -> None:
    """ImportError that says what to do."""
    if importlib.util.find_spec(f"{__package__}._C") is not None:
        return
    here = Path(__file__).parent
    build = f"build it (make build in {here.parent}, or pip install {here.parent})"
    others = [folder for entry in sys.path if _has_extension(folder := Path(entry).absolute() / here.name)]
    if others:
        build = f"start Python in another folder, to get {others[0]}, or {build}"
    version = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(f"nccl_ep in {here} has no extension _C for Python {version}, as it was not built here: {build}")


def _has_extension(folder: Path) -> bool:
    return any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


_require_extension()
