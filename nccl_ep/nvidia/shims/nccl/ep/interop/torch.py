"""Communicators of torch's process groups."""

from nccl_ep.nvidia.communicator import get_nccl_comm_from_group

__all__ = ["get_nccl_comm_from_group"]
