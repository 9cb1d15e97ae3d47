"""``import nccl.ep`` for programs that are not to be changed: ``nccl_ep.nvidia`` under NVIDIA's names.

``nccl`` is a namespace package: its parts may lie in several folders, and of a part that is in two of them the first
wins. ``shims`` has ``nccl.ep``. ``core_shims`` has as much of ``nccl.core`` as callers of ``nccl.ep`` use, for where
nccl4py is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CORE = str(_HERE / "core_shims")


def shims() -> str:
    """The folder with ``nccl.ep``."""
    return str(_HERE / "shims")


def folders() -> list[str]:
    """For PYTHONPATH: where ``import nccl.ep`` finds nccl_ep, and ``nccl.core`` is found at all.

    In a shell: ``PYTHONPATH=$(python -m nccl_ep.nvidia path)``.
    """
    return [shims()] if installed("core") else [shims(), _CORE]


def installed(part: str) -> str | None:
    """Where NVIDIA's own ``nccl.ep`` or ``nccl.core`` is installed, imported or not."""
    loaded = sys.modules.get(f"nccl.{part}")
    if loaded is not None and not _is_ours(origin := str(getattr(loaded, "__file__", None))):
        return origin
    path = [each for each in sys.path if not _is_ours(each)]
    namespace = PathFinder.find_spec("nccl", path)
    if namespace is None or namespace.submodule_search_locations is None:
        return None
    places = [each for each in namespace.submodule_search_locations if not _is_ours(each)]
    spec = PathFinder.find_spec(f"nccl.{part}", places)
    return None if spec is None else spec.origin


def _is_ours(place: str) -> bool:
    return place.startswith(str(_HERE))


def install_as_nccl_ep() -> None:
    """Makes ``import nccl.ep`` find nccl_ep, in this process and in those that ``multiprocessing`` spawns.

    nccl_ep wins over an installed nccl-extensions; ``nccl.core`` stays nccl4py's where that is installed. May be called
    twice.

    Raises: ImportError where the process has imported NVIDIA's own ``nccl.ep`` already, or a module ``nccl`` that is no
    namespace package.
    """
    loaded = sys.modules.get("nccl.ep")
    if loaded is not None and not _is_ours(origin := str(getattr(loaded, "__file__", None))):
        raise ImportError(
            f"this process has imported NVIDIA's nccl.ep, {origin}, and may hold objects of it: call "
            "nccl_ep.install_as_nccl_ep() before anything imports nccl.ep"
        )
    namespace = sys.modules.get("nccl")
    if namespace is not None and getattr(namespace, "__file__", None) is not None:
        raise ImportError(
            f"nccl is {namespace.__file__}, must be a namespace package for nccl.ep to be one of its parts"
        )
    if shims() not in sys.path:
        sys.path.insert(0, shims())
    if _CORE in folders() and _CORE not in sys.path:
        sys.path.append(_CORE)
    importlib.invalidate_caches()
    importlib.import_module("nccl.ep")
