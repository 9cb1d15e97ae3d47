"""``import deep_ep`` for programs that are not to be changed: this package under DeepEP's names.

The modules are files in ``shims``. A program calls ``install_as_deep_ep()`` before it imports DeepEP; one that cannot
be touched, or that starts workers, finds the folder in its ``PYTHONPATH``. The folder also says to
``importlib.metadata`` that a distribution ``deep_ep`` is there, for programs that ask for its version.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from ..checks import environment_switch, require_bools

NAMES = ("deep_ep", "deep_ep_cpp")  # modules of the folder; deep_ep has submodules
OVERRIDE = "NCCL_EP_OVERRIDE_DEEP_EP"


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


def install_as_deep_ep(override: bool | None = None) -> None:
    """Makes ``import deep_ep``, its submodules and ``deep_ep_cpp`` find nccl_ep, in this process.

    Processes that ``multiprocessing`` spawns find it as well. May be called twice.

    Args:
        override: whether nccl_ep comes before a DeepEP that is installed. None: as ``NCCL_EP_OVERRIDE_DEEP_EP`` of the
            environment says, 1 or 0; 0 where it is not set.

    Raises: ImportError where DeepEP itself is installed, with its place, and nobody said who comes first; or where it
    is imported already, whatever was said. ValueError, TypeError for other values.
    """
    require_bools(override=override)
    is_first = environment_switch(OVERRIDE) if override is None else bool(override)
    found = installed_elsewhere()
    places = ", ".join(f"{name} at {place}" for name, place in found.items())
    if any(name in sys.modules for name in found):
        raise ImportError(
            f"DeepEP itself is imported already ({places}): install_as_deep_ep() must come before that, or import "
            "nccl_ep.deep_ep in place of deep_ep"
        )
    if found and not is_first:
        raise ImportError(
            f"DeepEP itself is installed ({places}): uninstall it, import nccl_ep.deep_ep in place of deep_ep, or say "
            f"that nccl_ep comes first: install_as_deep_ep(override=True), or {OVERRIDE}=1 in the environment"
        )
    if found and shims() in sys.path:
        sys.path.remove(shims())
    if shims() not in sys.path:
        sys.path.insert(0 if found else len(sys.path), shims())
    importlib.invalidate_caches()
    for name in NAMES:
        importlib.import_module(name)
