"""The build backend of pyproject.toml: that of scikit-build-core, beside the torch that the package will run with.

pip builds in an environment of its own. Where it installs into one that has a torch, that is the one to build for.
Where there is none, the build fetches one, and pip installs the same.
"""

from __future__ import annotations

import os
import site
from importlib import metadata
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

TORCH = "torch>=2.11"


def torch_outside() -> str | None:
    """The folder of packages of the environment that pip installs into, if a torch is there. pip hides it."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return next((each for each in folders if any(metadata.distributions(name="torch", path=[each]))), None)


def _requires(found: list[str]) -> list[str]:
    return found if torch_outside() else [*found, TORCH]


def _show_torch() -> None:
    """To cmake/torch_paths.py."""
    if found := torch_outside():
        os.environ["NCCL_EP_TORCH_SITE"] = found


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _requires(_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _requires(_build.get_requires_for_build_editable(config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _show_torch()
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _show_torch()
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
