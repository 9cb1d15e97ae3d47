"""The calls that frameworks make of DeepEP, in their order and with their keywords, on CPU ranks, against torch.

Each function stands for the file that it names. The expert with the global id e gives x * (e + 1). Weights are powers
of two, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nccl_ep import deep_ep
from nccl_ep.deep_ep.hybrid import HybridEPBuffer, indices_to_map
from nccl_ep.testing import run_ranks
from tests.ll.row_producer import RowProducer

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 2, 4, 2, 256, 8
LOCAL = EXPERTS // RANKS
HALF = torch.bfloat16


@dataclass
class Rank:
    """What a framework has on a rank, and what it must get."""

    group: Any
    rank: int = field(init=False)
    x: torch.Tensor = field(init=False)
    ids: torch.Tensor = field(init=False)
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        draw = torch.Generator().manual_seed(self.rank)
        count = (MOST, 5)[self.rank]
        self.x = torch.randint(-2, 3, (count, HIDDEN), generator=draw).to(HALF)
        self.ids = torch.rand(count, EXPERTS, generator=draw).topk(TOPK)[1]
        self.ids[1, 1] = -1
        self.weights = torch.tensor([0.5, 0.25]).expand(count, TOPK).contiguous()

    def expected(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        factors = torch.where(self.ids >= 0, self.ids + 1, 0) * (self.weights if weights is None else weights)
        return (self.x.float() * factors.sum(1, keepdim=True)).to(HALF)

    def experts(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What a rank's experts make of flat rows: local ids [N, K], -1 for none."""
        factors = torch.where(ids >= 0, ids + self.rank * LOCAL + 1, 0) * torch.where(ids >= 0, weights, 0)
        return (rows.float() * factors.sum(1, keepdim=True)).to(HALF)

    def batched(self, rows: torch.Tensor) -> torch.Tensor:
        """Likewise of [L, C, H]."""
        ids = torch.arange(LOCAL).view(-1, 1, 1) + self.rank * LOCAL + 1
        return (rows.float() * ids).to(HALF)


def dequantized(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).to(HALF)


def bytes_of(group: Any) -> tuple[int, int]:
    nvl, rdma = 0, 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(group.size()),
        deep_ep.Buffer.get_combine_config(group.size()),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(HIDDEN * 2, group.size()), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(HIDDEN * 2, group.size()), rdma)
    return nvl, rdma


