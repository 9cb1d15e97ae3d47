"""An MoE layer whose experts begin while rows still come, and the same layer one step behind the other.

On GPUs the GEMMs are those of gemm.py. On CPU ranks a thread of the host takes the blocks in the order in which they
arrive and multiplies them by torch: the same contract, without a GPU.

    torchrun --nproc-per-node 2 examples/overlapped_moe/measure.py
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import nccl_ep
from nccl_ep.arrivals import Arrivals

if TYPE_CHECKING:
    from examples.overlapped_moe.gemm import Run

ROWS_PER_BLOCK = 128
SCALED = 128  # elements with one scale in FP8
TIMEOUT = 30.0  # seconds that a GEMM waits for a block


@dataclass
class Experts:
    """Weights of the local experts: w13 [L, 2 * I, H], gate above up; w2 [L, H, I]. scales: of e4m3, see gemm.py."""

    w13: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def random(local: int, hidden: int, inner: int, device: torch.device | str, seed: int = 0) -> Experts:
        generator = torch.Generator(device).manual_seed(seed)

        def made(*shape: int) -> torch.Tensor:
            scale = shape[-1] ** -0.5
            rows = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            return rows.mul_(scale)

        return Experts(made(local, 2 * inner, hidden), made(local, hidden, inner))

    def in_fp8(self) -> Experts:
        """In e4m3, with a scale for 128 x 128 elements."""

        def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            blocks = w.unflatten(1, (-1, SCALED)).unflatten(3, (-1, SCALED)).float()  # [L, rows, 128, columns, 128]
            scales = blocks.abs().amax((2, 4)).clamp(min=1e-10) / 448
            made = blocks / scales[:, :, None, :, None]
            return made.view(w.shape).to(torch.float8_e4m3fn), scales

        (w13, of_w13), (w2, of_w2) = quantised(self.w13), quantised(self.w2)
        return Experts(w13, w2, (of_w13, of_w2))

    def rows(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """What an expert makes of some rows, by torch."""
        gate, up = F.linear(x, self.w13[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.w2[expert])


class MoeLayer:
    """Dispatch, experts, combine.

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
        how: of ``gemm.Run`` (group, tma, stages). Experts in FP8 take rows in FP8.
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

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, overlaps: bool = True
    ) -> torch.Tensor:
        """x: bf16 [T, H]. ids: int64 [T, K]. weights: float32 [T, K]. Returns [T, H], the same bits either way."""
        run = self._on_host if self.buffer.device.type == "cpu" else self._on_gpu
        if not self.sorts:
            return run(x, ids, weights, overlaps)
        order = (ids % self.experts.w13.shape[0]).masked_fill(ids < 0, self.num_experts).amin(1).argsort()
        made = run(x[order], ids[order], weights[order], overlaps)
        return torch.empty_like(made).index_copy_(0, order, made)

    def combine(
        self, rows: torch.Tensor, out: nccl_ep.DispatchOutput, weights: torch.Tensor, **signals: Any
    ) -> torch.Tensor:
        """signals: as combine_send takes them."""
        if self.mode == "ht":
            if not signals:
                return nccl_ep.combine(rows, out.handle)
            return nccl_ep.combine_send(rows, out.handle, **signals).receive()
        return nccl_ep.combine_send(rows, out.handle, weights=weights, **signals).receive()

    def run_of(self, out: nccl_ep.DispatchOutput) -> Run:
        from examples.overlapped_moe.gemm import Run

        return Run(
            out.x, self.experts.w13, self.experts.w2, self.arrivals, self.blocks, TIMEOUT, x_scales=out.scales,
            scales=self.experts.scales, **self.how,
        )  # fmt: skip

    def _on_gpu(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, overlaps: bool) -> torch.Tensor:
        pending = self.send(x, ids, weights, self.num_sms if overlaps else 0)
        out = pending.early_output if overlaps else pending.receive()
        run = self.run_of(out)
        if not overlaps:
            run.gate_up(run.num_sms)
            run.down(run.num_sms)
            return self.combine(run.y, out, weights)
        current, comm = torch.cuda.current_stream(), self.buffer.get_comm_stream()
        ready = current.record_event()
        run.gate_up(run.num_sms - self.num_sms)
        comm.wait_event(ready)
        with torch.cuda.stream(comm):  # behind the dispatch, whose SMs help with what is left
            run.gate_up(self.num_sms)
        pending.receive()
        current.wait_stream(comm)
        if not self.signals:
            run.down(run.num_sms)
            return self.combine(run.y, out, weights)
        comm.wait_stream(current)
        with torch.cuda.stream(comm):
            run.down(run.num_sms - self.num_sms)
        combined = self.combine(
            run.y, out, weights, row_signals=run.signals, rows_per_signal=self.rows_per_block,
            signal_threshold=run.tiles, num_sms=self.num_sms,
        )  # fmt: skip
        current.wait_stream(comm)
        return combined

    def _on_host(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, overlaps: bool) -> torch.Tensor:
        pending = self.send(x, ids, weights, 0)
        out = pending.early_output if overlaps else pending.receive()
        rows, y = out.x.view(-1, out.x.shape[-1]), torch.zeros_like(out.x)
        signals = torch.zeros(self.blocks, dtype=torch.int32)
        errors: list[BaseException] = []

        def multiply() -> None:
            try:
                for block in self.arrivals.await_blocks(TIMEOUT):
                    here = slice(block.first, block.first + block.rows)
                    y.view_as(rows)[here] = self.experts.rows(rows[here], block.expert)
                    signals[block.number] += 1
            except BaseException as error:
                errors.append(error)

        consumer = threading.Thread(target=multiply)
        consumer.start()
        if overlaps:
            pending.receive()
        if overlaps and self.signals:
            combined = self.combine(
                y, out, weights, row_signals=signals, rows_per_signal=self.rows_per_block, num_sms=1
            )
            consumer.join()
        else:
            consumer.join()
            combined = self.combine(y, out, weights)
        if errors:
            raise errors[0]
        return combined
