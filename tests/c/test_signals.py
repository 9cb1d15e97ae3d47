"""Row signals of the C library: a send of combine that waits for the rows' blocks."""

from __future__ import annotations

import ctypes as c
from typing import Any

import pytest
import torch

from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import SECOND, refused, tensor
from tests.ll.row_producer import RowProducer

BAD = c_api.INVALID_ARGUMENT


class Solo:
    """A rank alone after a dispatch of four tokens to two experts, of four rows each."""

    def __init__(self, library: Library, group: c.c_void_p, **handle: int) -> None:
        self.library, self.group, self.handle = library, group, c.c_void_p()
        self.x = torch.arange(4 * 16, dtype=torch.float32).view(4, 16)
        self.ids, self.home_weights = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0]]), torch.full((4, 2), 0.5)
        self.rows, self.y = torch.zeros(2, 4, 16), torch.zeros(4, 16)
        weights, info = torch.zeros(2, 4), torch.zeros(6, dtype=torch.int32)
        config = c_api.HandleConfig(layout=c_api.LAYOUTS["expert_major"], **handle)
        library.InitHandle(self.handle, group, config, None)
        library.UpdateHandle(self.handle, tensor(self.ids))
        outputs = c_api.DispatchOutputs(tokens=tensor(self.rows), topk_weights=tensor(weights), info=tensor(info))
        library.Dispatch(
            self.handle, c_api.DispatchInputs(tokens=tensor(self.x)), outputs, c_api.DispatchConfig(), None
        )

    def combine(self, signals: torch.Tensor | None, rows: torch.Tensor | None = None, **config: Any) -> None:
        rows = self.rows if rows is None else rows
        inputs = c_api.CombineInputs(
            tokens=tensor(rows), topk_weights=tensor(self.home_weights), row_signals=tensor(signals)
        )
        good = {
            "send_only": 1,
            "weights": c_api.WEIGHTS_HOME,
            "num_sms": 1,
            "rows_per_signal": 2,
            "signal_threshold": 3,
        }
        outputs = c_api.CombineOutputs(tokens=tensor(self.y))
        self.library.Combine(self.handle, inputs, outputs, c_api.CombineConfig(**{**good, **config}), None)

    def expected(self) -> torch.Tensor:
        return self.x * (self.ids >= 0).sum(1, keepdim=True) / 2


def test_rows_leave_when_their_signals_come(library: Library) -> None:
    group = library.solo_group()
    solo = Solo(library, group)
    for seed in range(3):
        producer = RowProducer(solo.rows, 2, threshold=3, seed=seed)
        with producer:
            producer.begin()
            solo.combine(producer.signals, producer.rows)
        producer.rows.zero_()
        solo.y.zero_()
        library.Complete(solo.handle, None, None)
        assert torch.equal(solo.y, solo.expected())
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_high_throughput_waits_for_its_rows(library: Library) -> None:
    group = library.solo_group()
    solo = Solo(library, group, algorithm=c_api.HIGH_THROUGHPUT, capacity=4)
    for seed in range(3):
        producer = RowProducer(solo.rows, 2, threshold=3, seed=seed)
        solo.y.zero_()
        with producer:
            producer.begin()
            solo.combine(producer.signals, producer.rows, send_only=0)
        assert torch.equal(solo.y, solo.expected())
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


@pytest.mark.parametrize(
    ("text", "shape", "config"),
    [
        (r"row_signals has shape \[2, 3\], must be \[2, 2\]", (2, 3), {}),
        ("rows_per_signal is 0, must be at least 1", (2, 2), {"rows_per_signal": 0}),
        ("signal_threshold is -1, must be from 1 to 2147483647", (2, 2), {"signal_threshold": -1}),
        ("num_sms is 0: with row_signals it must be positive", (2, 2), {"num_sms": 0}),
        ("and split it", (2, 2), {"send_only": 0}),
        ("rows_per_signal is 2, signal_threshold 3, but there are no row_signals", None, {}),
    ],
)
def test_bad_signals_are_refused_and_harm_nothing(
    library: Library, text: str, shape: tuple[int, int] | None, config: dict[str, Any]
) -> None:
    group = library.solo_group()
    solo = Solo(library, group)
    signals = None if shape is None else torch.full(shape, 3, dtype=torch.int32)
    refused(BAD, text, lambda: solo.combine(signals, **config))
    solo.combine(torch.full((2, 2), 3, dtype=torch.int32))  # the refused call has harmed nothing
    library.Complete(solo.handle, None, None)
    assert torch.equal(solo.y, solo.expected())
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)


def test_a_signal_that_does_not_come(library: Library) -> None:
    group = library.solo_group(timeout_ns=SECOND // 4)
    solo = Solo(library, group)
    signals = torch.tensor([[3, 3], [2, 3]], dtype=torch.int32)
    refused(c_api.TIMEOUT, "signal of row block 0 of local expert 1's rows", lambda: solo.combine(signals))
    library.HandleDestroy(solo.handle)
    library.GroupDestroy(group)
