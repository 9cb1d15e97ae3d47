"""What is refused, with which words, and that a refused call leaves nothing behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import NO_BUFFER, make_buffer, of_no_buffer

EXPERTS, MOST = 4, 8  # plain_case of two ranks
GOOD = Expected(plain_case(2))
FLAT = Expected(plain_case(2, layout="flat", combine_weights="none"))


@dataclass
class Scene:
    """A rank with a good buffer, good arguments and a good dispatch behind it."""

    buffer: nccl_ep.Buffer
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: nccl_ep.DispatchOutput
    flat: nccl_ep.DispatchOutput

    def dispatch(self, *given: Any, **changes: Any) -> Any:
        args = given or (self.x, self.ids, self.weights)
        return nccl_ep.dispatch(*args, **{"buffer": self.buffer, "num_experts": EXPERTS, **changes})

    def send(self, *given: Any, **changes: Any) -> Any:
        args = given or (self.x, self.ids, self.weights)
        return nccl_ep.dispatch_send(*args, **{"buffer": self.buffer, "num_experts": EXPERTS, **changes})

    def combine(self, rows: torch.Tensor | None = None, **changes: Any) -> Any:
        handle = changes.pop("handle", self.out.handle)
        return nccl_ep.combine(self.out.x if rows is None else rows, handle, **changes)

    def combine_flat(self, **changes: Any) -> Any:
        return nccl_ep.combine(self.flat.x, self.flat.handle, **changes)

    def handle(self, **changes: Any) -> nccl_ep.Handle:
        return dataclasses.replace(self.out.handle, **changes)


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element past an aligned address."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    return room[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)


def _broken(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, whose elements begin at odd addresses."""
    room = bytearray(tensor.nbytes + 1)
    return torch.frombuffer(room, dtype=tensor.dtype, offset=1).view(tensor.shape).copy_(tensor)


def _dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Of one rank, without a process group."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
    return torch.stack([tensor, tensor], -1)[..., 0]


Bad = tuple[str, Callable[[Scene], Any], type[Exception], str]