def vllm_high_throughput(own: Rank) -> None:
    """vllm: DeepEPHTAll2AllManager, prepare_finalize/deepep_ht.py."""
    buffer = deep_ep.Buffer(
        group=own.group, num_nvl_bytes=1 << 24, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
        explicitly_destroy=True, device="cpu",
    )  # fmt: skip
    deep_ep.Buffer.set_num_sms(20)
    for previous in (None, buffer.capture()):
        per_rank, per_rdma, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
            topk_idx=own.ids, num_experts=EXPERTS, previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        rows, ids, weights, counts, handle, event = buffer.dispatch(
            x=own.x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert, topk_idx=own.ids, topk_weights=own.weights,
            expert_alignment=1, config=deep_ep.Buffer.get_dispatch_config(2), previous_event=previous,
            async_finish=True, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert counts == [int((ids == expert).sum()) for expert in range(LOCAL)]
        combined, _, event = buffer.combine(
            x=own.experts(rows, ids, weights), handle=handle, topk_weights=None,
            config=deep_ep.Buffer.get_combine_config(2), previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        assert event.event is None and torch.equal(combined, own.expected())
    buffer.destroy()


def vllm_low_latency(own: Rank) -> None:
    """vllm: DeepEPLLAll2AllManager, prepare_finalize/deepep_ll.py."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=RANKS, num_experts=EXPERTS
    )
    buffer = deep_ep.Buffer(
        group=own.group, num_nvl_bytes=1 << 22, num_rdma_bytes=num_bytes, low_latency_mode=True,
        num_qps_per_rank=LOCAL, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True,
        enable_shrink=True, device="cpu",
    )  # fmt: skip
    for fp8 in (False, True):
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            own.x, own.ids, MOST, EXPERTS, use_fp8=fp8, round_scale=False, use_ue8m0=False, async_finish=False,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        rows = dequantized(*rows) if fp8 else rows
        output = torch.empty_like(own.x)
        for waits in (False, True):
            _, _, hook = buffer.low_latency_combine(
                own.batched(rows), own.ids, own.weights, handle, async_finish=False, zero_copy=False,
                return_recv_hook=waits, out=output,
            )  # fmt: skip
            assert (hook is not None) == waits
            if hook is not None:
                hook()
            torch.testing.assert_close(output, own.expected(), rtol=0.07 if fp8 else 0, atol=0.03 if fp8 else 0)
        assert counts.dtype == torch.int32 and counts.shape == (LOCAL,)
    mask = torch.zeros(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    assert mask.tolist() == [0, 0]
    buffer.destroy()


NVFP4_SCALE = 48.0  # with which x, of 0 to 2, loses nothing


def of_nvfp4(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[L, C, H / 2] and [32, 4, rm, 4, rk, L], as FlashInfer's masked GEMM reads them."""
    experts, capacity, _ = rows.shape
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).long()
    straight = scales.permute(5, 2, 1, 0, 4, 3).reshape(experts, -1, 4 * scales.shape[4])[:, :capacity, : HIDDEN // 16]
    factors = (straight.float() / NVFP4_SCALE).repeat_interleave(16, -1)
    return (torch.cat([numbers, -numbers])[codes] * factors).to(HALF)


def vllm_nvfp4(own: Rank) -> None:
    """vllm: prepare_finalize/deepep_ll.py with VLLM_DEEPEPLL_NVFP4_DISPATCH=1; a factor for each expert."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS)
    buffer = deep_ep.Buffer(own.group, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True, device="cpu")
    (rows, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        own.x, own.ids, MOST, EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, use_nvfp4=True,
        x_global_scale=torch.full((EXPERTS,), NVFP4_SCALE), async_finish=False, return_recv_hook=True,
    )  # fmt: skip
    hook()
    rows = rows.permute(2, 0, 1)
    assert rows.shape == (LOCAL, RANKS * MOST, HIDDEN // 2) and counts.shape == (LOCAL,)
    output = torch.empty_like(own.x)
    _, _, hook = buffer.low_latency_combine(
        own.batched(of_nvfp4(rows, scales)), own.ids, own.weights, handle, async_finish=False, zero_copy=False,
        return_recv_hook=True, out=output,
    )  # fmt: skip
    hook()
    assert torch.equal(output, own.expected())
    buffer.destroy()


def sglang_nvfp4(own: Rank) -> None:
    """sglang: token_dispatcher/deepep.py with SGLANG_MOE_NVFP4_DISPATCH=1; the factor is a parameter of the layer."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS)
    buffer = deep_ep.Buffer(own.group, 0, num_bytes, low_latency_mode=True, device="cpu")
    factor = torch.nn.Parameter(torch.tensor(NVFP4_SCALE), requires_grad=False)
    for uses_hook in (False, True):
        received, _, handle, event, hook = buffer.low_latency_dispatch(
            own.x, own.ids, MOST, EXPERTS, use_fp8=False, use_nvfp4=True, x_global_scale=factor,
            async_finish=not uses_hook, return_recv_hook=uses_hook,
        )  # fmt: skip
        hook() if uses_hook else event.current_stream_wait()
        rows, scales = received
        assert rows.view(torch.uint8).shape == (RANKS * MOST, HIDDEN // 2, LOCAL)
        combined, event, hook = buffer.low_latency_combine(
            x=own.batched(of_nvfp4(rows.permute(2, 0, 1), scales.view(torch.float8_e4m3fn))), topk_idx=own.ids,
            topk_weights=own.weights, handle=handle, async_finish=not uses_hook, return_recv_hook=uses_hook,
        )  # fmt: skip
        hook() if uses_hook else event.current_stream_wait()
        assert torch.equal(combined, own.expected())
    buffer.destroy()


def vllm_v2(own: Rank) -> None:
    """vllm: prepare_finalize/deepep_v2.py: prefill expanded with sizes, decoding flat without."""
    buffer = deep_ep.ElasticBuffer(
        own.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, use_fp8_dispatch=False,
        explicitly_destroy=True, device="cpu",
    )  # fmt: skip
    rows, none, weights, handle, event = buffer.dispatch(
        x=own.x, topk_idx=own.ids, topk_weights=own.weights, num_experts=EXPERTS, num_max_tokens_per_rank=None,
        do_expand=True, do_cpu_sync=True, async_with_compute_stream=False,
    )  # fmt: skip
    assert event.event is None and none is None and weights.ndim == 1
    counts = handle.num_recv_tokens_per_expert_list
    ids = torch.repeat_interleave(torch.arange(LOCAL), torch.tensor(counts), output_size=sum(counts)).unsqueeze(1)
    combined, _, event = buffer.combine(
        x=own.experts(rows, ids, weights.unsqueeze(1)), handle=handle, topk_weights=None,
        async_with_compute_stream=True, allocate_on_comm_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert torch.equal(combined, own.expected())

    rows, ids, weights, handle, event = buffer.dispatch(
        x=own.x, topk_idx=own.ids, topk_weights=own.weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST,
        do_expand=False, do_cpu_sync=False, async_with_compute_stream=False,
    )  # fmt: skip
    assert handle.num_recv_tokens_per_expert_list == [] and rows.shape[0] == RANKS * MOST
    is_real = torch.arange(len(rows)) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
    ids = torch.where(is_real.unsqueeze(1), ids, -1)
    y = torch.where(is_real.unsqueeze(1), own.experts(rows, ids, weights), 0)
    combined, _, event = buffer.combine(
        x=y, handle=handle, topk_weights=None, async_with_compute_stream=False, allocate_on_comm_stream=False
    )
    assert event.event is None and torch.equal(combined, own.expected())
    buffer.destroy()


def sglang(own: Rank) -> None:
    """sglang: token_dispatcher/deepep.py, both modes in turn on one buffer."""
    nvl, rdma = bytes_of(own.group)
    rdma = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS), rdma)
    buffer = deep_ep.Buffer(
        own.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=LOCAL, allow_mnnvl=True, device="cpu"
    )
    config = deep_ep.Config(num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256)
    assert buffer.low_latency_mode and buffer.group_size == RANKS and deep_ep.Buffer.num_sms == 20
    for turn in range(2):
        previous = deep_ep.Buffer.capture() if turn else None
        per_rank, per_rdma, per_expert, is_in_rank, previous = buffer.get_dispatch_layout(
            own.ids,
            EXPERTS,
            previous_event=previous,
            async_finish=turn > 0,
            allocate_on_comm_stream=previous is not None,
        )
        rows, ids, weights, counts, handle, event = buffer.dispatch(
            own.x, topk_idx=own.ids, topk_weights=own.weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert,
            previous_event=previous, async_finish=turn > 0, allocate_on_comm_stream=turn > 0, expert_alignment=128,
            config=config,
        )  # fmt: skip
        if turn:
            event.current_stream_wait()
        assert all(count % 128 == 0 for count in counts)
        combined, _, event = buffer.combine(
            own.experts(rows, ids, weights), handle, async_finish=turn > 0,
            previous_event=deep_ep.Buffer.capture() if turn else None, allocate_on_comm_stream=turn > 0, config=config,
        )  # fmt: skip
        assert torch.equal(combined, own.expected())

        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            own.x, own.ids, MOST, EXPERTS, use_fp8=False, async_finish=turn == 0, return_recv_hook=turn > 0,
            round_scale=False, use_ue8m0=False,
        )  # fmt: skip
        hook() if hook else event.current_stream_wait()
        combined, event, hook = buffer.low_latency_combine(
            x=own.batched(rows), topk_idx=own.ids, topk_weights=own.weights, handle=handle, async_finish=turn == 0,
            return_recv_hook=turn > 0, overlap=False, src_signals=None, src_signal_expect_value=0,
        )  # fmt: skip
        hook() if hook else event.current_stream_wait()
        assert torch.equal(combined, own.expected())


def sglang_single_batch_overlap(own: Rank) -> None:
    """sglang: batch_overlap/single_batch_overlap.py, token_dispatcher/deepep.py: the down GEMM writes the rows while
    combine's send waits for its signals; on Hopper one for each block of rows, on Blackwell one an expert."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS)
    buffer = deep_ep.Buffer(
        own.group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=LOCAL, allow_mnnvl=True, device="cpu"
    )
    for turn in range(4):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            own.x, own.ids, MOST, EXPERTS, use_fp8=False, async_finish=False, return_recv_hook=True
        )
        hook()
        local, capacity, _ = rows.shape
        overlap_args: dict[str, Any]
        if turn % 2 == 0:
            down = RowProducer(own.batched(rows), 6, threshold=56, spare=3, seed=turn)
            overlap_args = {
                "overlap": True, "packed_recv_count": counts, "comp_signal": down.signals, "block_m": 6,
                "threshold": 56, "num_sms": 3,
            }  # fmt: skip
        else:
            down = RowProducer(own.batched(rows), capacity, seed=turn)
            signals = down.signals.view(local).view(torch.uint32)
            overlap_args = {"overlap": True, "src_signals": signals, "src_signal_expect_value": 1}
        with down:
            down.begin()
            combined, event, hook = buffer.low_latency_combine(
                x=down.rows, topk_idx=own.ids, topk_weights=own.weights, handle=handle, async_finish=False,
                return_recv_hook=True, **overlap_args,
            )  # fmt: skip
        hook()
        assert event.event is None and torch.equal(combined, own.expected())


def sglang_v2(own: Rank) -> None:
    """sglang: token_dispatcher/deepep_v2.py: decoding expanded without sizes, extending flat with them."""
    buffer = deep_ep.ElasticBuffer(
        own.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, use_fp8_dispatch=True,
        allow_hybrid_mode=False, sl_idx=0, prefer_overlap_with_compute=False, device="cpu",
    )  # fmt: skip
    assert buffer.num_bytes > 0
    num_sms = buffer.get_theoretical_num_sms(EXPERTS, TOPK)
    for expands in (True, False):
        x = (own.x.to(torch.float8_e4m3fn), torch.ones(len(own.x), HIDDEN // 128))
        (rows, scales), ids, weights, handle, event = buffer.dispatch(
            x, topk_idx=own.ids, topk_weights=own.weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST,
            expert_alignment=128, num_sms=num_sms, num_qps=buffer.get_theoretical_num_qps(num_sms),
            use_tma_aligned_col_major_sf=True, do_cpu_sync=not expands, do_expand=expands,
        )  # fmt: skip
        assert event.event is None and scales.stride(0) == 1
        if expands:
            ends = handle.psum_num_recv_tokens_per_expert
            ids = torch.full((len(rows), 1), -1)
            start = 0
            for expert, end in enumerate(ends.tolist()):
                ids[start:end] = expert
                start = -(-end // 128) * 128
            weights = weights.unsqueeze(1)
        else:
            count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
            assert count == len(rows) and sum(handle.num_recv_tokens_per_expert_list) % 128 == 0
        combined, _, event = buffer.combine(
            own.experts(dequantized(rows, scales.contiguous()), ids, weights), handle=handle, topk_weights=None,
            num_sms=num_sms, num_qps=buffer.get_theoretical_num_qps(num_sms),
        )  # fmt: skip
        assert event.event is None and torch.equal(combined, own.expected())


def lmdeploy(own: Rank) -> None:
    """lmdeploy: backends/cuda/token_dispatcher.py, one buffer for both modes."""
    nvl, rdma = bytes_of(own.group)
    rdma = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, RANKS, EXPERTS), rdma)
    buffer = deep_ep.Buffer(
        own.group, num_nvl_bytes=nvl, num_rdma_bytes=rdma, low_latency_mode=True, num_qps_per_rank=LOCAL, device="cpu"
    )
    assert isinstance(buffer, deep_ep.Buffer) and buffer.num_nvl_bytes == nvl and buffer.num_rdma_bytes == rdma
    buffer.set_num_sms(20)
    per_rank, per_rdma, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
        own.ids, EXPERTS, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    )
    rows, ids, weights, counts, handle, event = buffer.dispatch(
        own.x, topk_idx=own.ids, topk_weights=own.weights.to(torch.float32), num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert,
        previous_event=event, async_finish=False, allocate_on_comm_stream=False,
    )  # fmt: skip
    combined, _, _ = buffer.combine(
        own.experts(rows, ids, weights), handle, async_finish=False, previous_event=None, allocate_on_comm_stream=False
    )
    assert torch.equal(combined, own.expected()) and len(counts) == LOCAL
    (rows, scales), _, handle, event, hook = buffer.low_latency_dispatch(
        own.x, own.ids, MOST, EXPERTS, use_fp8=True, async_finish=True, return_recv_hook=False
    )
    assert hook is None
    event.current_stream_wait()
    combined, event, hook = buffer.low_latency_combine(
        own.batched(dequantized(rows, scales)), own.ids, own.weights, handle, async_finish=True, return_recv_hook=False
    )
    event.current_stream_wait()
    torch.testing.assert_close(combined, own.expected(), rtol=0.07, atol=0.03)


def xtuner(own: Rank) -> None:
    """xtuner: v1/ops/comm/deepep_op.py: functions of its own, which save the handle's tensors."""
    deep_ep.Buffer.set_num_sms(24)
    buffer = deep_ep.Buffer(own.group, *bytes_of(own.group), device="cpu")

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
            previous = deep_ep.EventOverlap(deep_ep.EventHandle())
            *counts, is_in_rank, event = buffer.get_dispatch_layout(
                own.ids, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
            )
            per_rank, per_rdma, per_expert = counts
            rows, ids, row_weights, per_expert_list, handle, event = buffer.dispatch(
                x, topk_idx=own.ids, topk_weights=weights, num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert,
                previous_event=event, async_finish=True, allocate_on_comm_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            ctx.save_for_backward(*handle)
            return rows, ids, row_weights, per_expert_list, handle

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, _: Any, grad_weights: torch.Tensor, *__: Any) -> Any:
            grad_x, grad_topk, event = buffer.combine(
                grad, ctx.saved_tensors, topk_weights=grad_weights, async_finish=True,
                previous_event=deep_ep.EventOverlap(deep_ep.EventHandle()), allocate_on_comm_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            return grad_x, grad_topk

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, handle: Any) -> torch.Tensor:
            ctx.save_for_backward(*handle)
            previous = deep_ep.EventOverlap(deep_ep.EventHandle())
            combined, _, event = buffer.combine(
                rows, handle, async_finish=True, previous_event=previous, allocate_on_comm_stream=True
            )
            event.current_stream_wait()
            return combined

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            rows, _, _, _, _, event = buffer.dispatch(
                grad, handle=ctx.saved_tensors, async_finish=True,
                previous_event=deep_ep.EventOverlap(deep_ep.EventHandle()), allocate_on_comm_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            return rows, None

    train(own, lambda x, weights: Dispatch.apply(x, weights), lambda rows, handle: Combine.apply(rows, handle))
    deep_ep.Buffer.set_num_sms(20)


def torchtitan_v2(own: Rank) -> None:
    """torchtitan: distributed/deepep/deepep.py since June 2026, training."""
    sizes = (own.group, MOST, HIDDEN)
    needed = deep_ep.ElasticBuffer.get_buffer_size_hint(*sizes, num_topk=TOPK, use_fp8_dispatch=False)
    buffer = deep_ep.ElasticBuffer(
        own.group, num_bytes=needed, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK,
        use_fp8_dispatch=False, deterministic=True, explicitly_destroy=True, device="cpu",
    )  # fmt: skip
    assert buffer.num_bytes >= needed and buffer.num_max_tokens_per_rank >= MOST

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
            rows, ids, row_weights, handle, _ = buffer.dispatch(
                x, topk_idx=own.ids, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST,
                num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOPK), do_expand=False, do_cpu_sync=True,
            )  # fmt: skip
            ctx.handle = handle
            return rows, ids, row_weights, handle.num_recv_tokens_per_expert_list, handle

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, _: Any, grad_weights: torch.Tensor, *__: Any) -> Any:
            grad_x, grad_topk, _ = buffer.combine(grad, handle=ctx.handle, topk_weights=grad_weights.float())
            return grad_x, grad_topk

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, handle: Any) -> torch.Tensor:
            ctx.handle = handle
            combined, _, event = buffer.combine(rows, handle=handle, topk_weights=None, async_with_compute_stream=True)
            event.current_stream_wait()
            return combined

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            rows, *_ = buffer.dispatch(grad, handle=ctx.handle, num_sms=ctx.handle.num_sms, do_cpu_sync=False)
            return rows, None

    train(own, lambda x, weights: Dispatch.apply(x, weights), lambda rows, handle: Combine.apply(rows, handle))
    with torch.no_grad():  # a generator: expanded, and no sizes
        rows, _, weights, handle, _ = buffer.dispatch(
            own.x, topk_idx=own.ids, topk_weights=own.weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST,
            do_expand=True, do_cpu_sync=False,
        )  # fmt: skip
        ends = handle.psum_num_recv_tokens_per_expert
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        ids = torch.full((len(rows), 1), -1)
        ids[: int(ends[-1])] = torch.repeat_interleave(torch.arange(LOCAL), counts).unsqueeze(1)
        y = own.experts(rows, ids, weights.reshape(len(rows), -1).sum(-1, keepdim=True))
        assert torch.equal(buffer.combine(y, handle=handle)[0], own.expected())
    buffer.destroy()


