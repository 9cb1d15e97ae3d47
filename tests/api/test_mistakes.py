"""Mistakes of a first hour, and the first line of the error: the argument as the caller knows it, its value, and what
to do. (What else a call refuses, and that nothing is sent then, is in test_bad_input.py and its like.)"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import nccl_ep
from nccl_ep import choices, config, deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT
from tests.support.patience import PATIENCE, of_living_ranks

TOKENS, HIDDEN, TOPK, EXPERTS = 8, 64, 2, 4
SIZES: dict[str, Any] = {
    "max_tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS, "device": "cpu",
}  # fmt: skip
MADE_WITH = r"; the buffer was made with max_tokens=8, hidden=64, topk=2, num_experts=4, dtype=torch.bfloat16, "


def make(**changes: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(None, **{**SIZES, **changes})


def ended() -> nccl_ep.Buffer:
    buffer = make()
    buffer.destroy()
    return buffer


def rows_sent(scene: Scene) -> Any:
    sent = nccl_ep.dispatch_send(scene.x, scene.ids, buffer=scene.buffer, num_experts=EXPERTS)
    try:
        return sent.x  # type: ignore[attr-defined]
    finally:
        sent.receive()


class Scene(SimpleNamespace):
    """Buffers of one rank, of each API; tensors of a good call, and what it returned."""

    def dispatch(self, **changes: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "buffer": self.buffer}
        return nccl_ep.dispatch(**{**given, "num_experts": EXPERTS, **changes})

    def ht(self, **changes: Any) -> Any:
        return self.dispatch(**{"mode": "ht", "layout": "packed", **changes})

    def combine(self, **changes: Any) -> Any:
        return nccl_ep.combine(**{"rows": self.out.x, "handle": self.out.handle, **changes})

    def ll_dispatch(self, **changes: Any) -> Any:
        sizes = {"num_max_dispatch_tokens_per_rank": TOKENS, "num_experts": EXPERTS}
        return self.v1.low_latency_dispatch(**{"x": self.x, "topk_idx": self.ids, **sizes, **changes})

    def ll_combine(self, **changes: Any) -> Any:
        given = {"x": self.received, "topk_idx": self.ids, "topk_weights": self.weights, "handle": self.handle}
        return self.v1.low_latency_combine(**{**given, **changes})

    def elastic(self, **changes: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "num_experts": EXPERTS}
        return self.v2.dispatch(**{**given, **changes})

    def elastic_combine(self, **changes: Any) -> Any:
        return self.v2.combine(**{"x": self.of_v2[0], "handle": self.of_v2[3], **changes})

    def permute(self, **changes: Any) -> Any:
        given = {"hidden": self.x, "topk_idx": self.ids, "topk_weights": self.weights}
        return self.hybrid.dispatch_with_permute(**{**given, **changes})

    def unpermute(self, **changes: Any) -> Any:
        return self.hybrid.combine_with_unpermute(
            **{"hidden": self.of_hybrid[0], "handle": self.of_hybrid[4], **changes}
        )

    def many(self, times: int) -> dict[str, Any]:
        """So many times the tokens."""
        return {"x": self.x.repeat(times, 1), "topk_idx": self.ids.repeat(times, 1), "topk_weights": None}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    s = Scene(x=torch.ones(TOKENS, HIDDEN).bfloat16(), ids=torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS)
    s.weights = torch.ones(TOKENS, TOPK)
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 1, EXPERTS)
    with (
        make(mode="auto") as s.buffer,
        make() as s.ll_buffer,
        deep_ep.Buffer(None, 0, num_bytes, low_latency_mode=True, device="cpu") as s.v1,
        deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, device="cpu") as s.v2,
        deep_ep.HybridEPBuffer(None, HIDDEN, TOKENS, EXPERTS, device="cpu") as s.hybrid,
    ):
        s.out, s.fp8 = s.dispatch(), s.dispatch(quant="fp8")
        s.received, _, s.handle, *_ = s.ll_dispatch(use_fp8=False)
        s.of_v2, s.of_hybrid = s.elastic(), s.permute()
        yield s


Mistake = tuple[str, Callable[[Scene], Any], type[Exception], str]
FLOAT8 = r"combine adds up no e4m3 rows: they must be bf16, fp16 or fp32, as out\.dequantized\(\) makes them"
NO_ROOM = "the window is too small for "
HINT = r"; Buffer\.get_low_latency_rdma_size_hint says the num_rdma_bytes"

BUFFERS: list[Mistake] = [
    ("a device of another name", lambda s: make(device="gpu"), ValueError,
     "device is 'gpu', must be \"cuda\", \"cpu\" or a torch.device$"),
    ("a device that is a number", lambda s: make(device=1.5), ValueError, "device is 1.5, must be \"cuda\""),
    ("hidden in bytes of no row", lambda s: make(hidden=7), ValueError,
     "hidden is 7: rows of 7 x torch.bfloat16 have 14 bytes, must be a multiple of 16"),
    ("top-k 0", lambda s: make(topk=0), ValueError, "topk is 0, must be 1 to 32"),
    ("top-k 33", lambda s: make(topk=33), ValueError, "topk is 33, must be 1 to 32"),
    ("no experts", lambda s: make(num_experts=0), ValueError, "num_experts is 0, and 0 experts do not divide over 1"),
    ("many experts", lambda s: make(num_experts=10**7), ValueError,
     "num_experts is 10000000: 10000000 experts on a rank, at most 65534"),
    ("too many tokens for the memory", lambda s: make(max_tokens=10**9), nccl_ep.SystemError,
     r"no memory for a window of \d+ bytes; the buffer was made with max_tokens=1000000000, hidden=64"),
    ("a mode in full", lambda s: make(mode="low_latency"), ValueError, "mode is 'low_latency', must be one of ll, ht"),
    ("a dtype's name", lambda s: make(dtype="bf16"), TypeError, "dtype is 'bf16', must be a torch.dtype"),
    ("ids that are counted or not", lambda s: make(on_invalid_ids="drop"), ValueError,
     "on_invalid_ids is 'drop', must be \"count\" or \"raise\""),
    ("a rank as the group", lambda s: nccl_ep.Buffer.for_shapes(0, **SIZES), TypeError,
     "group is a int: must be a torch"),
    ("a world of no ranks", lambda s: nccl_ep.modes.choose_mode(8, 128, 2, 0, None), ValueError, "num_ranks is 0"),
    ("no buffer", lambda s: s.dispatch(buffer=None), TypeError, "buffer is None, must be a nccl_ep.Buffer"),
    ("an option of no buffer", lambda s: make(layout="packed"), TypeError,
     r"Buffer\.for_shapes\(\) got an unexpected keyword argument 'layout'$"),
    ("an operation as a method", lambda s: s.buffer.dispatch(s.x, s.ids), AttributeError,
     "'Buffer' object has no attribute 'dispatch': it is a function, nccl_ep.dispatch; DeepEP's methods are those of "),
    ("a method of DeepEP", lambda s: s.buffer.low_latency_dispatch(s.x, s.ids, TOKENS, EXPERTS), AttributeError,
     r"'Buffer' object has no attribute 'low_latency_dispatch'; DeepEP's methods are those of nccl_ep\.deep_ep"),
    ("an attribute of nobody", lambda s: s.buffer.world_size, AttributeError,
     "'Buffer' object has no attribute 'world_size'$"),
    ("a shape that is a number", lambda s: s.buffer.empty(TOKENS), TypeError,
     r"size is a int, must be a shape, as \(rows, hidden\)$"),
    ("a check after the end", lambda s: ended().check(), nccl_ep.UsageError, r"the buffer \S+ was destroyed$"),
    ("another API's buffer", lambda s: s.dispatch(buffer=s.v1), TypeError, "buffer is <.*: give its core"),
]  # fmt: skip

DISPATCHES: list[Mistake] = [
    ("experts of one rank", lambda s: s.dispatch(num_experts=2), ValueError,
     r"topk_idx\[1, 0\] is 2, must be 0 to 1, or -1 for no expert\. Does num_experts count the experts of all ranks\?"),
    ("more experts than the buffer's", lambda s: s.dispatch(num_experts=6), ValueError,
     "num_experts is 6, but the buffer was made for num_experts=4$"),
    ("more experts than the buffer's, HT", lambda s: s.ht(num_experts=6), ValueError,
     "num_experts is 6, but the buffer was made for num_experts=4$"),
    ("an id of no expert, HT", lambda s: s.ht(topk_idx=s.ids - 2), ValueError,
     r"topk_idx\[0, 0\] is -2, must be 0 to 3"),
    ("more tokens", lambda s: s.dispatch(**s.many(3)), ValueError, "24 tokens, but max_tokens is 8"),
    ("a larger max_tokens", lambda s: s.dispatch(max_tokens=1000), ValueError,
     NO_ROOM + "1000 tokens a rank, top-2, .*" + MADE_WITH),
    ("a larger top-k", lambda s: s.dispatch(topk_idx=s.ids.repeat(1, 4), topk_weights=None), ValueError,
     NO_ROOM + "8 tokens a rank, top-8, .*" + MADE_WITH),
    ("longer rows", lambda s: s.dispatch(x=s.x.repeat(1, 40)), ValueError,
     NO_ROOM + "8 tokens a rank, top-2, rows of 5120 bytes: .*" + MADE_WITH),
    ("a larger max_tokens, HT", lambda s: s.ht(max_tokens=1000), ValueError,
     NO_ROOM + "high throughput of 1000 tokens a rank, .*" + MADE_WITH),
    ("a larger top-k, HT", lambda s: s.ht(topk_idx=s.ids.repeat(1, 4), topk_weights=None), ValueError,
     NO_ROOM + "high throughput of 8 tokens a rank, top-8 .*" + MADE_WITH),
    ("a window without sizes", lambda s: nccl_ep.dispatch(
        s.x.repeat(1, 500), s.ids, buffer=nccl_ep.Buffer(device="cpu"), num_experts=EXPERTS, max_tokens=TOKENS
     ), ValueError, NO_ROOM + ".*; the buffer was made with no sizes: Buffer.for_shapes takes those"),
    ("HT in the default layout", lambda s: s.dispatch(mode="ht"), ValueError,
     'layout expert_major needs a capacity in high throughput: give capacity=, .*layout="packed"'),
    ("exact sizes in LL", lambda s: s.dispatch(layout="packed", capacity="exact"), ValueError,
     'capacity "exact" is for high throughput .*: mode is "ll", layout "packed"'),
    ("HT of a buffer of LL", lambda s: s.ht(buffer=s.ll_buffer), ValueError,
     'the buffer was made without room for high throughput: make it with mode="ht" or "auto"'),
    ("a typing error", lambda s: s.dispatch(layout="packd"), ValueError,
     "layout is 'packd', must be one of expert_major, packed, rank_major, flat"),
    ("a dtype as quant", lambda s: s.dispatch(quant=torch.float8_e4m3fn), ValueError,
     "quant is torch.float8_e4m3fn, must be one of None, fp8"),
    ("own scales and quant", lambda s: s.dispatch(quant="fp8", scales=torch.ones(TOKENS, 1)), ValueError,
     "scales given together with quant fp8, which makes its own: give one of the two"),
    ("own scales and quant, HT", lambda s: s.ht(quant="fp8", scales=torch.ones(TOKENS, 1)), ValueError,
     "scales given together with quant fp8, which makes its own: give one of the two"),
    ("weights and ids the wrong way round", lambda s: s.dispatch(topk_idx=s.weights, topk_weights=s.ids), ValueError,
     "topk_idx is torch.float32, must be torch.int64 or torch.int32"),
    ("rows and ids the wrong way round", lambda s: s.dispatch(x=s.ids, topk_idx=s.x), ValueError,
     "topk_idx is torch.bfloat16, must be torch.int64 or torch.int32"),
    ("rows and ids the wrong way round, split", lambda s: nccl_ep.dispatch_send(
        s.ids, s.x, buffer=s.buffer, num_experts=EXPERTS
     ), ValueError, "topk_idx is torch.bfloat16, must be torch.int64 or torch.int32"),
    ("a cached dispatch of other tokens", lambda s: nccl_ep.dispatch_cached(s.x[:4], s.ht().handle), ValueError,
     r"x has shape \[4, 64\], must be \[8, hidden\], as in the dispatch of the handle"),
    ("outputs of another layout", lambda s: s.ht(out=s.ht(layout="flat")), ValueError,
     r"out\.x has shape \[8, 64\], must be \[16, 64\]"),
    ("fields of DeepEP", lambda s: s.dispatch().recv_x, AttributeError,
     "'DispatchOutput' object has no attribute 'recv_x'; it has x, scales, topk_idx, weights, counts, "),
    ("rows of what is not received", lambda s: rows_sent(s), AttributeError,
     r"'Pending' object has no attribute 'x': receive\(\) returns the result"),
    ("ids of 16 bits", lambda s: s.dispatch(topk_idx=s.ids.short()), ValueError, "topk_idx is torch.int16, must be"),
    ("weights of a router in bf16", lambda s: s.dispatch(topk_weights=s.weights.bfloat16()), ValueError,
     "topk_weights is torch.bfloat16, must be torch.float32"),
    ("the router's logits", lambda s: s.dispatch(topk_weights=torch.ones(TOKENS, EXPERTS)), ValueError,
     r"topk_weights has shape \[8, 4\], must be \[8, 2\]"),
    ("rows of no dtype there is", lambda s: s.dispatch(x=s.x.to(torch.complex128)), ValueError,
     "rows of torch.complex128 are not supported"),
    ("rows of torch's quantisation", lambda s: s.dispatch(
        x=torch.quantize_per_tensor(s.x.float(), 1.0, 0, torch.qint8)
     ), ValueError, "x is torch.qint8, a quantized tensor of torch"),
    ("gradients of several outputs at once", lambda s: torch.autograd.functional.jacobian(
        lambda x: s.dispatch(x=x).x, s.x, vectorize=True
     ), nccl_ep.UsageError, r"nccl_ep::\w+ does not run under torch.vmap \(is_grads_batched, vectorize\)"),
    ("a batch", lambda s: s.dispatch(x=s.x[None]), ValueError, r"x has shape \[1, 8, 64\], must be \[tokens, hidden\]"),
]  # fmt: skip

COMBINES: list[Mistake] = [
    ("rows in FP8", lambda s: s.combine(rows=s.fp8.x), ValueError, FLOAT8),
    ("the output in place of its handle", lambda s: s.combine(handle=s.out), TypeError,
     "handle is a DispatchOutput, must be the handle of a dispatch's output"),
    ("rows in float64", lambda s: s.combine(rows=s.out.x.double()), ValueError,
     "rows is torch.float64, must be torch.bfloat16, torch.float16 or torch.float32"),
    ("rows in int32, HT", lambda s: nccl_ep.combine((out := s.ht()).x.int(), out.handle), ValueError,
     "rows is torch.int32, must be torch.bfloat16"),
    ("weights in bf16", lambda s: s.combine(weights=s.weights.bfloat16()), ValueError,
     "weights is torch.bfloat16, must be torch.float32"),
    ("wider rows", lambda s: s.combine(rows=s.out.x.float().repeat(1, 1, 2)), ValueError,
     NO_ROOM + "8 tokens a rank, top-2, rows of 512 bytes: .* bytes of partial sums, .*" + MADE_WITH),
    ("an output of another dtype", lambda s: s.combine(out=torch.empty(TOKENS, HIDDEN)), ValueError,
     "out is torch.float32, must be torch.bfloat16"),
    ("a tensor as the output's dtype", lambda s: s.combine(out_dtype=s.x), TypeError, "out_dtype is a Tensor, must be"),
    ("integers as the output's dtype", lambda s: s.combine(out_dtype=torch.int32), ValueError,
     "out_dtype is torch.int32, must be that of rows, or torch.float32"),
    ("integers as the output's dtype, split", lambda s: nccl_ep.combine_send(
        s.out.x, s.out.handle, out_dtype=torch.int32
     ), ValueError, "out_dtype is torch.int32, must be that of rows, or torch.float32"),
    ("ids without weights", lambda s: s.combine(topk_idx=s.ids), ValueError,
     r"topk_idx is given without weights \[tokens, top-k\]: at combine it goes with those"),
    ("weights of rows that have them", lambda s: nccl_ep.combine(
        (out := s.dispatch(layout="flat")).x, out.handle, weights=s.weights
     ), ValueError, "weights are given, but the rows of layout flat are already weighted by the caller: multiply"),
    ("signals in a tensor", lambda s: nccl_ep.combine_send(s.out.x, s.out.handle, rows_per_signal=s.x), TypeError,
     "rows_per_signal is a Tensor, must be an integer"),
    ("a scale that is a number", lambda s: s.fp8.dequantized(tensor_scale=1.0), TypeError,
     "tensor_scale is 1.0, must be a tensor"),
    ("a scale for each row", lambda s: s.fp8.dequantized(tensor_scale=s.weights), ValueError,
     r"tensor_scale has shape \[8, 2\], must have one element"),
    ("blocks of no rows", lambda s: nccl_ep.Arrivals.blocks_of("packed", 8, 1, 0), ValueError, "rows_per_block is 0"),
    ("blocks of another layout", lambda s: nccl_ep.Arrivals.blocks_of("flat", 8, 1, 4), ValueError,
     "layout is 'flat', must be \"expert_major\" or \"packed\""),
    ("more blocks than there are", lambda s: nccl_ep.Arrivals(s.buffer, blocks=4).await_blocks(blocks=5), ValueError,
     "blocks is 5, must be 0 to 4"),
    ("a wait of no number", lambda s: nccl_ep.Arrivals(s.buffer, blocks=4).await_blocks("1"), TypeError,
     "timeout is '1', must be a number of seconds"),
    ("a dimension of nothing", lambda s: nccl_ep.mark_tokens(s.x, dim=None), TypeError, "dim is None, must be an int"),
    ("no ranks", lambda s: run_ranks(0, lambda group: None), ValueError, "num_ranks is 0, must be 1 to 2048"),
    ("ranks without a function", lambda s: run_ranks(1, None), TypeError, "body is None, must be a function"),
    ("a dtype's name", lambda s: s.fp8.dequantized("bf16"), TypeError, "dtype is 'bf16', must be a torch.dtype"),
    ("rows that were not quantised", lambda s: s.out.dequantized(), ValueError,
     "x is torch.bfloat16: only rows that dispatch has quantised"),
]  # fmt: skip

DEEP_EP: list[Mistake] = [
    ("LL: an id of no expert", lambda s: s.ll_dispatch(topk_idx=s.ids + 1), ValueError,
     r"topk_idx\[1, 1\] is 4, must be"),
    ("LL: more tokens", lambda s: s.ll_dispatch(num_max_dispatch_tokens_per_rank=4), ValueError,
     "8 tokens, but num_max_dispatch_tokens_per_rank is 4"),
    ("LL: a larger max_tokens", lambda s: s.ll_dispatch(num_max_dispatch_tokens_per_rank=4000), ValueError,
     NO_ROOM + r"4000 tokens a rank, .*; the buffer was made with num_nvl_bytes=0, num_rdma_bytes=\d+, .*" + HINT),
    ("LL: cleaning for more", lambda s: s.v1.clean_low_latency_buffer(4000, HIDDEN, EXPERTS), ValueError,
     "the window of buffer.* is too small for 4000 tokens a rank, .*" + HINT),
    ("LL: experts", lambda s: s.ll_dispatch(num_experts=0), ValueError,
     "num_experts is 0, and 0 experts do not divide"),
    ("LL: more experts than the core's", lambda s: deep_ep.Buffer.of(s.ll_buffer).low_latency_dispatch(
        s.x, s.ids, TOKENS, 6
     ), ValueError, "num_experts is 6, but the buffer was made for num_experts=4$"),
    ("LL: ids", lambda s: s.ll_dispatch(topk_idx=s.ids.short()), ValueError,
     "topk_idx is torch.int16, must be torch.int64"),
    ("LL: counters", lambda s: s.ll_dispatch(cumulative_local_expert_recv_stats=torch.zeros(4)), ValueError,
     "cumulative_local_expert_recv_stats is torch.float32, must be torch.int32"),
    ("LL: rows of another dispatch", lambda s: s.ll_combine(x=s.received[:, 1:].contiguous()), ValueError,
     r"x has shape \[4, 7, 64\], must be \[4, 8, 64\]"),
    ("LL: weights", lambda s: s.ll_combine(topk_weights=s.weights.bfloat16()), ValueError,
     "topk_weights is torch.bfloat16, must be torch.float32"),
    ("LL: rows in float64", lambda s: s.ll_combine(x=s.received.double()), ValueError, "x is torch.float64, must be"),
    ("SMs", lambda s: deep_ep.Buffer.set_num_sms("20"), TypeError, "new_num_sms is '20', must be an integer"),
    ("a list of ranks", lambda s: deep_ep.Buffer.get_dispatch_config([0]), TypeError, "num_ranks is a list, must be"),
    ("LL: FP8", lambda s: s.ll_combine(x=s.received.to(torch.float8_e4m3fn)), ValueError, FLOAT8),
    ("LL: rows with their scales", lambda s: s.ll_combine(x=(s.received, s.received)), TypeError,
     "x is a tuple, must be a"),
    ("V2: no sizes", lambda s: deep_ep.ElasticBuffer(None, device="cpu"), ValueError,
     "num_bytes is None, num_max_tokens"),
    ("V2: more tokens", lambda s: s.elastic(**s.many(3)), ValueError, "24 tokens, but num_max_tokens_per_rank is 8"),
    ("V2: a larger max_tokens", lambda s: s.elastic(num_max_tokens_per_rank=1000), ValueError,
     NO_ROOM + ".*; the buffer was made with num_bytes=None, num_max_tokens_per_rank=8, hidden=64, num_topk=2"),
    ("V2: an id of no expert", lambda s: s.elastic(topk_idx=s.ids + 1), ValueError,
     r"topk_idx\[1, 1\] is 4, must be 0 to 3"),
    ("V2: seconds", lambda s: deep_ep.ElasticBuffer(None, 1 << 20, num_gpu_timeout_secs="1"), TypeError,
     "num_gpu_timeout_secs is '1', must be a number of seconds"),
    ("V2: no seconds", lambda s: deep_ep.ElasticBuffer(None, 1 << 20, num_gpu_timeout_secs=0), ValueError,
     "num_gpu_timeout_secs is 0 s, must be positive"),
    ("V2: tokens of no number", lambda s: s.elastic(num_max_tokens_per_rank=1.5), TypeError,
     "num_max_tokens_per_rank is 1.5, must be an integer"),
    ("V2: a number", lambda s: s.elastic_combine(x=torch.tensor(3.0)), ValueError, r"x has shape \[\], must be "),
    ("V2: biases of nothing", lambda s: s.elastic_combine(bias=[None]), TypeError, "bias 0 is None, must be a tensor"),
    ("V2: experts of a tensor", lambda s: s.v2.dispatch(s.x, handle=s.of_v2[3], num_experts=s.x), TypeError,
     "num_experts is a Tensor, must be an integer"),
    ("LL: the hint of no tokens", lambda s: deep_ep.Buffer.get_low_latency_rdma_size_hint(0, HIDDEN, 1, EXPERTS),
     ValueError, "num_max_dispatch_tokens_per_rank is 0, must be at least 1"),
    ("V2: rows of another dispatch", lambda s: s.elastic_combine(x=s.of_v2[0][1:]), ValueError,
     r"x has shape \[7, 64\], must be \[8, 64\]"),
    ("Hybrid: hidden", lambda s: deep_ep.HybridEPBuffer(None, 7, TOKENS, EXPERTS, device="cpu"), ValueError,
     "hidden_dim is 7: rows of 7"),
    ("Hybrid: padding", lambda s: s.permute(pad_multiple=-1), ValueError, "pad_multiple is -1, must be at least 1"),
    ("Hybrid: padding of no number", lambda s: s.permute(pad_multiple="x"), TypeError, "pad_multiple is 'x', must"),
    ("Hybrid: ids in a list", lambda s: s.permute(topk_idx=[[0]]), TypeError, "topk_idx is a list, must be a tensor"),
    ("Hybrid: weights", lambda s: s.permute(topk_weights=1.0), TypeError, "topk_weights is 1.0, must be a tensor"),
    ("Hybrid: scales", lambda s: s.permute(scaling_factor=2), TypeError, "scaling_factor is 2, must be a tensor"),
    ("Hybrid: rows in no whole number", lambda s: s.permute(handle=s.of_hybrid[4], num_permuted_tokens=16.5), TypeError,
     "num_permuted_tokens is 16.5, must be an integer"),
    ("Hybrid: rows beyond memory", lambda s: s.permute(handle=s.of_hybrid[4], num_permuted_tokens=1 << 40), ValueError,
     "num_permuted_tokens is 1099511627776, beyond 32 bits"),
    ("Hybrid: probs", lambda s: s.unpermute(probs=1.0), TypeError, "probs is 1.0, must be a tensor"),
    ("Hybrid: SMs", lambda s: deep_ep.HybridEPBuffer(None, HIDDEN, TOKENS, 4, num_sms_dispatch_api=s.x), TypeError,
     "num_sms_dispatch_api is a Tensor, must be an integer"),
    ("Hybrid: rows", lambda s: s.permute(hidden=s.x.t()), ValueError,
     "hidden of shape .* is not contiguous|topk_idx has"),
    ("Hybrid: rows of another dispatch", lambda s: s.unpermute(hidden=s.of_hybrid[0][1:]), ValueError,
     r"hidden has shape \[15, 64\], must be \[16, 64\]"),
]  # fmt: skip
MISTAKES = BUFFERS + DISPATCHES + COMBINES + DEEP_EP


@pytest.mark.parametrize(("call", "error", "line"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_the_first_line_names_the_argument(
    call: Callable[[Scene], Any], error: type[Exception], line: str, scene: Scene
) -> None:
    with pytest.raises(error) as caught:
        call(scene)
    assert caught.type is error
    assert re.match(line, str(caught.value).split("\n", 1)[0]), str(caught.value)


@pytest.mark.skipif(nccl_ep._C.has_cuda(), reason="of builds without CUDA")
@pytest.mark.parametrize("call", [nccl_ep.dispatch, nccl_ep.dispatch_send])
def test_a_tensor_of_a_gpu_is_told_that_this_build_has_no_cuda(call: Callable[..., Any], scene: Scene) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # which is on a GPU, for all that the call can see, where there is none
        x, ids = torch.empty(TOKENS, HIDDEN, device="cuda").bfloat16(), torch.zeros(TOKENS, TOPK, device="cuda")
    text = r"^x is on cuda:0, the buffer on cpu: this nccl_ep was built without CUDA \(.*\): build it where nvcc is, "
    with pytest.raises(ValueError, match=text):
        call(x, ids, buffer=scene.buffer, num_experts=EXPERTS)


# ---- Of several ranks


@pytest.mark.parametrize(
    ("group", "started", "text"),
    [
        (None, "2", r"group is None, and WORLD_SIZE is 2: call torch\.distributed\.init_process_group\(\) first"),
        (None, "1", None),
        (None, "", None),
        (None, "two", None),
        (nccl_ep.bootstrap.SoloRendezvous(), "2", None),
    ],
)
def test_ranks_that_were_started_together_have_a_group(
    group: Any, started: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun without a process group, each would be rank 0 of 1."""
    monkeypatch.setenv("WORLD_SIZE", started)
    makers: list[Callable[[], Any]] = [
        lambda: nccl_ep.Buffer(group, device="cpu"),
        lambda: nccl_ep.Buffer.for_shapes(group, **SIZES),
        lambda: deep_ep.Buffer(group, device="cpu"),
    ]
    for make_one in makers:
        if text is None:
            make_one().destroy()
            continue
        with pytest.raises(ValueError, match=text):
            make_one()


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_that_mpi_has_started_have_a_group(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher, "4")
    with pytest.raises(ValueError, match=rf"group is None, and {launcher} is 4: call torch\.distributed"):
        make()


