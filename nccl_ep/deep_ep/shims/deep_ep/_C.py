"""What callers import of DeepEP's extension, by its newer name."""

from nccl_ep.deep_ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
