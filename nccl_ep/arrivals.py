"""Rows of a dispatch that announce themselves, block by block, to a consumer that runs beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from .buffer import Buffer, require_buffer
from .checks import MAX_INT32, require_integers, require_one_of, require_timeout, require_within
from .choices import LayoutName
from .errors import TimeoutError, UsageError
from .marks import mark_memory

# csrc/runtime/common/arrivals.h
_EXPECTED, _FAILED, _PLAN, _HEADER, _TABLES, _MOST_BLOCKS = 0, 1, 6, 16, 5, 65535
_WORDS, _ROWS, _FIRST, _EXPERTS = range(4)


def require_arrivals(arrivals: object, buffer: Buffer) -> None:
    if not isinstance(arrivals, Arrivals):
        raise TypeError(f"arrivals is a {type(arrivals).__name__}, must be nccl_ep.Arrivals")
    if arrivals.buffer is not buffer:
        raise UsageError("arrivals are of another buffer")


@contextlib.contextmanager
def announced(arrivals: Arrivals | None) -> Iterator[None]:
    """The dispatch inside tells of its rows."""
    if arrivals is None:
        yield
        return
    arrivals.arm()
    if is_dynamo_compiling():
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the buffer is gone
            arrivals.disarm()
        raise


@dataclass(frozen=True)
class Block:
    """A block of rows: rows [first, first + rows) of x, as [rows, H], all of one local expert."""

    number: int
    first: int
    rows: int
    expert: int


class Arrivals:
    """Memory in which dispatches announce blocks of rows, one dispatch after the other. It is never cleared.

    A block has up to ``rows_per_block`` rows of one expert. In expert_major [L, C, H] block b of expert e has
    number e * ceil(C / rows_per_block) + b. In packed [N, H] block b begins at row b * rows_per_block, and
    ``expert_alignment`` must be a multiple of ``rows_per_block``.

    The words are for the dispatch that was begun last. A consumer is enqueued behind the call that begins it, and has
    ended before the next one is. In what torch.compile compiles, the consumer is an op or a Triton kernel that takes
    ``state`` beside rows of the output: the compiler does not know that a dispatch writes into ``state``.

    Attributes:
        state: int32, the memory; csrc/runtime/common/arrivals.h has its parts.
        expected: int32 [1] what a word of the present dispatch becomes. failed: int32 [1] becomes that where the
            dispatch gives up.
        plan: int64 [1] ``expected`` << 32 | blocks that have rows, as soon as the routing is known: before the rows.
        words: int32 [blocks] ``expected`` where all rows of the block lie at their place.
        rows, first, experts: int32 [blocks] of all blocks of the output once ``plan`` has come, and of a block whose
            word has come: how many rows it has, the first of them as a row of x seen as [rows, H], and their local
            expert (-1: no rows).
        order: int64 [blocks] the blocks in the order in which they arrived: ``expected`` << 32 | block. Blocks without
            rows stand last.
    """

    def __init__(self, buffer: Buffer, *, blocks: int, rows_per_block: int = 128) -> None:
        """
        Args:
            blocks: of the largest output, see ``blocks_of``.
            rows_per_block: 64 to 256 suit GEMMs.

        Raises: ValueError, with the value.
        """
        require_buffer(buffer)
        require_within(1, _MOST_BLOCKS, blocks=blocks)
        require_within(1, MAX_INT32, rows_per_block=rows_per_block)
        self.blocks, self.rows_per_block = blocks, rows_per_block
        order_at = _HEADER + (_TABLES * blocks + 1) // 2 * 2
        self.buffer = buffer
        self.state = torch.zeros(order_at + 2 * blocks, dtype=torch.int32, device=buffer.device)
        mark_memory(self.state)
        tables = self.state[_HEADER : _HEADER + _TABLES * blocks].view(_TABLES, blocks)
        self.expected = self.state[_EXPECTED : _EXPECTED + 1]
        self.failed = self.state[_FAILED : _FAILED + 1]
        self.plan = self.state[_PLAN : _PLAN + 2].view(torch.int64)
        self.words, self.rows, self.first, self.experts = (tables[each] for each in (_WORDS, _ROWS, _FIRST, _EXPERTS))
        self.order = self.state[order_at:].view(torch.int64)
        self._told = 0  # of ``failed``

    @staticmethod
    def blocks_of(layout: LayoutName, capacity: int, num_local_experts: int, rows_per_block: int) -> int:
        """Blocks of an output: ``capacity`` as in ``dispatch``, rows of an expert (expert_major) or in all (packed).

        Raises: ValueError, TypeError, with the value.
        """
        require_one_of(("expert_major", "packed"), layout=layout)
        require_within(0, MAX_INT32, capacity=capacity)
        require_within(1, MAX_INT32, num_local_experts=num_local_experts, rows_per_block=rows_per_block)
        each = -(-capacity // rows_per_block)
        return each * num_local_experts if layout == "expert_major" else each

    def begin(self) -> None:
        """``dispatch`` calls it, on the current stream, before its operation: words of earlier ones are old then."""
        torch.ops.nccl_ep.begin_arrivals.default(self.buffer._seq, self.state)

    def arm(self) -> None:
        """``dispatch`` calls it: the buffer's next dispatch announces its rows here."""
        torch.ops.nccl_ep.announce_rows.default(self.buffer._seq, self.state, self.blocks, self.rows_per_block)

    def disarm(self) -> None:
        torch.ops.nccl_ep.announce_rows.default(self.buffer._seq, None, 0, 0)

    def has_failed(self) -> bool:
        """Whether the present dispatch, or a consumer of it, has given up. The host waits for the current stream."""
        return bool((self.failed == self.expected).item())

    def check(self) -> None:
        """Raises TimeoutError where a dispatch, or a consumer of its rows, has given up since the last call.

        A consumer on a GPU that gives up by itself leaves its work undone, and fails no operation. The host waits for
        the current stream.
        """
        failed = int(self.failed.item())
        if failed != self._told:
            self._told = failed
            raise TimeoutError(f"dispatch {failed} with these arrivals, or a consumer of its rows, has given up")

    def await_plan(
        self, timeout: float = 60.0, *, blocks: int | None = None, expected: int | None = None
    ) -> list[Block]:
        """All blocks that have rows, by their numbers, on CPU ranks: as soon as they are known, before the rows come.

        Arguments and errors are those of ``await_blocks``. A consumer on the GPU has ``wait_plan``.
        """
        known, expected = self._require_wait(timeout, blocks, expected)
        self._await(self.plan, 0, expected, timeout, "the plan of blocks did not come")
        return [block for number in range(known) if (block := self._block(number)).rows > 0]

    def await_blocks(
        self, timeout: float = 60.0, *, blocks: int | None = None, expected: int | None = None
    ) -> Iterator[Block]:
        """The blocks that have rows, in the order in which they arrive, on CPU ranks: in another thread than dispatch.

        A consumer on the GPU waits by ``nccl_ep.triton`` or ``nccl_ep_signals.cuh``.

        Args:
            timeout: seconds for each block.
            blocks: of the output, where this memory has room for more.
            expected: of the dispatch that is meant, which may not have begun; default: of the one that was begun last.

        Raises: TimeoutError, where no further block comes in ``timeout`` seconds or the dispatch gives up; ValueError,
        TypeError, with the value; UsageError on a GPU.
        """
        return self._arrived(timeout, *self._require_wait(timeout, blocks, expected))

    def _arrived(self, timeout: float, blocks: int, expected: int) -> Iterator[Block]:
        for place in range(blocks):
            number = self._await(
                self.order, place, expected, timeout, f"block {place} in the order of arrivals did not come"
            )
            block = self._block(number)
            if block.rows == 0:
                return
            yield block

    def _require_wait(self, timeout: float, blocks: int | None, expected: int | None) -> tuple[int, int]:
        """The blocks and the ``expected`` of a wait of the host."""
        require_timeout(timeout=timeout)
        require_within(0, self.blocks, blocks=self.blocks if blocks is None else blocks)
        require_integers(expected=expected)
        if self.buffer.device.type != "cpu":
            raise UsageError(
                f"await_blocks and await_plan are for CPU ranks, and the buffer is on {self.buffer.device}: consumers "
                "there wait by nccl_ep.triton or nccl_ep_signals.cuh"
            )
        return self.blocks if blocks is None else blocks, int(self.expected) if expected is None else expected

    def _await(self, words: torch.Tensor, place: int, expected: int, timeout: float, missing: str) -> int:
        """The low half of a word whose high half is ``expected``."""
        seen, state = words.numpy(), self.state.numpy()
        end = time.monotonic() + timeout
        while int(seen[place]) >> 32 != expected:
            if int(state[_FAILED]) == expected or time.monotonic() > end:
                raise TimeoutError(missing)
            time.sleep(2e-5)
        return int(seen[place]) & 0xFFFFFFFF

    def _block(self, number: int) -> Block:
        return Block(number, int(self.first[number]), int(self.rows[number]), int(self.experts[number]))