def test_a_communicator_of_mpi_has_its_ranks() -> None:
    """``comm=`` of for_shapes, too: it would be a world of one."""
    group = ThreadGroup.make(2)[0]
    comm = SimpleNamespace(Get_rank=group.rank, Get_size=group.size, allgather=lambda mine: group.allgather(mine, 0.01))
    with pytest.raises(nccl_ep.TimeoutError, match="nothing was heard from rank 1"):
        make(comm=comm)


def test_handles_of_different_dispatches_are_told_to_all() -> None:
    def body(group: ThreadGroup) -> str:
        x = torch.ones(1, HIDDEN).bfloat16()
        with nccl_ep.Buffer.for_shapes(group, **SIZES, timeout=of_living_ranks(PATIENCE)) as buffer:

            def dispatch(owner: int) -> nccl_ep.DispatchOutput:
                ids = torch.tensor([[owner * EXPERTS // 2, -1]])
                return nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS)

            outs = dispatch(buffer.rank), dispatch(1 - buffer.rank)
            mine = outs[buffer.rank]
            with pytest.raises(nccl_ep.MismatchError) as caught:
                nccl_ep.combine(mine.x, mine.handle)
            return str(caught.value)

    text = (
        "ranks gave handles of different dispatches to combine 1: rank 0 that of dispatch 1, rank 1 that of dispatch 2"
    )
    first, second = run_ranks(2, body)
    assert text in first
    assert "rank 1 that of dispatch 2, rank 0 that of dispatch 1" in second


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_tensor_that_wants_a_gradient_on_one_rank_only_is_asked_for(mode: Any) -> None:
    def body(group: ThreadGroup) -> str:
        x = torch.ones(1, HIDDEN).bfloat16().requires_grad_(group.rank() == 0)
        factor = torch.ones(1, requires_grad=True)
        with nccl_ep.Buffer.for_shapes(group, **SIZES, mode=mode, timeout=of_living_ranks(PATIENCE)) as buffer:
            ids = torch.tensor([[0, 2]])
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="packed")
            loss = nccl_ep.combine((out.x * factor).bfloat16(), out.handle).sum()
            if group.rank() == 1:
                loss.backward()
                group.allgather(b"", of_living_ranks(PATIENCE))
                return ""
            buffer.set_timeout(1.0)
            with pytest.raises(nccl_ep.TimeoutError) as caught:
                loss.backward()
            group.allgather(b"", of_living_ranks(PATIENCE))
            return str(caught.value)

    text = "; this is a backward pass: does every rank call it, and do the same tensors want gradients on all ranks?"
    assert run_ranks(2, body)[0].endswith(text)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_second_thread_is_refused_and_disturbs_nothing(mode: Any) -> None:
    def body(group: ThreadGroup) -> None:
        x, ids = torch.full((1, HIDDEN), 1.0 + group.rank()).bfloat16(), torch.tensor([[0, 2]])
        with nccl_ep.Buffer.for_shapes(group, **SIZES, mode=mode, timeout=of_living_ranks(PATIENCE)) as buffer:

            def call() -> torch.Tensor:
                out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS, mode=mode, layout="flat")
                return nccl_ep.combine(out.x, out.handle)

            sums, refused = [], []

            def try_it() -> None:
                try:
                    sums.append(call())
                except nccl_ep.UsageError as error:
                    refused.append(str(error))

            if group.rank() == 0:
                threads = [threading.Thread(target=try_it) for _ in range(2)]
                for thread in threads:
                    thread.start()
                until = time.monotonic() + of_living_ranks(PATIENCE)
                while not refused and time.monotonic() < until:  # one waits for rank 1, which comes later
                    time.sleep(0.001)
                group.allgather(b"", of_living_ranks(PATIENCE))
                for thread in threads:
                    thread.join()
                assert refused == ["another thread is in an operation of this buffer: one thread at a time calls it"]
            else:
                group.allgather(b"", of_living_ranks(PATIENCE))
                try_it()
            assert len(sums) == 1 and torch.equal(sums[0], 2 * x)

    run_ranks(2, body)


