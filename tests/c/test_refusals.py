"""What the C library refuses, with which result and words, and that nothing is broken by it."""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import SECOND, make_group, refused, run_case, tensor
from tests.support.expected import Expected, plain_case
from tests.support.patience import PATIENCE


@pytest.fixture
def group(library: Library) -> Iterator[c.c_void_p]:
    made = library.solo_group()
    yield made
    library.GroupDestroy(made)


def test_bad_groups_are_refused_with_the_values(library: Library) -> None:
    for result, pattern, config in (
        (c_api.INVALID_ARGUMENT, "arena_bytes is 4096, but low latency has", {"algorithm": 1, "arena_bytes": 4096}),
        (c_api.INVALID_ARGUMENT, "max_token_bytes is 600000, must be 1 to 524288",
         {"algorithm": 2, "max_token_bytes": 600000}),
        (c_api.INVALID_ARGUMENT, "algorithm 7", {"algorithm": 7}),
        (c_api.INVALID_ARGUMENT, "enable_mask is set, but high throughput has", {"algorithm": 2, "enable_mask": 1}),
        (c_api.INVALID_ARGUMENT, "ll_network 3 is unknown", {"ll_network": 3}),
        (c_api.INVALID_ARGUMENT, "window 2 is unknown", {"window": 2}),
        (c_api.INVALID_ARGUMENT, "device is -3", {"device": -3}),
        (c_api.INVALID_ARGUMENT, "0 experts do not divide", {"num_experts": 0}),
        (c_api.INVALID_ARGUMENT, "top-k is 33", {"topk": 33}),
        (c_api.INVALID_ARGUMENT, "max_dispatch_tokens_per_rank is 0", {"max_tokens": 0}),
        (c_api.INVALID_ARGUMENT, "max_token_bytes is 0", {"max_token_bytes": 0}),
        (c_api.INVALID_ARGUMENT, "max_token_bytes is 100000", {"max_token_bytes": 100000}),
        (c_api.INVALID_ARGUMENT, "1 ranks do not divide into domains of 3", {"domain_size": 3}),
        (c_api.INVALID_ARGUMENT, "overflow_policy 5", {"overflow_policy": 5}),
        (c_api.INVALID_ARGUMENT, f"timeout_ns is {10**18 + 1}, at most {10**18}$", {"timeout_ns": 10**18 + 1}),
    ):  # fmt: skip
        refused(result, pattern, lambda config=config: library.solo_group(**config))
    made = c.c_void_p()
    config = c_api.GroupConfig(num_experts=2, max_tokens=4, topk=2, max_token_bytes=64)
    create = library.CreateGroupFromCallback
    refused(c_api.INVALID_ARGUMENT, "rank 2 of 2", create, made, 2, 2, c_api.Allgather(), None, config)
    refused(c_api.INVALID_ARGUMENT, "allgather is null", create, made, 0, 2, c_api.Allgather(), None, config)
    refused(
        c_api.INVALID_ARGUMENT,
        "config is null, must be a ncclEpGroupConfig_t",
        create,
        made,
        0,
        1,
        c_api.Allgather(),
        None,
        None,
    )
    failing = c_api.Allgather(lambda *_: 42)
    refused(
        c_api.SYSTEM_ERROR,
        "rank 0 could not gather 8 bytes from 2 ranks.* 42",
        create,
        made,
        0,
        2,
        failing,
        None,
        config,
    )
    refused(c_api.INVALID_ARGUMENT, "group is null", library.Check, None)
    library.GroupDestroy(None)
    library.HandleDestroy(None)


