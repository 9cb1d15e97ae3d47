"""Tensors of one call that overlap, in C: refused where the call writes one of them, served where they only touch."""

from __future__ import annotations

import ctypes as c
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.c import c_api
from tests.c import test_ht_refusals as ht
from tests.c import test_refusals as ll
from tests.c.c_api import Library
from tests.c.case import refused, tensor

BAD = c_api.INVALID_ARGUMENT
# Keywords of Solo's methods, and what the errors call these tensors.
NAMES = {
    "x": "tokens", "ids": "topk_idx", "rows": "output tokens", "weights": "output topk_weights",
    "row_expert": "output row_expert", "info": "output info", "out_scales": "output scales",
}  # fmt: skip
COMBINE_NAMES = {
    "rows": "tokens", "y": "output tokens", "values": "values of topk_weights", "scalars": "output topk_weights",
}  # fmt: skip


def beside(first: torch.Tensor, second: torch.Tensor, *, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in one memory: the second over the last 16 bytes of the first, or right behind it."""
    begin = (first.nbytes - 1) // 16 * 16 if overlap else -(-first.nbytes // 16) * 16
    memory = torch.zeros(begin + first.nbytes + second.nbytes, dtype=torch.uint8)
    parts = [
        memory[at : at + each.nbytes].view(each.dtype).view(each.shape) for each, at in ((first, 0), (second, begin))
    ]
    parts[0].copy_(first)
    if not overlap:
        parts[1].copy_(second)
    return parts[0], parts[1]


def check(
    call: Callable[..., None], reads: dict[str, Any], writes: dict[str, Any], names: dict[str, str],
    after: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Calls with every output over, and behind, every other tensor. after: of a call that was served."""
    order = [*reads, *writes]
    given = {**reads, **writes}
    for out, other in itertools.product(writes, order):
        if out == other:
            continue
        for first, second in ((out, other), (other, out)):
            moved = beside(given[first], given[second], overlap=True)
            later, earlier = sorted((out, other), key=order.index, reverse=True)
            use = "read" if earlier in reads else "written"
            text = f"{names.get(later, later)} of .* overlaps {names.get(earlier, earlier)} of .*, which is {use} while"
            changed = {**given, first: moved[0], second: moved[1]}
            refused(BAD, text, lambda changed=changed: call(**changed))
        moved = beside(given[other], given[out], overlap=False)
        call(**{**given, other: moved[0], out: moved[1]})
        after()


@pytest.mark.parametrize("staged", [False, True], ids=["fused", "staged"])
def test_alias_check_of_low_latency_refuses_what_is_written_twice(library: Library, staged: bool) -> None:
    group = library.solo_group(max_token_bytes=256)
    solo = ll.Solo(library, group)

    def complete() -> None:
        if staged:
            library.Complete(solo.handle, None, None)

    reads = {"x": solo.x, "topk_weights": torch.ones(4, 2), "scales": torch.ones(4, 4), "ids": solo.ids}
    outputs = {"rows": solo.rows, "out_scales": torch.zeros(8, 4), "weights": solo.weights,
               "row_expert": solo.row_expert, "info": solo.info}  # fmt: skip

    def dispatch(**given: Any) -> None:
        solo.dispatch(send_only=staged, **given)

    def combine(**given: Any) -> None:
        solo.combine(send_only=staged, mode=c_api.WEIGHTS_HOME, **given)

    check(dispatch, reads, outputs, NAMES, complete)
    home = {"rows": solo.rows, "topk_weights": torch.ones(4, 2), "topk_idx": solo.ids}
    check(combine, home, {"y": solo.y}, COMBINE_NAMES, complete)
    solo.check_round()
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_alias_check_of_high_throughput_refuses_what_is_written_twice(library: Library) -> None:
    group = library.solo_group(algorithm=c_api.HIGH_THROUGHPUT, max_token_bytes=192)
    solo = ht.Solo(library, group)

    def dispatch(cached: bool = False, **given: Any) -> None:
        given["extra"], given["extra_rows"] = [given.pop("more")], [given.pop("more_rows")]
        library.UpdateHandle(solo.handle, tensor(given.pop("ids", solo.ids)))
        solo.dispatch(cached=cached, **given)

    names = {**NAMES, "more": r"extra\[0\]", "more_rows": r"output extra\[0\]"}
    reads = {"x": solo.x, "more": solo.more}
    rows, more = {"rows": solo.rows}, {"more_rows": solo.more_rows}
    routing = {"weights": solo.weights, "row_expert": solo.row_expert, "info": solo.info}
    check(dispatch, {**reads, "topk_weights": torch.ones(4, 2), "ids": solo.ids}, {**rows, **routing, **more}, names)
    check(lambda **given: dispatch(cached=True, **given), reads, {**rows, **more}, names)
    check(solo.combine, {"rows": solo.rows, "values": solo.weights}, {"y": solo.y, "scalars": solo.scalars},
          COMBINE_NAMES)  # fmt: skip

    def route(ids: torch.Tensor, info: torch.Tensor) -> None:
        library.UpdateHandle(solo.handle, tensor(ids))
        solo.route(info)

    check(route, {"ids": solo.ids}, {"info": solo.info}, {"ids": "topk_idx"})
    solo.check_round()
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


@pytest.mark.parametrize("algorithm", [c_api.LOW_LATENCY, c_api.HIGH_THROUGHPUT])
def test_alias_check_knows_the_handles_memory(library: Library, algorithm: int) -> None:
    """What a dispatch writes and a combine reads."""
    group, size = library.solo_group(algorithm=algorithm), c.c_size_t()
    config = c_api.HandleConfig(layout=c_api.LAYOUTS["packed"])
    library.HandleMemSize(group, config, size)
    memory = torch.zeros(size.value // 4, dtype=torch.int32)
    solo = ll.Solo(library, group)
    library.HandleDestroy(solo.handle)
    library.InitHandle(solo.handle, group, config, memory.data_ptr())
    text = f"of .* overlaps handle_mem of {size.value} bytes, which is {{}} while it is written"
    scalars, values = memory[-8:].view(torch.float32).view(4, 2), torch.zeros(8)
    refused(BAD, f"output info {text.format('written')}", lambda: solo.dispatch(info=memory[-9:]))
    inside = memory[:16].view(torch.int64).view(4, 2).fill_(-1)
    refused(BAD, f"handle_mem of {size.value} bytes overlaps topk_idx of 64 bytes", lambda: solo.dispatch(ids=inside))
    solo.dispatch()
    for out, pattern in (
        (scalars, f"out {text.format('read')}"),
        (values.view(4, 2), r"out of shape \[4, 2\] overlaps values of shape \[8\]"),
    ):
        refused(BAD, pattern, library.CombineWeights, solo.handle, tensor(values), tensor(out), None)
    solo.check_round()
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


@pytest.mark.parametrize("algorithm", [c_api.LOW_LATENCY, c_api.HIGH_THROUGHPUT])
def test_a_bias_may_be_the_output_itself(library: Library, algorithm: int) -> None:
    group = library.solo_group(algorithm=algorithm)
    solo = ll.Solo(library, group, layout="flat")
    flat = {"rows": torch.zeros(4, 16), "weights": torch.zeros(4, 2), "row_expert": None,
            "topk_idx": torch.zeros(4, 2, dtype=torch.int64), "info": torch.zeros(4, dtype=torch.int32)}  # fmt: skip
    solo.dispatch(**flat)
    y = torch.ones(4, 16)
    solo.combine(rows=flat["rows"], y=y, bias0=y)
    assert torch.equal(y, 1 + solo.x * (solo.ids >= 0).any(1, keepdim=True))
    first, second = beside(y, y, overlap=True)
    text = r"output tokens of shape \[4, 16\] overlaps bias\[0\] of shape \[4, 16\]"
    refused(BAD, text, lambda: solo.combine(rows=flat["rows"], y=first, bias0=second))
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)
