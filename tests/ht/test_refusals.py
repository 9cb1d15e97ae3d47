"""What high throughput refuses, with which words, and that a refused call leaves nothing behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import NO_BUFFER, of_no_buffer

EXPERTS, HIDDEN, MOST, LONGEST = 4, 64, 8, 65536
FLAT = Expected(plain_case(2, layout="flat"))
PACKED = Expected(plain_case(2, layout="packed"))


@dataclass
class Scene:
    """A rank with a good buffer, good arguments and good dispatches behind it."""

    buffer: nccl_ep.Buffer
    x: torch.Tensor
    ids: torch.Tensor
    flat: nccl_ep.DispatchOutput
    packed: nccl_ep.DispatchOutput

    def dispatch(self, x: torch.Tensor | None = None, **changes: Any) -> Any:
        how = {"buffer": self.buffer, "num_experts": EXPERTS, "mode": "ht", "layout": "flat", **changes}
        return nccl_ep.dispatch(self.x if x is None else x, self.ids, **how)

    def cached(self, x: torch.Tensor | None = None, handle: nccl_ep.Handle | None = None, **changes: Any) -> Any:
        return nccl_ep.dispatch_cached(self.x if x is None else x, handle or self.flat.handle, **changes)

    def handle(self, out: nccl_ep.DispatchOutput, **changes: Any) -> nccl_ep.Handle:
        return dataclasses.replace(out.handle, **changes)

    def garbled(self, out: nccl_ep.DispatchOutput, index: int, value: int) -> nccl_ep.Handle:
        tensor = out.handle.tensor.clone()
        tensor[index] = value
        return self.handle(out, tensor=tensor)


def _long(more: int = 1) -> torch.Tensor:
    """Rows of so many bytes too many."""
    return torch.zeros(MOST, LONGEST + more, dtype=torch.uint8)


Bad = tuple[str, Callable[[Scene], Any], type[Exception], str]

BAD: list[Bad] = [
    ("mode", lambda s: s.dispatch(mode="fast"), ValueError, "mode is 'fast', must be one of ll, ht, auto"),
    ("capacity", lambda s: s.dispatch(capacity="all"), ValueError, "capacity is 'all', must be a number, None or"),
    ("exact in LL", lambda s: s.dispatch(mode="ll", capacity="exact"), ValueError, 'capacity "exact" is for high'),
    ("exact expert_major", lambda s: s.dispatch(layout="expert_major", capacity="exact"), ValueError,
     'not for expert_major: mode is "ht", layout "expert_major"'),
    ("expert_major", lambda s: s.dispatch(layout="expert_major"), ValueError, "expert_major needs a capacity"),
    ("negative capacity", lambda s: s.dispatch(capacity=-2), ValueError, "capacity is -2, must not be negative"),
    ("a split call", lambda s: nccl_ep.dispatch_send(s.x, s.ids, buffer=s.buffer, num_experts=EXPERTS, mode="ht",
                                               layout="flat"), ValueError, "dispatch of high throughput is not split"),
    ("extra tokens", lambda s: s.dispatch(extra=[s.x[:7]]), ValueError, r"tensor 1 of the dispatch .* 7: must"),
    ("extra rank", lambda s: s.dispatch(extra=[s.x[0]]), ValueError, "tensor 1 of the dispatch has 1 dimensions"),
    ("extra width", lambda s: s.dispatch(extra=[s.x[:, :4].contiguous()]), ValueError,
     "rows of tensor 1 have 8 bytes: must be a multiple of 16"),
    ("extra strides", lambda s: s.dispatch(extra=[s.x[:, ::2]]), ValueError, "an extra tensor of shape .* not contig"),
    ("extra device", lambda s: s.dispatch(extra=[s.x.to("meta")]), ValueError, "extra 0 is on meta, the buffer on cpu"),
    ("extra kind", lambda s: s.dispatch(extra=["x"]), TypeError, "extra 0 is 'x', must be a tensor"),
    ("many extra", lambda s: s.dispatch(extra=[s.x] * 4), ValueError, "5 tensors, must be 1 to 4"),
    ("window", lambda s: s.dispatch(s.x.repeat(1, 20)), ValueError,
     "window is too small for high throughput of 8 tokens a rank, top-2 of 4 experts, rows of 2560 bytes"),
    ("window for extra", lambda s: s.dispatch(extra=[s.x] * 3), ValueError, "rows of 512 bytes"),
    ("tokens", lambda s: s.dispatch(max_tokens=7), ValueError, "8 tokens, but max_tokens is 7"),
    ("odd row", lambda s: s.dispatch(s.x[:, :4].contiguous()), ValueError, "a row of 8 bytes: must be a multiple"),
    ("long row", lambda s: s.dispatch(_long()), ValueError, f"a row of {LONGEST + 1} bytes: must .* at most {LONGEST}"),
    ("long extra", lambda s: s.dispatch(extra=[_long(16)]), ValueError,
     f"tensor 1 has rows of {LONGEST + 16} bytes, must be 1 to {LONGEST}"),
    ("quant dtype", lambda s: s.dispatch(s.x.float(), quant="fp8"), ValueError, "fp8 of fp32: only bf16 and fp16"),
    ("quant and scales", lambda s: s.dispatch(quant="fp8", scales=torch.ones(8, 1)), ValueError, "scales given"),
    ("scales", lambda s: s.dispatch(scales=torch.ones(7, 1)), ValueError, r"scales have shape \[7, 1\], must be \[8, "),
    ("num_sms", lambda s: s.dispatch(num_sms=-1), ValueError, "num_sms is -1"),
    ("out of other sizes", lambda s: s.dispatch(capacity=3, out=s.flat), ValueError,
     r"out\.x has shape \[16, 64\], must be \[3, 64\]"),
    ("out of exact sizes", lambda s: s.dispatch(capacity="exact", out=s.flat), ValueError, "of exact sizes cannot be"),
    ("out that is a copy", lambda s: s.dispatch(out=dataclasses.replace(s.flat)), nccl_ep.UsageError,
     "out is a copy of an output"),
    # handles
    ("cached tokens", lambda s: s.cached(s.x[:7]), ValueError, r"x has shape \[7, 64\], must be \[8, hidden\], as"),
    ("cached rank", lambda s: s.cached(s.x[0]), ValueError, r"must be \[8, hidden\]"),
    ("cached quant", lambda s: s.cached(quant="fp4"), ValueError, "quant is 'fp4'"),
    ("cached odd row", lambda s: s.cached(s.x[:, :4].contiguous()), ValueError, "a row of 8 bytes"),
    ("cached long row", lambda s: s.cached(_long(16)), ValueError, f"a row of {LONGEST + 16} bytes: .* most {LONGEST}"),
    ("cached num_sms", lambda s: s.cached(num_sms=-1), ValueError, "num_sms is -1, must not be negative"),
    ("cached device", lambda s: s.cached(s.x.to("meta")), ValueError, "x is on meta"),
    ("handle tokens", lambda s: s.cached(handle=s.handle(s.flat, num_tokens=3)), ValueError, "route has shape"),
    ("handle topk", lambda s: s.cached(handle=s.handle(s.packed, topk=7)), ValueError, "route has shape"),
    ("handle slots", lambda s: s.cached(handle=s.handle(s.flat, slots=s.packed.handle.slots)), ValueError,
     "handle's slots has shape"),
    ("handle slots dtype", lambda s: s.cached(handle=s.handle(s.flat, slots=s.x)), ValueError,
     "slots is torch.bfloat16"),
    ("handle counts", lambda s: s.cached(handle=s.garbled(s.flat, 0, 99)), ValueError,
     "was changed: number of rows 0 is 99, must be 0 to 8"),
    ("handle id", lambda s: s.cached(handle=s.garbled(s.flat, 8, 4)), ValueError, "expert id 0 is 4, must be -1 to 3"),
    ("handle row", lambda s: s.cached(handle=s.garbled(s.flat, 24, -3)), ValueError, "row 0 is -3, must be -2 to"),
    ("handle slot", lambda s: s.cached(handle=s.garbled(s.flat, 40, 16)), ValueError, "slot 0 is 16, must be -1 to 15"),
    ("handle place", lambda s: nccl_ep.combine(s.packed.x, s.handle(s.packed, slots=torch.full_like(
        s.packed.handle.slots, 999))), ValueError, "place 0 is 999, must be -2 to 31"),
    ("handle capacity", lambda s: nccl_ep.combine(s.flat.x[:3].contiguous(), s.handle(s.flat, capacity=4)), ValueError,
     r"rows has shape \[3, 64\], must be \[4, 64\]"),
    ("handle of no buffer", lambda s: s.cached(handle=of_no_buffer(s.flat.handle)), nccl_ep.UsageError,
     f"buffer, number {NO_BUFFER}, is gone"),
    # combine
    ("rows shape", lambda s: nccl_ep.combine(s.packed.x, s.flat.handle), ValueError, r"must be \[16, 64\]"),
    ("long rows", lambda s: nccl_ep.combine(torch.zeros(16, LONGEST // 2 + 1).bfloat16(), s.flat.handle), ValueError,
     f"a row of {LONGEST + 2} bytes: must be .* at most {LONGEST}"),
    ("rows dtype", lambda s: nccl_ep.combine(s.flat.x.double(), s.flat.handle), ValueError, "rows is torch.float64"),
    ("rows window", lambda s: nccl_ep.combine(s.flat.x.repeat(1, 20), s.flat.handle), ValueError, "window is too"),
    ("weights of flat", lambda s: nccl_ep.combine(s.flat.x, s.flat.handle, weights=torch.ones(8, 2)), ValueError,
     "rows of layout flat are already weighted"),
    ("bias of packed", lambda s: nccl_ep.combine(s.packed.x, s.packed.handle, bias=s.x), ValueError,
     "biases go with layout flat, not with packed"),
    ("bias kind", lambda s: nccl_ep.combine(s.flat.x, s.flat.handle, bias=5), TypeError, "bias is a int, must be"),
    ("bias shape", lambda s: nccl_ep.combine(s.flat.x, s.flat.handle, bias=s.x[:7]), ValueError, "bias has shape"),
    ("out shape", lambda s: nccl_ep.combine(s.flat.x, s.flat.handle, out=s.x[:7]), ValueError, r"out has shape \[7"),
    ("values shape", lambda s: nccl_ep.combine_weights(s.flat.weights[:3], s.flat.handle), ValueError,
     r"values has shape \[3, 2\], must be \[16, 2\]"),
]  # fmt: skip


def _buffer(group: Any, **options: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=MOST, hidden=HIDDEN, topk=2, num_experts=EXPERTS, mode="auto", wire_dtype=torch.float32,
        scale_bytes=128, device="cpu", timeout=60.0, **options,
    )  # fmt: skip


def _run(case: Expected, buffer: nccl_ep.Buffer) -> nccl_ep.DispatchOutput:
    given = case.inputs[buffer.rank]
    out = nccl_ep.dispatch(
        given.x, given.topk_idx, given.topk_weights, buffer=buffer, mode="ht", **case.case.dispatch_kwargs()
    )
    case.check_dispatch(out, buffer.rank)
    case.combine(buffer, out.handle)
    case.combine_weights(buffer, out.handle)
    return out


@pytest.mark.parametrize(("call", "error", "text"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_a_bad_call_is_refused_and_changes_nothing(
    call: Callable[[Scene], Any], error: type[Exception], text: str
) -> None:
    """One rank makes a bad call, which its peer never hears of; then both go on, with the same bits as ever."""

    def body(group: ThreadGroup) -> None:
        with _buffer(group) as buffer:
            flat, packed = _run(FLAT, buffer), _run(PACKED, buffer)
            if group.rank() == 0:
                before = buffer.stats(), buffer.wire_bytes()
                given = FLAT.inputs[0]
                with pytest.raises(error, match=text) as caught:
                    call(Scene(buffer, given.x, given.topk_idx, flat, packed))
                assert caught.type is error
                assert (buffer.stats(), buffer.wire_bytes()) == before
            FLAT.combine(buffer, flat.handle)
            _run(PACKED, buffer)
            _run(FLAT, buffer)
            buffer.check()

    run_ranks(2, body)


def test_a_buffer_without_room_says_so() -> None:
    case = Expected(plain_case(1, layout="flat"))
    shapes = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 2, "device": "cpu"}
    with nccl_ep.Buffer.for_shapes(**shapes) as buffer:
        for mode in ("ht", "auto"):
            with pytest.raises(ValueError, match='made without room for high throughput: make it with mode="ht" or'):
                given = case.inputs[0]
                nccl_ep.dispatch(
                    given.x, given.topk_idx, buffer=buffer, mode=mode, capacity="exact", layout="flat", num_experts=2
                )
        case.run(buffer)
    with nccl_ep.Buffer.for_shapes(**shapes, mode="ht") as buffer:
        with pytest.raises(ValueError, match='made without room for low latency: make it with mode="ll" or'):
            case.dispatch(buffer)
        _run(case, buffer)
    with pytest.raises(ValueError, match="mode is 'both', must be one of ll, ht, auto"):
        nccl_ep.Buffer.for_shapes(**shapes, mode="both")


def test_a_handle_that_points_past_a_peers_output_is_refused() -> None:
    """Rows lie at another rank: what cannot be checked at the door is checked before it is written."""
    case = Expected(plain_case(1, layout="flat", capacity=5, capacity_kind="ample"))
    with _buffer(None) as buffer:
        given = case.inputs[0]
        out = nccl_ep.dispatch(given.x, given.topk_idx, buffer=buffer, mode="ht", **case.case.dispatch_kwargs())
        tensor = out.handle.tensor
        rows = tensor[-2 * given.topk_idx.numel() : -given.topk_idx.numel()]
        rows[rows >= 0] = 5
        with pytest.raises(ValueError, match="or was changed: row 5 of rank 0, which has 5"):
            nccl_ep.dispatch_cached(given.x, out.handle)


def test_invalid_ids_are_reported() -> None:
    ids = torch.tensor([[0, 1], [4, -1], [-5, 2]])
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    with _buffer(None, on_invalid_ids="count") as buffer:
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, mode="ht", layout="flat")
        assert out.total.tolist() == [2]
        with pytest.raises(ValueError, match=r"2 expert ids out of range .* the first is 4 at token 1, k 0"):
            buffer.check()
        buffer.check()
