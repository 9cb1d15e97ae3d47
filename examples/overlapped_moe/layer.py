"""An MoE layer whose experts begin while rows still come, and the same layer one step behind the other. Its backward
pass is of the same kind: gradients go out by a dispatch, the experts' GEMMs begin while they come, and the weights'
gradients are made beside the combine that takes the tokens' home.

On GPUs the GEMMs are those of on_gpu.py. On CPU ranks a thread of the host takes the blocks in the order in which they
arrive (on_host.py): the same contract, without a GPU.

    torchrun --nproc-per-node 2 -m examples.overlapped_moe.measure
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

import nccl_ep
from examples.overlapped_moe import on_host
from examples.overlapped_moe.experts import Experts, Kept
from examples.overlapped_moe.function import MoeFunction
from nccl_ep.arrivals import Arrivals

ROWS_PER_BLOCK = 128
TIMEOUT = 30.0  # seconds that a GEMM waits for a block

Gemms = Any  # Forward or Backward of on_gpu.py or on_host.py
Combine = Callable[..., nccl_ep.Pending[torch.Tensor]]


class MoeLayer:
    """Dispatch, experts, combine. x, weights and the experts' weights have gradients, but in FP8; all ranks must want
    the same ones.

    "ht": packed rows; the experts begin while rows come. "ll": expert_major; the combine's send begins besides while
    the experts still write, block by block; its buffer is made with ``late_weights``. "ht" has that, too, where
    ``signals`` says so: it adds up a token's rows here once all of them are written.

    Args:
        num_sms: SMs of the operation that a GEMM runs beside.
        rows_per_block: on GPUs that of gemm.py. capacity: rows of an expert ("ll") or in all; default: what always
            fits.
        sorts: tokens go in the order of their first expert, as every rank counts its own: a block is complete when the
            last of its rows has come, which in any other order is the end of the dispatch.
        signals: of "ht", see above.
        how: of ``gemm.GroupedGemms`` (group, tma, stages). Experts in FP8 take rows in FP8.
    """

    def __init__(
        self, buffer: nccl_ep.Buffer, experts: Experts, *, num_experts: int, max_tokens: int, topk: int,
        mode: nccl_ep.choices.Mode = "ht", num_sms: int = 16, rows_per_block: int = ROWS_PER_BLOCK,
        capacity: int | None = None, sorts: bool = False, signals: bool | None = None,
        how: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.sorts, self.signals, self.how = sorts, mode == "ll" if signals is None else signals, how or {}
        self.buffer, self.experts, self.num_experts, self.mode = buffer, experts, num_experts, mode
        self.num_sms, self.rows_per_block, self.max_tokens = num_sms, rows_per_block, max_tokens
        local, tokens = experts.w13.shape[0], buffer.num_ranks * max_tokens
        self.layout: nccl_ep.choices.LayoutName = "packed" if mode == "ht" else "expert_major"
        if mode == "ht":
            most = capacity or tokens * min(topk, local) + local * (rows_per_block - 1)
            self.capacity = -(-most // rows_per_block) * rows_per_block
        else:
            self.capacity = capacity or tokens
        self.blocks = Arrivals.blocks_of(self.layout, self.capacity, local, rows_per_block)
        self.arrivals = Arrivals(buffer, blocks=self.blocks, rows_per_block=rows_per_block)

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, overlaps: bool = True
    ) -> torch.Tensor:
        """x: bf16 [T, H]. ids: int64 [T, K]. weights: float32 [T, K]. Returns [T, H], the same bits either way, as are
        those of the gradients."""
        if self.sorts:
            order = (ids % self.experts.w13.shape[0]).masked_fill(ids < 0, self.num_experts).amin(1).argsort()
            made = self._call(x[order], ids[order], weights[order], overlaps)
            return torch.empty_like(made).index_copy_(0, order, made)
        return self._call(x, ids, weights, overlaps)

    def _call(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, overlaps: bool) -> torch.Tensor:
        experts = self.experts
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in (x, weights, experts.w13, experts.w2)):
            return self.forward(x, ids, weights, overlaps=overlaps, keeps=False)[0]
        if experts.scales is not None:
            raise ValueError(f"experts are {experts.w13.dtype}, which have no gradient: call the layer under no_grad")
        made: torch.Tensor = MoeFunction.apply(self, overlaps, x, ids, weights, experts.w13, experts.w2)
        return made

    # ---- The two passes, without autograd

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, overlaps: bool, keeps: bool
    ) -> tuple[torch.Tensor, Kept | None, nccl_ep.Handle]:
        """[T, H], what a backward pass needs, if it ``keeps`` that, and the handle."""
        pending = self.send(x, ids, weights, self.num_sms if overlaps else 0)
        out = pending.early_output if overlaps else pending.receive()
        gemms = self.forward_gemms(out, keeps)
        combined = self._run(pending, gemms, out.handle, "dispatch" if self.mode == "ht" else weights, overlaps)
        return combined, self.kept(out, gemms.gates) if keeps else None, out.handle

    def backward(
        self, gradient: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: Kept, handle: nccl_ep.Handle,
        experts: Experts, *, overlaps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients of x, weights, w13 and w2 from that of the combined rows. ids: low latency routes again."""
        num_sms = self.num_sms if overlaps else 0
        pending: Any
        if self.mode == "ht":
            pending = nccl_ep.dispatch_cached_send(gradient, handle, num_sms=num_sms, arrivals=self.arrivals)
        else:
            pending = self.send(gradient, ids, weights, num_sms)
        moved = pending.early_output if overlaps else pending.receive()
        gemms = self.backward_gemms(moved.x, kept, experts)
        # Low latency takes signals with weights given here alone.
        of_x = self._run(pending, gemms, handle, None if self.mode == "ht" else torch.ones_like(weights), overlaps)
        return of_x, nccl_ep.combine_weights(gemms.of_weights(), handle), gemms.of_w13, gemms.of_w2

    # ---- Their parts

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_sms: int
    ) -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
        """The dispatch, on the buffer's own stream."""
        return nccl_ep.dispatch_send(
            x, ids, weights, buffer=self.buffer, num_experts=self.num_experts, mode=self.mode, layout=self.layout,
            max_tokens=self.max_tokens, capacity=self.capacity, num_sms=num_sms, arrivals=self.arrivals,
            expert_alignment=self.rows_per_block if self.layout == "packed" else 1, async_finish=True,
            quant=None if self.experts.scales is None else "fp8",
        )  # fmt: skip

    def kept(self, out: nccl_ep.DispatchOutput, gates: torch.Tensor) -> Kept:
        local = self.experts.w13.shape[0]
        if out.offsets is None:
            firsts = torch.arange(local, dtype=torch.int32, device=out.x.device) * self.capacity
        else:
            firsts = out.offsets[:local]
        return Kept(out.x, gates, out.weights, firsts, out.counts)

    def forward_gemms(self, out: nccl_ep.DispatchOutput, keeps: bool = False) -> Gemms:
        if self.buffer.device.type == "cpu":
            return on_host.Forward(out.x, self.experts, keeps, self.blocks)
        from examples.overlapped_moe import on_gpu

        given = (self.arrivals, self.blocks, TIMEOUT)
        return on_gpu.Forward(out.x, out.scales, self.experts, keeps, *given, **self.how)

    def backward_gemms(self, gradient: torch.Tensor, kept: Kept, experts: Experts) -> Gemms:
        if self.buffer.device.type == "cpu":
            return on_host.Backward(gradient, kept, experts, self.blocks)
        from examples.overlapped_moe import on_gpu

        return on_gpu.Backward(gradient, kept, experts, self.arrivals, self.blocks, TIMEOUT, **self.how)

    def _run(
        self, pending: nccl_ep.Pending[Any], gemms: Gemms, handle: nccl_ep.Handle, weights: Any, overlaps: bool
    ) -> torch.Tensor:
        """The GEMMs and the combine of the rows that they make. ``pending`` is open where they overlap."""
        combine = functools.partial(nccl_ep.combine_send, gemms.rows, handle, weights=weights)
        signals = {
            "row_signals": gemms.signals, "rows_per_signal": self.rows_per_block, "signal_threshold": gemms.tiles,
            "num_sms": self.num_sms,
        } if overlaps and self.signals else {}  # fmt: skip
        run = self._run_on_host if self.buffer.device.type == "cpu" else self._run_on_gpu
        return run(pending if overlaps else None, gemms, combine, signals)

    def _run_on_gpu(
        self, pending: nccl_ep.Pending[Any] | None, gemms: Gemms, combine: Combine, signals: dict[str, Any]
    ) -> torch.Tensor:
        if pending is None:
            gemms.first(gemms.num_sms)
            gemms.second(gemms.num_sms)
            combined = combine(async_finish=self.mode == "ht").receive()
            gemms.beside(gemms.num_sms)
            return combined
        others = gemms.num_sms - self.num_sms
        current, comm = torch.cuda.current_stream(), self.buffer.get_comm_stream()
        ready = current.record_event()
        gemms.first(others)
        comm.wait_event(ready)
        with torch.cuda.stream(comm):  # behind the dispatch, whose SMs help with what is left
            gemms.first(self.num_sms)
        pending.receive()
        current.wait_stream(comm)
        if not signals:
            gemms.second(gemms.num_sms)
            sending = combine(async_finish=self.mode == "ht", num_sms=self.num_sms if gemms.works_beside else 0)
            gemms.beside(others)
            return sending.receive()
        comm.wait_stream(current)
        with torch.cuda.stream(comm):
            gemms.second(others)
            gemms.beside(others)
        combined = combine(**signals).receive()
        current.wait_stream(comm)
        return combined

    def _run_on_host(
        self, pending: nccl_ep.Pending[Any] | None, gemms: Gemms, combine: Combine, signals: dict[str, Any]
    ) -> torch.Tensor:
        errors: list[BaseException] = []

        @torch.no_grad()
        def multiply() -> None:
            try:
                for block in self.arrivals.await_blocks(TIMEOUT):
                    gemms.block(block)
            except BaseException as error:
                errors.append(error)

        consumer = threading.Thread(target=multiply)
        consumer.start()
        if pending is not None:
            pending.receive()
        sending = combine(**signals) if signals else None
        combined = sending.receive() if sending is not None else None
        consumer.join()
        if errors:
            raise errors[0]
        if combined is None:
            combined = combine(async_finish=self.mode == "ht").receive()
        gemms.beside()
        return combined