DISPATCH: list[Bad] = [
    # devices and kinds of tensors
    ("x device", lambda s: s.dispatch(s.x.to("meta"), s.ids), ValueError, "x is on meta, the buffer on cpu"),
    ("ids device", lambda s: s.dispatch(s.x, s.ids.to("meta")), ValueError, "topk_idx is on meta, the buffer on cpu"),
    ("weights device", lambda s: s.dispatch(s.x, s.ids, s.weights.to("meta")), ValueError, "topk_weights is on meta"),
    ("scales device", lambda s: s.dispatch(s.x, s.ids, scales=torch.ones(8, 1, device="meta")), ValueError,
     "scales is on"),
    ("x sparse", lambda s: s.dispatch(s.x.to_sparse(), s.ids), ValueError, "x is torch.sparse_coo, must be strided"),
    ("x list", lambda s: s.dispatch([[1.0]], s.ids), TypeError, "x is a list, must be a tensor"),
    ("nested", lambda s: s.dispatch(torch.nested.nested_tensor([s.x]), s.ids), ValueError, "x is a nested tensor"),
    ("no experts", lambda s: s.dispatch(num_experts=None), TypeError, "num_experts is None, must be an integer"),
    ("no alignment", lambda s: s.dispatch(expert_alignment=None), TypeError, "expert_alignment is None"),
    ("no SMs", lambda s: s.dispatch(num_sms=None), TypeError, "num_sms is None, must be an integer"),
    ("DTensor", lambda s: s.dispatch(_dtensor(s.x), s.ids), TypeError, r"x is a DTensor, .* give x\.to_local\(\)"),
    ("DTensor", lambda s: s.combine(_dtensor(s.out.x)), TypeError, r"is a DTensor, .*\.to_local\(\)"),
    ("vmap", lambda s: torch.vmap(lambda x: s.dispatch(x, s.ids).x)(s.x[None]), nccl_ep.UsageError, "under torch.vmap"),
    ("vmap", lambda s: torch.vmap(s.combine)(s.out.x[None]), nccl_ep.UsageError, "ll_combine .* under torch.vmap"),
    ("grad", lambda s: torch.func.grad(lambda x: s.dispatch(x, s.ids).x.sum())(s.x), nccl_ep.UsageError, "torch.func"),
    # dtypes
    ("x dtype", lambda s: s.dispatch(s.x.to(torch.complex128), s.ids), ValueError,
     "torch.complex128 are not supported"),
    ("quant dtype", lambda s: s.dispatch(s.x.float(), s.ids, quant="fp8"), ValueError,
     "fp8 of fp32: only bf16 and fp16"),
    ("ids dtype", lambda s: s.dispatch(s.x, s.ids.float()), ValueError,
     "topk_idx is torch.float32, must be torch.int64 or torch.int32"),
    ("weights dtype", lambda s: s.dispatch(s.x, s.ids, s.weights.double()), ValueError,
     "is torch.float64, must be torch.float32"),
    # ranks and shapes
    ("x rank 1", lambda s: s.dispatch(s.x[0], s.ids), ValueError, r"x has shape \[64\], must be \[tokens, hidden\]"),
    ("x rank 0", lambda s: s.dispatch(s.x[0, 0], s.ids), ValueError, r"x has shape \[\], must be \[tokens, hidden\]"),
    ("x rank 3", lambda s: s.dispatch(s.x[None], s.ids), ValueError, r"x has shape \[1, 8, 64\], must be"),
    ("ids rank", lambda s: s.dispatch(s.x, s.ids[0]), ValueError,
     r"topk_idx has shape \[2\], must be \[tokens, top-k\]"),
    ("ids tokens", lambda s: s.dispatch(s.x, s.ids[:7]), ValueError,
     r"topk_idx has shape \[7, 2\], must be \[8, top-k\]"),
    ("weights shape", lambda s: s.dispatch(s.x, s.ids, s.weights[:, :1].contiguous()), ValueError,
     r"topk_weights has shape \[8, 1\], must be \[8, 2\]"),
    ("scales rank", lambda s: s.dispatch(s.x, s.ids, scales=torch.ones(8)), ValueError, r"scales have shape \[8\]"),
    ("scales tokens", lambda s: s.dispatch(s.x, s.ids, scales=torch.ones(7, 1)), ValueError,
     r"scales have shape \[7, 1\], must be \[8, "),
    ("scales none", lambda s: s.dispatch(s.x, s.ids, scales=torch.ones(8, 0)), ValueError,
     r"scales have shape \[8, 0\]"),
    # memory
    ("x contiguity", lambda s: s.dispatch(_strided(s.x), s.ids), ValueError,
     r"x of shape .* strides \[128, 2\] is not cont"),
    ("ids contiguity", lambda s: s.dispatch(s.x, _strided(s.ids)), ValueError, "topk_idx of shape .* not contiguous"),
    ("weights contiguity", lambda s: s.dispatch(s.x, s.ids, _strided(s.weights)), ValueError,
     "topk_weights of shape .* not contiguous"),
    ("weights alignment", lambda s: s.dispatch(s.x, s.ids, _broken(s.weights)), ValueError,
     "topk_weights at address 0x.* not aligned to its elements of 4 bytes"),
    ("ids alignment", lambda s: s.dispatch(s.x, _broken(s.ids)), ValueError,
     "topk_idx at address 0x.* not aligned to its elements of 8 bytes"),
    ("x alignment", lambda s: s.dispatch(_misaligned(s.x), s.ids), ValueError, "x at address 0x.* not aligned to 16"),
    # sizes
    ("too many tokens", lambda s: s.dispatch(s.x, s.ids, max_tokens=7), ValueError, "8 tokens, but max_tokens is 7"),
    ("no max_tokens", lambda s: s.dispatch(s.x, s.ids, max_tokens=0), ValueError,
     "max_tokens is 0, must be at least 1"),
    ("odd experts", lambda s: s.dispatch(num_experts=5), ValueError, "5 experts do not divide over 2 ranks"),
    ("nested", lambda s: s.dispatch(torch.nested.nested_tensor([s.x]), s.ids), ValueError, "x is a nested tensor"),
    ("no experts", lambda s: s.dispatch(num_experts=0), ValueError, "0 experts do not divide"),
    ("negative experts", lambda s: s.dispatch(num_experts=-4), ValueError, "-4 experts do not divide"),
    ("top-k 0", lambda s: s.dispatch(s.x, s.ids[:, :0].contiguous()), ValueError, "top-k is 0, must be 1 to 32"),
    ("top-k 33", lambda s: s.dispatch(s.x, s.ids[:, :1].repeat(1, 33)), ValueError, "top-k is 33, must be 1 to 32"),
    ("odd row", lambda s: s.dispatch(s.x[:, :4].contiguous(), s.ids), ValueError,
     "a row of 8 bytes: must be a multiple of 16"),
    ("odd quantised row", lambda s: s.dispatch(s.x[:, :8].contiguous(), s.ids, quant="fp8"), ValueError,
     "a row of 8 bytes"),
    ("empty row", lambda s: s.dispatch(s.x[:, :0].contiguous(), s.ids), ValueError, "a row of 0 bytes"),
    ("huge row", lambda s: s.dispatch(torch.zeros(8, 32776, dtype=torch.bfloat16), s.ids), ValueError,
     "a row of 65552 bytes: must be a multiple of 16 and at most 65536"),
    ("window rows", lambda s: s.dispatch(s.x.repeat(1, 20), s.ids), ValueError,
     r"window is too small for 8 tokens a rank, top-2, rows of 2560 bytes: a bank needs \d+ .* and 40960 .* rows.*"
     "; the buffer was made with max_tokens=8, hidden=64"),
    ("window routing", lambda s: s.dispatch(s.x, s.ids, max_tokens=10**6), ValueError,
     "a bank needs 64000000 bytes of routing"),
    ("window scales", lambda s: s.dispatch(s.x, s.ids, scales=torch.ones(8, 1000)), ValueError, "rows of 4176 bytes"),
    # choices
    ("mode", lambda s: s.dispatch(mode="fast"), ValueError, "mode is 'fast', must be one of ll, ht, auto"),
    ("no high throughput", lambda s: s.dispatch(mode="ht", layout="flat"), ValueError, "made without room for high"),
    ("layout", lambda s: s.dispatch(layout="round"), ValueError,
     "layout is 'round', must be one of expert_major, packed"),
    ("quant", lambda s: s.dispatch(quant="fp4"), ValueError, "quant is 'fp4', must be one of None, fp8, fp8_rounded"),
    ("quant and scales", lambda s: s.dispatch(quant="fp8", scales=torch.ones(8, 1)), ValueError,
     "scales given together with quant fp8, which makes its own"),
    ("capacity", lambda s: s.dispatch(capacity=-1), ValueError, "capacity is -1, must not be negative"),
    ("capacity of rank_major", lambda s: s.dispatch(layout="rank_major", capacity=3), ValueError,
     "capacity is 3, but layout"),
    ("huge capacity", lambda s: s.dispatch(capacity=2**31 - 1), ValueError, "would have 4294967294 rows"),
    ("alignment 0", lambda s: s.dispatch(layout="packed", expert_alignment=0), ValueError,
     "expert_alignment is 0, must be"),
    ("alignment -8", lambda s: s.dispatch(layout="packed", expert_alignment=-8), ValueError, "expert_alignment is -8"),
    ("alignment of flat", lambda s: s.dispatch(layout="flat", expert_alignment=8), ValueError,
     "expert_alignment is 8, but"),
    ("num_sms", lambda s: s.dispatch(num_sms=-1), ValueError, "num_sms is -1, must not be negative"),
    ("beyond 32 bits", lambda s: s.dispatch(num_experts=2**33), ValueError,
     "num_experts is 8589934592, beyond 32 bits"),
    # the send refuses the same
    ("send contiguity", lambda s: s.send(_strided(s.x), s.ids), ValueError, "not contiguous"),
    ("send window", lambda s: s.send(s.x.repeat(1, 20), s.ids), ValueError, "window is too small"),
    ("send tokens", lambda s: s.send(max_tokens=7), ValueError, "8 tokens, but max_tokens is 7"),
]  # fmt: skip

