"""An MoE layer whose experts begin while rows still come, and the same layer one step behind the other.

On GPUs the GEMMs are those of gemm.py. On CPU ranks a thread of the host takes the blocks in the order in which they
arrive and multiplies them by torch: the same contract, without a GPU.

    torchrun --nproc-per-node 2 examples/overlapped_moe/measure.py
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import nccl_ep
from nccl_ep.arrivals import Arrivals, Block

ROWS_PER_BLOCK = 128
TIMEOUT = 30.0  # seconds that a GEMM waits for a block


@dataclass
class Experts:
    """Weights of the local experts: w13 [L, 2 * I, H], gate above up; w2 [L, H, I]; bf16."""

    w13: torch.Tensor
    w2: torch.Tensor

    @staticmethod
    def random(local: int, hidden: int, inner: int, device: torch.device | str, seed: int = 0) -> Experts:
        generator = torch.Generator(device).manual_seed(seed)

        def made(*shape: int) -> torch.Tensor:
            scale = shape[-1] ** -0.5
            rows = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            return rows.mul_(scale)

        return Experts(made(local, 2 * inner, hidden), made(local, hidden, inner))

    def rows(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """What an expert makes of some rows, by torch."""
        gate, up = F.linear(x, self.w13[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.w2[expert])


class MoeLayer:
    """Dispatch, experts, combine. Rows are packed: blocks of ROWS_PER_BLOCK rows of one expert.

    Args:
        mode: "ht" or "ll". num_sms: SMs of the dispatch that the GEMM runs beside.
        rows_per_block: on GPUs that of gemm.py. capacity: rows in all; default: what always fits.
    """

    def __init__(
        self, buffer: nccl_ep.Buffer, experts: Experts, *, num_experts: int, max_tokens: int, topk: int,
        mode: nccl_ep.choices.Mode = "ht", num_sms: int = 16, rows_per_block: int = ROWS_PER_BLOCK,
        capacity: int | None = None,
    ) -> None:  # fmt: skip
        self.buffer, self.experts, self.num_experts, self.mode = buffer, experts, num_experts, mode
        self.num_sms, self.rows_per_block, self.max_tokens = num_sms, rows_per_block, max_tokens
        local = experts.w13.shape[0]
        most = buffer.num_ranks * max_tokens * min(topk, local) + local * (rows_per_block - 1)
        self.capacity = -(-(capacity or most) // rows_per_block) * rows_per_block
        self.arrivals = Arrivals(buffer, blocks=self.capacity // rows_per_block, rows_per_block=rows_per_block)

    def _send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_sms: int
    ) -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
        return nccl_ep.dispatch_send(
            x, ids, weights, buffer=self.buffer, num_experts=self.num_experts, mode=self.mode, layout="packed",
            max_tokens=self.max_tokens, capacity=self.capacity, expert_alignment=self.rows_per_block, num_sms=num_sms,
            arrivals=self.arrivals, async_finish=True,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, overlaps: bool = True
    ) -> torch.Tensor:
        """x: bf16 [T, H]. ids: int64 [T, K]. weights: float32 [T, K]. Returns [T, H], the same bits either way."""
        if self.buffer.device.type == "cpu":
            return self._on_host(x, ids, weights, overlaps)
        from examples.overlapped_moe import gemm

        pending = self._send(x, ids, weights, self.num_sms if overlaps else 0)
        out = pending.early_output if overlaps else pending.receive()
        run = gemm.Run(out.x, self.experts.w13, self.experts.w2, self.arrivals, TIMEOUT)
        if overlaps:
            comm = self.buffer.get_comm_stream()
            run.gate_up(run.num_sms - self.num_sms)
            with torch.cuda.stream(comm):  # behind the dispatch, whose SMs help with what is left
                run.gate_up(self.num_sms)
            pending.receive()
            torch.cuda.current_stream().wait_stream(comm)
        else:
            run.gate_up(run.num_sms)
        run.down(run.num_sms)
        return nccl_ep.combine(run.y, out.handle)

    def _on_host(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, overlaps: bool) -> torch.Tensor:
        made: dict[int, tuple[Block, torch.Tensor]] = {}
        errors: list[BaseException] = []

        def multiply(out: nccl_ep.DispatchOutput) -> None:
            try:
                for block in self.arrivals.await_blocks(TIMEOUT):
                    rows = out.x[block.first : block.first + block.rows]
                    made[block.number] = block, self.experts.rows(rows, block.expert)
            except BaseException as error:
                errors.append(error)

        pending = self._send(x, ids, weights, 0)
        out = pending.early_output if overlaps else pending.receive()
        consumer = threading.Thread(target=multiply, args=(out,))
        consumer.start()
        if overlaps:
            pending.receive()
        consumer.join()
        if errors:
            raise errors[0]
        y = torch.zeros_like(out.x)
        for block, rows in made.values():
            y[block.first : block.first + block.rows] = rows
        return nccl_ep.combine(y, out.handle)