# ---- Words that arguments are chosen from


def _refused(call: Callable[[], Any]) -> set[str]:
    """The words that the library says are right."""
    with pytest.raises(ValueError) as caught:
        call()
    return set(re.findall(r"\w+", str(caught.value).partition("must be ")[2])) - {"one", "of", "or", "None"}


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (choices.Mode, lambda s: s.dispatch(mode="?")),
        (choices.Mode, lambda s: make(mode="?")),
        (choices.LayoutName, lambda s: s.dispatch(layout="?")),
        (choices.QuantName, lambda s: s.dispatch(quant="?")),
        (choices.LlNetwork, lambda s: make(ll_network="?")),
        (choices.Window, lambda s: make(window="?")),
        (choices.OnOverflow, lambda s: make(on_overflow="?")),
        (choices.OnInvalidIds, lambda s: make(on_invalid_ids="?")),
    ],
)
def test_a_type_checker_knows_the_librarys_words(words: Any, call: Callable[[Scene], Any], scene: Scene) -> None:
    assert _refused(lambda: call(scene)) == set(typing.get_args(words))


def test_a_type_checker_knows_the_words_beside_other_types(scene: Scene) -> None:
    assert set(typing.get_args(choices.WireFormat)) == set(config.WIRE_FORMATS)
    for word in typing.get_args(choices.WireFormat):
        scene.combine(wire_dtype=word)
    assert typing.get_args(choices.Exact) == ("exact",) and scene.ht(capacity="exact").x.shape[0] == TOKENS * TOPK
    assert typing.get_args(choices.Weighting) == ("dispatch",)
    scene.combine(weights="dispatch")


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (nccl_ep.dispatch, "mode layout capacity quant"),
        (nccl_ep.dispatch_send, "mode layout capacity quant"),
        (nccl_ep.dispatch_cached, "quant"),
        (nccl_ep.combine, "weights wire_dtype"),
        (nccl_ep.combine_send, "weights wire_dtype"),
        (nccl_ep.Buffer.__init__, "on_overflow on_invalid_ids ll_network window"),
        (nccl_ep.Buffer.for_shapes, "mode"),
    ],
)
def test_signatures_have_the_words(function: Any, names: str) -> None:
    """A plain str takes any word."""
    hints = typing.get_type_hints(function)
    for name in names.split():
        kinds = {hints[name], *typing.get_args(hints[name])}
        assert str not in kinds and any(typing.get_origin(kind) is Literal for kind in kinds), name


