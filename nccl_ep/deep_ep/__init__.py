"""DeepEP V1's names: ``from nccl_ep.deep_ep import Buffer`` is all that its callers change. See docs/deepep.md."""

import torch

from ..events import EventHandle, EventOverlap
from .buffer import Buffer
from .config import Config

topk_idx_t = torch.int64  # the dtype of topk_idx; int32 is accepted as well

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
