"""Kernels in Triton that move rows between the order of tokens and that of experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024


@triton.jit
def gather_rows_kernel(rows, source, out, H, BLOCK: tl.constexpr):
    """out[p] = rows[source[p]], of the program's row p, where there is one."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(source + row).to(tl.int64)
    if token >= 0:
        own = tl.arange(0, BLOCK)
        for column in range(0, H, BLOCK):
            at = column + own
            tl.store(out + row * H + at, tl.load(rows + token * H + at, mask=at < H), mask=at < H)


@triton.jit
def add_rows_kernel(rows, places, weights, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over k of weights[t, k] * rows[places[t, k]], of the program's token t and those that are there."""
    token = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, BLOCK)
    for column in range(0, H, BLOCK):
        at = column + own
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in range(K):
            place = tl.load(places + token * K + k).to(tl.int64)
            if place >= 0:
                row = tl.load(rows + place * H + at, mask=at < H, other=0.0).to(tl.float32)
                total += row * tl.load(weights + token * K + k)
        tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


def gather(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Of order.py, as ``add`` is."""
    out = rows.new_empty(len(source), rows.shape[1])
    if len(source):
        gather_rows_kernel[(len(source),)](rows, source, out, rows.shape[1], BLOCK=COLUMNS)
    return out


def add(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    tokens, topk = places.shape
    if tokens:
        add_rows_kernel[(tokens,)](rows, places, weights.contiguous(), out, rows.shape[1], K=topk, BLOCK=COLUMNS)
    return out
