"""What the C library refuses of high throughput, with which result and words, and that nothing is broken by it."""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from nccl_ep.modes import auto_ll_tokens
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import SECOND, CaseRun, make_group, refused, tensor
from tests.support.expected import Expected, plain_case
from tests.support.patience import PATIENCE

BAD, USAGE = c_api.INVALID_ARGUMENT, c_api.INVALID_USAGE


class Solo:
    """A rank alone with a packed handle and small tensors, whose parts a test may replace by bad ones."""

    def __init__(self, library: Library, group: c.c_void_p, **config: Any) -> None:
        self.library, self.group, self.handle = library, group, c.c_void_p()
        self.x, self.more = torch.arange(64, dtype=torch.float32).view(4, 16), torch.arange(64).view(4, 16)
        self.ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]])
        self.rows, self.more_rows = torch.zeros(8, 16), torch.zeros(8, 16, dtype=torch.int64)
        self.weights, self.row_expert = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
        self.info = torch.zeros(9, dtype=torch.int32)
        self.y, self.scalars = torch.zeros(4, 16), torch.zeros(4, 2)
        fields = {"layout": c_api.LAYOUTS["packed"], "algorithm": c_api.HIGH_THROUGHPUT, **config}
        library.InitHandle(self.handle, group, c_api.HandleConfig(**fields), None)
        library.UpdateHandle(self.handle, tensor(self.ids))

    def inputs(self, **replaced: Any) -> Any:
        given = replaced.get("extra", [self.more])
        return c_api.DispatchInputs(
            tokens=tensor(replaced.get("x", self.x)), topk_weights=tensor(replaced.get("topk_weights")),
            extra=list(map(tensor, given)),
        )  # fmt: skip

    def dispatch(self, *, send_only: bool = False, cached: bool = False, **replaced: Any) -> None:
        has_routing = {"weights": self.weights, "row_expert": self.row_expert, "info": self.info}
        default = dict.fromkeys(has_routing) if cached else has_routing
        outputs = c_api.DispatchOutputs(
            tokens=tensor(replaced.get("rows", self.rows)),
            topk_weights=tensor(replaced.get("weights", default["weights"])),
            row_expert=tensor(replaced.get("row_expert", default["row_expert"])),
            info=tensor(replaced.get("info", default["info"])),
            extra=list(map(tensor, replaced.get("extra_rows", [self.more_rows]))),
        )  # fmt: skip
        config = c_api.DispatchConfig(send_only=send_only, cached=cached, num_sms=replaced.get("num_sms", 0))
        self.library.Dispatch(self.handle, self.inputs(**replaced), outputs, config, None)

    def route(self, info: torch.Tensor | None = None) -> None:
        self.library.RouteHandle(self.handle, tensor(self.info if info is None else info), None)

    def combine(
        self, *, send_only: bool = False, values: Any = "weights", scalars: Any = "scalars", **rest: Any
    ) -> None:
        inputs = c_api.CombineInputs(
            tokens=tensor(rest.get("rows", self.rows)),
            values=tensor(self.weights if isinstance(values, str) else values),
        )  # fmt: skip
        outputs = c_api.CombineOutputs(
            tokens=tensor(rest.get("y", self.y)), values=tensor(self.scalars if isinstance(scalars, str) else scalars)
        )
        self.library.Combine(
            self.handle, inputs, outputs, c_api.CombineConfig(send_only=send_only, weights=c_api.WEIGHTS_NONE), None
        )

    def check_round(self) -> None:
        """Dispatch, cached dispatch, combine with scalars: all as it must be."""
        self.library.UpdateHandle(self.handle, tensor(self.ids))
        self.dispatch()
        assert self.info.tolist() == [2, 3, 2, 3, 0, 5, 0, 2, 5] and self.row_expert[:5].tolist() == [0, 0, 1, 1, 1]
        tokens = torch.tensor([0, 3, 0, 1, 3])
        assert torch.equal(self.rows[:5], self.x[tokens]) and torch.equal(self.more_rows[:5], self.more[tokens])
        self.dispatch(cached=True, x=self.x + 1)
        assert torch.equal(self.rows[:5], self.x[tokens] + 1)
        self.combine()
        chosen = self.ids >= 0
        assert torch.equal(self.y, (self.x + 1) * chosen.sum(1, keepdim=True))
        assert torch.equal(self.scalars, chosen.float())


