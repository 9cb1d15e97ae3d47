"""``nccl.ep``'s ``Tensor``: a description of memory that the caller owns."""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .datatypes import NcclDataType, datatype_of, dtype_of

_CARRIERS = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32), 8: ("<i8", torch.int64)}


class Tensor:
    """A tensor of torch, an object with ``__dlpack__`` or ``__cuda_array_interface__``, or memory at an address.

    Args:
        buffer: the object, which is kept, or an address, whose memory the caller keeps.
        dtype, shape: of an address, and of nothing else: a ``NcclDataType`` or its number, and lengths.
        window: of NCCL, which the memory lies in. Accepted: this library has windows of its own, and reads and writes
            the memory by itself. window_offset: bytes, with a window alone.

    The tensor's strides are obeyed; results that must have gaps cost a copy.

    Raises: ValueError and TypeError for arguments that do not belong together, and for what is no tensor.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        dtype: int | None = None,
        shape: Sequence[int] | None = None,
        window: Any = None,
        window_offset: int | None = None,
    ) -> None:
        self._buffer, self._address = buffer, 0
        is_address = isinstance(buffer, numbers.Integral) and not isinstance(buffer, bool)
        if is_address != (dtype is not None) or is_address != (shape is not None):
            raise ValueError("dtype and shape belong to an address: both with one, neither with a tensor")
        if (window is None) != (window_offset is None):
            raise ValueError(f"window_offset is {window_offset!r}, must be given with a window, and only with one")
        self._window = window
        if is_address:
            assert dtype is not None and shape is not None
            self._buffer, self._address = None, int(buffer)
            self._sizes, self._dtype = tuple(int(each) for each in shape), dtype_of(dtype)
            self._datatype = NcclDataType(int(dtype))
            self._tensor: torch.Tensor | None = None
        else:
            self._tensor = _tensor_of(buffer)
            self._sizes, self._dtype = tuple(self._tensor.shape), self._tensor.dtype
            self._datatype = datatype_of(self._dtype)
        if not self._sizes:
            raise ValueError("a Tensor has at least one dimension")

    def on(self, device: torch.device, name: str = "a Tensor") -> torch.Tensor:
        """As torch has it, on a device. ValueError for a tensor on another one."""
        if self._tensor is None:
            self._tensor = _tensor_at(self._address, self._dtype, self._sizes, device)
        if self._tensor.device != device:
            raise ValueError(f"{name} is on {self._tensor.device}, its group on {device}")
        return self._tensor

    @property
    def ptr(self) -> int:
        """A number of this object. (There is no C struct behind it.)"""
        return id(self)

    @property
    def ndim(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    @property
    def datatype(self) -> NcclDataType:
        return self._datatype

    @property
    def data(self) -> int:
        """The address of the memory."""
        return self._address if self._tensor is None else self._tensor.data_ptr()

    @property
    def buffer(self) -> Any:
        """What the Tensor was made of; None for an address."""
        return self._buffer

    def __repr__(self) -> str:
        return f"<Tensor {self._datatype.name} {list(self._sizes)} at {self.data:#x}>"


def _tensor_of(buffer: Any) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor):
        if buffer.layout != torch.strided or buffer.is_nested or buffer.is_quantized:
            raise ValueError(f"buffer is a {buffer.layout} tensor of {buffer.dtype}, must be a strided one of numbers")
        return buffer.detach()
    if hasattr(buffer, "__dlpack__"):
        return from_dlpack(buffer)
    if hasattr(buffer, "__cuda_array_interface__"):
        return torch.as_tensor(buffer, device="cuda")
    raise TypeError(
        f"buffer is a {type(buffer).__name__}, must be a torch tensor, an object with __dlpack__ or "
        "__cuda_array_interface__, or an address"
    )


def _tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Memory that somebody else owns."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    code, carrier = _CARRIERS[dtype.itemsize]  # not every dtype of torch has a name there
    described = {"shape": (count,), "typestr": code, "data": (address, False), "version": 3}
    given = type("Described", (), {"__cuda_array_interface__": described})()
    return torch.as_tensor(given, device=device).view(carrier).view(dtype).view(shape)


def tensor_of(given: Any, name: str, device: torch.device) -> torch.Tensor:
    """Of a field of a struct. ValueError for None, TypeError for what is no ``Tensor``."""
    if given is None:
        raise ValueError(f"{name} is None, must be a Tensor")
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}, must be a nccl.ep.Tensor")
    return given.on(device, name)


def rows_of(given: Any, name: str, device: torch.device) -> torch.Tensor:
    """``tensor_of``, contiguous, of two dimensions."""
    rows = tensor_of(given, name, device)
    if rows.dim() != 2:
        raise ValueError(f"{name} has shape {list(rows.shape)}, must be [tokens, hidden]")
    return rows.contiguous()


def tensor_or_none(given: Any, name: str, device: torch.device) -> torch.Tensor | None:
    return None if given is None else tensor_of(given, name, device)