class Solo:
    """A rank alone with a handle and small tensors, whose parts a test may replace by bad ones."""

    def __init__(self, library: Library, group: c.c_void_p, layout: str = "packed", **config: Any) -> None:
        self.library, self.group, self.handle = library, group, c.c_void_p()
        self.x = torch.arange(4 * 16, dtype=torch.float32).view(4, 16)
        self.ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]])
        self.rows, self.weights = torch.zeros(8, 16), torch.zeros(8)
        self.row_expert, self.info = torch.zeros(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        self.y = torch.zeros(4, 16)
        library.InitHandle(self.handle, group, c_api.HandleConfig(layout=c_api.LAYOUTS[layout], **config), None)

    def dispatch(self, *, send_only: bool = False, quant: int = 0, update: bool = True, **replaced: Any) -> None:
        if update:
            self.library.UpdateHandle(self.handle, tensor(replaced.get("ids", self.ids)))
        inputs = c_api.DispatchInputs(
            tokens=tensor(replaced.get("x", self.x)), topk_weights=tensor(replaced.get("topk_weights")),
            scales=tensor(replaced.get("scales")),
        )  # fmt: skip
        outputs = c_api.DispatchOutputs(
            tokens=tensor(replaced.get("rows", self.rows)), topk_weights=tensor(replaced.get("weights", self.weights)),
            row_expert=tensor(replaced.get("row_expert", self.row_expert)),
            info=tensor(replaced.get("info", self.info)), topk_idx=tensor(replaced.get("topk_idx")),
            scales=tensor(replaced.get("out_scales")),
        )  # fmt: skip
        config = c_api.DispatchConfig(send_only=send_only, quant=quant, num_sms=replaced.get("num_sms", 0))
        self.library.Dispatch(self.handle, inputs, outputs, config, None)

    def combine(self, *, send_only: bool = False, **replaced: Any) -> None:
        optional = {name: tensor(replaced[name]) for name in ("topk_weights", "topk_idx", "bias0") if name in replaced}
        inputs = c_api.CombineInputs(tokens=tensor(replaced.get("rows", self.rows)), **optional)
        outputs = c_api.CombineOutputs(tokens=tensor(replaced.get("y", self.y)))
        config = c_api.CombineConfig(
            send_only=send_only, weights=replaced.get("mode", c_api.WEIGHTS_NONE), wire_dtype=replaced.get("wire", 0)
        )
        self.library.Combine(self.handle, inputs, outputs, config, None)

    def check_round(self) -> None:
        self.dispatch()
        self.y.fill_(-1)
        self.combine()
        assert torch.equal(self.y, self.x * (self.ids >= 0).sum(1, keepdim=True))


def bad_dispatches() -> list[tuple[str, dict[str, Any]]]:
    odd = torch.zeros(4 * 16 + 1)[1:].view(4, 16)
    return [
        (r"tokens have shape \[64\]", {"x": torch.zeros(64)}),
        (r"tokens have shape \[3, 16\], topk_idx has 4 tokens", {"x": torch.zeros(3, 16)}),
        ("tokens at address .* is not aligned to 16 bytes", {"x": odd}),
        ("a row of 12 bytes", {"x": torch.zeros(4, 3), "rows": torch.zeros(8, 3)}),
        ("window is too small", {"x": torch.zeros(4, 64), "rows": torch.zeros(8, 64)}),
        (r"topk_idx has shape \[4, 3\]", {"ids": torch.zeros(4, 3, dtype=torch.int64)}),
        ("topk_idx is float32", {"ids": torch.zeros(4, 2)}),
        ("5 tokens, but max_tokens is 4", {"ids": torch.zeros(5, 2, dtype=torch.int64)}),
        (r"topk_weights has shape \[4, 1\], must be \[4, 2\]", {"topk_weights": torch.zeros(4, 1)}),
        (r"output tokens has shape \[7, 16\], must be \[8, 16\]", {"rows": torch.zeros(7, 16)}),
        ("output tokens is bfloat16, must be float32", {"rows": torch.zeros(8, 16, dtype=torch.bfloat16)}),
        ("output topk_weights is not given", {"weights": None}),
        ("output info has shape", {"info": torch.zeros(3, dtype=torch.int32)}),
        ("output topk_idx is given, but this call has none", {"topk_idx": torch.zeros(8, 2, dtype=torch.int64)}),
        ("quant 9 is unknown", {"quant": 9}),
        (r"scales have shape \[3, 1\]", {"scales": torch.zeros(3, 1)}),
        ("output scales is not given", {"scales": torch.zeros(4, 1)}),
        ("num_sms is -1", {"num_sms": -1}),
    ]  # fmt: skip


def test_bad_calls_are_refused_and_the_next_good_one_works(library: Library, group: c.c_void_p) -> None:
    solo = Solo(library, group)
    refused(c_api.INVALID_USAGE, "no routing yet", lambda: solo.dispatch(update=False))
    refused(c_api.INVALID_USAGE, "nothing was dispatched", solo.combine)
    library.Complete(solo.handle, None, None)  # nothing was sent
    for pattern, replaced in bad_dispatches():
        refused(c_api.INVALID_ARGUMENT, pattern, lambda r=replaced: solo.dispatch(**r))
    solo.check_round()
    for pattern, replaced in (
        (r"tokens has shape \[7, 16\], must be \[8, 16\]", {"rows": torch.zeros(7, 16)}),
        ("adds up", {"rows": torch.zeros(8, 16, dtype=torch.int32)}),
        (r"output tokens has shape \[4, 15\]", {"y": torch.zeros(4, 15)}),
        ("adds up fp32 rows to bf16: the output must be of the rows' dtype, or fp32",
         {"y": torch.zeros(4, 16, dtype=torch.bfloat16)}),
        ("weights 4 is unknown", {"mode": 4}),
        ("go with NCCL_EPX_WEIGHTS_HOME", {"topk_weights": torch.zeros(4, 2)}),
        ("topk_weights is not given", {"mode": c_api.WEIGHTS_HOME}),
        ("wire_dtype is float8_e4m3, must be float32 as the output tokens$", {"wire": 2}),
        ("wire_dtype 77 is unknown", {"wire": 77}),
        ("topk_idx is float32, must be int64 or int32",
         {"mode": c_api.WEIGHTS_HOME, "topk_weights": torch.zeros(4, 2), "topk_idx": torch.zeros(4, 2)}),
        ("biases go with layout flat", {"bias0": torch.zeros(4, 16)}),
    ):  # fmt: skip
        refused(c_api.INVALID_ARGUMENT, pattern, lambda r=replaced: solo.combine(**r))
    descriptor = c_api.Tensor(ndim=5, dtype=7)
    refused(c_api.INVALID_ARGUMENT, "5 dimensions", library.UpdateHandle, solo.handle, descriptor)
    refused(c_api.INVALID_ARGUMENT, "datatype 77", library.UpdateHandle, solo.handle, c_api.Tensor(ndim=2, dtype=77))
    descriptor = c_api.Tensor(ndim=2, dtype=4, sizes=(4, 2))
    refused(
        c_api.INVALID_ARGUMENT, r"topk_idx of shape \[4, 2\] has no data", library.UpdateHandle, solo.handle, descriptor
    )
    solo.check_round()
    library.HandleDestroy(solo.handle)


def test_a_bad_handle_is_refused_with_the_values(library: Library, group: c.c_void_p) -> None:
    handle = c.c_void_p()
    for pattern, config in (
        ("layout is not set", {}),
        ("layout 9 is unknown", {"layout": 9}),
        ("num_topk is 3, must be 1 to the group's 2", {"layout": 1, "topk": 3}),
        ("capacity is -2", {"layout": 1, "capacity": -2}),
        ("rank_major always", {"layout": 3, "capacity": 4}),
        ("layout flat has no alignment", {"layout": 4, "expert_alignment": 8}),
        ("a capacity of 4294967296 rows, at most 2147483647", {"layout": 4, "capacity": 1 << 32}),
        (f"a capacity of {2**63 - 1} rows, at most 2147483647", {"layout": 1, "capacity": 2**63 - 1}),
        ("would have 4294967294 rows at capacity 2147483647", {"layout": 1, "capacity": 2**31 - 1}),
        ("reserved of ncclEpxHandleOptions_t is 77, must be 0", {"layout": 1, "reserved": 77}),
    ):
        refused(c_api.INVALID_ARGUMENT, pattern, library.InitHandle, handle, group, c_api.HandleConfig(**config), None)
        refused(
            c_api.INVALID_ARGUMENT, pattern, library.HandleMemSize, group, c_api.HandleConfig(**config), c.c_size_t()
        )
    odd = c.c_void_p(1 << 20 | 8)
    refused(c_api.INVALID_ARGUMENT, "not aligned", library.InitHandle, handle, group, c_api.HandleConfig(layout=1), odd)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    create = library.CreateHandle
    refused(
        c_api.INVALID_ARGUMENT,
        "ncclEpUpdateHandle: topk_idx has",
        create,
        handle,
        group,
        c_api.HandleConfig(layout=1),
        tensor(ids),
        None,
    )


def test_send_and_complete_are_taken_in_turn(library: Library, group: c.c_void_p) -> None:
    first, second = Solo(library, group), Solo(library, group)
    first.dispatch(send_only=True)
    for call in (first.dispatch, first.combine, lambda: library.HandleDestroy(first.handle)):
        refused(c_api.INVALID_USAGE, "a dispatch was sent and has not been received", call)
    text = r"dispatch 1 was sent and has not been received; receive it \(or destroy the group\)"
    refused(c_api.INVALID_USAGE, text, second.dispatch)
    library.Complete(first.handle, None, None)
    second.check_round()
    first.combine(send_only=True)
    second.dispatch()  # beside a combine in flight
    refused(c_api.INVALID_USAGE, "a combine was sent", first.dispatch)
    library.Complete(first.handle, None, None)
    assert torch.equal(first.y, second.y)
    for solo in (first, second):
        library.HandleDestroy(solo.handle)


def test_a_handle_outlives_its_group(library: Library) -> None:
    group = library.solo_group()
    solo = Solo(library, group)
    solo.dispatch(send_only=True)
    library.GroupDestroy(group)
    refused(c_api.INVALID_USAGE, "the group was destroyed", library.Complete, solo.handle, None, None)
    refused(c_api.INVALID_USAGE, "the group was destroyed", solo.dispatch)
    library.HandleDestroy(solo.handle)


@pytest.mark.parametrize("send_only", [False, True], ids=["fused", "staged"])
@pytest.mark.parametrize("policy", [0, 1], ids=["count", "error"])
def test_overflow_is_counted_or_refused_as_asked(library: Library, policy: int, send_only: bool) -> None:
    group = library.solo_group(overflow_policy=policy)
    solo = Solo(library, group, capacity=3)

    small = {"rows": torch.zeros(3, 16), "weights": torch.zeros(3), "row_expert": torch.zeros(3, dtype=torch.int32)}

    def dispatch() -> None:
        solo.dispatch(send_only=send_only, **small)
        if send_only:
            library.Complete(solo.handle, None, None)

    for _ in range(2):
        if policy == 0:
            dispatch()
        else:
            refused(c_api.OVERFLOW, "2 rows did not fit", dispatch)
        assert solo.info.tolist()[:6] == [2, 1, 2, 3, 2, 3]  # counts, demand, overflow, total
        library.Check(group)
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_ids_out_of_range_are_reported_once(library: Library, group: c.c_void_p) -> None:
    solo = Solo(library, group)
    solo.dispatch(ids=torch.tensor([[0, 1], [7, -1], [-1, -1], [1, 0]]))
    refused(c_api.INVALID_ARGUMENT, "the first is 7 at token 1, k 0", library.Check, group)
    library.Check(group)
    library.HandleDestroy(solo.handle)


def test_errors_stay_with_their_thread(library: Library) -> None:
    refused(c_api.INVALID_ARGUMENT, "group is null", library.Check, None)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(library.last_error()))
    thread.start()
    thread.join()
    assert texts == [""] and "group is null" in library.last_error()
    assert library.raw.ncclEpxGetErrorString(c_api.MISMATCH) == b"mismatch between ranks"


