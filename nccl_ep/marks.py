"""What torch.compile is told of the library's functions and tensors, without torch._dynamo: its import takes 2 s, and
only a compiler needs it."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"
_has_dynamo = _DYNAMO in sys.modules
_unmarked: list[weakref.ref[torch.Tensor]] = []


def constant(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``: to a trace, what the function returns is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def mark_seq(seq: torch.Tensor) -> None:
    """Its first length is a symbol, the others are constants, its address stays: now, or when torch._dynamo comes."""
    _unmarked.append(weakref.ref(seq))
    if _has_dynamo:
        _mark_all()


def _mark_all() -> None:
    from torch._dynamo import mark_dynamic, mark_static, mark_static_address

    while _unmarked:
        seq = _unmarked.pop()()
        if seq is not None:
            mark_dynamic(seq, 0)
            mark_static(seq, [1, 2, 3])
            mark_static_address(seq, guard=False)


class _Finder:
    """Of ``sys.meta_path``: it sees the import of torch._dynamo."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _DYNAMO or _Finder not in sys.meta_path:
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            usual = loader.exec_module

            def exec_module(module: Any) -> None:
                global _has_dynamo
                usual(module)
                _has_dynamo = True
                _mark_all()

            loader.exec_module = exec_module
        return spec


if not _has_dynamo:
    sys.meta_path.insert(0, _Finder)
