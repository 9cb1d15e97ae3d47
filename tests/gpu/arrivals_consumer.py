"""A kernel that copies blocks of rows as a dispatch announces them."""

from __future__ import annotations

import triton
import triton.language as tl

from nccl_ep.triton import expert_of, first_row_of, rows_of, wait_plan, wait_rows


@triton.jit
def copy_blocks(x, seen, experts, state, blocks, blocks_here, words, timeout_ns: tl.constexpr, WIDTH: tl.constexpr):
    """seen[row] = x[row] of int32 rows of `words`, block by block as they arrive; experts[row]: the block's."""
    place = tl.program_id(0)
    planned = wait_plan(state, timeout_ns)
    total = 0  # of the plan's blocks; where it is another number, rows are missing
    for block in range(blocks_here * (planned >= 0)):
        total += (rows_of(state, blocks, block) > 0).to(tl.int32)
    planned = tl.where(total == planned, planned, 0)
    rows = 1
    while (place < planned) & (rows > 0):
        block = wait_rows(state, blocks, place, timeout_ns)
        rows = 0
        if block >= 0:
            rows = rows_of(state, blocks, block)
        first = first_row_of(state, blocks, tl.maximum(block, 0)).to(tl.int64)
        expert = expert_of(state, blocks, tl.maximum(block, 0))
        for row in range(rows):
            tl.store(experts + first + row, expert)
            for word in range(0, words, WIDTH):
                at = word + tl.arange(0, WIDTH)
                value = tl.load(x + (first + row) * words + at, mask=at < words)
                tl.store(seen + (first + row) * words + at, value, mask=at < words)
        place += tl.num_programs(0)