def test_memory_beyond_addresses_is_refused(library: Library, group: c.c_void_p) -> None:
    memory = c.c_void_p()
    for size in (2**64 - 1, 2**64 - 11, 2**63):
        text = f"{size} bytes were asked for, at most {2**63 - 1}"
        refused(c_api.INVALID_ARGUMENT, text, library.MemAlloc, group, memory, size)
    refused(c_api.SYSTEM_ERROR, "no memory", library.MemAlloc, group, memory, 2**63 - 1)
    assert memory.value is None


def test_the_longest_deadline_is_served(library: Library) -> None:
    group = library.solo_group(timeout_ns=10**18)
    library.GroupSetTimeout(group, 10**18)
    text = f"timeout_ns is {2**64 - 1}, at most {10**18}$"
    refused(c_api.INVALID_ARGUMENT, text, library.GroupSetTimeout, group, 2**64 - 1)
    library.GroupDestroy(group)


def test_a_fork_may_not_use_the_group(library: Library, group: c.c_void_p) -> None:
    child = os.fork()
    if child == 0:
        os._exit(library.raw.ncclEpxCheck(group))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == c_api.RESULTS[c_api.INVALID_USAGE]
    library.Check(group)


# ---- Ranks that disagree or fall silent


@pytest.mark.parametrize(
    ("field", "text"),
    [("domain_size", "domain size: rank . has ., rank . has"), ("window", r"\(window\): rank . has .*cuMem")],
)
def test_ranks_that_disagree_hear_of_it(library: Library, field: str, text: str) -> None:
    def body(group: ThreadGroup) -> None:
        refused(c_api.MISMATCH, text, lambda: make_group(library, group, **{field: group.rank()}))

    run_ranks(2, body)


