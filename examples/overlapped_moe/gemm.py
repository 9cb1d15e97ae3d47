"""A grouped GEMM in Triton that takes blocks of rows in the order in which a dispatch brings them.

A program takes tiles by tickets. GROUP blocks that have arrived one after the other share the columns of the weights
that are read: tile t of a group is column tile t // GROUP of its block t % GROUP. So the programs work on the blocks
that came first, and programs of a later launch help with what is left.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nccl_ep.arrivals import Arrivals
from nccl_ep.triton import expert_of, first_row_of, rows_of, signal_rows, wait_rows

SCALED = 128  # elements with one scale in FP8


@triton.jit
def _weights(w, expert_rows, column, columns, k, inner, w_expert, w_row, w_inner, TMA: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of an expert's weights, of its rows from ``column`` on."""
    if TMA:
        return w.load([(expert_rows + column).to(tl.int32), k]).T
    else:
        at = w_expert + columns[None, :].to(tl.int64) * w_row + (k + inner)[:, None].to(tl.int64) * w_inner
        return tl.load(w + at)


@triton.jit
def _add(acc, a_tile, b_tile, a_scale, w_scales, FP8: tl.constexpr):
    if FP8:
        return acc + tl.dot(a_tile, b_tile) * (a_scale[:, None] * tl.load(w_scales)[None, :])
    else:
        return tl.dot(a_tile, b_tile, acc)


