"""The C library knows its groups and handles: what was destroyed, or never made, is refused and not followed."""

from __future__ import annotations

import ctypes as c
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import refused
from tests.support.patience import PATIENCE

INT, SIZE, HANDLE = c.c_int(), c.c_size_t(), c.c_void_p()
INPUTS, OUTPUTS = (
    (c_api.RawDispatchInputs(), c_api.RawDispatchOutputs()),
    (c_api.RawCombineInputs(), c_api.RawCombineOutputs()),
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {  # behind the group or the handle
    "EpGroupDestroy": (),
    "EpHandleMemSize": (1, None, SIZE, 1),
    "EpUpdateHandle": (c_api.Tensor(), None, None),
    "EpHandleDestroy": (),
    "EpDispatch": (*INPUTS, None, None, None),
    "EpCombine": (*OUTPUTS, None, None),
    "EpComplete": (None, None),
    "EpMaskQuery": (None, None),
    "EpMaskUpdate": (None, None),
    "EpMaskClean": (None,),
    "EpGetAsyncError": (INT,),
    "EpErrorClear": (),
    "EpxGroupSetTimeout": (0,),
    "EpxCheck": (),
    "EpxGroupGetInfo": (c_api.GroupInfo(),),
    "EpxMemAlloc": (c.c_void_p(), 64),
    "EpxMemFree": (None,),
    "EpxHandleMemSize": (0, None, SIZE, 1, c_api.HandleOptions(layout=1)),
    "EpxRouteHandle": (None, None),
    "EpxHandleGetInfo": (c_api.HandleInfo(),),
    "EpxDispatchShapes": (*INPUTS, None, None),
    "EpxDispatch": (*INPUTS, None, None, None, None),
    "EpxCombine": (*OUTPUTS, None, None, None),
    "EpxCombineWeights": (None, None, None),
}
OF_GROUPS = ("EpGroupDestroy", "EpHandleMemSize", "EpMaskQuery", "EpMaskUpdate", "EpMaskClean", "EpGetAsyncError",
             "EpErrorClear", "EpxGroupSetTimeout", "EpxCheck", "EpxGroupGetInfo", "EpxMemAlloc", "EpxMemFree",
             "EpxHandleMemSize")  # fmt: skip


def calls(library: Library, kind: str) -> list[Callable[[c.c_void_p], None]]:
    """Every function that takes an object of the kind."""
    found: list[Callable[[c.c_void_p], None]] = [
        lambda given, name=name, rest=rest: getattr(library, name)(given, *rest)  # type: ignore[misc]
        for name, rest in ARGUMENTS.items()
        if (name in OF_GROUPS) == (kind == "group")
    ]
    if kind == "group":
        options, ids = c_api.HandleOptions(layout=1), c_api.Tensor(2, 4, 0, (0, 1))
        found.append(lambda given: library.EpInitHandle(HANDLE, given, 1, None, 1, None))
        found.append(lambda given: library.EpxInitHandle(HANDLE, given, 0, None, 1, None, options))
        found.append(lambda given: library.EpCreateHandle(HANDLE, given, 1, ids, None, None, None))
    return found


def make_handle(library: Library, group: c.c_void_p) -> c.c_void_p:
    handle = c.c_void_p()
    library.InitHandle(handle, group, c_api.HandleConfig(layout=1), None)
    return handle


def test_every_function_that_takes_an_object_is_tried() -> None:
    without = {"EpInitHandle", "EpxInitHandle", "EpCreateHandle"}  # that calls() has
    others = {"EpGetVersion", "EpxGetVersion", "EpTensorAlloc", "EpTensorDestroy", "EpxTensorBytes", "EpCreateGroup",
              "EpxCreateGroup", "EpxCommFromCallback", "EpxCommDestroy"}  # fmt: skip
    assert set(c_api.FUNCTIONS) - without - others == set(ARGUMENTS)


def test_what_is_no_live_object_is_refused(library: Library) -> None:
    group, gone_group = library.solo_group(), library.solo_group()
    handle, gone_handle = make_handle(library, group), make_handle(library, group)
    library.HandleDestroy(gone_handle)
    library.GroupDestroy(gone_group)
    zeros = c.create_string_buffer(4096)
    never = [c.c_void_p(c.addressof(zeros)), c.c_void_p(1), c.c_void_p(2**64 - 1), c.c_void_p((group.value or 0) + 8)]
    for kind, gone, other, other_kind in (
        ("group", gone_group, handle, "handle"),
        ("handle", gone_handle, group, "group"),
    ):
        for call in calls(library, kind):
            for given in (gone, *never):
                text = f": {kind} at address {given.value:#x} was destroyed, or never made$"
                refused(c_api.INVALID_ARGUMENT, text, call, given)
            refused(c_api.INVALID_ARGUMENT, f"{kind} at address {other.value:#x} is a {other_kind}$", call, other)
    library.Check(group)
    library.HandleDestroy(handle)
    library.GroupDestroy(group)


def test_an_address_is_the_object_that_lives_there(library: Library) -> None:
    """Memory comes back: an old pointer to it is the new object's, as long as that lives, and no other."""
    live, gone, came_back = [library.solo_group() for _ in range(4)], set[int | None](), 0
    for turn in range(3000):  # the allocator gives it to whom it likes: mostly at once, now and then late
        gone.add(live[turn % 4].value)
        library.GroupDestroy(live.pop(turn % 4))
        live.append(library.solo_group())
        alive = {group.value for group in live}
        came_back += live[-1].value in gone
        for address in [live[-1].value, *sorted(gone, key=str)[turn % 8 :: 1 + len(gone) // 8]]:
            if address in alive:
                library.Check(c.c_void_p(address))
            else:
                text = "was destroyed|is a communicator"
                refused(c_api.INVALID_ARGUMENT, text, library.Check, c.c_void_p(address))
        if turn >= 40 and came_back > 0:
            break
    assert came_back > 0, "no address came back"
    for group in live:
        library.GroupDestroy(group)


def test_threads_make_use_and_destroy_their_own(library: Library) -> None:
    faults: list[BaseException] = []

    def body() -> None:
        try:
            for _ in range(60):
                group = library.solo_group()
                handles = [make_handle(library, group) for _ in range(5)]
                for handle in handles:
                    library.HandleGetInfo(handle, c_api.HandleInfo())
                    refused(c_api.INVALID_ARGUMENT, "is a handle", library.Check, handle)
                    library.HandleDestroy(handle)
                library.Check(group)
                library.GroupDestroy(group)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not faults, faults


def test_a_fork_beside_busy_threads_makes_its_own_group(library: Library) -> None:
    """Whatever the threads, which it has not got, held when it was made."""
    over = threading.Event()

    def body() -> None:
        group = library.solo_group()
        while not over.is_set():
            library.HandleDestroy(make_handle(library, group))
        library.GroupDestroy(group)

    parents, threads = library.solo_group(), [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE))
                try:
                    group = library.solo_group()
                    library.HandleDestroy(make_handle(library, group))
                    library.GroupDestroy(group)
                    library.GroupDestroy(parents)  # nothing to do here
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
    library.GroupDestroy(parents)