@pytest.mark.parametrize("step", ["fused", "staged", "home"])
def test_handles_of_different_dispatches_are_refused_on_all_ranks(library: Library, step: str) -> None:
    def combine(solo: Solo) -> None:
        options = {"topk_weights": torch.ones(4, 2), "mode": c_api.WEIGHTS_HOME} if step == "home" else {}
        solo.combine(send_only=step == "staged", **options)
        if step == "staged":
            library.Complete(solo.handle, None, None)

    def body(group: ThreadGroup) -> None:
        rank, made = group.rank(), make_group(library, group, num_experts=2, max_tokens=4, topk=2, max_token_bytes=64)
        handles = [Solo(library, made) for _ in range(2)]
        for each in handles:
            each.info = torch.zeros(6, dtype=torch.int32)
            each.dispatch()
        for each in handles[::-1]:
            combine(each)
            assert torch.equal(each.y, each.x * (each.ids >= 0).sum(1, keepdim=True))
        text = f"rank {rank} that of dispatch {1 + rank}, rank {1 - rank} that of dispatch {2 - rank}"
        refused(c_api.MISMATCH, f"handles of different dispatches to combine 3: {text}", lambda: combine(handles[rank]))
        refused(c_api.MISMATCH, f"has failed: .*{text}", library.Check, made)
        for each in handles:
            library.HandleDestroy(each.handle)
        library.GroupDestroy(made)

    run_ranks(2, body)


