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

from examples.overlapped_moe.swiglu import store_gates, store_gates_gradient, swiglu
from nccl_ep.arrivals import Arrivals
from nccl_ep.triton import expert_of, first_row_of, rows_of, signal_rows, wait_rows

SCALED = 128  # elements with one scale in FP8


@triton.jit
def _weights(w, expert, count, column, columns, k, inner, K, w_expert, w_row, w_inner, TMA: tl.constexpr,
             TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of an expert's weights [count, K], of its rows from ``column`` on."""
    if TMA:
        if TRANSPOSED:
            return w.load([(expert * K + k).to(tl.int32), column])
        else:
            return w.load([(expert * count + column).to(tl.int32), k]).T
    else:
        at = w + expert * w_expert + columns[None, :].to(tl.int64) * w_row
        return tl.load(at + (k + inner)[:, None].to(tl.int64) * w_inner)


@triton.jit
def _add(acc, a_tile, b_tile, a_scale, w_scales, FP8: tl.constexpr):
    if FP8:
        return acc + tl.dot(a_tile, b_tile) * (a_scale[:, None] * tl.load(w_scales)[None, :])
    else:
        return tl.dot(a_tile, b_tile, acc)


@triton.jit
def grouped_gemm_kernel(
    a, w, out, a_scales, w_scales, out_scales, gates, row_weights, weighted, dots, state, tickets, signals, blocks,
    blocks_here, timeout_ns: tl.constexpr, K, N, w_expert, w_row, w_inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """KIND "rows": out[row] = a[row] @ w.T, of w [L, N, K], and each tile counts up the signal of its block: N //
    BLOCK_N for all rows. "gated": out[row] = swiglu(a[row] @ gate.T, a[row] @ up.T), of w [L, 2 * N, K], gate above up;
    in FP8 quantised again; ``gates``, if there are any, keeps the products. "gradient": out, weighted and dots as
    swiglu.py has them, of hidden = a[row] @ w.T.

    blocks: of the arrivals; blocks_here: of this output. w: a pointer with strides, or a descriptor (TMA), of the
    weights or (TRANSPOSED) of what they are transposed of. FP8: a and w are e4m3, with a float32 scale for 128 elements
    of a row of a, and for 128 x 128 of an expert's w."""
    GATED: tl.constexpr = KIND == "gated"
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
            first = first_row_of(state, blocks, block).to(tl.int64)
            a_rows = first + own
            is_row = own[:, None] < rows
            column = tile // GROUP * BLOCK_N
            columns = column + tl.arange(0, BLOCK_N)
            inner = tl.arange(0, BLOCK_K)
            count = 2 * N if GATED else N
            a_at = a + a_rows[:, None] * K + inner[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            up = acc
            scaled = K // 128
            a_scale, scales_at = own.to(tl.float32), own  # which are read of FP8 alone
            if FP8:
                scales_at = w_scales + (expert * count + columns) // 128 * scaled
            for k in range(0, K, BLOCK_K):
                a_tile = tl.load(a_at + k, mask=is_row, other=0.0)
                if FP8:
                    a_scale = tl.load(a_scales + a_rows * scaled + k // 128, mask=own < rows, other=0.0)
                b_tile = _weights(w, expert, count, column, columns, k, inner, K, w_expert, w_row, w_inner, TMA,
                                  TRANSPOSED, BLOCK_N, BLOCK_K)  # fmt: skip
                acc = _add(acc, a_tile, b_tile, a_scale, scales_at + k // 128, FP8)
                if GATED:
                    b_tile = _weights(w, expert, count, N + column, N + columns, k, inner, K, w_expert, w_row, w_inner,
                                      TMA, TRANSPOSED, BLOCK_N, BLOCK_K)  # fmt: skip
                    up = _add(up, a_tile, b_tile, a_scale, scales_at + N // 128 * scaled + k // 128, FP8)
            if KIND == "gradient":
                store_gates_gradient(acc, gates, row_weights, out, weighted, dots, first, own, own < rows, columns,
                                     tile // GROUP, tiles, N)  # fmt: skip
            else:
                if GATED:
                    if gates is not None:
                        store_gates(gates, first, own, own < rows, columns, acc, up, N)
                    acc = swiglu(acc, up)
                    if FP8:
                        scale = tl.maximum(tl.max(tl.abs(acc), 1), 1e-10) / 448
                        acc = acc / scale[:, None]
                        tl.store(out_scales + a_rows * (N // 128) + column // 128, scale, mask=own < rows)
                tl.store(out + a_rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=is_row)
            if KIND == "rows":
                signal_rows(signals, block)


class GroupedGemms:
    """What GEMMs over the rows of one dispatch have in common.

    Args:
        arrivals: of the dispatch. blocks: of 128 or 256 rows that its output has. FP8: of 128.
        timeout: seconds that a program waits for a block.
        group: blocks that share the columns of the weights that are read. tma: weights come by TMA; of [L, A, B] they
            are contiguous, or transposed of what is. stages: of the pipelines.

    Attributes:
        signals: int32 [blocks] column tiles of the rows for combine that are written, of each block.
    """

    def __init__(
        self, arrivals: Arrivals, blocks: int, timeout: float, *, fp8: bool = False, group: int = 1, tma: bool = False,
        stages: int = 4,
    ) -> None:  # fmt: skip
        self.block_m = arrivals.rows_per_block
        if self.block_m not in ((128,) if fp8 else (128, 256)):
            raise ValueError(f"rows_per_block is {self.block_m}, must be 128 or, of bf16, 256")
        self.width = 256 * 128 // self.block_m  # columns of a program's tile, or twice as many as its tile of two has
        self.arrivals, self.blocks_here, self.timeout_ns = arrivals, blocks, int(timeout * 1e9)
        device = arrivals.state.device
        self.tickets, self.signals = torch.zeros(2 + blocks, dtype=torch.int32, device=device).split([2, blocks])
        # On the CPU it is one program of Triton's interpreter.
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.how = {
            "BLOCK_M": self.block_m, "BLOCK_K": SCALED if fp8 else 64, "GROUP": group, "FP8": fp8, "TMA": tma,
            "num_warps": 8, "num_stages": 3 if fp8 else stages,
        }  # fmt: skip

    def run(
        self, programs: int, kind: str, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tickets: torch.Tensor, *,
        scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
        gates: torch.Tensor | None = None, row_weights: torch.Tensor | None = None,
        weighted: torch.Tensor | None = None, dots: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """On the current stream. May be launched more than once: the launches share the tiles. scales: of a, w and
        out."""
        width = self.width if kind == "rows" else self.width // 2
        columns = w.shape[1] // 2 if kind == "gated" else w.shape[1]
        is_transposed = w.stride(1) == 1
        weights: Any = w
        if self.how["TMA"]:
            tile = [width, self.how["BLOCK_K"]]
            stored = w.transpose(1, 2) if is_transposed else w
            flat = stored.view(-1, stored.shape[2])
            weights = TensorDescriptor.from_tensor(flat, tile[::-1] if is_transposed else tile)
        grouped_gemm_kernel[(programs,)](
            a, weights, out, *scales, gates, row_weights, weighted, dots, self.arrivals.state, tickets, self.signals,
            self.arrivals.blocks, self.blocks_here, self.timeout_ns, w.shape[2], columns, *w.stride(), BLOCK_N=width,
            KIND=kind, TRANSPOSED=is_transposed, **self.how,
        )  # fmt: skip


def require_sizes(hidden: int, inner: int) -> None:
    """ValueError for sizes that the tiles do not divide."""
    if hidden % 256 != 0 or inner % 128 != 0:
        raise ValueError(f"H is {hidden}, I {inner}: must be multiples of 256 and 128")
