"""Another thread ends a wait of the C library; handles that were changed; arguments that Python refuses, too."""

from __future__ import annotations

import ctypes as c
import threading
import time
from typing import Any

import pytest
import torch

from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import SECOND, make_group, refused, tensor
from tests.support.patience import DEADLINES, PATIENCE, Clock, Late, with_more_time

BAD, USAGE = c_api.INVALID_ARGUMENT, c_api.INVALID_USAGE
ALGORITHMS = {"ll": c_api.LOW_LATENCY, "ht": c_api.HIGH_THROUGHPUT}


class Flat:
    """A rank's flat handle, with memory of its own, and small tensors."""

    def __init__(self, library: Library, group: c.c_void_p, num_ranks: int = 1, **config: Any) -> None:
        self.library, self.group, self.handle = library, group, c.c_void_p()
        rows = 4 * num_ranks
        self.x, self.ids = torch.ones(4, 16), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
        self.rows, self.weights = torch.zeros(rows, 16), torch.zeros(rows, 2)
        self.out_ids, self.info = torch.zeros(rows, 2).long(), torch.zeros(2 * num_ranks + 2, dtype=torch.int32)
        self.y, self.scalars = torch.zeros(4, 16), torch.zeros(4, 2)
        fields = c_api.HandleConfig(layout=c_api.LAYOUTS["flat"], capacity=rows, max_tokens=4, **config)
        size = c.c_size_t()
        library.HandleMemSize(group, fields, size)
        self.memory = torch.zeros(size.value // 4, dtype=torch.int32)
        library.CreateHandle(self.handle, group, fields, tensor(self.ids), self.memory.data_ptr())

    def dispatch(
        self, x: torch.Tensor | None = None, scales: Any = None, out_scales: Any = None, **config: Any
    ) -> None:
        cached = config.get("cached", 0)
        inputs = c_api.DispatchInputs(tokens=tensor(self.x if x is None else x), scales=scales)
        beside = {"topk_weights": tensor(self.weights), "topk_idx": tensor(self.out_ids), "info": tensor(self.info)}
        outputs = c_api.DispatchOutputs(
            tokens=tensor(self.rows), scales=tensor(out_scales), **({} if cached == 1 else beside)
        )
        self.library.Dispatch(self.handle, inputs, outputs, c_api.DispatchConfig(**config), None)

    def combine(self, **config: Any) -> None:
        inputs, outputs = c_api.CombineInputs(tokens=tensor(self.rows)), c_api.CombineOutputs(tokens=tensor(self.y))
        self.library.Combine(self.handle, inputs, outputs, c_api.CombineConfig(**config), None)

    def combine_weights(self) -> None:
        self.library.CombineWeights(self.handle, tensor(self.weights), tensor(self.scalars), None)


@pytest.mark.parametrize("mode", ALGORITHMS)
@pytest.mark.parametrize("value", [1_000_000, -7, (1 << 31) - 1])
def test_a_handle_that_was_changed_is_refused(library: Library, mode: str, value: int) -> None:
    """Whichever number is changed, an operation is refused or reads what there is. Then the handle serves again, unless
    what is wrong was found amid a call, by which the group fails."""
    num_refused, place, size = 0, 0, 1
    while place < size:
        group = library.solo_group(algorithm=ALGORITHMS[mode])
        flat = Flat(library, group)
        flat.dispatch()
        kept, size, has_failed = flat.memory.clone(), len(flat.memory), False
        flat.memory[place] = value
        for call in [flat.combine, flat.combine_weights] + [lambda each=flat: each.dispatch(cached=1)] * (mode == "ht"):
            try:
                call()
            except c_api.Refused as error:
                assert error.result == BAD and "is not of these sizes, or was changed" in error.text
                has_failed = has_failed or "that rank 0 gave" in error.text
                num_refused += 1
        flat.memory.copy_(kept)
        if not has_failed:
            flat.y.zero_()
            flat.combine()
            assert torch.equal(flat.y, torch.ones(4, 16))
        library.HandleDestroy(flat.handle)
        library.GroupDestroy(group)
        place += 1
    assert num_refused > 20  # counts, ids, rows, slots


def test_a_handle_that_was_changed_between_its_steps_is_refused(library: Library) -> None:
    group = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT)
    flat = Flat(library, group)
    library.RouteHandle(flat.handle, tensor(flat.info), None)
    flat.memory[0] = 5  # rows from this rank to itself
    none = flat.info
    flat.info = None  # type: ignore[assignment]  # it was filled already
    refused(BAD, "was changed: number of rows 0 is 5, must be 0 to 4", flat.dispatch)
    flat.memory[0] = 4
    flat.dispatch()
    flat.info = none
    library.HandleDestroy(flat.handle)
    ll = library.solo_group(algorithm=c_api.LOW_LATENCY)
    flat = Flat(library, ll)
    flat.dispatch()
    flat.combine(send_only=1)
    kept = flat.memory.clone()
    flat.memory.fill_(1_000_000)
    refused(
        BAD, "or was changed: number of tokens 0 is 1000000, must be 0 to 4", library.Complete, flat.handle, None, None
    )
    flat.memory.copy_(kept)
    library.Complete(flat.handle, None, None)
    assert torch.equal(flat.y, torch.ones(4, 16))
    library.HandleDestroy(flat.handle)
    for each in (group, ll):
        library.GroupDestroy(each)


