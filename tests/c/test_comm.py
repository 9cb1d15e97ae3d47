"""Groups of the C library over a caller's NCCL communicator."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import pytest
import torch.distributed as dist

from nccl_ep.bootstrap import rendezvous_of
from tests.c import c_api
from tests.c.c_api import Library, Refused
from tests.c.case import CaseRun, has_c_form, refused
from tests.c.comm import Nccl, over
from tests.support.expected import expected_cases
from tests.support.gpus import WORLDS, needs_gpu, on_gpu, ranks_on_gpus
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes


class Alone:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def run_cases(rank: int, library_file: Path, num_ranks: int) -> int:
    """Generated cases, each in a group of its own; at last the communicator is still the caller's."""
    on_gpu(rank)
    library, nccl = Library(library_file), Nccl()
    comm = nccl.make(rank, num_ranks)
    cases = expected_cases(8, num_ranks=num_ranks, first=700, fits=has_c_form)
    for number, case in enumerate(cases):
        group = rendezvous_of(dist.group.WORLD) if num_ranks > 1 else Alone()
        CaseRun(library, case, group, number % 2 == 1, "cuda", make=over(comm)).run()
    nccl.destroy(comm)
    return len(cases)


def run_cases_without_nccl(rank: int, library_file: Path, num_ranks: int) -> int:
    """The same in groups of a callback, whose windows are of cuMem: ranks may share a GPU."""
    on_gpu(rank)
    library = Library(library_file)
    cases = expected_cases(8, num_ranks=num_ranks, first=700, fits=has_c_form)
    for number, case in enumerate(cases):
        group = rendezvous_of(dist.group.WORLD)
        CaseRun(library, case, group, number % 2 == 1, "cuda", window=c_api.WINDOW_CUMEM).run()
    return len(cases)


class TestOnGpus:
    pytestmark = needs_gpu

    def test_a_group_of_a_communicator_of_one_rank_gives_the_oracles_bits(self, library_file: Path) -> None:
        assert run_cases(0, library_file, 1) == 8

    @ranks_on_gpus
    @pytest.mark.parametrize("num_ranks", WORLDS)
    def test_groups_of_communicators_give_the_oracles_bits(
        self, num_ranks: int, library_file: Path, tmp_path: Path
    ) -> None:
        got = run_processes(num_ranks, run_cases, tmp_path, library_file, num_ranks, timeout=PATIENCE)
        assert got == [8] * num_ranks

    @ranks_on_gpus
    @pytest.mark.parametrize("num_ranks", WORLDS)
    def test_groups_without_nccl_give_the_oracles_bits(
        self, num_ranks: int, library_file: Path, tmp_path: Path
    ) -> None:
        got = run_processes(num_ranks, run_cases_without_nccl, tmp_path, library_file, num_ranks, timeout=PATIENCE)
        assert got == [8] * num_ranks


def test_what_is_refused_without_a_gpu(library: Library) -> None:
    made = c.c_void_p()
    config = c_api.GroupConfig(num_experts=2, max_tokens=4, topk=2, max_token_bytes=64)
    refused(c_api.INVALID_ARGUMENT, "comm is null", library.CreateGroup, made, None, config)
    refused(c_api.INVALID_ARGUMENT, "group is null", library.CreateGroup, None, c.c_void_p(16), config)
    with pytest.raises(Refused) as caught:
        library.CreateGroup(made, c.c_void_p(16), config)
    assert caught.value.result == c_api.NOT_SUPPORTED
    assert "built without CUDA: ncclEpxCommFromCallback makes one" in str(caught.value)
