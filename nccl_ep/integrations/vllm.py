"""vLLM's ``deepep`` backends over nccl_ep.

vLLM has no registration for all-to-all backends of others. Its own backends import ``deep_ep``, and its plugins run in
every process that it starts, before that. So ``register`` is a plugin, of the group ``vllm.general_plugins``, that
makes ``deep_ep`` be nccl_ep where the environment asks for it:

    NCCL_EP_FOR_VLLM=1 vllm serve MODEL --enable-expert-parallel --data-parallel-size 8 \\
        --all2all-backend deepep_low_latency

Its backend ``deepep_v2`` asks for what DeepEP V2 needs before it calls anybody: NCCL 2.30.4, and GIN on the process
group unless ``EP_DISABLE_GIN`` is set. nccl_ep needs neither in one NVLink domain, so the plugin answers both.
"""

from __future__ import annotations

import os

from ..checks import environment_switch

SWITCH = "NCCL_EP_FOR_VLLM"
_NO_GIN = "EP_DISABLE_GIN"
_LEAST_NCCL = "DEEPEP_V2_MIN_NCCL_VERSION_RAW"  # of vllm.utils.import_utils
_OLDEST_NCCL = 22809  # csrc/transport/nccl/version.h


def register() -> None:
    """vLLM's plugin: nothing without ``NCCL_EP_FOR_VLLM=1``, so that nccl_ep can be installed beside DeepEP.

    Raises: ValueError for another value than 0 or 1; ImportError as ``nccl_ep.install_as_deep_ep``.
    """
    if environment_switch(SWITCH):
        from ..deep_ep.install import install_as_deep_ep

        install_as_deep_ep()
        _answer_for_v2()


def _answer_for_v2() -> None:
    """What ``deepep_v2`` asks before it calls: read from vLLM 0.33.0. Another vLLM may ask otherwise, or not at all."""
    os.environ.setdefault(_NO_GIN, "1")
    try:
        from vllm.utils import import_utils
    except ImportError:
        return
    least = getattr(import_utils, _LEAST_NCCL, _OLDEST_NCCL)
    if least > _OLDEST_NCCL:
        setattr(import_utils, _LEAST_NCCL, _OLDEST_NCCL)