@pytest.fixture
def group(library: Library) -> Iterator[c.c_void_p]:
    made = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT, max_token_bytes=192)
    yield made
    library.GroupDestroy(made)


def test_a_bad_handle_is_refused_with_the_values(library: Library, group: c.c_void_p) -> None:
    for pattern, config in (
        ("algorithm 3 is unknown", {"layout": 2, "algorithm": 3}),
        ("algorithm is 1, but the group was made with 2 alone: both_algorithms", {"layout": 2, "algorithm": 1}),
        ("max_tokens is 5, must be 1 to the group's 4", {"layout": 2, "max_tokens": 5}),
        ("expert_major needs a capacity in high throughput", {"layout": 1}),
        (
            'capacity "exact" is for high throughput and not for expert_major: mode is "ht", layout "expert_major"',
            {"layout": 1, "capacity": -1},
        ),
        ("capacity is -1, but layout rank_major always", {"layout": 3, "capacity": c_api.EXACT}),
        ("capacity is -2", {"layout": 2, "capacity": -2}),
    ):
        refused(BAD, pattern, library.InitHandle, c.c_void_p(), group, c_api.HandleConfig(**config), None)
    both = library.solo_group()
    exact_ll = c_api.HandleConfig(layout=2, algorithm=1, capacity=c_api.EXACT)
    refused(
        BAD,
        'capacity "exact" is for high throughput .*: mode is "ll", layout "packed"',
        library.InitHandle,
        c.c_void_p(),
        both,
        exact_ll,
        None,
    )
    ll = library.solo_group(algorithm=c_api.LOW_LATENCY)
    ht_config = c_api.HandleConfig(layout=2, algorithm=2)
    refused(
        BAD,
        "the group was made with 1 alone: both_algorithms of ncclEpxGroupOptions_t",
        library.InitHandle,
        c.c_void_p(),
        ll,
        ht_config,
        None,
    )
    for made in (both, ll):
        library.GroupDestroy(made)


def test_auto_takes_low_latency_up_to_its_room(library: Library) -> None:
    for max_tokens, row_bytes, topk in ((1000, 65536, 2), (300, 65536, 1), (64, 64, 2), (5000, 64, 2)):
        made = library.solo_group(max_tokens=max_tokens, max_token_bytes=row_bytes, topk=topk)
        info, told = c_api.GroupInfo(), c_api.HandleInfo()
        library.GroupGetInfo(made, info)
        most = auto_ll_tokens(max_tokens, row_bytes, topk, 1, 2, "cpu")
        assert (info.algorithm, info.ll_max_tokens) == (c_api.ALGORITHM_AUTO, most)
        expected = {
            1: 1,
            most: 1,
            min(most + 1, max_tokens): 2 if most < max_tokens else 1,
            0: 2 - (most == max_tokens),
        }
        for tokens, algorithm in expected.items():
            handle = c.c_void_p()
            library.InitHandle(handle, made, c_api.HandleConfig(layout=4, max_tokens=tokens), None)
            library.HandleGetInfo(handle, told)
            assert (told.algorithm, told.max_tokens) == (algorithm, tokens or max_tokens)
            assert (told.layout, told.topk, told.capacity) == (4, topk, tokens or max_tokens)
            library.HandleDestroy(handle)
        if most < max_tokens:
            config = c_api.HandleConfig(layout=4, algorithm=c_api.LOW_LATENCY)
            text = f"max_tokens is {max_tokens}, but the group has room for low latency up to {most}"
            refused(BAD, text, library.InitHandle, c.c_void_p(), made, config, None)
        library.GroupDestroy(made)


