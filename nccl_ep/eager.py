"""Whole operations in one call of C++ (csrc/torch/binding/eager.h), where nothing but tensors and numbers is given.

Each returns None and has done nothing where a call is not that plain: a gradient is wanted, a mode of torch or a
subclass of tensors would see the op, an argument is new, or wrong. The caller then goes the long way, which defines the
operation. Where a compiler traces they must not be called.
"""

from __future__ import annotations

from torch.utils._device import DeviceContext

from . import _C
from .events import EventHandle, EventOverlap
from .handle import DispatchOutput, Handle

_C.set_default_device_mode(DeviceContext)
_C.set_eager_types(Handle, DispatchOutput, EventOverlap, EventHandle)

dispatch_eager, combine_eager = _C.dispatch_eager, _C.combine_eager
