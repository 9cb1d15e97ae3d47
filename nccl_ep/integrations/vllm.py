"""vLLM's ``deepep`` backends over nccl_ep.

vLLM has no registration for all-to-all backends of others. Its own backends import ``deep_ep``, and its plugins run in
every process that it starts, before that. So ``register`` is a plugin, of the group ``vllm.general_plugins``, that
makes ``deep_ep`` be nccl_ep where the environment asks for it:

    NCCL_EP_FOR_VLLM=1 vllm serve MODEL --enable-expert-parallel --data-parallel-size 8 \\
        --all2all-backend deepep_low_latency
"""

from __future__ import annotations

import os

SWITCH = "NCCL_EP_FOR_VLLM"


def register() -> None:
    """vLLM's plugin: nothing without ``NCCL_EP_FOR_VLLM=1``, so that nccl_ep can be installed beside DeepEP.

    Raises: ValueError for another value than 0 or 1; ImportError as ``nccl_ep.install_as_deep_ep``.
    """
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {switch!r}, must be 0 or 1")
    if switch == "1":
        from ..deep_ep.install import install_as_deep_ep

        install_as_deep_ep()
