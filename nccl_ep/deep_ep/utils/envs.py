"""What programs written for DeepEP import of ``deep_ep.utils.envs``: ranks, seeds, and the domains of a group.

Source: DeepEP V2's functions of these names.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist

from ...bootstrap import rendezvous_of
from ...checks import require_bools, require_int32

__all__ = [
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]

_seeds = {"local": 0, "global": 0}
_node: dict[str, int] = {}


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Domains of ranks that share memory, and the ranks of each, of a buffer that is made without ``domain_size``.

    That is one domain of all ranks. A group that crosses NVLink domains is refused when the buffer is made, and the
    error says what ``domain_size`` must be; a buffer's method of this name has what it was given. Not collective.
    """
    return 1, rendezvous_of(group).size()


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """The same."""
    require_bools(allow_hybrid_mode=allow_hybrid_mode)
    return get_physical_domain_size(group)


def init_seed(global_seed: int) -> None:
    """Seeds torch and ``random`` with ``global_seed`` plus the rank."""
    require_int32(global_seed=global_seed)
    _seeds.update({"local": global_seed + dist.get_rank(), "global": global_seed})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """Of ``init_seed``: with the rank added."""
    return _seeds["local"]


def get_global_seed() -> int:
    """Of ``init_seed``: as it was given."""
    return _seeds["global"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Starts torch's process group: NCCL on GPUs, one a rank, or gloo where there are none. Collective.

    The environment has ``MASTER_ADDR``, ``MASTER_PORT``, and of nodes (not of ranks) ``WORLD_SIZE`` and ``RANK``. The
    default dtype becomes bf16, and with GPUs the default device CUDA.

    Returns: rank, ranks, and a group of all.
    """
    require_int32(local_rank=local_rank, num_local_ranks=num_local_ranks, seed=seed)
    nodes, node = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if has_gpus else "gloo", init_method=f"tcp://{address}:{port}", world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank, device_id=torch.device("cuda", local_rank) if has_gpus else None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    if has_gpus:
        torch.set_default_device("cuda")
    _node["rank"] = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(nodes * num_local_ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return dist.get_rank(), dist.get_world_size(), group


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints s on all ranks, or on the first of each node; then the ranks meet. Collective, after ``init_dist``."""
    if not once_in_node or _node.get("rank", dist.get_rank()) == 0:
        print(s, flush=True)
    dist.barrier()


def check_torch_deterministic() -> None:
    """Nothing: torch may fill memory that is not initialised, as it likes."""