def torchtitan_hybrid(own: Rank) -> None:
    """torchtitan: distributed/deepep/hybridep.py: its four ops, with and without a wait of the host."""
    buffer = HybridEPBuffer(
        group=own.group, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=MOST, num_local_experts=LOCAL, use_fp8=False,
        num_sms_dispatch_api=16, num_sms_combine_api=16, load_cached_kernels=True, use_shared_buffer=True,
        enable_custom_allgather=True, device="cpu",
    )  # fmt: skip
    config = buffer.configurer.buffer_config
    assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (
        HIDDEN, MOST, LOCAL,
    )  # fmt: skip
    ids = own.ids.clamp(min=0)  # it has no -1
    routing_map, probs = indices_to_map(ids, own.weights.float(), len(own.x), EXPERTS)
    assert probs is not None
    for non_blocking in (False, True):
        most = MOST * RANKS * min(LOCAL, TOPK) if non_blocking else None
        rows, scores, _, tokens, handle = buffer.dispatch_with_permute(
            hidden=own.x, routing_map=routing_map, probs=probs, scaling_factor=None, num_of_experts_per_rank=LOCAL,
            pad_multiple=8, num_permuted_tokens=most, non_blocking=non_blocking,
        )  # fmt: skip
        assert scores is not None and rows.shape[0] == (most or int(tokens.sum()))
        experts = torch.full((len(rows), 1), -1)
        experts[: int(tokens.sum())] = torch.repeat_interleave(torch.arange(LOCAL), tokens).unsqueeze(1)
        combined, none = buffer.combine_with_unpermute(
            hidden=own.experts(rows, experts, scores.unsqueeze(1)), handle=handle
        )
        factors = (probs * routing_map * torch.arange(1, EXPERTS + 1)).sum(1, keepdim=True)
        assert none is None and torch.equal(combined, (own.x.float() * factors).to(HALF))
        grad, *_ = buffer.dispatch_with_permute(  # the backward passes
            hidden=combined, scaling_factor=None, handle=handle, num_permuted_tokens=rows.shape[0], pad_multiple=8
        )
        back, dense = buffer.combine_with_unpermute(hidden=grad, probs=scores, handle=handle)
        assert torch.equal(dense, probs) and back.shape == own.x.shape
        assert torch.equal(back, combined * routing_map.sum(1, keepdim=True))
    buffer.destroy()


