"""Grouped GEMMs in Triton that take blocks of rows in the order in which a dispatch brings them.

A program takes tiles by tickets: tile t is column tile t % N of the block at place t // N of the order of arrival. So
the programs work on the blocks that came first, and programs of a later launch help with what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nccl_ep.arrivals import Arrivals
from nccl_ep.triton import expert_of, first_row_of, rows_of, signal_rows, wait_rows


@triton.jit
def gate_up_kernel(
    x, w, h, state, tickets, blocks, blocks_here, timeout_ns, K, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """blocks: of the arrivals; blocks_here: of this output.

    h[row] = silu(x[row] @ gate.T) * (x[row] @ up.T), of w [L, 2 * N, K]: gate above up. h: bf16 [rows, N]."""
    tiles = N // BLOCK_N
    is_on = 1
    while is_on != 0:
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        place = ticket // tiles
        if place >= blocks_here:
            is_on = 0
        else:
            block = wait_rows(state, blocks, place, timeout_ns)
            rows = 0
            if block >= 0:
                rows = rows_of(state, blocks, block)
            if rows == 0:
                is_on = 0
            else:
                expert = expert_of(state, blocks, block).to(tl.int64)
                own = tl.arange(0, BLOCK_M)
                a_rows = first_row_of(state, blocks, block).to(tl.int64) + own
                column = ticket % tiles * BLOCK_N
                columns = column + tl.arange(0, BLOCK_N)
                gate_rows = expert * 2 * N + columns
                zero = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                inner = tl.arange(0, BLOCK_K)
                a_at = x + a_rows[:, None] * K + inner[None, :]
                b_at = w + gate_rows[None, :] * K + inner[:, None]
                up_at = b_at + N.to(tl.int64) * K
                gate, up = zero, zero
                for k in range(0, K, BLOCK_K):
                    a_tile = tl.load(a_at + k, mask=own[:, None] < rows, other=0.0)
                    gate_tile = tl.load(b_at + k)
                    up_tile = tl.load(up_at + k)
                    gate = tl.dot(a_tile, gate_tile, gate)
                    up = tl.dot(a_tile, up_tile, up)
                made = (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16)
                tl.store(h + a_rows[:, None] * N + columns[None, :], made, mask=own[:, None] < rows)


@triton.jit
def down_kernel(
    h, w, y, state, tickets, signals, blocks, blocks_here, timeout_ns, K, N, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[row] = h[row] @ w.T, of w [L, N, K]; each tile counts up the signal of its block: N // BLOCK_N for all rows."""
    tiles = N // BLOCK_N
    is_on = 1
    while is_on != 0:
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        place = ticket // tiles
        if place >= blocks_here:
            is_on = 0
        else:
            block = wait_rows(state, blocks, place, timeout_ns)
            rows = 0
            if block >= 0:
                rows = rows_of(state, blocks, block)
            if rows == 0:
                is_on = 0
            else:
                expert = expert_of(state, blocks, block).to(tl.int64)
                own = tl.arange(0, BLOCK_M)
                a_rows = first_row_of(state, blocks, block).to(tl.int64) + own
                columns = ticket % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
                inner = tl.arange(0, BLOCK_K)
                a_at = h + a_rows[:, None] * K + inner[None, :]
                b_at = w + (expert * N + columns)[None, :] * K + inner[:, None]
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for k in range(0, K, BLOCK_K):
                    a_tile = tl.load(a_at + k, mask=own[:, None] < rows, other=0.0)
                    acc = tl.dot(a_tile, tl.load(b_at + k), acc)
                tl.store(y + a_rows[:, None] * N + columns[None, :], acc.to(tl.bfloat16), mask=own[:, None] < rows)
                signal_rows(signals, block)


class Run:
    """The two GEMMs over the rows of one dispatch.

    Args:
        x: bf16 [.., H], rows of a dispatch. w13: bf16 [L, 2 * I, H], gate above up. w2: bf16 [L, H, I].
        blocks: of 128 or 256 rows that x has, as the arrivals count them.
        timeout: seconds that a program waits for a block.

    Attributes:
        h: bf16 [rows, I]. y: as x; rows that do not exist are unspecified.
        signals: int32 [blocks] column tiles of y that are written, of each block. tiles: how many there are.
    """

    def __init__(
        self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, arrivals: Arrivals, blocks: int, timeout: float
    ) -> None:
        hidden, inner = x.shape[-1], w2.shape[2]
        if hidden % 256 != 0 or inner % 128 != 0:
            raise ValueError(f"H is {hidden}, I {inner}: must be multiples of 256 and 128")
        self.block_m = arrivals.rows_per_block
        if self.block_m not in (128, 256):
            raise ValueError(f"rows_per_block is {self.block_m}, must be 128 or 256")
        self.width = 256 * 128 // self.block_m  # of a program's tile: of gate and up together, or of y
        self.x, self.w13, self.w2, self.arrivals = x, w13, w2, arrivals
        self.timeout_ns = int(timeout * 1e9)
        self.blocks_here = blocks
        self.h = x.new_empty(x.numel() // hidden, inner)
        self.y = torch.empty_like(x)
        self.tickets, self.signals = torch.zeros(2 + blocks, dtype=torch.int32, device=x.device).split([2, blocks])
        self.tiles = hidden // self.width
        self.num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count

    def gate_up(self, programs: int) -> None:
        """On the current stream. May be launched more than once: the launches share the tiles."""
        state, hidden, inner = self.arrivals.state, self.x.shape[-1], self.h.shape[1]
        gate_up_kernel[(programs,)](
            self.x, self.w13, self.h, state, self.tickets[:1], self.arrivals.blocks,
            self.blocks_here, self.timeout_ns, hidden, inner, BLOCK_M=self.block_m, BLOCK_N=self.width // 2,
            BLOCK_K=64, num_warps=8, num_stages=4,
        )  # fmt: skip

    def down(self, programs: int) -> None:
        state, hidden, inner = self.arrivals.state, self.x.shape[-1], self.h.shape[1]
        down_kernel[(programs,)](
            self.h, self.w2, self.y, state, self.tickets[1:], self.signals, self.arrivals.blocks, self.blocks_here,
            self.timeout_ns, inner, hidden, BLOCK_M=self.block_m, BLOCK_N=self.width, BLOCK_K=64,
            num_warps=8, num_stages=4,
        )  # fmt: skip
