"""What the two GEMMs in Triton have between them: SwiGLU and its gradient, of a tile of gate and of up."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def store_gates(gates, first, own, is_row, columns, gate, up, N):
    """Rows first + own of gates [.., 2 * N], gate beside up."""
    at = gates + first * (2 * N) + (own[:, None] * (2 * N) + columns[None, :])
    tl.store(at, gate.to(gates.dtype.element_ty), mask=is_row[:, None])
    tl.store(at + N, up.to(gates.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def store_gates_gradient(hidden, gates, weights, out, weighted, dots, first, own, is_row, columns, tile, tiles, N):
    """hidden: the gradient of swiglu(gate, up) [rows first + own, columns], if every row had weight 1.

    weights: of the rows. out: the gradient of gates. weighted [.., N]: swiglu(gate, up) times the row's weight.
    dots [.., tiles]: of each tile of columns, the share in the gradient of the row's weight.
    """
    is_there = is_row[:, None]
    at = own[:, None] * (2 * N) + columns[None, :]  # of 32 bits, behind 64 of the block's
    gates += first * (2 * N)
    gate = tl.load(gates + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gates + N + at, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(weights + first + own, mask=is_row, other=0.0)[:, None]
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    tl.store(dots + (first + own) * tiles + tile, tl.sum(hidden * silu * up, 1), mask=is_row)
    made = (silu * up * weight).to(weighted.dtype.element_ty)
    tl.store(weighted + first * N + (own[:, None] * N + columns[None, :]), made, mask=is_there)
    hidden *= weight
    out += first * (2 * N)
    of_gate = hidden * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(out + at, of_gate.to(out.dtype.element_ty), mask=is_there)
    tl.store(out + N + at, (hidden * silu).to(out.dtype.element_ty), mask=is_there)