def expanded_training(own: Rank) -> None:
    """DeepEP V2.5's README: expanded rows forward and backward, events of its own, epilogues deferred."""
    buffer = deep_ep.EPBuffer(own.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, device="cpu")
    num_sms = buffer.get_theoretical_num_sms(EXPERTS, TOPK)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
            event = buffer.dispatch(
                x, topk_idx=own.ids, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST,
                expert_alignment=8, num_sms=num_sms, previous_event=buffer.capture(), async_with_compute_stream=True,
                allocate_on_comm_stream=True, do_cpu_sync=True, do_expand=True, do_zero_padding=True,
                use_tma_aligned_col_major_sf=True, defer_epilogue=True,
            )  # fmt: skip
            rows, _, row_weights, handle = event.current_stream_wait()
            ctx.handle = handle
            counts = handle.num_recv_tokens_per_expert_list
            ids = torch.repeat_interleave(torch.arange(LOCAL), torch.tensor(counts)).unsqueeze(1)
            ctx.mark_non_differentiable(ids)
            return rows, ids, row_weights.unsqueeze(1), counts, handle

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, _: Any, grad_weights: torch.Tensor, *__: Any) -> Any:
            grad_x, grad_topk, event = buffer.combine(
                grad, handle=ctx.handle, topk_weights=grad_weights.squeeze(1), num_sms=num_sms,
                async_with_compute_stream=True,
            )  # fmt: skip
            event.current_stream_wait()
            return grad_x, grad_topk

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, handle: Any) -> torch.Tensor:
            ctx.handle = handle
            event = buffer.combine(
                rows, handle=handle, num_sms=num_sms, async_with_compute_stream=True, defer_epilogue=True
            )
            return event.current_stream_wait()[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            rows, _, _, _, event = buffer.dispatch(
                grad, handle=ctx.handle, num_sms=num_sms, async_with_compute_stream=True, do_expand=True,
                do_zero_padding=True, use_tma_aligned_col_major_sf=True,
            )  # fmt: skip
            event.current_stream_wait()
            return rows, None

    train(
        own, lambda x, weights: Dispatch.apply(x, weights), lambda rows, handle: Combine.apply(rows, handle),
        alignment=8,
    )  # fmt: skip
    buffer.destroy()


def train(own: Rank, dispatch: Callable[..., Any], combine: Callable[..., Any], alignment: int = 1) -> None:
    """A layer's forward and backward pass; gradients of x and of the weights against the formula."""
    x, weights = own.x.clone().requires_grad_(), own.weights.clone().requires_grad_()
    rows, ids, row_weights, counts, handle = dispatch(x, weights)
    assert alignment > 1 or counts == [int((ids == expert).sum()) for expert in range(LOCAL)]
    factors = torch.where(ids >= 0, ids + own.rank * LOCAL + 1, 0)
    y = (rows.float() * (factors * row_weights).sum(1, keepdim=True)).to(HALF)
    combined = combine(y, handle)
    assert torch.equal(combined.detach(), own.expected())
    (combined * torch.ones_like(combined)).sum().backward()  # gradients are contiguous, as those of a layer are
    applied = torch.where(own.ids >= 0, own.ids + 1, 0)
    assert torch.equal(x.grad, (applied * own.weights).sum(1, keepdim=True).expand_as(x).to(HALF))
    assert torch.equal(weights.grad, applied * own.x.float().sum(1, keepdim=True))


CALLERS = (
    vllm_high_throughput, vllm_low_latency, vllm_nvfp4, vllm_v2, sglang, sglang_nvfp4, sglang_single_batch_overlap,
    sglang_v2, lmdeploy, xtuner, torchtitan_v2, torchtitan_hybrid, expanded_training,
)  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
def test_a_caller_of_deepep_gets_right_results(caller: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_HINT_TOKENS", "64")
    run_ranks(RANKS, lambda group: caller(Rank(group)))
