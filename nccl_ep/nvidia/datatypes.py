"""NCCL's data types, and torch's."""

from __future__ import annotations

from enum import IntEnum

import torch

NcclInvalid = ValueError  # what an argument that cannot be served raises


class NcclDataType(IntEnum):
    """As ``nccl.h`` has them. FLOAT4X2: two 4-bit numbers in a byte, which NCCL has no name for."""

    INT8 = 0
    CHAR = 0
    UINT8 = 1
    INT32 = 2
    INT = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    HALF = 6
    FLOAT32 = 7
    FLOAT = 7
    FLOAT64 = 8
    DOUBLE = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11
    FLOAT4X2 = 12


_DTYPES = {
    NcclDataType.INT8: torch.int8,
    NcclDataType.UINT8: torch.uint8,
    NcclDataType.INT32: torch.int32,
    NcclDataType.UINT32: torch.uint32,
    NcclDataType.INT64: torch.int64,
    NcclDataType.UINT64: torch.uint64,
    NcclDataType.FLOAT16: torch.float16,
    NcclDataType.FLOAT32: torch.float32,
    NcclDataType.FLOAT64: torch.float64,
    NcclDataType.BFLOAT16: torch.bfloat16,
    NcclDataType.FLOAT8E4M3: torch.float8_e4m3fn,
    NcclDataType.FLOAT8E5M2: torch.float8_e5m2,
    NcclDataType.FLOAT4X2: torch.uint8,
}
_TYPES = {dtype: code for code, dtype in _DTYPES.items() if code is not NcclDataType.FLOAT4X2}


def dtype_of(datatype: int) -> torch.dtype:
    """ValueError for a number that is no data type."""
    try:
        return _DTYPES[NcclDataType(int(datatype))]
    except ValueError:
        raise ValueError(f"dtype is {datatype!r}, must be one of NcclDataType") from None


def datatype_of(dtype: torch.dtype) -> NcclDataType:
    """ValueError for a dtype that NCCL has not got."""
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is packed:
        return NcclDataType.FLOAT4X2
    if dtype not in _TYPES:
        raise ValueError(f"the tensor is {dtype}, which NCCL has no data type for: give a view of its bytes")
    return _TYPES[dtype]
