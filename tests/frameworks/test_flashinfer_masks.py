"""FlashInfer's calls for fault tolerance, unchanged, over masks of nccl_ep's ``nccl.ep.Group``.

Before them it asks for the functions of a C library, which must lie in the folder of the package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("flashinfer is not installed: make frameworks", allow_module_level=True)

RANKS = 2


def run(rank: int, package: str) -> None:
    import nccl_ep
    from nccl_ep import nvidia as ep
    from nccl_ep.nvidia import library
    from nccl_ep.nvidia.communicator import get_nccl_comm_from_group

    library.__file__ = f"{package}/nvidia/library.py"
    nccl_ep.install_as_nccl_ep()
    from flashinfer.moe_ep import supports_fault_tolerance
    from flashinfer.moe_ep.backends.split.comm.nccl_ep._mask_ffi import mask_ffi

    assert supports_fault_tolerance("nccl_ep")
    calls = mask_ffi()
    config = ep.GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, max_token_bytes=512, enable_mask=True)
    group = ep.Group.create(get_nccl_comm_from_group(dist.group.WORLD), config, device="cpu")
    active, host = torch.empty(RANKS, dtype=torch.int32), torch.ones(RANKS, dtype=torch.int32)
    calls.mask_query(group, active.data_ptr(), 0)
    assert active.tolist() == [1, 1] and not calls.get_async_error(group)
    host[1 - rank] = 0
    calls.mask_update(group, host.data_ptr(), 0)
    calls.mask_query(group, active.data_ptr(), 0)
    assert active.equal(host) and not calls.get_async_error(group)
    calls.error_clear(group)
    dist.barrier()
    calls.mask_clean(group, 0)
    calls.mask_query(group, active.data_ptr(), 0)
    assert active.tolist() == [1, 1]
    group.destroy()


def test_masks(library_file: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "libnccl_ep.so.0").symlink_to(library_file.resolve())
    run_processes(RANKS, run, tmp_path, str(package))
