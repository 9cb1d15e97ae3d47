"""What a rank does in the tests of DeepEP's low-latency methods, on CPU ranks and on GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import deep_ep, reference
from nccl_ep.bootstrap import rendezvous_of
from tests.support.cases import Case, generate
from tests.support.contents import as_bytes
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.gpus import on_gpu

QUANTS: dict[str | None, dict[str, bool]] = {
    None: {"use_fp8": False},
    "fp8": {"use_fp8": True},
    "fp8_rounded": {"use_fp8": True, "round_scale": True},
    "fp8_ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}
COUNT_MASK = 2**32 - 1
IDS = torch.tensor([[0, 1], [1, -1], [0, 1]])  # of a small dispatch in a world of one rank


def as_deepep(case: Case, **changes: Any) -> Case:
    """The case as DeepEP's methods can put it: all the room that there may be, weights given at combine."""
    return dataclasses.replace(
        case, layout="expert_major", capacity=None, capacity_kind="default", scales_dtype=None, expert_alignment=1,
        zero_padding=False, with_weights=False, out_dtype=None, wire_dtype=None, biases=0, scale=1.0,
        combine_weights="masked" if case.seed % 2 else "tensor", **changes,
    )  # fmt: skip


def deepep_cases(count: int, num_ranks: int, **changes: Any) -> list[DeepEpCase]:
    """The first generated cases of so many ranks."""
    fitting = (case for case in map(generate, itertools.count()) if case.num_ranks == num_ranks)
    return [DeepEpCase(as_deepep(case, **changes)) for case in itertools.islice(fitting, count)]


def small_case(num_ranks: int = 2, **changes: Any) -> DeepEpCase:
    return DeepEpCase(as_deepep(plain_case(num_ranks, **changes)))


def one_rank(**options: Any) -> deep_ep.Buffer:
    sizes = {
        "max_tokens": 4, "hidden": 64, "topk": 2, "num_experts": 2, "device": "cpu", "timeout": 60.0,
        "late_weights": True,
    }  # fmt: skip
    return deep_ep.Buffer.of(nccl_ep.Buffer.for_shapes(None, **{**sizes, **options}))


def dispatched(buffer: deep_ep.Buffer, **options: Any) -> tuple[Any, ...]:
    """IDS, and what a dispatch of rows of ones to them returns."""
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    return (IDS, *buffer.low_latency_dispatch(x, IDS, 4, 2, **{"use_fp8": False, **options}))


