"""The gradients of the experts' weights in Triton: a product over the rows of each expert, and over no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def grouped_weight_gradient_kernel(
    a, b, out, firsts, counts, experts, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """out[e] = a[rows of e].T @ b[rows of e], of a [.., M] and b [.., N]: firsts[e], and counts[e] of them."""
    columns = N // BLOCK_N
    tiles = M // BLOCK_M * columns
    for each in range(tl.program_id(0), experts * tiles, tl.num_programs(0)):
        expert, tile = each // tiles, each % tiles
        count = tl.load(counts + expert)
        m = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
        own = tl.arange(0, BLOCK_K)
        rows = tl.load(firsts + expert).to(tl.int64) + own
        a_at = a + rows[:, None] * M + m[None, :]
        b_at = b + rows[:, None] * N + n[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, count, BLOCK_K):
            is_row = (k + own)[:, None] < count
            a_tile = tl.load(a_at, mask=is_row, other=0.0)
            b_tile = tl.load(b_at, mask=is_row, other=0.0)
            acc = tl.dot(a_tile.T, b_tile, acc)
            a_at += BLOCK_K * M
            b_at += BLOCK_K * N
        at = out + expert.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty))


def weight_gradient(
    programs: int, a: torch.Tensor, b: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """[L, M, N] of a [.., M] and b [.., N], multiples of 128. firsts, counts: int32 [L] rows of each expert."""
    m, n, experts = a.shape[-1], b.shape[-1], counts.shape[0]
    out = a.new_empty(experts, m, n)
    grouped_weight_gradient_kernel[(programs,)](
        a, b, out, firsts, counts, experts, m, n, BLOCK_M=128, BLOCK_N=256 if n % 256 == 0 else 128, BLOCK_K=64,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
