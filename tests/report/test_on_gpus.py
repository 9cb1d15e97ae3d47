"""What a recording does on a GPU, on events and streams that only write down what they are asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nccl_ep import recording

LINE = {
    "buffer": "b.rank1", "rank": 1, "num_ranks": 2, "operation": "ht dispatch", "begin_ns": 5, "end_ns": 6,
    "experts": 4, "is_home_bound": False,
}  # fmt: skip
IDS = torch.tensor([[0, 1], [3, -1], [2, 0]])


class Gpu:
    """Its streams work only when ``run`` says so: 1 ms for what lies between two events of a stream."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ms = 0.0
        self.enqueued: list[Event] = []
        self.is_capturing = False

    def run(self) -> None:
        for event in self.enqueued:
            self.ms += 1
            event.ms = self.ms
        self.enqueued.clear()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.ms = gpu, None

    def record(self, stream: Any) -> None:
        self._gpu.asked.append(f"record on {stream.cuda_stream}")
        self._gpu.enqueued.append(self)

    def synchronize(self) -> None:
        self._gpu.asked.append("synchronize")
        self._gpu.run()

    def query(self) -> bool:
        return self.ms is not None

    def elapsed_time(self, other: Event) -> float:
        assert self.ms is not None and other.ms is not None
        return other.ms - self.ms


class Stream:
    def __init__(self, cuda_stream: int, device: int = 0) -> None:
        self.cuda_stream = cuda_stream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(recording, "_timing_event", lambda: Event(made))
    monkeypatch.setattr(recording, "_page_locked", lambda shape: torch.empty(shape, dtype=torch.int32))
    for name, value in {
        "device": lambda index: contextlib.nullcontext(), "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda: Stream(7), "ExternalStream": Stream,
        "is_current_stream_capturing": lambda: made.is_capturing,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    yield made


def operate(recorder: recording._Recorder, number: int, stream: int, *counted: Any, **more: Any) -> None:
    begun = recorder.begin((0, stream))
    recorder.end((LINE | {"number": number} | more, begun, *counted))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rank1.jsonl").read_text().splitlines()][2:-1]


def test_the_host_waits_once_and_reads_what_is_done(tmp_path: Path, gpu: Gpu) -> None:
    recorder = recording._Recorder(tmp_path)
    for number in range(1, 2 * recording._READ_AFTER):
        operate(recorder, number, 7 + number % 2, None, IDS, False)
        if number == recording._READ_AFTER - 2:
            gpu.run()
    assert gpu.asked.count("synchronize") == 1  # for the two clocks
    assert gpu.asked[:5] == ["record on 8", "synchronize", "record on 8", "record on 8", "record on 8"]
    assert len(recorder._waiting) == recording._READ_AFTER + 1  # the GPU has not come to them
    recorder.close()
    found = lines(tmp_path)
    assert [line["number"] for line in found] == list(range(1, 2 * recording._READ_AFTER))
    assert {line["device_us"] for line in found} == {1000.0}
    begins = [line["device_begin_ns"] for line in found]
    assert {later - earlier for earlier, later in pairwise(begins)} == {3_000_000}
    assert all(line["rows"] == [2, 2] and line["choices"] == [2, 1, 1, 1] for line in found)


def test_rows_that_the_operation_has_counted_are_copied(tmp_path: Path, gpu: Gpu) -> None:
    recorder = recording._Recorder(tmp_path)
    operate(recorder, 1, 7, torch.tensor([5, 9], dtype=torch.int32), None, False, is_home_bound=True)
    operate(recorder, 2, 7, None, IDS, True, is_home_bound=True)
    operate(recorder, 3, 7, None, None, False)
    recorder.close()
    first, per_choice, without = lines(tmp_path)
    assert first["rows"] == [5, 9] and per_choice["rows"] == [3, 2] and "rows" not in without
    assert not any("choices" in line for line in (first, per_choice, without))


def test_nothing_is_added_to_a_graph(tmp_path: Path, gpu: Gpu) -> None:
    recorder = recording._Recorder(tmp_path)
    gpu.is_capturing = True
    operate(recorder, 1, 9, None, IDS, False)
    assert gpu.asked == []
    gpu.is_capturing = False
    operate(recorder, 2, 9, None, IDS, False)
    recorder.close()
    captured, eager = lines(tmp_path)
    assert captured["is_captured"] and "rows" not in captured and "device_us" not in captured
    assert eager["rows"] == [2, 2] and eager["device_us"] == 1000.0
