"""What callers of nccl.ep use of nccl4py, where that is not installed."""

from nccl_ep.nvidia.communicator import Communicator, UniqueId, get_unique_id
from nccl_ep.nvidia.datatypes import NcclDataType, NcclInvalid

__all__ = ["Communicator", "NcclDataType", "NcclInvalid", "UniqueId", "get_unique_id"]

globals().update(NcclDataType.__members__)  # nccl.core.BFLOAT16 and the others
