"""Masks of ranks in the C library (``enable_mask``): low latency goes on without ranks that are late or left out."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import SECOND, CaseRun, make_group, refused, tensor
from tests.c.comm import Nccl, over
from tests.ll.mask_ranks import DEADLINE, Parted, tell_if_late
from tests.support.expected import Expected, plain_case
from tests.support.gpus import WORLDS, needs_gpu, on_gpu, one_gpu_worlds, ranks_on_gpus
from tests.support.patience import PATIENCE, Clock, with_more_time
from tests.support.processes import run_processes

BAD, USAGE = c_api.INVALID_ARGUMENT, c_api.INVALID_USAGE


class MaskRun(CaseRun):
    """A rank that makes the calls of a case with all ranks, some of which may be masked."""

    def __init__(self, library: Library, case: Parted, group: Any, device: str = "cpu", make: Any = make_group) -> None:
        mask: dict[str, Any] = {"enable_mask": 1, "timeout_ns": int(PATIENCE * SECOND)}
        super().__init__(library, case.whole, group, False, device, make, **mask)
        self.parts, self.handle = case, c.c_void_p()
        layout = c_api.LAYOUTS[case.whole.case.layout]
        library.InitHandle(self.handle, self.group, c_api.HandleConfig(layout=layout), None)

    def masked(self) -> list[int]:
        status = torch.full((self.case.num_ranks,), 7, dtype=torch.int32, device=self.device)
        self.library.MaskQuery(self.group, status.data_ptr(), None)
        assert set(status.tolist()) <= {0, 1}, status
        return (status.cpu() == 0).nonzero().flatten().tolist()

    def mask(self, *others: int) -> None:
        self.library.MaskUpdate(self.group, self.case.num_ranks, others)

    def has_error(self) -> bool:
        found = c.c_int(7)
        self.library.GetAsyncError(self.group, found)
        assert found.value in (0, 1)
        return bool(found.value)

    def set_timeout(self, seconds: float) -> None:
        self.library.GroupSetTimeout(self.group, int(seconds * SECOND))

    def round(self, want: Expected, *, staged: bool = False) -> None:
        """All operations, with the inputs of all ranks; `want`: what those that are not masked must give."""
        self.staged = staged
        want.check_dispatch(self.dispatch(self.handle), self.rank)
        rows, values = self.move(want.rows[self.rank]), self.move(want.values[self.rank])
        assert rows is not None
        want.check_combine(self.combine_rows(self.handle, rows), self.rank)
        scalars = torch.empty_like(want.scalars[self.rank], device=self.device)
        self.library.CombineWeights(self.handle, tensor(values), tensor(scalars), None)
        want.check_scalars(scalars.cpu(), self.rank)

    def part(self) -> Expected:
        return self.parts.parts[self.parts.number_of(self.rank)]

    def others(self) -> list[int]:
        return sorted(self.parts.groups[1 - self.parts.number_of(self.rank)])

    def close(self) -> None:
        self.library.HandleDestroy(self.handle)
        self.library.GroupDestroy(self.group)


def part_and_meet(library: Library, case: Parted, group: Any, device: str = "cpu", make: Any = make_group) -> None:
    """Ranks of the first group mask the others, who hear of it; all meet again."""
    run = MaskRun(library, case, group, device, make)
    run.round(case.whole)
    group.allgather(b"", PATIENCE)
    if run.rank in case.groups[0]:
        run.mask(*case.groups[1])
        assert not run.has_error()
    group.allgather(b"", PATIENCE)
    for staged in (False, True):
        run.round(run.part(), staged=staged)
        assert run.masked() == run.others()
        assert run.has_error() == (run.rank not in case.groups[0])
    library.MaskClean(run.group)
    assert run.masked() == []
    run.round(case.whole)
    library.Check(run.group)
    run.close()


def come_late(
    library: Library, num_ranks: int, group: Any, deadline: float, device: str = "cpu", make: Any = make_group
) -> None:
    """The last rank does not come to a dispatch. The others go on after the deadline, then without waiting; it hears of
    that, goes on alone, and comes back when masks are cleaned."""
    late = num_ranks - 1
    case = Parted(plain_case(num_ranks), frozenset(range(late)))
    run = MaskRun(library, case, group, device, make)
    run.round(case.whole)
    if run.rank != late:
        run.set_timeout(deadline)
        with Clock(deadline + PATIENCE / 2):
            out = run.dispatch(run.handle)
            masked = run.masked()
        tell_if_late(group, "" if masked == [late] else f"rank {run.rank} has masked {masked}")
        assert run.has_error()
        library.ErrorClear(run.group)
        assert not run.has_error()
        run.part().check_dispatch(out, run.rank)
        run.set_timeout(2 * PATIENCE)
        with Clock(PATIENCE):
            for staged in (False, True):
                run.round(run.part(), staged=staged)
        assert run.masked() == [late]
    else:
        tell_if_late(group, "")
    group.allgather(b"", PATIENCE)
    if run.rank == late:
        run.round(run.part())
        assert run.masked() == run.others()
    library.MaskClean(run.group)
    assert run.masked() == [] and run.has_error() == (run.rank == late)  # cleaning leaves the flag
    run.round(case.whole)
    library.Check(run.group)
    run.close()


def clean_without_the_last(
    library: Library, num_ranks: int, group: Any, device: str = "cpu", make: Any = make_group
) -> None:
    """The last rank stays away when masks are cleaned. It counts as active until the next operation, which does not
    wait for it. Later it comes back."""
    case = Parted(plain_case(num_ranks), frozenset(range(num_ranks - 1)))
    run = MaskRun(library, case, group, device, make)
    if run.rank != num_ranks - 1:
        run.mask(num_ranks - 1)
        run.round(run.part())
        run.set_timeout(1.0)
        with Clock(1.0 + PATIENCE / 2):
            library.MaskClean(run.group)
        assert run.masked() == [] and not run.has_error()
        run.set_timeout(2 * PATIENCE)
        with Clock(PATIENCE):
            for staged in (False, True):
                run.round(run.part(), staged=staged)
                assert run.masked() == [num_ranks - 1] and run.has_error()
    group.allgather(b"", PATIENCE)
    library.MaskClean(run.group)
    assert run.masked() == []
    run.round(case.whole)
    library.Check(run.group)
    run.close()


@pytest.mark.parametrize(("num_ranks", "first"), [(2, {1}), (3, {0, 2}), (4, {1, 2})])
def test_ranks_part_and_meet_again(library: Library, num_ranks: int, first: set[int]) -> None:
    case = Parted(plain_case(num_ranks), frozenset(first))
    run_ranks(num_ranks, lambda group: part_and_meet(library, case, group))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_late(library: Library, num_ranks: int) -> None:
    def run(deadline: float) -> None:
        run_ranks(num_ranks, lambda group: come_late(library, num_ranks, group, deadline))

    with_more_time(run)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_masks_are_cleaned_without_a_rank_that_stays_away(library: Library, num_ranks: int) -> None:
    run_ranks(num_ranks, lambda group: clean_without_the_last(library, num_ranks, group))


def test_a_masked_rank_that_is_said_to_be_active_is_masked_again(library: Library) -> None:
    case = Parted(plain_case(2), frozenset({0}))

    def body(group: ThreadGroup) -> None:
        run = MaskRun(library, case, group)
        run.mask(1 - run.rank)
        for _ in range(2):
            run.round(run.part())
            assert run.masked() == run.others()
            library.ErrorClear(run.group)
            run.mask()
            assert run.masked() == [] and not run.has_error()
            run.mask()
            run.round(run.part())
            assert run.masked() == run.others() and run.has_error()
        group.allgather(b"", PATIENCE)
        library.MaskClean(run.group)
        run.round(case.whole)
        run.close()

    run_ranks(2, body)


def test_an_open_send_is_received_before_masks_are_cleaned(library: Library) -> None:
    case = Parted(plain_case(2))

    def body(group: ThreadGroup) -> None:
        run = MaskRun(library, case, group)
        given = run.expected.inputs[run.rank]
        library.UpdateHandle(run.handle, tensor(given.topk_idx))
        inputs = c_api.DispatchInputs(tokens=tensor(given.x), topk_weights=tensor(given.topk_weights))
        out = run.run_dispatch(run.handle, inputs, c_api.DispatchConfig(send_only=1))
        refused(USAGE, "a dispatch was sent and has not been received", library.MaskClean, run.group)
        library.Complete(run.handle, None, None)
        case.whole.check_dispatch(run.output(out), run.rank)
        library.MaskClean(run.group)
        run.round(case.whole)
        run.close()

    run_ranks(2, body)


def test_extra_tensors_whose_operations_could_leave_out_different_ranks_are_refused(library: Library) -> None:
    case = Parted(plain_case(2))

    def body(group: ThreadGroup) -> None:
        run = MaskRun(library, case, group)
        given = run.expected.inputs[run.rank]
        library.UpdateHandle(run.handle, tensor(given.topk_idx))
        more = [torch.ones(len(given.x), 4) * i for i in range(2)]
        for count in (1, 2):
            inputs = c_api.DispatchInputs(tokens=tensor(given.x), extra=list(map(tensor, more[:count])))

            def dispatch(inputs: Any = inputs) -> None:
                run.run_dispatch(run.handle, inputs, None)

            if count == 1:
                dispatch()
            else:
                refused(BAD, "1 extra tensors need .* may leave out other ranks", dispatch)
        run.round(case.whole)
        run.close()

    run_ranks(2, body)


def test_masks_are_refused_where_they_have_no_meaning(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        made, status, rank = make_group(library, group, enable_mask=1), torch.zeros(2, dtype=torch.int32), group.rank()
        refused(BAD, f"mask of rank {rank} is 0, but that is this rank itself", library.MaskUpdate, made, 2, [rank])
        for wrong in (-1, 2):
            mask = (c.c_int * 2)(1, wrong)
            refused(BAD, f"mask of rank 1 is {wrong}, must be 0 or 1", library.EpMaskUpdate, made, mask, None)
        refused(BAD, "mask is null", library.EpMaskUpdate, made, None, None)
        refused(BAD, "mask_status is null", library.MaskQuery, made, None, None)
        refused(BAD, "error_out is null", library.GetAsyncError, made, None)
        library.MaskUpdate(made, 2, [1 - rank])
        library.MaskUpdate(made, 2, [1 - rank])  # it is
        library.MaskClean(made)
        library.MaskUpdate(made, 2, [])
        library.GroupDestroy(made)

        plain = make_group(library, group)
        refused(USAGE, "the group was made without enable_mask", library.MaskQuery, plain, status.data_ptr(), None)
        refused(USAGE, "the group was made without enable_mask", library.MaskUpdate, plain, 2, [1 - rank])
        refused(USAGE, "the group was made without enable_mask", library.MaskClean, plain)
        refused(USAGE, "the group was made without enable_mask", library.GetAsyncError, plain, c.c_int())
        refused(USAGE, "the group was made without enable_mask", library.ErrorClear, plain)
        library.GroupDestroy(plain)
        text = "masked among the ranks of one domain, these are 2 in 2"
        refused(BAD, text, lambda: make_group(library, group, enable_mask=1, domain_size=1))

    run_ranks(2, body)


def test_ranks_that_disagree_hear_of_it(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        text = "whether late ranks are masked: rank . has ., rank . has"
        refused(c_api.MISMATCH, text, lambda: make_group(library, group, enable_mask=group.rank()))

    run_ranks(2, body)


# ---- On GPUs


def run_over_nccl(rank: int, library_file: Path, num_ranks: int) -> None:
    """A process: ranks that part and meet, and one that is late."""
    on_gpu(rank)
    library, group = Library(library_file), rendezvous_of(dist.group.WORLD)
    part_and_meet(library, Parted(plain_case(num_ranks), frozenset({0})), group, "cuda")
    come_late(library, num_ranks, group, DEADLINE, "cuda")
    clean_without_the_last(library, num_ranks, group, "cuda")


def run_over_communicator(rank: int, library_file: Path, num_ranks: int) -> None:
    """The same with groups of a communicator, by which masks are cleaned. It is the caller's again at the end."""
    on_gpu(rank)
    library, group, nccl = Library(library_file), rendezvous_of(dist.group.WORLD), Nccl()
    comm = nccl.make(rank, num_ranks)
    part_and_meet(library, Parted(plain_case(num_ranks), frozenset({0})), group, "cuda", over(comm))
    come_late(library, num_ranks, group, DEADLINE, "cuda", over(comm))
    nccl.destroy(comm)


class TestOnGpus:
    pytestmark = needs_gpu

    @one_gpu_worlds
    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_groups_part_and_meet_on_one_gpu(self, library: Library, num_ranks: int) -> None:
        case = Parted(plain_case(num_ranks), frozenset({0}))
        run_ranks(num_ranks, lambda group: part_and_meet(library, case, group, "cuda"))
        run_ranks(num_ranks, lambda group: clean_without_the_last(library, num_ranks, group, "cuda"))

    @ranks_on_gpus
    @pytest.mark.parametrize("num_ranks", WORLDS)
    @pytest.mark.parametrize("body", [run_over_nccl, run_over_communicator], ids=["callback", "communicator"])
    def test_groups_part_and_meet_in_processes(
        self, body: Any, num_ranks: int, library_file: Path, tmp_path: Path
    ) -> None:
        run_processes(num_ranks, body, tmp_path, library_file, num_ranks, timeout=2 * PATIENCE)
