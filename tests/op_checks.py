"""What the tests of the ops of both modes share."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

HT_OPS = [
    "ht_dispatch", "ht_dispatch_out", "ht_dispatch_cached", "ht_dispatch_cached_out", "ht_dispatch_deepep",
    "ht_combine", "ht_combine_out", "arena_empty",
]  # fmt: skip
UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def as_fake(mode: FakeTensorMode, each: Any) -> Any:
    """An argument with its tensors, also those of a list, replaced by fake ones."""
    if isinstance(each, list):
        return [as_fake(mode, item) for item in each]
    return mode.from_tensor(each) if isinstance(each, torch.Tensor) else each


def described(result: Any) -> list[tuple[Any, ...]]:
    """Of each tensor that an op returned, all but its contents."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return [(tuple(t.shape), t.dtype, t.stride(), t.device, t.storage_offset()) for t in tensors]
