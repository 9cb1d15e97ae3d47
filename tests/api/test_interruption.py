"""Signals that come while a rank waits in an operation."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.config import pack_dispatch
from nccl_ep.testing import run_ranks
from tests.support.patience import PATIENCE, Clock, Late, with_more_time

X, IDS = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 0]])
CONFIG = pack_dispatch({"num_experts": 2, "topk": 2, "max_tokens": 2, "layout": 3})


class Interrupted(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """What the handlers of two signals have noted: one returns, one raises."""
    notes: list[str] = []

    def note(*_: Any) -> None:
        notes.append("noted")

    def interrupt(*_: Any) -> None:
        notes.append("raised")
        raise Interrupted("by a handler")

    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGUSR2, interrupt)
    yield notes
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("called", ["operation", "op"])
def test_a_handler_that_raises_ends_the_wait(mode: str, called: str, handled: list[str]) -> None:
    """The exception is the handler's own; the buffer has failed, and says why. A handler that returns ends nothing."""
    with_more_time(partial(_interrupt, mode, called, handled))


def _interrupt(mode: str, called: str, handled: list[str], seconds: float) -> None:
    """seconds: from which on the rank waits."""
    handled.clear()
    sizes: dict[str, Any] = {"max_tokens": 2, "hidden": 64, "topk": 2, "num_experts": 2, "mode": "auto"}
    buffer, other = run_ranks(2, lambda group: nccl_ep.Buffer.for_shapes(group, **sizes, device="cpu", timeout=300.0))

    def send() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    def wait() -> None:
        if called == "operation":
            nccl_ep.dispatch(X, IDS, buffer=buffer, num_experts=2, mode=mode, layout="flat")
        elif mode == "ll":
            torch.ops.nccl_ep.ll_dispatch(buffer._seq, X, None, IDS, None, 4, CONFIG)
        else:
            torch.ops.nccl_ep.ht_dispatch(buffer._seq, [X], None, IDS, None, 4, CONFIG)

    sending = threading.Thread(target=send)
    with Clock(2 * seconds + PATIENCE), pytest.raises(Interrupted, match="by a handler"):
        sending.start()
        wait()
    assert handled == ["noted", "raised"]
    sending.join()
    what = "high-throughput dispatch 1" if mode == "ht" else "dispatch 1"
    try:
        buffer.check()
    except nccl_ep.TimeoutError as error:
        assert re.search(f"rank 0 was interrupted while it waited for .* rank 1 in {what}", str(error)), error
    else:
        raise Late("the signals came before the wait")
    for each in (buffer, other):
        each.destroy()
