"""What DeepEP has under this name."""

from nccl_ep.deep_ep.utils.envs import *  # noqa: F403
