"""Where callers look for data types, and for what an argument that cannot be served raises."""

from nccl_ep.nvidia.datatypes import NcclDataType, NcclInvalid

__all__ = ["NcclDataType", "NcclInvalid"]
