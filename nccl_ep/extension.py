"""Imported first: loads the extension _C, or says in one sentence why that cannot be, and what to do."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_HERE = Path(__file__).parent


def _require_extension() -> None:
    """Raises ImportError."""
    spec = importlib.util.find_spec(f"{__package__}._C")
    if spec is None or spec.origin is None:
        raise ImportError(_unbuilt())
    try:
        from . import _C
    except ImportError as error:
        raise ImportError(_unloadable(Path(spec.origin), str(error))) from error
    # Those of another minor release may load, and then read torch's objects wrongly.
    built_for = parse_build(_C.BUILD)["torch"]
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(_of_another_torch(Path(spec.origin), built_for))


def parse_build(text: str) -> dict[str, str]:
    """What an extension was built for, as its BUILD says it: "torch", "cuda" (or empty), "architectures"."""
    return dict(each.split("=", 1) for each in text.split("|") if "=" in each)


def _unbuilt() -> str:
    """Unbuilt sources hide an installed package from Python."""
    clone = _HERE.parent
    build = f"build it (make build in {clone}, or pip install {clone})"
    others = [folder for entry in sys.path if _has_extension(folder := Path(entry).absolute() / _HERE.name)]
    if others:
        programs = f"make build in {clone}, then {clone}/.venv/bin/python"
        build = f"start Python in another folder, to get {others[0]}; for programs of the clone itself: {programs}"
    version = ".".join(map(str, sys.version_info[:2]))
    return f"nccl_ep in {_HERE} has no extension _C for Python {version}, as it was not built here: {build}"


def _has_extension(folder: Path) -> bool:
    return any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _unloadable(file: Path, error: str) -> str:
    found = re.search(rb"nccl_ep_build(\|[ -{}~]+)+", file.read_bytes())
    built_for = parse_build(found[0].decode())["torch"] if found else ""
    if built_for and _minor(built_for) != _minor(torch.__version__):
        return _of_another_torch(file, built_for)
    if "GLIBC" in error:
        return f"{file} was built on a newer system than this one ({error}): {_again()}"
    if library := re.match(r"(\S+): cannot open shared object file", error):
        return (
            f"{file} needs {library[1]}, which is not found here: install it, or add its folder to LD_LIBRARY_PATH, "
            f"or {_again()}"
        )
    return f"{file} cannot be loaded ({error}): {_again()}"


def _of_another_torch(file: Path, built_for: str) -> str:
    return (
        f"{file} was built for torch {built_for}, and this is torch {torch.__version__}: {_again()}, "
        f'or pip install "torch=={_minor(built_for)}.*"'
    )


def _again() -> str:
    return "build nccl_ep again for this torch (pip install --force-reinstall --no-deps --no-cache-dir . in its clone)"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


_require_extension()