COMBINE: list[Bad] = [
    ("rows device", lambda s: s.combine(s.out.x.to("meta")), ValueError, "rows is on meta, the buffer on cpu"),
    ("rows dtype", lambda s: s.combine(s.out.x.to(torch.float64)), ValueError, "rows is torch.float64, must"),
    ("rows integers", lambda s: s.combine(s.out.x.to(torch.int16)), ValueError, "rows is torch.int16, must"),
    ("rows shape", lambda s: s.combine(s.out.x[:, :-1].contiguous()), ValueError,
     r"rows has shape \[2, 15, 64\], must be \[2, 16, 64\]"),
    ("rows of another layout", lambda s: s.combine(s.flat.x), ValueError,
     r"rows has shape \[16, 64\], must be \[2, 16, 64\]"),
    ("rows rank", lambda s: s.combine(s.out.x.flatten()), ValueError, "rows have 1 dimensions"),
    ("rows contiguity", lambda s: s.combine(_strided(s.out.x)), ValueError, "rows of shape .* not contiguous"),
    ("rows alignment", lambda s: s.combine(_misaligned(s.out.x)), ValueError, "rows at address 0x.* not aligned to 16"),
    ("odd rows", lambda s: s.combine(s.out.x[..., :4].contiguous()), ValueError, "a row of 8 bytes"),
    ("long out", lambda s: s.combine(s.out.x.repeat(1, 1, 512), out_dtype=torch.float32), ValueError,
     "an output row of 131072 bytes"),
    ("fp16 rows to bf16", lambda s: s.combine(s.out.x.half(), out_dtype=torch.bfloat16), ValueError,
     "combine adds up fp16 rows to bf16: the output must be of the rows' dtype, or fp32"),
    ("bf16 rows to fp16", lambda s: s.combine(out_dtype=torch.float16, wire_dtype=torch.float32), ValueError,
     "combine adds up bf16 rows to fp16: the output must be of the rows' dtype, or fp32"),
    ("fp32 rows to bf16", lambda s: s.combine(s.out.x.float(), out_dtype=torch.bfloat16), ValueError,
     "combine adds up fp32 rows to bf16: the output must be of the rows' dtype, or fp32"),
    ("fp32 rows to fp16", lambda s: s.combine(s.out.x.float(), out_dtype=torch.float16), ValueError,
     "combine adds up fp32 rows to fp16: the output must be of the rows' dtype, or fp32"),
    ("window", lambda s: s.combine(s.out.x.repeat(1, 1, 20)), ValueError,
     "window is too small .* rows of 2560 bytes: a bank .* of partial sums, .*; the buffer was made with max_tokens=8"),
    ("weights name", lambda s: s.combine(weights="mine"), ValueError, "weights is 'mine', must be \"dispatch\""),
    ("weights type", lambda s: s.combine(weights=1.0), TypeError, "weights is a float, must be"),
    ("weights device", lambda s: s.combine(weights=s.weights.to("meta")), ValueError, "weights is on meta"),
    ("weights dtype", lambda s: s.combine(weights=s.weights.half()), ValueError,
     "weights is torch.float16, must be torch.float32"),
    ("weights shape", lambda s: s.combine(weights=s.weights[:7]), ValueError,
     r"weights has shape \[7, 2\], must be \[8, 2\]"),
    ("weights of flat", lambda s: s.combine_flat(weights=s.weights), ValueError,
     "rows of layout flat are already weighted"),
    ("ids without weights", lambda s: s.combine(topk_idx=s.ids), ValueError, "topk_idx is given without weights"),
    ("ids dtype", lambda s: s.combine(weights=s.weights, topk_idx=s.ids.short()), ValueError,
     "topk_idx is torch.int16, must be torch.int32"),
    ("ids shape", lambda s: s.combine(weights=s.weights, topk_idx=s.ids[:1]), ValueError,
     r"topk_idx has shape \[1, 2\]"),
    ("bias of expert_major", lambda s: s.combine(bias=s.x), ValueError,
     "biases go with layout flat, not with expert_major"),
    ("three biases", lambda s: s.combine_flat(bias=(s.x, s.x, s.x)), ValueError, "3 biases, at most 2"),
    ("bias dtype", lambda s: s.combine_flat(bias=s.x.half()), ValueError,
     "bias is torch.float16, must be torch.bfloat16"),
    ("bias shape", lambda s: s.combine_flat(bias=s.x[:7]), ValueError, r"bias has shape \[7, 64\], must be \[8, 64\]"),
    ("bias device", lambda s: s.combine_flat(bias=(s.x, s.x.to("meta"))), ValueError, "bias 1 is on meta"),
    ("bias alignment", lambda s: s.combine_flat(bias=_misaligned(s.x)), ValueError, "bias at address .* not aligned"),
    ("out dtype", lambda s: s.combine(out_dtype=torch.int32), ValueError, "out_dtype is torch.int32, must be"),
    ("wire dtype", lambda s: s.combine(wire_dtype=torch.float16), ValueError,
     "wire_dtype is torch.float16, must be torch.bf"),
    ("out shape", lambda s: s.combine(out=torch.empty(7, 64, dtype=s.x.dtype)), ValueError,
     r"out has shape \[7, 64\], must be \[8, 64\]"),
    ("out type", lambda s: s.combine(out=torch.empty(8, 64)), ValueError,
     "out is torch.float32, must be torch.bfloat16"),
    ("out contiguity", lambda s: s.combine(out=_strided(s.x)), ValueError, "out of shape .* not contiguous"),
    ("out alignment", lambda s: s.combine(out=_misaligned(s.x)), ValueError, "out at address .* not aligned"),
    ("num_sms", lambda s: s.combine(num_sms=-2), ValueError, "num_sms is -2"),
    # handles
    ("handle of no buffer", lambda s: s.combine(handle=of_no_buffer(s.out.handle)), nccl_ep.UsageError,
     f"handle's buffer, number {NO_BUFFER}, is gone"),
    ("handle ranks", lambda s: s.combine(handle=s.handle(num_ranks=4)), nccl_ep.UsageError,
     "is of 4 ranks, its buffer .* of 2"),
    ("handle tokens", lambda s: s.combine(handle=s.handle(num_tokens=5)), ValueError,
     r"handle has shape \[84\], must be \[80\]"),
    ("handle more tokens", lambda s: s.combine(handle=s.handle(num_tokens=9)), ValueError,
     "handle has shape|9 tokens, but"),
    ("handle negative tokens", lambda s: s.combine(handle=s.handle(num_tokens=-1)), ValueError,
     "handle has shape|-1 tokens"),
    ("handle topk", lambda s: s.combine(handle=s.handle(topk=3)), ValueError, "handle has shape"),
    ("handle max_tokens", lambda s: s.combine(handle=s.handle(max_tokens=16)), ValueError, "handle has shape"),
    ("handle experts", lambda s: s.combine(handle=s.handle(num_experts=8)), ValueError,
     r"rows has shape .*, must be \[4, 16, 64\]"),
    ("handle odd experts", lambda s: s.combine(handle=s.handle(num_experts=3)), ValueError,
     "3 experts do not divide over 2"),
    ("handle capacity", lambda s: s.combine(handle=s.handle(capacity=7)), ValueError,
     "must be -2 to 13|rows has shape"),
    ("handle and rows of a smaller capacity",
     lambda s: s.combine(s.out.x[:, :1].contiguous(), handle=s.handle(capacity=1)),
     ValueError, r"handle is not of these sizes, or was changed: row \d+ is \d+, must be -2 to 1"),
    ("handle layout", lambda s: s.combine(handle=s.handle(layout=nccl_ep.Layout.FLAT)), ValueError, "handle has shape"),
    ("handle dtype", lambda s: s.combine(handle=s.handle(tensor=s.out.handle.tensor.long())), ValueError,
     "is torch.int64, must be torch.int32"),
    ("handle garbled",
     lambda s: s.combine(handle=s.handle(tensor=torch.full_like(s.out.handle.tensor, 99))), ValueError,
     "number of tokens 0 is 99, must be 0 to 8"),
    # scalars
    ("values shape", lambda s: nccl_ep.combine_weights(s.out.weights[:, :3], s.out.handle), ValueError,
     r"values has shape \[2, 3\], must be \[2, 16\]"),
    ("values of flat", lambda s: nccl_ep.combine_weights(s.flat.weights[:, 0], s.flat.handle), ValueError,
     r"values has shape \[16\], must be \[16, 2\]"),
    ("values dtype", lambda s: nccl_ep.combine_weights(s.out.weights.half(), s.out.handle), ValueError,
     "values is torch.float16"),
    ("values device", lambda s: nccl_ep.combine_weights(s.out.weights.to("meta"), s.out.handle), ValueError,
     "values is on meta"),
    ("values contiguity", lambda s: nccl_ep.combine_weights(_strided(s.out.weights), s.out.handle), ValueError,
     "not contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), [bad[1:] for bad in DISPATCH + COMBINE],
                         ids=[bad[0] for bad in DISPATCH] + ["combine: " + bad[0] for bad in COMBINE])  # fmt: skip
def test_a_bad_call_is_refused_and_changes_nothing(
    call: Callable[[Scene], Any], error: type[Exception], text: str
) -> None:
    """One rank makes a bad call, which its peer never hears of; then both go on, with the same bits as ever."""

    def body(group: ThreadGroup) -> None:
        with make_buffer(GOOD.case, group) as buffer:
            buffer.max_tokens = MOST
            out, flat = GOOD.dispatch(buffer), FLAT.dispatch(buffer)
            if group.rank() == 0:
                given = GOOD.inputs[0]
                assert given.topk_weights is not None
                before = buffer.stats(), buffer.wire_bytes()
                with pytest.raises(error, match=text) as caught:
                    call(Scene(buffer, given.x, given.topk_idx, given.topk_weights, out, flat))
                assert caught.type is error
                assert (buffer.stats(), buffer.wire_bytes()) == before
            GOOD.combine(buffer, out.handle)
            FLAT.combine(buffer, flat.handle)
            GOOD.run(buffer)
            GOOD.run(buffer, staged=True)
            buffer.check()

    run_ranks(2, body)


# ---- Served, but reported


def test_ids_out_of_range_are_reported_once() -> None:
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        given = case.case.rank_input(group.rank())
        with make_buffer(case.case, group) as buffer:
            case.dispatch(buffer)
            buffer.check()
            ids = given.topk_idx.clone()
            want = ids.clone()
            if group.rank() == 1:
                ids[3, 1], ids[5, 0], ids[6, 1] = 4, -7, 2**40
                want[3, 1] = want[5, 0] = want[6, 1] = -1
            runs = {}
            for name, chosen in (("wrong", ids), ("absent", want)):
                out = nccl_ep.dispatch(
                    given.x, chosen, given.topk_weights, buffer=buffer, zero_padding=True, **{
                        key: value for key, value in case.case.dispatch_kwargs().items() if key != "zero_padding"
                    }
                )  # fmt: skip
                runs[name] = [out.x, out.weights, out.counts, out.demand, nccl_ep.combine(out.x, out.handle)]
            for wrong, absent in zip(runs["wrong"], runs["absent"], strict=True):
                assert torch.equal(wrong, absent)
            if group.rank() == 1:
                with pytest.raises(
                    ValueError, match=r"3 expert ids out of range .* first is 4 at token 3, k 1; .* as -1"
                ):
                    buffer.check()
            buffer.check()
            case.run(buffer)

    run_ranks(2, body)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_forward_derivative_is_refused_not_lost(mode: str) -> None:
    """Levels of forward derivatives are the process's, not a thread's: one rank."""
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=4, hidden=64, topk=2, num_experts=4, dtype=torch.float32, mode="auto", device="cpu"
    ) as buffer:
        x, ids = torch.ones(3, 64), torch.zeros(3, 2, dtype=torch.int64)

        def dispatch(x: torch.Tensor) -> nccl_ep.DispatchOutput:
            return nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, mode=mode, layout="flat")

        out = dispatch(x)
        rows = out.x.clone()
        for call, given in ((dispatch, x), (lambda rows: nccl_ep.combine(rows, out.handle), rows)):
            with pytest.raises(nccl_ep.UsageError, match="no forward derivative"):
                torch.func.jvp(call, (given,), (given,))
            for is_enabled in (True, False):
                with torch.set_grad_enabled(is_enabled), forward_ad.dual_level():
                    dual = forward_ad.make_dual(given, given)
                    with pytest.raises(nccl_ep.UsageError, match="no forward derivative"):
                        call(dual)