def test_every_row_of_a_routing_is_checked(library: Library) -> None:
    """A token with two choices on a rank has two rows there, and the receiver makes the second from the first."""
    group = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT)
    fields = c_api.HandleConfig(layout=c_api.LAYOUTS["packed"], capacity=8)
    size, handle, ids = c.c_size_t(), c.c_void_p(), torch.tensor([[0, 1], [1, 0]])
    library.HandleMemSize(group, fields, size)
    memory = torch.zeros(size.value // 4, dtype=torch.int32)
    library.CreateHandle(handle, group, fields, tensor(ids), memory.data_ptr())
    info, row_expert = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    library.RouteHandle(handle, tensor(info), None)
    first = next(i for i in range(len(memory)) if memory[i : i + 4].tolist() == [0, 2, 3, 1])  # rows of the choices
    memory[first + 1] = 1 << 20
    x, rows, weights = torch.ones(2, 16), torch.zeros(8, 16), torch.zeros(8)
    inputs = c_api.DispatchInputs(tokens=tensor(x))
    outputs = c_api.DispatchOutputs(
        tokens=tensor(rows), topk_weights=tensor(weights), row_expert=tensor(row_expert)
    )  # fmt: skip
    refused(BAD, "or was changed: row 1048576 of rank 0, which has 8", library.Dispatch, handle, inputs, outputs, None,
            None)  # fmt: skip
    library.HandleDestroy(handle)
    library.GroupDestroy(group)


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_strides_that_no_memory_has_are_refused(library: Library, mode: str) -> None:
    group = library.solo_group(algorithm=ALGORITHMS[mode], max_token_bytes=128)
    flat = Flat(library, group)
    scales, out = torch.ones(4, 2), torch.zeros(4, 2)
    for strides in ((2**63 - 1, 1), (2, 2**63 - 1), (-(2**63), 1), (2**62, 2**62)):
        described = tensor(scales)
        described.strides = strides
        refused(BAD, "a stride of -?[0-9]+ between [42] elements: no memory is as large|overlaps",
                lambda given=described: flat.dispatch(scales=given, out_scales=out))  # fmt: skip
    flat.dispatch(scales=tensor(scales), out_scales=out)
    assert torch.equal(out, torch.ones(4, 2))
    one = tensor(torch.ones(4, 2)[:, :1])
    one.strides = (2, 2**63 - 1)  # of one element: it has none
    flat.dispatch(scales=one, out_scales=torch.zeros(4, 1))
    library.HandleDestroy(flat.handle)
    library.GroupDestroy(group)


def test_flags_are_0_or_1(library: Library) -> None:
    """Ours are; NCCL EP takes any number that is not 0 for yes."""
    options = c_api.GroupOptions(both_algorithms=2)
    config, comm = c_api.RawGroupConfig(), library.comm(0, 1, c_api.Allgather())
    text = "both_algorithms is 2, must be 0 or 1"
    refused(BAD, text, library.EpxCreateGroup, c.c_void_p(), comm, config, options)
    library.EpxCommDestroy(comm)
    group = library.solo_group(enable_mask=7)
    library.MaskUpdate(group, 1, [])
    flat = Flat(library, group)
    for name in ("zero_padding", "cached"):
        refused(BAD, f"{name} is 7, must be 0 or 1", lambda name=name: flat.dispatch(**{name: 7}))
    flat.dispatch(send_only=7)
    library.Complete(flat.handle, None, None)
    flat.combine(send_only=9)
    library.Complete(flat.handle, None, None)
    assert torch.equal(flat.y, torch.ones(4, 16))
    library.HandleDestroy(flat.handle)
    library.GroupDestroy(group)


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_another_thread_ends_a_wait(library: Library, mode: str) -> None:
    """By a shorter timeout, or by the end of the group. What it held is not freed under the call."""

    def body(rank: ThreadGroup, seconds: float) -> list[str]:
        ended = []
        for what in ("destroy", "timeout"):
            fields = {"algorithm": ALGORITHMS[mode], "max_tokens": 4, "timeout_ns": 300 * SECOND}
            group = make_group(library, rank, num_experts=2, **fields)
            flat = Flat(library, group, 2)
            if rank.rank() == 0:
                act = library.GroupDestroy if what == "destroy" else lambda made: library.GroupSetTimeout(made, SECOND)
                timer = threading.Timer(seconds, act, [group])
                timer.start()
                with Clock(PATIENCE), pytest.raises(c_api.Refused) as caught:
                    flat.dispatch()
                assert caught.value.result == (USAGE if what == "destroy" else c_api.TIMEOUT), caught.value
                ended.append(caught.value.text)
                timer.join()
            rank.allgather(b"ended", 300.0)
            library.HandleDestroy(flat.handle)
            if rank.rank() == 1 or what == "timeout":
                library.GroupDestroy(group)
        return ended

    def run(seconds: float) -> None:
        destroyed, given_up = run_ranks(2, lambda rank: body(rank, seconds))[0]
        if "the group was destroyed by another thread while rank 0 waited" not in destroyed:
            raise Late(destroyed)
        if "with a timeout that was changed to 1 s meanwhile" not in given_up:
            raise Late(given_up)

    with_more_time(run, (0.2, *DEADLINES[1:]))


def test_a_group_may_be_destroyed_amid_calls(library: Library) -> None:
    for _ in range(20):
        group = library.solo_group()
        thread = threading.Thread(target=lambda made=group: (time.sleep(0.002), library.GroupDestroy(made)))
        thread.start()
        info = c_api.GroupInfo()
        try:
            while True:
                library.GroupGetInfo(group, info)
                library.Check(group)
        except c_api.Refused as error:
            assert "was destroyed" in error.text
        thread.join()
