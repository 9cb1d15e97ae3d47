"""A kernel that writes the rows of a combine while its send waits for their signals: a thread of the host."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType

import torch

POISON = 0x7F  # every byte of a row that is not written yet: a NaN in each dtype


class RowProducer:
    """Writes blocks of rows in random order, late, each with ``threshold`` steps of its counter behind it.

    Args:
        made: [L, C, H], or packed [N, H], what the rows will be.
        rows_per_signal: of a block. spare: counters behind the last block's, flat.
        delay: seconds that a block takes at most.

    Attributes:
        rows: as ``made``, poisoned at first. signals: int32 [L, blocks of an expert], or flat with ``spare`` and where
            rows are packed.
    """

    def __init__(
        self, made: torch.Tensor, rows_per_signal: int, *, threshold: int = 1, spare: int = 0, seed: int = 0,
        delay: float = 0.002,
    ) -> None:  # fmt: skip
        local, capacity = (1, made.shape[0]) if made.dim() == 2 else made.shape[:2]
        self.made, self.rows_per_signal, self.threshold, self.delay = made, rows_per_signal, threshold, delay
        self.rows = torch.empty_like(made)
        self.rows.view(torch.uint8).fill_(POISON)
        per_expert = -(-capacity // rows_per_signal)
        flat = torch.zeros(local * per_expert + spare, dtype=torch.int32)
        self._counters = flat[: local * per_expert].view(local, per_expert)
        self.signals = flat if spare or made.dim() == 2 else self._counters
        self.random = random.Random(seed)
        self.blocks = [(expert, block) for expert in range(local) for block in range(per_expert)]
        self.random.shuffle(self.blocks)
        self._thread = threading.Thread(target=self._run)
        self._begin = threading.Event()

    def write(self, expert: int, block: int) -> None:
        """The rows of a block, and its signal."""
        begin = block * self.rows_per_signal
        end = begin + self.rows_per_signal
        rows, made = (each.view(-1, *each.shape[-2:]) for each in (self.rows, self.made))
        rows[expert, begin:end] = made[expert, begin:end]
        for _ in range(self.threshold):
            self._counters[expert, block] += 1

    def _run(self) -> None:
        self._begin.wait()
        time.sleep(10 * self.delay)  # the send is likely to wait by now
        for index, (expert, block) in enumerate(self.blocks):
            if index < 40:
                time.sleep(self.random.random() * self.delay)
            self.write(expert, block)

    def __enter__(self) -> RowProducer:
        self._thread.start()
        return self

    def begin(self) -> None:
        """Called before the send, which does not return before it is done on CPU ranks."""
        self._begin.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin.set()
        self._thread.join()
