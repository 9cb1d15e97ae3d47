"""Frameworks beside nccl.ep."""
