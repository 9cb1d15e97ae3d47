"""What test_stream_event.py runs in a process of its own: python checks.py FOLDER, where the module fake_device is."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

sys.path.insert(0, sys.argv[1])

import fake_device  # type: ignore[import-not-found]

asked, run, tensor_at = fake_device.asked, fake_device.run, fake_device.tensor_at
OWN, OTHER = (torch.Stream(device="privateuseone:0") for _ in range(2))
X, Y = tensor_at(16), tensor_at(32)


@contextlib.contextmanager
def keeps_no_reference() -> Iterator[None]:
    before = sys.getrefcount(X)
    yield
    assert sys.getrefcount(X) == before


def check_nobody_waits() -> None:
    """The allocator is told of every tensor when the event goes, and not before."""
    with keeps_no_reference():
        event, kept = run(OWN, [X, (Y, [torch.zeros(2)])])
        assert len(kept) == 3 and kept[0] is X
        assert asked() == ["create", f"record on {OWN.stream_id}"]
        del kept
        assert asked() == []
        del event
        assert asked() == [f"note 16 on {OWN.stream_id}", f"note 32 on {OWN.stream_id}"]


def check_the_caller_waits() -> None:
    with keeps_no_reference():
        event, kept = run(OWN, [X])
        assert asked() == [f"record on {OWN.stream_id}"]  # of the event before
        event.wait()
        assert asked() == ["block 0 of 0"]
        del event, kept
        assert asked() == []


def check_another_stream_waits() -> None:
    event, kept = run(OWN, [X])
    asked()
    event.wait(OTHER)
    event.wait(stream=OTHER)
    OTHER.wait_event(event)  # as torch.cuda.Stream and torch.Stream do it
    assert asked() == [f"block {OTHER.stream_id} of 0"] * 3
    del event, kept
    assert asked() == [f"note 16 on {OWN.stream_id}"]


def check_callers_differ() -> None:
    """The caller is who called, whatever stream is current later."""
    fake_device.make_current(0, OTHER.stream_id)
    event, kept = run(OWN, [X])
    fake_device.make_current(0, 0)
    asked()
    event.wait()
    event.wait(OTHER)
    del event, kept
    assert asked() == ["block 0 of 0", f"block {OTHER.stream_id} of 0"]


def check_the_current_device_waits() -> None:
    """By default, as with torch.cuda.Event: a stream of another device may wait for this one."""
    event, kept = run(OWN, [X])
    asked()
    fake_device.make_current(1, 7)
    event.wait()
    fake_device.make_current(0, 0)
    del event, kept
    assert asked() == ["block 7 of 1", f"note 16 on {OWN.stream_id}"]


def check_other_methods() -> None:
    event, _ = run(OWN, [X])
    asked()
    none = sys.getrefcount(None)
    for _ in range(1000):
        assert event.query() is True
        event.synchronize()
        event.wait(None)
    assert abs(sys.getrefcount(None) - none) < 100
    for wrong in (
        lambda: event.wait(1), lambda: event.wait(OTHER, OTHER), lambda: event.wait(strem=OTHER),
        lambda: event.wait(OTHER, stream=OTHER), lambda: type(event)(),
    ):  # fmt: skip
        try:
            wrong()
        except TypeError:
            continue
        raise AssertionError("not refused")
    asked()


def check_an_allocator_that_takes_no_note() -> None:
    """The others are told all the same."""
    event, kept = run(OWN, [tensor_at(fake_device.REFUSED), X])
    asked()
    del event, kept
    assert asked() == [f"note {fake_device.REFUSED} on {OWN.stream_id}", f"note 16 on {OWN.stream_id}"]


def check_no_event_is_recorded() -> None:
    with keeps_no_reference():
        fake_device.refuse_events(True)
        for _ in range(3):
            try:
                run(OWN, [X])
            except RuntimeError as error:
                assert "no event is recorded" in str(error)
                continue
            raise AssertionError("not refused")
        fake_device.refuse_events(False)
    assert asked() == [f"note 16 on {OWN.stream_id}"] * 3


def check_a_cycle_is_collected() -> None:
    tensor: Any = tensor_at(64)
    tensor.event = run(OWN, [tensor])
    gone = weakref.ref(tensor)
    asked()
    del tensor
    gc.collect()
    assert gone() is None
    assert asked() == [f"note 64 on {OWN.stream_id}"]


def check_events_are_used_again() -> None:
    with keeps_no_reference():
        events = [run(OWN, [X]) for _ in range(50)]
        del events
        asked()
        for _ in range(2000):
            event, kept = run(OWN, [X, Y])
            event.wait()
        del event, kept
    said = asked()
    assert "create" not in said and "destroy" not in said and len(said) == 4000


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print("right:", name)
