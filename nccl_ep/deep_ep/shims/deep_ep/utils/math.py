"""What DeepEP has under this name."""

from nccl_ep.deep_ep.utils.math import *  # noqa: F403