def test_a_rank_that_never_comes_is_named_at_the_deadline(library: Library) -> None:
    absent = ThreadGroup.make(2)[0]
    refused(c_api.TIMEOUT, "rank 0 could not gather", lambda: make_group(library, absent, timeout_ns=SECOND // 5))


def test_a_silent_rank_ends_the_group_and_a_new_one_works(library: Library) -> None:
    expected = Expected(plain_case(2))
    done = threading.Event()

    def body(group: ThreadGroup) -> None:
        made = make_group(library, group)
        if group.rank() == 1:
            assert done.wait(PATIENCE)
        else:
            library.GroupSetTimeout(made, SECOND // 5)
            solo = Solo(library, made, layout="flat")
            flat = {
                "rows": torch.zeros(16, 16), "weights": torch.zeros(16, 2), "row_expert": None,
                "topk_idx": torch.zeros(16, 2, dtype=torch.int64), "info": torch.zeros(6, dtype=torch.int32),
            }  # fmt: skip
            refused(c_api.TIMEOUT, "rank 0 waited 0.2 s for the op header of rank 1", lambda: solo.dispatch(**flat))
            refused(c_api.TIMEOUT, "has failed: rank 0 waited", lambda: solo.dispatch(**flat))
            refused(c_api.TIMEOUT, "ncclEpxCheck: the group has failed: .*; destroy it", library.Check, made)
            library.HandleDestroy(solo.handle)
            done.set()
        library.GroupDestroy(made)

    run_ranks(2, body)
    run_case(library, expected, staged=False)