class DeepEpCase(Expected):
    """A case whose operations go through DeepEP's methods, with the oracle's word on each of their results."""

    def send(self, buffer: nccl_ep.Buffer | deep_ep.Buffer, **options: Any) -> tuple[Any, ...]:
        buffer = deep_ep.Buffer.of(buffer)
        given, case = self.inputs[buffer.rank], self.case
        x, ids = given.x.to(buffer.device, copy=True), given.topk_idx.to(buffer.device, copy=True)
        result = buffer.low_latency_dispatch(x, ids, case.max_tokens, case.num_experts, **QUANTS[case.quant], **options)
        if options.get("return_recv_hook"):  # the inputs are free
            x.view(torch.uint8).fill_(0x5A)
            ids.fill_(-7)
        return result

    def send_back(self, buffer: nccl_ep.Buffer | deep_ep.Buffer, handle: Any, **options: Any) -> tuple[Any, ...]:
        buffer = deep_ep.Buffer.of(buffer)
        rank = buffer.rank
        kwargs = self.case.rank_combine_kwargs(rank)
        ids = self.inputs[rank].topk_idx if kwargs["topk_idx"] is None else kwargs["topk_idx"]
        weights = kwargs["weights"].to(buffer.device)
        rows = self.rows[rank].to(buffer.device, copy=True)
        if options.get("zero_copy"):
            buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
            rows.fill_(float("nan"))
        result = buffer.low_latency_combine(rows, ids.to(buffer.device), weights, handle, **options)
        if options.get("return_recv_hook"):
            rows.zero_()
        return result

    def check_received(self, rank: int, received: Any, counts: torch.Tensor, handle: Any) -> None:
        case, want, where = self.case, self.results[rank], self.where(rank)
        rows, scales = received if case.quant else (received, None)
        local, capacity = case.num_experts // case.num_ranks, case.num_ranks * case.max_tokens
        src_info, layout_range, *numbers = handle
        assert numbers == [case.max_tokens, case.hidden, case.num_experts], where
        assert counts.dtype == torch.int32 and counts.tolist() == want.counts.tolist(), where
        assert rows.shape == (local, capacity, case.hidden) and rows.is_contiguous(), where
        self._check_rows(rows, want.x, want.valid, f"{where}: x")
        if scales is not None:
            assert want.scales is not None and scales.dtype == want.scales.dtype, where
            width = want.scales.shape[-1]
            assert scales.shape == (local, capacity, width), where
            assert scales.stride() == (capacity * width, 1, capacity), f"{where}: strides {scales.stride()}"
            self._check_rows(scales.contiguous(), want.scales, want.valid, f"{where}: scales")
        sources, ranges = self.account(rank)
        assert layout_range.dtype == torch.int64 and layout_range.tolist() == ranges.tolist(), where
        assert src_info.dtype == torch.int32 and src_info.shape == (local, capacity), where
        valid = want.valid.view(local, capacity)
        assert src_info.cpu()[valid].tolist() == sources[valid].tolist(), where

    @staticmethod
    def _check_rows(got: torch.Tensor, want: torch.Tensor, valid: torch.Tensor, where: str) -> None:
        width = want.shape[-1]
        got, want = as_bytes(got.cpu()), as_bytes(want)
        difference = reference.first_difference(got.view(-1, width)[valid], want.view(-1, width)[valid])
        assert not difference, f"{where}: {difference}"

    def account(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """src_info [L, C] and layout_range [L, R] by the oracle's places."""
        case = self.case
        local, capacity = case.num_experts // case.num_ranks, case.num_ranks * case.max_tokens
        sources = torch.zeros(local * capacity, dtype=torch.int32)
        of_expert: list[list[list[int]]] = [[[] for _ in range(case.num_ranks)] for _ in range(local)]
        for source, token, k in self.results[rank].row_of.ge(0).nonzero().tolist():
            row = int(self.results[rank].row_of[source, token, k])
            sources[row] = token
            of_expert[row // capacity][source].append(row % capacity)
        ranges = torch.zeros(local, case.num_ranks, dtype=torch.int64)
        for expert, each in enumerate(of_expert):
            begin = 0
            for source, rows in enumerate(each):
                assert sorted(rows) == list(range(begin, begin + len(rows)))
                ranges[expert, source] = begin << 32 | len(rows)
                begin += len(rows)
        return sources.view(local, capacity), ranges

    def run(self, buffer: nccl_ep.Buffer, *, staged: bool = False, **options: Any) -> None:
        """A dispatch and a combine. options: of both; ``staged`` stands for hooks."""
        rank = buffer.rank
        received, counts, handle, event, hook = self.send(buffer, return_recv_hook=staged, **options)
        self._finish(staged, event, hook)
        self.check_received(rank, received, counts, handle)
        combined, event, hook = self.send_back(buffer, rebuilt(handle), return_recv_hook=staged, **options)
        self._finish(staged, event, hook)
        self.check_combine(combined.cpu(), rank)

    @staticmethod
    def _finish(staged: bool, event: nccl_ep.EventOverlap, hook: Any) -> None:
        assert (hook is not None) == staged
        if hook is not None:
            hook()
        if event.event is not None:
            event.current_stream_wait()


class _Save(torch.autograd.Function):
    """Takes a handle apart as the author of a layer would: tensors here, numbers there."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, handle: Any, kept: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(*(each for each in handle if isinstance(each, torch.Tensor)))
        ctx.numbers = [each for each in handle if not isinstance(each, torch.Tensor)]
        ctx.kept = kept
        return one.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.kept.append((*ctx.saved_tensors, *ctx.numbers))
        return grad, None, None


def rebuilt(handle: Any) -> Any:
    """The handle after its tensors went through ``save_for_backward``."""
    kept: list[Any] = []
    one = torch.ones(1, requires_grad=True)
    _Save.apply(one, handle, kept).backward()
    assert isinstance(kept[0], tuple) and kept[0] is not handle
    return kept[0]


# ---- A program as users of DeepEP write it


def similarity_gap(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2<x, y> / (|x|^2 + |y|^2) of x + 1 and y + 1, by which DeepEP's own tests judge."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def dequantised(received: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rows, scales = received
    if scales.dtype == torch.int32:  # four exponents in each
        exponents = scales.contiguous().view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    groups = rows.float().unflatten(-1, (-1, 128))
    return (groups * scales.contiguous().unsqueeze(-1)).flatten(-2).bfloat16()


def run_program(rank: int, num_ranks: int, device_type: str = "cpu", rounds: int = 1) -> int:
    """A low-latency layer over every option, each checked by what all ranks' routing says. Returns the layers run."""
    num_tokens, hidden, num_experts, topk = 24, 1024, 4 * num_ranks, 3
    device = torch.device("cpu") if device_type == "cpu" else on_gpu(rank)
    group = dist.group.WORLD
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=num_tokens, hidden=hidden, num_ranks=num_ranks, num_experts=num_experts
    )
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=num_experts // num_ranks,
        allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True, on_invalid_ids="count", device=device,
    )  # fmt: skip
    buffer.clean_low_latency_buffer(num_tokens, hidden, num_experts)

    # A row holds its rank, and in its last columns its token.
    made = torch.Generator().manual_seed(rank)
    x = torch.full((num_tokens, hidden), float(rank - 3), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(num_tokens, dtype=torch.bfloat16).unsqueeze(1)
    topk_idx = torch.rand(num_tokens, num_experts, generator=made).topk(topk, dim=1).indices
    topk_idx[torch.randint(num_tokens, (4,), generator=made), torch.randint(topk, (4,), generator=made)] = -1
    topk_weights = torch.rand(num_tokens, topk, generator=made)
    all_idx = [torch.empty_like(topk_idx) for _ in range(num_ranks)]
    dist.all_gather(all_idx, topk_idx, group=group)
    x, topk_idx, topk_weights = x.to(device), topk_idx.to(device), topk_weights.to(device)
    want = x.float() * topk_weights.masked_fill(topk_idx == -1, 0).sum(1, keepdim=True)

    layers = 0
    total = torch.zeros(num_experts // num_ranks, dtype=torch.int32, device=device)
    for use_hook, how, zero_copy in itertools.product((False, True), QUANTS.values(), (False, True)):
        for _ in range(rounds):
            layers += 1
            received, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, topk_idx, num_tokens, num_experts, cumulative_local_expert_recv_stats=total, **how,
                async_finish=not use_hook, return_recv_hook=use_hook,
            )  # fmt: skip
            hook() if hook is not None else event.current_stream_wait()
            rows = dequantised(received) if isinstance(received, tuple) else received.clone()
            for local in range(num_experts // num_ranks):
                _check_expert(rank, num_ranks, local, rows, counts, handle, all_idx, how)
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
            out = torch.empty_like(x)
            combined, event, hook = buffer.low_latency_combine(
                rows, topk_idx, topk_weights, handle, use_logfmt=not zero_copy, zero_copy=zero_copy,
                async_finish=not use_hook, return_recv_hook=use_hook, out=out,
            )  # fmt: skip
            hook() if hook is not None else event.current_stream_wait()
            assert combined is out and not torch.isnan(combined).any()
            gap = similarity_gap(combined.float(), want)
            assert gap < (9e-4 if how["use_fp8"] else 1e-5), f"rank {rank}, {how}: {gap}"
    assert total.tolist() == (layers * counts).tolist()
    buffer.destroy()
    return layers


def _check_expert(
    rank: int, num_ranks: int, local: int, rows: torch.Tensor, counts: torch.Tensor, handle: Any,
    all_idx: list[torch.Tensor], how: dict[str, bool],
) -> None:  # fmt: skip
    expert = rank * rows.shape[0] + local
    count = int(counts[local])
    assert count == sum(int((ids == expert).sum()) for ids in all_idx)
    src_info, layout_range = handle[0][local], handle[1][local]
    assert int((layout_range & COUNT_MASK).sum()) == count
    mine = rows[local, :count].float()
    for source in range(num_ranks):
        begin, number = int(layout_range[source] >> 32), int(layout_range[source] & COUNT_MASK)
        assert number == int((all_idx[source] == expert).sum())
        from_source = mine[begin : begin + number]
        tokens = src_info[begin : begin + number].tolist()
        assert tokens == sorted(set((all_idx[source] == expert).nonzero()[:, 0].tolist()))
        if not how.get("round_scale"):
            assert torch.allclose(from_source[:, :-128], torch.tensor(float(source - 3)))
            assert torch.allclose(from_source[:, -1].cpu(), torch.tensor(tokens, dtype=torch.float32), rtol=0.01)


# ---- Ranks of their own


def run_cases(rank: int, num_ranks: int, count: int) -> int:
    """Generated cases on GPUs: fused, with hooks, and on the buffer's own stream."""
    device, cases = on_gpu(rank), deepep_cases(count, num_ranks, domain_size=None)
    ways: list[dict[str, Any]] = [{}, {"staged": True}, {"async_finish": True}]
    with shared_buffer(rendezvous_of(dist.group.WORLD), cases, device=device) as buffer:
        for number, case in enumerate(cases):
            case.run(buffer, **ways[number % 3])
        torch.cuda.synchronize()
        buffer.require_usable()
        return int(buffer.stats()["dispatches"])


def run_waits(rank: int, num_ranks: int) -> list[list[int]]:
    """What this rank waited for the others, in ns, in dispatches and combines; the last rank comes late to each."""
    device, case = on_gpu(rank), small_case(num_ranks)
    found = []
    with shared_buffer(rendezvous_of(dist.group.WORLD), [case], device=device) as buffer:
        case.run(buffer)
        for staged in (False, True):
            waits = torch.zeros(2, num_ranks, dtype=torch.int64, device=device)
            start = time.monotonic_ns()
            handle: Any = None
            for number, name in enumerate(("dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats")):
                torch.cuda.synchronize()
                dist.barrier()
                time.sleep(0.3 * (rank == num_ranks - 1))
                options = {name: waits[number], "return_recv_hook": staged}
                sent = case.send(buffer, **options) if number == 0 else case.send_back(buffer, handle, **options)
                if sent[-1] is not None:
                    sent[-1]()
                handle = sent[2] if number == 0 else handle
            torch.cuda.synchronize()
            buffer.require_usable()
            assert waits.max() <= time.monotonic_ns() - start
            found += waits.tolist()
    return found


LATE = 0.3  # seconds


def run_late_send(rank: int, num_ranks: int) -> list[float]:
    """The ms that this rank's GPU was busy with the send of a combine. The last rank comes late to each, and so
    are its weights; the first is for what a first call sets up."""
    device, case = on_gpu(rank), small_case(num_ranks)
    took = []
    with shared_buffer(rendezvous_of(dist.group.WORLD), [case], device=device) as buffer:
        handle = case.send(buffer)[2]
        for _ in range(4):
            torch.cuda.synchronize()
            dist.barrier()
            time.sleep(LATE * (rank == num_ranks - 1))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            y, _, hook = case.send_back(buffer, handle, return_recv_hook=True)
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
            hook()
            torch.cuda.synchronize()
            case.check_combine(y.cpu(), rank)
    return took
