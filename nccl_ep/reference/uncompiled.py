"""What keeps compilers away from the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """The function, which torch.compile leaves as it is; with fullgraph=True it refuses it."""
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
