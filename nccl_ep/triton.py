"""For kernels in Triton: waits for rows of a dispatch as they arrive, and signals rows to a combine. Needs Triton.

All programs of a kernel that waits must be able to run while the dispatch does: it needs the SMs that ``num_sms`` gives
it. docs/memory_model.md says which stores pair with which loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# csrc/runtime/common/arrivals.h. kClock is the consumers' own.
_FAILED = tl.constexpr(1)
_CLOCK = tl.constexpr(4)
_PLAN = tl.constexpr(6)
_HEADER = tl.constexpr(16)
_TABLES = tl.constexpr(5)
_ROWS = tl.constexpr(1)
_FIRST = tl.constexpr(2)
_EXPERTS = tl.constexpr(3)
_POLLS = tl.constexpr(128)  # between two looks at the clock and the failure flag


@triton.jit
def _wait_word(state, word_at, timeout_ns):  # type: ignore[no-untyped-def]
    """The low half of a word whose high half becomes what the dispatch expects; -1: something has given up.

    Source: a spinning acquire, as in Triton-distributed's ``dl.wait``; Triton's own atomics alone are used.
    """
    expected = tl.load(state)
    clock = (state + _CLOCK).to(tl.pointer_type(tl.int64), bitcast=True)
    # One thread runs a scalar atomic and tells the others: all threads see the same word and the same time.
    word = tl.atomic_add(word_at, 0, sem="acquire", scope="gpu")
    polls = 0
    start = tl.full((), 0, tl.int64)
    is_waiting = 1
    while ((word >> 32).to(tl.int32) != expected) & (is_waiting != 0):
        polls += 1
        if polls % _POLLS == 0:
            now = tl.atomic_max(clock, globaltimer().to(tl.int64), sem="relaxed", scope="gpu")
            failed = tl.atomic_add(state + _FAILED, 0, sem="relaxed", scope="gpu")
            if polls == 2 * _POLLS:  # what the clock gave the first time may be of an earlier kernel
                start = now
            if failed == expected:
                is_waiting = 0
            if (polls > 2 * _POLLS) & (now - start > timeout_ns):
                is_waiting = 0
                tl.atomic_xchg(state + _FAILED, expected, sem="relaxed", scope="gpu")
        word = tl.atomic_add(word_at, 0, sem="acquire", scope="gpu")
    return tl.where((word >> 32).to(tl.int32) == expected, word.to(tl.int32), -1)


@triton.jit
def wait_plan(state, timeout_ns):  # type: ignore[no-untyped-def]
    """Waits until it is known which blocks have rows, before the rows come. ``rows_of``, ``first_row_of`` and
    ``expert_of`` may be asked of any block of the output then.

    Args:
        state: int32*, ``Arrivals.state``.
        timeout_ns: int64, how long to wait. Where it passes, the failure flag is set, and other programs stop waiting.

    Returns: how many blocks have rows, or -1 where the dispatch or a consumer of it has given up.
    """
    return _wait_word(state, (state + _PLAN).to(tl.pointer_type(tl.int64), bitcast=True), timeout_ns)


@triton.jit
def wait_rows(state, blocks, place, timeout_ns):  # type: ignore[no-untyped-def]
    """Waits for the block at ``place`` in the order of arrival. All threads of the program may read its rows then.

    Args:
        state: int32*, ``Arrivals.state``. blocks: ``Arrivals.blocks``. place: 0 to blocks of the output - 1.
        timeout_ns: int64, how long to wait. Where it passes, the failure flag is set, and other programs stop waiting.

    Returns: the block, or -1 where the dispatch or a consumer of it has given up. A block without rows (``rows_of`` is
    0) says that no later place has rows.
    """
    order = (state + _HEADER + (_TABLES * blocks + 1) // 2 * 2).to(tl.pointer_type(tl.int64), bitcast=True) + place
    return _wait_word(state, order, timeout_ns)


@triton.jit
def rows_of(state, blocks, block):  # type: ignore[no-untyped-def]
    """Of a block that has arrived, or behind ``wait_plan``: how many rows it has."""
    return tl.load(state + _HEADER + _ROWS * blocks + block, volatile=True)


@triton.jit
def first_row_of(state, blocks, block):  # type: ignore[no-untyped-def]
    """Of a block that has arrived, or behind ``wait_plan``: its first row, of x as [rows, H]."""
    return tl.load(state + _HEADER + _FIRST * blocks + block, volatile=True)


@triton.jit
def expert_of(state, blocks, block):  # type: ignore[no-untyped-def]
    """Of a block that has arrived, or behind ``wait_plan``: the local expert of its rows; -1: it has none."""
    return tl.load(state + _HEADER + _EXPERTS * blocks + block, volatile=True)


@triton.jit
def signal_rows(signals, index):  # type: ignore[no-untyped-def]
    """Counts up ``signals[index]``, of ``combine_send(row_signals=...)``, behind all that the program has stored."""
    tl.debug_barrier()
    tl.atomic_add(signals + index, 1, sem="release", scope="gpu")
