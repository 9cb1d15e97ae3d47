"""Hybrid-EP, the branch of DeepEP with ``HybridEPBuffer``."""

from .buffer import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
