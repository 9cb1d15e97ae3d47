"""Time in tests, on machines that may be slow or busy: a limit is generous, or relative, or has another chance."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nccl_ep import _C

PATIENCE = 60.0  # seconds; what takes longer hangs, or has waited for a deadline of so many
DEADLINES = (0.7, 5.0, 30.0)  # seconds, of ranks that wait for one that does not come
_TRIES = 10


def of_living_ranks(seconds: float) -> float:
    """The deadline of a buffer whose ranks all live: emulated GPUs are slow."""
    return max(seconds, 600.0) if _C.EMULATES_GPU else seconds


class Late(AssertionError):
    """What a busy machine does as well as a mistake: a living rank came too late."""


def with_more_time(test: Callable[[float], None], deadlines: Sequence[float] = DEADLINES) -> None:
    """``test(deadline)``, again with a longer deadline where a living rank came too late, the longest at last."""
    for deadline in deadlines[:-1]:
        try:
            return test(deadline)
        except Exception as error:
            # Of run_ranks, which adds the texts of the other ranks: this one's error may follow from what they did.
            notes = [note for note in getattr(error, "__notes__", ()) if f": {Late.__name__}: " in note]
            if not isinstance(error, Late) and not notes:
                raise
            warnings.warn(f"repeated, {deadline} s were too short: {'; '.join(notes) or error}", stacklevel=2)
    return test(deadlines[-1])


class Clock:
    """Holds a block against a limit, in seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, kind: object, *_: object) -> None:
        took = time.monotonic() - self.start
        if kind is None:
            assert took < self.limit, f"took {took:.2f} s, at most {self.limit} s"


def raises_at_once(deadline: float, error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    """Every try raises. One that waits for the deadline takes no less, so that a single quick one shows that none is
    waited for, while the machine may keep any of them."""
    took = []
    for _ in range(_TRIES):
        start = time.monotonic()
        with pytest.raises(error, match=match):
            call()
        took.append(time.monotonic() - start)
        if took[-1] < deadline / 2:
            return
    raise AssertionError(f"took {min(took):.2f} s at least, the deadline is {deadline} s")
