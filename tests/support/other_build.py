"""The extension of another build directory in the place of nccl_ep/_C of the source tree.

For builds that must not lie in nccl_ep/, since the file's name is the same: of emulated GPUs, by
tests/support/emulated.py, and against another torch. `make newest` puts a link to this file into .venv-newest, and a
.pth file that calls it at every start of Python: so processes that tests start find that extension too.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

NAME = "nccl_ep._C"


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, build: Path, target: str) -> None:
        self._build, self._target = build, target

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        built = self._build / f"_C{EXTENSION_SUFFIXES[0]}"
        if not built.exists():
            raise ImportError(f"{self._build} has no extension for this Python: run make {self._target}")
        return importlib.util.spec_from_file_location(NAME, built)


def use(build: str | Path, target: str) -> None:
    """`import nccl_ep` takes the extension that stands in `build`, which `make <target>` puts there."""
    if NAME in sys.modules:
        raise ImportError(f"{NAME} is loaded already, from {sys.modules[NAME].__file__}")
    sys.meta_path.insert(0, _Finder(Path(build).resolve(), target))