@pytest.mark.slow
def test_mypy_refuses_another_word(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport nccl_ep\n"
        "def call(x: torch.Tensor, ids: torch.Tensor, buffer: nccl_ep.Buffer) -> None:\n"
        '    nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, layout="packed", capacity="exact", mode="ht")\n'
        '    nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4, layout="packd")\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    (line,) = (each for each in done.stdout.splitlines() if "error:" in each)
    assert "program.py:5: error:" in line and "Literal['packd']" in line, done.stdout


# ---- What is printed


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_printing_an_output_shows_no_rows(mode: str, scene: Scene) -> None:
    out = scene.dispatch(mode=mode, layout="packed", quant="fp8")
    text = repr(out)
    rows = TOKENS * TOPK
    assert text.startswith(f"DispatchOutput(x=float8_e4m3fn[{rows}, 64], scales=float32[{rows}, 1], weights=float32[")
    assert ", counts=[4, 4, 4, 4], overflow=[0], handle=Handle(" in text
    assert f"mode={mode!r}, layout='packed', num_tokens=8, topk=2, num_experts=4" in text
    assert "tensor(" not in text and len(text) < 400 and str(out) == text
    if mode == "ht":
        moved = nccl_ep.dispatch_cached(scene.x, out.handle)
        assert repr(moved) == f"Payload(x=bfloat16[{rows}, 64], scales=None, extra=())"


def test_printing_what_is_not_received_says_so(scene: Scene) -> None:
    sent = nccl_ep.dispatch_send(scene.x, scene.ids, buffer=scene.buffer, num_experts=EXPERTS)
    assert repr(sent) == "<nccl_ep.Pending: to be received>"
    sent.receive()
    assert repr(sent) == "<nccl_ep.Pending: this operation was received already>"


def test_printing_in_a_trace_has_no_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert nccl_ep.handle.tensor_told(torch.zeros(3, dtype=torch.int32), True) == "int32[3]"
