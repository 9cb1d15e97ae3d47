"""What torch.compile is told of the library's functions and tensors, and of a program's tensors. torch._dynamo is not
imported for it: that takes 2 s, and only a compiler needs it."""

from __future__ import annotations

import functools
import importlib.util
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar, cast

import torch

from .checks import INT64, require_tensors, require_within

Function = TypeVar("Function", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"
_has_dynamo = _DYNAMO in sys.modules
_unmarked: list[tuple[weakref.ref[torch.Tensor], bool]] = []
_uncompiled: list[Callable[[], None]] = []


def constant(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``: to a trace, what the function returns is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: Function, reason: str | None = None) -> Function:
    """As ``torch.compiler.disable``: torch.compile leaves the function as it is; with fullgraph=True it refuses it."""
    called = [function]

    def disable() -> None:
        called[0] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return called[0](*args, **kwargs)

    _uncompiled.append(disable)
    if _has_dynamo:
        _mark_all()
    return cast(Function, call)


def mark_tokens(*tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> None:
    """Tells ``torch.compile`` that a length of these tensors is a number of tokens, which may be any, 0 and 1 too.

    Call it in front of every call of the compiled layer, with the tensors that are given to the layer. The layer is
    then compiled once, at its first call. Without it torch compiles for the first number, for the second, for 0 and
    for 1; a rank that does so in the middle of a run lets the others wait, and their deadline counts.

    Args:
        tensors: those that a token has a row of. The marks stay with a tensor, but not with its views and copies.
        dim: the dimensions that are numbers of tokens: (0, 1) for [batch, sequence, hidden].

    What is computed of an unknown length may not choose between two programs (``if x.shape[0] > 8``): torch refuses it.

    Raises: TypeError for what is no tensor; ValueError for a dimension that a tensor has not.
    """
    if torch.compiler.is_compiling():
        return
    dims = []
    for one in dim if isinstance(dim, Sequence) else (dim,):
        require_within(*INT64, dim=one)
        dims.append(operator.index(one))
    for at, each in enumerate(tensors):
        require_tensors(**{f"tensors[{at}]": each})
        for one in dims:
            if not -each.dim() <= one < each.dim():
                raise ValueError(f"dim is {one}, but tensors[{at}] has shape {list(each.shape)}")
    from torch._dynamo.decorators import mark_unbacked

    for each in tensors:
        mark_unbacked(each, [one % each.dim() for one in dims])


def mark_seq(seq: torch.Tensor) -> None:
    """Its first length is a symbol, the others are constants, its address stays: now, or when torch._dynamo comes."""
    _mark(seq, True)


def mark_memory(tensor: torch.Tensor) -> None:
    """Its address stays, so that a compiler passes it on as it is and does not copy it."""
    _mark(tensor, False)


def _mark(tensor: torch.Tensor, is_seq: bool) -> None:
    _unmarked.append((weakref.ref(tensor), is_seq))
    if _has_dynamo:
        _mark_all()


def _mark_all() -> None:
    from torch._dynamo import mark_dynamic, mark_static, mark_static_address

    while _uncompiled:
        _uncompiled.pop()()
    while _unmarked:
        ref, is_seq = _unmarked.pop()
        tensor = ref()
        if tensor is None:
            continue
        if is_seq:
            mark_dynamic(tensor, 0)
            mark_static(tensor, [1, 2, 3])
        mark_static_address(tensor, guard=False)


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
