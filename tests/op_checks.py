"""What the tests of the ops of both modes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nccl_ep import reference

HT_OPS = [
    "ht_dispatch", "ht_dispatch_out", "ht_dispatch_cached", "ht_dispatch_cached_out", "ht_dispatch_deepep",
    "ht_combine", "ht_combine_out", "arena_empty",
]  # fmt: skip
LOCAL_OPS = ["token_layout"]  # which speak to no other rank
UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def as_fake(mode: FakeTensorMode, each: Any, static_shapes: bool = False) -> Any:
    """An argument with its tensors, also those of a list, replaced by fake ones."""
    if isinstance(each, list):
        return [as_fake(mode, item, static_shapes) for item in each]
    return mode.from_tensor(each, static_shapes=static_shapes) if isinstance(each, torch.Tensor) else each


def described(result: Any) -> list[tuple[Any, ...]]:
    """Of each tensor that an op returned, all but its contents."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return [(tuple(t.shape), t.dtype, t.stride(), t.device, t.storage_offset()) for t in tensors]


def faked(name: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same of what the op's fake returns."""
    with FakeTensorMode() as mode:
        return described(getattr(torch.ops.nccl_ep, name).default(*(as_fake(mode, each) for each in args)))


def check_compiled(layer: Callable[..., torch.Tensor], args: tuple[Any, ...], backend: str) -> None:
    """Compiled whole, it gives the same bits, call after call."""
    want = layer(*args)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(3):
        assert not reference.first_difference(compiled(*args), want)
