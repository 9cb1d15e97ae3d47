"""What DeepEP has under this name."""

from nccl_ep.deep_ep.utils.testing import *  # noqa: F403