BAD_CALLS: list[tuple[str, int, str, Callable[[Solo], Any]]] = [
    ("num_sms", BAD, "num_sms is -1", lambda s: s.dispatch(num_sms=-1)),
    ("tokens", BAD, r"tokens have shape \[3, 16\]", lambda s: s.dispatch(x=torch.zeros(3, 16), extra=[])),
    ("odd row", BAD, "a row of 12 bytes", lambda s: s.dispatch(x=torch.zeros(4, 3), rows=torch.zeros(8, 3))),
    ("window", BAD, "window is too small for high throughput of 4 tokens",
     lambda s: s.dispatch(x=torch.zeros(4, 64), rows=torch.zeros(8, 64))),
    ("extra tokens", BAD, r"extra\[0\] has shape \[3, 16\], must be \[4",
     lambda s: s.dispatch(extra=[torch.zeros(3, 16)])),
    ("extra dimensions", BAD, r"extra\[1\] has shape \[4\]", lambda s: s.dispatch(extra=[s.more, s.more[:, 0]])),
    ("extra width", BAD, r"extra\[0\] has rows of 1 elements of 8 bytes: must be a multiple of 16",
     lambda s: s.dispatch(extra=[torch.zeros(4, 1, dtype=torch.int64)])),
    ("extra alignment", BAD, r"extra\[0\] at address .* is not aligned to 16",
     lambda s: s.dispatch(extra=[torch.zeros(65, dtype=torch.int64)[1:].view(4, 16)])),
    ("extra output", BAD, r"output extra\[0\] is not given", lambda s: s.dispatch(extra_rows=[])),
    ("extra type", BAD, r"output extra\[0\] is float32, must be int64",
     lambda s: s.dispatch(extra_rows=[torch.zeros(8, 16)])),
    ("extra for nothing", BAD, r"output extra\[0\] is given, but this call has none",
     lambda s: s.dispatch(extra=[])),
    ("cached tokens", BAD, r"tokens have shape \[3, 16\], the dispatch of the handle had 4 tokens",
     lambda s: s.dispatch(cached=True, x=torch.zeros(3, 16), extra=[])),
    ("cached weights", BAD, "topk_weights go with a routing",
     lambda s: s.dispatch(cached=True, topk_weights=torch.ones(4, 2))),
    ("cached info", BAD, "output info is given, but this call has", lambda s: s.dispatch(cached=True, info=s.info)),
    ("route info", BAD, r"info has shape \[8\], must be \[9\]", lambda s: s.route(torch.zeros(8, dtype=torch.int32))),
    ("route info type", BAD, "info is int64, must be int32", lambda s: s.route(torch.zeros(9, dtype=torch.int64))),
    ("combine rows", BAD, r"tokens has shape \[7, 16\]", lambda s: s.combine(rows=torch.zeros(7, 16))),
    ("combine type", BAD, "adds up 32 bits rows", lambda s: s.combine(rows=torch.zeros(8, 16, dtype=torch.int32))),
    ("values", BAD, r"topk_weights has shape \[8, 2\], must be \[8\]", lambda s: s.combine(values=torch.zeros(8, 2))),
    ("values home", BAD, "output topk_weights is not given, must be float32", lambda s: s.combine(scalars=None)),
    ("values for nothing", BAD, "topk_weights is not given, must be float32", lambda s: s.combine(values=None)),
    ("weights alone", BAD, r"out has shape \[4\]", lambda s: s.library.CombineWeights(
        s.handle, tensor(s.weights), tensor(torch.zeros(4)), None)),
    ("free", BAD, "is not of ncclEpxMemAlloc", lambda s: s.library.MemFree(s.group, s.x.data_ptr())),
    ("allocate", BAD, "memory is null", lambda s: s.library.MemAlloc(s.group, None, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("result", "text", "call"), [bad[1:] for bad in BAD_CALLS], ids=[bad[0] for bad in BAD_CALLS])
def test_bad_calls_are_refused_and_the_next_good_one_works(
    library: Library, group: c.c_void_p, result: int, text: str, call: Callable[[Solo], Any]
) -> None:
    solo = Solo(library, group)
    solo.check_round()
    before, after = c_api.GroupInfo(), c_api.GroupInfo()
    library.GroupGetInfo(group, before)
    refused(result, text, call, solo)
    library.GroupGetInfo(group, after)
    assert bytes(before) == bytes(after)
    solo.combine()  # of the dispatch before
    solo.check_round()
    library.Check(group)
    library.HandleDestroy(solo.handle)


def test_steps_are_taken_in_turn(library: Library, group: c.c_void_p) -> None:
    solo = Solo(library, group, capacity=c_api.EXACT)
    shapes = c_api.DispatchOutputs()
    unrouted = c.c_void_p()
    library.InitHandle(unrouted, group, c_api.HandleConfig(layout=4), None)
    refused(USAGE, "no routing yet", library.RouteHandle, unrouted, tensor(solo.info), None)
    for call in (solo.dispatch, lambda: library.DispatchShapes(solo.handle, solo.inputs(), None, shapes)):
        refused(USAGE, "exact, but not known before ncclEpxRouteHandle", call)
    for call in (solo.combine, lambda: solo.dispatch(cached=True)):
        refused(USAGE, "nothing was dispatched with this handle yet", call)
    told = c_api.HandleInfo()
    for capacity in (c_api.EXACT, 5):
        library.HandleGetInfo(solo.handle, told)
        assert told.capacity == capacity
        solo.route()
    refused(USAGE, "nothing was dispatched with this handle yet", solo.combine)
    solo.rows, solo.more_rows, solo.weights = torch.zeros(5, 16), torch.zeros(5, 16, dtype=torch.int64), torch.zeros(5)
    solo.row_expert = torch.zeros(5, dtype=torch.int32)
    refused(BAD, "output info is given, but this call has none", solo.dispatch)
    for _ in range(2):  # any number along the same routes
        solo.dispatch(info=None)
        solo.combine()
        assert torch.equal(solo.y, solo.x * (solo.ids >= 0).sum(1, keepdim=True))
    library.UpdateHandle(solo.handle, tensor(solo.ids))
    solo.combine()  # a new routing is known, and nothing was done with it
    refused(USAGE, "exact, but not known", lambda: solo.dispatch(info=None))
    solo.route()
    for call in (solo.combine, lambda: solo.dispatch(cached=True)):  # the routes are not those of the rows any more
        refused(USAGE, "nothing was dispatched with this handle yet", call)
    for handle in (solo.handle, unrouted):
        library.HandleDestroy(handle)


def test_low_latency_has_no_steps(library: Library) -> None:
    group = library.solo_group()
    solo = Solo(library, group, algorithm=c_api.LOW_LATENCY)
    refused(USAGE, "the handle is of low latency", solo.route)
    refused(BAD, "cached is 1, but the handle is of low latency", lambda: solo.dispatch(cached=True, extra=[]))
    solo.dispatch(extra=[], extra_rows=[])
    refused(USAGE, "NCCL_EP_BWD_PASS, but the handle is of low latency", solo.combine)
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_low_latency_moves_extra_tensors(library: Library) -> None:
    """One in the rows of tokens, each other one by itself; split calls have the first alone."""
    group = library.solo_group(algorithm=c_api.LOW_LATENCY, max_token_bytes=192)
    solo = Solo(library, group, algorithm=c_api.LOW_LATENCY)
    tokens = torch.tensor([0, 3, 0, 1, 3])
    more = [solo.more, -solo.x, solo.more.to(torch.int32)]
    for count in (1, 2, 3):
        rows = [torch.zeros(8, 16, dtype=each.dtype) for each in more[:count]]
        solo.info.zero_(), solo.rows.zero_(), solo.weights.zero_(), solo.row_expert.zero_()
        solo.dispatch(extra=more[:count], extra_rows=rows)
        assert solo.info.tolist() == [2, 3, 2, 3, 0, 5, 0, 2, 5] and solo.row_expert[:5].tolist() == [0, 0, 1, 1, 1]
        assert torch.equal(solo.rows[:5], solo.x[tokens]) and solo.weights.tolist() == [1] * 5 + [0] * 3
        assert all(torch.equal(row[:5], each[tokens]) for row, each in zip(rows, more, strict=False))
    solo.more_rows.zero_()
    solo.dispatch(send_only=True)
    library.Complete(solo.handle, None, None)
    assert torch.equal(solo.more_rows[:5], solo.more[tokens])
    two = {"extra": more[:2], "extra_rows": [solo.more_rows, solo.rows]}
    refused(BAD, "send_only is set, and 1 extra tensors", lambda: solo.dispatch(send_only=True, **two))
    wide = torch.zeros(4, 256)
    two = {"extra": [solo.more, wide], "extra_rows": [solo.more_rows, torch.zeros(8, 256)]}
    refused(BAD, "window is too small .* rows of 1040 bytes", lambda: solo.dispatch(**two))
    solo.dispatch()
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_memory_of_the_arena_is_aligned_and_comes_back(library: Library) -> None:
    group = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT, arena_bytes=4096)
    info, blocks = c_api.GroupInfo(), []
    for size, free in ((1, 3584), (1024, 2560), (2560, 0), (0, 0), (1 << 20, 0)):
        memory = c.c_void_p()
        library.MemAlloc(group, memory, size)
        c.memset(memory, 0xA5, size)
        library.GroupGetInfo(group, info)
        assert memory.value is not None and memory.value % 64 == 0 and info.arena_free_bytes == free
        blocks.append(memory)
    library.MemFree(group, blocks[1])
    library.GroupGetInfo(group, info)
    assert info.arena_free_bytes == 1024
    refused(BAD, "is not of ncclEpxMemAlloc", library.MemFree, group, blocks[1])
    library.MemFree(group, None)
    child = os.fork()
    if child == 0:
        os._exit(library.raw.ncclEpxMemAlloc(group, c.byref(c.c_void_p()), 8))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == c_api.RESULTS[USAGE]
    library.GroupDestroy(group)  # the other blocks with it


@pytest.mark.parametrize("policy", [0, 1], ids=["count", "error"])
@pytest.mark.parametrize("routed", [False, True], ids=["fused", "routed"])
def test_overflow_is_counted_or_refused_as_asked(library: Library, policy: int, routed: bool) -> None:
    group = library.solo_group(overflow_policy=policy, algorithm=c_api.HIGH_THROUGHPUT)
    solo = Solo(library, group, capacity=3)
    small = {
        "rows": torch.zeros(3, 16), "weights": torch.zeros(3), "row_expert": torch.zeros(3, dtype=torch.int32),
        "extra": [], "extra_rows": [],
    }  # fmt: skip
    for _ in range(2):
        first = solo.route if routed else lambda: solo.dispatch(**small)
        if policy == 0:
            first()
        else:
            refused(c_api.OVERFLOW, "2 rows did not fit", first)
        if routed:
            solo.dispatch(**small, info=None)
        assert solo.info.tolist()[:6] == [2, 1, 2, 3, 2, 3]  # counts, demand, overflow, total
        assert torch.equal(small["rows"], solo.x[[0, 3, 0]])
        library.Check(group)
        library.UpdateHandle(solo.handle, tensor(solo.ids))
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_high_throughput_has_no_split_calls(library: Library, group: c.c_void_p) -> None:
    """A send is the whole operation, and there is nothing to complete."""
    solo = Solo(library, group)
    solo.dispatch(send_only=True)
    library.Complete(solo.handle, None, None)
    solo.combine(send_only=True)
    assert torch.equal(solo.y, solo.x * (solo.ids >= 0).sum(1, keepdim=True))
    solo.check_round()
    library.HandleDestroy(solo.handle)


def test_one_group_serves_both_algorithms_with_the_same_bits(library: Library) -> None:
    """Handles of both algorithms, in any order, with the same bits."""
    expected = Expected(plain_case(2, layout="packed"))

    def body(group: ThreadGroup) -> None:
        run = CaseRun(library, expected, group, False, "cpu")
        handles = [c.c_void_p(), c.c_void_p(), c.c_void_p()]
        for handle, algorithm in zip(handles, (1, 2, 2), strict=True):
            library.InitHandle(handle, run.group, c_api.HandleConfig(layout=2, algorithm=algorithm), None)
        for order in ((0, 1, 2), (2, 0, 1)):
            for number in order:
                expected.check_dispatch(run.dispatch(handles[number]), group.rank())
            for number in reversed(order):
                expected.check_combine(run.combine(handles[number]), group.rank())
                expected.check_scalars(run.scalars(handles[number]), group.rank())
        info = c_api.GroupInfo()
        library.GroupGetInfo(run.group, info)
        assert (info.num_dispatches, info.num_ht_dispatches, info.num_combines, info.num_ht_combines) == (2, 4, 4, 8)
        for handle in handles:
            library.HandleDestroy(handle)
        library.GroupDestroy(run.group)

    run_ranks(2, body)


# ---- Ranks that disagree or fall silent


def two_ranks(library: Library, group: ThreadGroup) -> tuple[c.c_void_p, Solo]:
    made = make_group(library, group, algorithm=c_api.HIGH_THROUGHPUT, num_experts=2, max_tokens=4, max_token_bytes=192)
    return made, one_of_two(library, made)


def one_of_two(library: Library, made: c.c_void_p) -> Solo:
    solo = Solo(library, made)
    solo.rows, solo.more_rows, solo.weights = torch.zeros(8, 16), torch.zeros(8, 16, dtype=torch.int64), torch.zeros(8)
    solo.info = torch.zeros(6, dtype=torch.int32)
    return solo


def test_ranks_that_make_other_calls_hear_of_it(library: Library) -> None:
    def body(group: ThreadGroup) -> None:
        made, solo = two_ranks(library, group)
        calls = ("rank 0 called counts of a high-throughput dispatch", "rank 1 called high-throughput dispatch")
        text = f"{calls[0]}.*hidden 0.*{calls[1]}|{calls[1]}.*hidden 16.*{calls[0]}"
        refused(c_api.MISMATCH, text, solo.route if group.rank() == 0 else solo.dispatch)
        refused(c_api.MISMATCH, "has failed", library.Check, made)
        library.HandleDestroy(solo.handle)
        library.GroupDestroy(made)

    run_ranks(2, body)


@pytest.mark.parametrize("step", ["combine", "cached"])
def test_handles_of_different_dispatches_are_refused_on_all_ranks(library: Library, step: str) -> None:
    def body(group: ThreadGroup) -> None:
        rank, (made, first) = group.rank(), two_ranks(library, group)
        handles = [first, one_of_two(library, made)]
        for each in handles:
            each.dispatch()
        for each in handles[::-1]:
            each.combine()
            assert torch.equal(each.y, each.x * (each.ids >= 0).sum(1, keepdim=True))
        mine = handles[rank]
        text = f"rank {rank} that of dispatch {1 + rank}, rank {1 - rank} that of dispatch {2 - rank}"
        kind = "combine 3" if step == "combine" else "dispatch 3"
        call = mine.combine if step == "combine" else partial(mine.dispatch, cached=True)
        refused(c_api.MISMATCH, f"handles of different dispatches to high-throughput {kind}: {text}", call)
        refused(c_api.MISMATCH, f"has failed: .*{text}", library.Check, made)
        for each in handles:
            library.HandleDestroy(each.handle)
        library.GroupDestroy(made)

    run_ranks(2, body)


def test_a_silent_rank_ends_the_group(library: Library) -> None:
    done = threading.Event()

    def body(group: ThreadGroup) -> None:
        made, solo = two_ranks(library, group)
        if group.rank() == 1:
            assert done.wait(PATIENCE)
        else:
            library.GroupSetTimeout(made, SECOND // 5)
            refused(c_api.TIMEOUT, "rank 0 waited 0.2 s for the op header of rank 1", solo.route)
            refused(c_api.TIMEOUT, "has failed: rank 0 waited", solo.dispatch)
            done.set()
        library.HandleDestroy(solo.handle)
        library.GroupDestroy(made)

    run_ranks(2, body)


def test_a_handle_outlives_its_group(library: Library) -> None:
    group = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT, max_token_bytes=192)
    solo = Solo(library, group)
    solo.check_round()
    library.GroupDestroy(group)
    for call in (solo.route, solo.dispatch, solo.combine, lambda: solo.dispatch(cached=True)):
        refused(USAGE, "the group was destroyed", call)
    library.HandleDestroy(solo.handle)