@triton.jit
def grouped_gemm_kernel(
    a, w, out, a_scales, w_scales, out_scales, state, tickets, signals, blocks, blocks_here, timeout_ns, K, N,
    w_expert, w_row, w_inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """GATED: out[row] = silu(a[row] @ gate.T) * (a[row] @ up.T), of w [L, 2 * N, K], gate above up; in FP8 quantised
    again. Else out[row] = a[row] @ w.T, bf16, of w [L, N, K], and each tile counts up the signal of its block:
    N // BLOCK_N for all rows.

    blocks: of the arrivals; blocks_here: of this output. w: a pointer with strides, or a descriptor (TMA). FP8: a and w
    are e4m3, with a float32 scale for 128 elements of a row of a, and for 128 x 128 of an expert's w."""
    tiles = N // BLOCK_N
    is_on = 1
    while is_on != 0:
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        tile = ticket % (GROUP * tiles)
        place = ticket // (GROUP * tiles) * GROUP + tile % GROUP
        block, rows = -1, 0
        if place < blocks_here:
            block = wait_rows(state, blocks, place, timeout_ns)
            if block >= 0:
                rows = rows_of(state, blocks, block)
        # Blocks without rows stand last.
        if (ticket // (GROUP * tiles) * GROUP >= blocks_here) | ((place < blocks_here) & (block < 0)):
            is_on = 0
        if (rows == 0) & (tile % GROUP == 0):
            is_on = 0
        if rows > 0:
            expert = expert_of(state, blocks, block).to(tl.int64)
            own = tl.arange(0, BLOCK_M)
            a_rows = first_row_of(state, blocks, block).to(tl.int64) + own
            is_row = own[:, None] < rows
            column = tile // GROUP * BLOCK_N
            columns = column + tl.arange(0, BLOCK_N)
            inner = tl.arange(0, BLOCK_K)
            expert_rows = expert * (2 * N if GATED else N)
            a_at = a + a_rows[:, None] * K + inner[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up = acc
            scaled = K // 128
            a_scale, scales_at = own.to(tl.float32), own  # which are read of FP8 alone
            if FP8:
                scales_at = w_scales + (expert_rows + columns) // 128 * scaled
            for k in range(0, K, BLOCK_K):
                a_tile = tl.load(a_at + k, mask=is_row, other=0.0)
                if FP8:
                    a_scale = tl.load(a_scales + a_rows * scaled + k // 128, mask=own < rows, other=0.0)
                b_tile = _weights(w, expert_rows, column, columns, k, inner, expert * w_expert, w_row, w_inner, TMA,
                                  BLOCK_N, BLOCK_K)  # fmt: skip
                acc = _add(acc, a_tile, b_tile, a_scale, scales_at + k // 128, FP8)
                if GATED:
                    b_tile = _weights(w, expert_rows, N + column, N + columns, k, inner, expert * w_expert, w_row,
                                      w_inner, TMA, BLOCK_N, BLOCK_K)  # fmt: skip
                    up = _add(up, a_tile, b_tile, a_scale, scales_at + N // 128 * scaled + k // 128, FP8)
            at = a_rows[:, None] * N + columns[None, :]
            if GATED:
                acc = acc / (1 + tl.exp(-acc)) * up
                if FP8:
                    scale = tl.maximum(tl.max(tl.abs(acc), 1), 1e-10) / 448
                    acc = acc / scale[:, None]
                    tl.store(out_scales + a_rows * (N // 128) + column // 128, scale, mask=own < rows)
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row)
            if not GATED:
                signal_rows(signals, block)


class Run:
    """The two GEMMs over the rows of one dispatch.

    Args:
        x: bf16 [.., H], rows of a dispatch, or e4m3 with ``x_scales`` [.., H / 128]. w13: [L, 2 * I, H], gate above up.
        w2: [L, H, I]. Of the dtype of x, bf16 of any strides.
        scales: of FP8: float32 [L, 2 * I / 128, H / 128] and [L, H / 128, I / 128].
        blocks: of 128 or 256 rows that x has, as the arrivals count them. FP8: of 128.
        timeout: seconds that a program waits for a block.
        group: blocks that share the columns of the weights that are read. tma: weights come by TMA; H and I are their
            last dimensions then, contiguous. stages: of the pipelines.

    Attributes:
        h: [rows, I]. y: bf16, as x; rows that do not exist are unspecified.
        signals: int32 [blocks] column tiles of y that are written, of each block. tiles: how many there are.
    """

    def __init__(
        self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, arrivals: Arrivals, blocks: int, timeout: float, *,
        x_scales: torch.Tensor | None = None, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        group: int = 1, tma: bool = False, stages: int = 4,
    ) -> None:  # fmt: skip
        hidden, inner = x.shape[-1], w2.shape[2]
        if hidden % 256 != 0 or inner % 128 != 0:
            raise ValueError(f"H is {hidden}, I {inner}: must be multiples of 256 and 128")
        self.block_m, self.fp8 = arrivals.rows_per_block, x_scales is not None
        if self.block_m not in ((128,) if self.fp8 else (128, 256)):
            raise ValueError(f"rows_per_block is {self.block_m}, must be 128 or, of bf16, 256")
        self.width = 256 * 128 // self.block_m  # of a program's tile: of gate and up together, or of y
        self.x, self.w13, self.w2, self.arrivals = x, w13, w2, arrivals
        self.x_scales, self.scales = x_scales, scales
        self.timeout_ns = int(timeout * 1e9)
        self.blocks_here = blocks
        rows = x.numel() // hidden
        self.h = x.new_empty(rows, inner)
        self.h_scales = torch.empty(rows, inner // SCALED, device=x.device) if self.fp8 else None
        self.y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        self.tickets, self.signals = torch.zeros(2 + blocks, dtype=torch.int32, device=x.device).split([2, blocks])
        self.tiles = hidden // self.width
        self.num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        self.how = {
            "BLOCK_M": self.block_m, "BLOCK_K": SCALED if self.fp8 else 64, "GROUP": group, "FP8": self.fp8, "TMA": tma,
            "num_warps": 8, "num_stages": 3 if self.fp8 else stages,
        }  # fmt: skip

    def gate_up(self, programs: int) -> None:
        """On the current stream. May be launched more than once: the launches share the tiles."""
        self._run(
            programs, self.x, self.w13, self.h, self.x_scales, 0, self.h_scales, self.tickets[:1],
            self.h.shape[1], self.width // 2, gated=True,
        )  # fmt: skip

    def down(self, programs: int) -> None:
        self._run(
            programs, self.h, self.w2, self.y, self.h_scales, 1, None, self.tickets[1:], self.y.shape[-1], self.width,
            gated=False,
        )  # fmt: skip

    def _run(
        self, programs: int, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, a_scales: torch.Tensor | None,
        which: int, out_scales: torch.Tensor | None, tickets: torch.Tensor, columns: int, block_n: int, gated: bool,
    ) -> None:  # fmt: skip
        weights: Any = w
        if self.how["TMA"]:
            weights = TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), [block_n, self.how["BLOCK_K"]])
        grouped_gemm_kernel[(programs,)](
            a, weights, out, a_scales, None if self.scales is None else self.scales[which], out_scales,
            self.arrivals.state, tickets, self.signals, self.arrivals.blocks, self.blocks_here, self.timeout_ns,
            w.shape[2], columns, *w.stride(), BLOCK_N=block_n, GATED=gated, **self.how,
        )  # fmt: skip
