"""What the tests of the ops of both modes share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import nccl_ep
from nccl_ep import _C, reference

HT_OPS = [
    "ht_dispatch", "ht_dispatch_out", "ht_dispatch_cached", "ht_dispatch_cached_out", "ht_dispatch_deepep",
    "ht_combine", "ht_combine_out", "arena_empty",
]  # fmt: skip
EXACT_OPS = ["ht_route", "ht_dispatch_routed"]  # the second after the first
LOCAL_OPS = ["token_layout", "map_experts", "carrier", "carried", "size_at"]  # which speak to no other rank
SIGNALLED_OPS = ["ht_combine_signalled"]  # of layouts of experts' rows alone
ARRIVAL_OPS = ["announce_rows", "begin_arrivals"]  # which change memory past their schemas
BESIDE_OPS = ["run_beside", "await_beside"]  # which change streams
UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def as_fake(mode: FakeTensorMode, each: Any, static_shapes: bool = False) -> Any:
    """An argument with its tensors, also those of a list, replaced by fake ones."""
    if isinstance(each, list):
        return [as_fake(mode, item, static_shapes) for item in each]
    return mode.from_tensor(each, static_shapes=static_shapes) if isinstance(each, torch.Tensor) else each


def described(result: Any) -> list[tuple[Any, ...]]:
    """Of each tensor that an op returned, all but its contents."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return [(tuple(t.shape), t.dtype, t.stride(), t.device, t.storage_offset()) for t in tensors]


def faked(name: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same of what the op's fake returns."""
    with FakeTensorMode() as mode:
        return described(getattr(torch.ops.nccl_ep, name).default(*(as_fake(mode, each) for each in args)))


def number_at(handle: nccl_ep.Handle) -> int:
    """Where the tensor of a handle says of which dispatch it is."""
    if handle.mode == "ll":
        return handle.num_ranks
    sizes = handle.num_experts, handle.num_tokens, handle.max_tokens, handle.topk
    return _C.ht_route_parts(handle.num_ranks, int(handle.seq.shape[2]), *sizes)[0] + handle.num_local_experts + 1


def unnumbered(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """That of a handle, without the number that stands there."""
    return torch.cat([tensor[:at], tensor[at + 1 :]])


@contextlib.contextmanager
def apart_from_numbers(handle: nccl_ep.Handle) -> Iterator[None]:
    """opcheck runs an op several times, and compares. Here without the numbers in handles of that size."""
    size, at, assert_close = handle.tensor.shape, number_at(handle), torch.testing.assert_close

    def without(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or each.dtype != torch.int32 or each.shape != size:
            return each
        return unnumbered(each, at)

    def compare(actual: Any, expected: Any, **options: Any) -> None:
        assert_close(tree_map(without, actual), tree_map(without, expected), **options)

    with mock.patch.object(torch.testing, "assert_close", compare):
        yield


def check_compiled(layer: Callable[..., torch.Tensor], args: tuple[Any, ...], backend: str) -> None:
    """Compiled whole, it gives the same bits, call after call."""
    want = layer(*args)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(3):
        assert not reference.first_difference(compiled(*args), want)


def check_apart(name: str, args: tuple[Any, ...], reads: tuple[str, ...]) -> None:
    """Every tensor that the op writes, laid over the first bytes of each other one of the call, is refused, and runs
    right before them."""
    op = getattr(torch.ops.nccl_ep, name).default
    arguments = op._schema.arguments
    leaves = [(i, j) for i, arg in enumerate(args) for j in range(len(arg) if isinstance(arg, list) else 1)]

    def at(place: tuple[int, int]) -> Any:
        arg = args[place[0]]
        return arg[place[1]] if isinstance(arg, list) else arg

    def changed(place: tuple[int, int], tensor: torch.Tensor, given: tuple[Any, ...]) -> tuple[Any, ...]:
        i, j = place
        new = [*given[i][:j], tensor, *given[i][j + 1 :]] if isinstance(given[i], list) else tensor
        return *given[:i], new, *given[i + 1 :]

    there = [place for place in leaves[1:] if isinstance(at(place), torch.Tensor) and at(place).numel()]
    outs = [place for place in there if arguments[place[0]].alias_info is not None]
    others = [place for place in there if place in outs or arguments[place[0]].name in reads]
    for out, other in itertools.product(outs, others):
        if out == other:
            continue
        sizes = at(out).nbytes, at(other).nbytes
        for begin, overlaps in ((sizes[0] - 1) // 16 * 16, True), (-(-sizes[0] // 16) * 16, False):
            memory = torch.zeros(begin + sizes[0] + sizes[1], dtype=torch.uint8)
            mine = memory[: sizes[0]].view(at(out).dtype).view(at(out).shape)
            theirs = memory[begin:][: sizes[1]].view(at(other).dtype).view(at(other).shape)
            theirs.copy_(at(other))
            given = changed(other, theirs, changed(out, mine, args))
            if not overlaps:
                op(*given)
                continue
            with pytest.raises(ValueError, match=r"overlaps .*, which is (read|written) while it is written"):
                op(*given)
                raise AssertionError(f"{arguments[out[0]].name} over {arguments[other[0]].name} was taken")
