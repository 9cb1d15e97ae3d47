"""``import deep_ep`` for programs that are not to be changed: this package under DeepEP's names.

The modules are files in ``shims``. A program calls ``install_as_deep_ep()`` before it imports DeepEP; one that cannot
be touched, or that starts workers, finds the folder in its ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAMES = ("deep_ep", "deep_ep_cpp")  # modules of the folder; deep_ep has submodules


def shims() -> str:
    """The folder with modules ``deep_ep`` and ``deep_ep_cpp``, for ``PYTHONPATH``.

    In a shell: ``PYTHONPATH=$(python -m nccl_ep.deep_ep path)``.
    """
    return str(Path(__file__).resolve().parent / "shims")


def installed_elsewhere() -> dict[str, str]:
    """Modules of these names that are not ours, and where they are: DeepEP's own."""
    found = {}
    for name in NAMES:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
        origin = getattr(loaded, "__file__", None) if spec is None else spec.origin
        if (loaded is not None or spec is not None) and not (origin or "").startswith(shims()):
            found[name] = origin or "a module that was made up in this process"
    return found


def install_as_deep_ep() -> None:
    """Makes ``import deep_ep``, ``deep_ep.utils`` and ``deep_ep_cpp`` find nccl_ep, in this process.

    Processes that ``multiprocessing`` spawns find it as well. May be called twice.

    Raises: ImportError where DeepEP itself is installed, with its place: which one a program gets must not depend on
    who came first.
    """
    found = installed_elsewhere()
    if found:
        places = ", ".join(f"{name} at {place}" for name, place in found.items())
        raise ImportError(
            f"DeepEP itself is installed ({places}): uninstall it, or import nccl_ep.deep_ep in place of deep_ep"
        )
    if shims() not in sys.path:
        sys.path.append(shims())
    importlib.invalidate_caches()
    for name in NAMES:
        importlib.import_module(name)
