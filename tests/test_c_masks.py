"""Rank masks through the C library: what tests/test_masks.py holds of Python's methods, here of ncclEpMask*."""

from __future__ import annotations

import ctypes as c
from typing import Any

import c_api
import pytest
import torch
from c_api import Library
from c_case import SECOND, CaseRun, make_group, refused
from expected import Expected, plain_case
from mask_ranks import Parted
from patience import PATIENCE
from test_c_ht_refusals import Solo

from nccl_ep.testing import ThreadGroup, run_ranks

DEADLINE = 2 * SECOND
BAD, USAGE = c_api.INVALID_ARGUMENT, c_api.INVALID_USAGE


class Masked(CaseRun):
    """A rank of a case whose ranks may fall apart."""

    def __init__(self, library: Library, whole: Expected, group: Any, staged: bool) -> None:
        super().__init__(library, whole, group, staged, "cpu", enable_mask=1)
        self.whole, self.handle = whole, c.c_void_p()
        library.InitHandle(self.handle, self.group, c_api.HandleConfig(layout=1), None)

    def masks(self) -> list[int]:
        status = (c.c_int32 * self.case.num_ranks)(*[7] * self.case.num_ranks)
        self.library.MaskQuery(self.group, status, None)
        assert set(status) <= {0, 1}
        return [rank for rank, is_masked in enumerate(status) if is_masked]

    def round(self, want: Expected) -> None:
        """All operations with the inputs of the whole; `want`: what the ranks that hear one another get."""
        self.expected = self.whole
        want.check_dispatch(self.dispatch(self.handle), self.rank)
        self.expected = want
        want.check_combine(self.combine(self.handle), self.rank)
        want.check_scalars(self.scalars(self.handle), self.rank)

    def destroy(self) -> None:
        self.library.HandleDestroy(self.handle)
        self.library.GroupDestroy(self.group)


@pytest.mark.parametrize("staged", [False, True])
def test_a_late_rank_is_masked_and_comes_back(library: Library, staged: bool) -> None:
    case = Parted(plain_case(3), frozenset({0, 1}))

    def body(group: ThreadGroup) -> None:
        run = Masked(library, case.whole, group, staged)
        run.round(case.whole)
        assert run.masks() == []
        group.allgather(b"", PATIENCE)
        if run.rank != 2:
            library.GroupSetTimeout(run.group, DEADLINE)
            for _ in range(2):
                run.round(case.parts[0])
                assert run.masks() == [2]
            pattern = "rank 2 is masked, and ranks do not come back one by one: all call ncclEpMaskClean"
            refused(USAGE, pattern, library.MaskUpdate, run.group, 2, 0, None)
        group.allgather(b"", PATIENCE)
        library.GroupSetTimeout(run.group, int(PATIENCE * SECOND))
        library.MaskClean(run.group)
        assert run.masks() == []
        run.round(case.whole)
        library.Check(run.group)
        run.destroy()

    run_ranks(3, body)


def test_ranks_are_masked_by_hand(library: Library) -> None:
    case = Parted(plain_case(2), frozenset({0}))

    def body(group: ThreadGroup) -> None:
        run = Masked(library, case.whole, group, staged=False)
        library.MaskUpdate(run.group, 1 - run.rank, 0, None)  # is not masked: nothing happens
        library.MaskUpdate(run.group, 1 - run.rank, 1, None)
        assert run.masks() == [1 - run.rank]
        run.round(case.parts[run.rank])
        library.MaskClean(run.group)
        run.round(case.whole)
        run.destroy()

    run_ranks(2, body)


def test_a_rank_that_does_not_come_to_clean(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        made = make_group(library, group, enable_mask=1)
        library.MaskUpdate(made, 1 - group.rank(), 1, None)
        if group.rank() == 0:
            library.GroupSetTimeout(made, SECOND // 20)
            refused(c_api.TIMEOUT, "ncclEpMaskClean: ", library.MaskClean, made)
            refused(
                USAGE, "a rank did not come when masks were to be cleaned: make a new group", library.MaskClean, made
            )
        library.GroupDestroy(made)

    run_ranks(2, body)


def test_bad_masks_are_refused(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        plain, masks = make_group(library, group), make_group(library, group, enable_mask=1)
        refused(
            USAGE, "rank 1 cannot be masked: the group was made without masks", library.MaskUpdate, plain, 1, 1, None
        )
        library.MaskClean(plain)
        for rank, pattern in ((-1, "rank -1 to mask, must be 0 to 1"), (2, "rank 2 to mask"), (64, "rank 64 to mask")):
            for mask in (0, 1):
                refused(BAD, pattern, library.MaskUpdate, masks, rank, mask, None)
        own = group.rank()
        refused(BAD, f"rank {own} to mask is this rank itself", library.MaskUpdate, masks, own, 1, None)
        refused(BAD, "status is null, must have room for 2 ranks", library.MaskQuery, masks, None, None)
        for made in (plain, masks):
            library.GroupDestroy(made)

    run_ranks(2, body)


def test_domains_have_no_masks(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        refused(
            BAD,
            "among at most 64 ranks of one domain, these are 2 in 2",
            lambda: make_group(library, group, enable_mask=1, domain_size=1),
        )

    run_ranks(2, body)


def test_one_further_tensor_with_masks(library: Library) -> None:
    group = library.solo_group(algorithm=c_api.LOW_LATENCY, max_token_bytes=192, enable_mask=1)
    solo = Solo(library, group, algorithm=c_api.LOW_LATENCY)
    two = {"further": [solo.more, -solo.x], "further_rows": [solo.more_rows, torch.zeros(8, 16)]}
    refused(BAD, "1 further tensors need an operation of their own, which may see", lambda: solo.dispatch(**two))
    solo.dispatch()
    assert torch.equal(solo.more_rows[:5], solo.more[torch.tensor([0, 3, 0, 1, 3])])
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)
