"""Ranks that meet and go no further: broken and forged records, and what a failed creation leaves behind."""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import SoloRendezvous, rendezvous_of
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes

SIZES: dict[str, Any] = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cpu"}

# ---- Broken and forged records

_HEAD = 40  # bytes of csrc/transport/session.h: Session::Head


class _Following(ThreadGroup):
    """Waits for the other rank for as long as that one lives."""

    def __init__(self, group: ThreadGroup, is_over: threading.Event) -> None:
        super().__init__(group._world, group.rank())
        self._is_over = is_over

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        while True:
            try:
                return super().allgather(mine, 0.02)
            except nccl_ep.TimeoutError:
                if self._is_over.is_set():
                    raise


class _Forging(ThreadGroup):
    """Alters what is heard of the other rank in one round."""

    def __init__(self, group: ThreadGroup, number: int, change: Callable[[bytes], bytes]) -> None:
        super().__init__(group._world, group.rank())
        self._number, self._change = number, change

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        texts = super().allgather(mine, timeout)
        self._number -= 1
        if self._number == -1:
            texts[1 - self.rank()] = self._change(texts[1 - self.rank()])
        return texts


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: text[:-1],
        lambda text: text[:_HEAD],
        lambda text: b"\xff" * len(text),
        lambda text: text[:_HEAD] + b"\xff\xfe" * ((len(text) - _HEAD) // 2),
        lambda text: text[:_HEAD] + bytes([text[_HEAD] if len(text) > _HEAD else 0]) + bytes(len(text)),
        lambda text: text + b"\x80more",
    ],
    ids=["nothing", "shorter", "head", "ones", "payload", "zeros", "longer"],
)
def test_a_broken_record_is_an_error(change: Callable[[bytes], bytes], number: int) -> None:
    """Rank 0 hears something broken. It says so, or has no use for what it heard; rank 1 gives up, or has a buffer."""
    ended: dict[int, str] = {}
    is_over = threading.Event()

    def body(group: ThreadGroup) -> None:
        end = _Following(group, is_over) if group.rank() else _Forging(group, number, change)
        try:
            nccl_ep.Buffer.for_shapes(end, **SIZES, timeout=PATIENCE).destroy()
            ended[group.rank()] = ""
        except nccl_ep.EpError as error:
            ended[group.rank()] = str(error)
        is_over.set()

    run_ranks(2, body)
    is_changed = number > 0 or change(bytes(_HEAD)) != bytes(_HEAD)  # the first record is a head and nothing else
    is_read = number < 5  # the last one tells by coming that the other window is clean
    assert ("rank 1" in ended[0]) == (is_changed and is_read) or "no record of making a buffer" in ended[0], ended


class _Pretending(SoloRendezvous):
    """Rank 0 of two, which hears of the other what ``forge`` makes of its own record."""

    def __init__(self, forge: Callable[[bytes], bytes]) -> None:
        self.forge = forge

    def size(self) -> int:
        return 2

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        head = mine[:8] + struct.pack("<I", 1) + mine[12:_HEAD]
        return [mine, head + self.forge(mine[_HEAD:])]


def test_a_rank_that_claims_to_be_a_thread_of_this_process_is_refused() -> None:
    """Its window would be at a token that this process does not know."""

    def forge(body: bytes) -> bytes:
        return body[:1] + bytes(16) if len(body) == 17 else body

    with pytest.raises(
        nccl_ep.MismatchError, match=r"rank 1 says that its window 0{32} is in this process, where there"
    ):
        nccl_ep.Buffer.for_shapes(_Pretending(forge), **SIZES)


_SEAT, _INVITATION = struct.Struct("<qQQ"), struct.Struct("<cqqQQ16s")  # csrc/transport/host/window.cc


def _process_beside(invite: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> _Pretending:
    """The other rank claims to be a process. ``invite`` makes its invitation of this rank's."""

    def forge(body: bytes) -> bytes:
        if len(body) == _SEAT.size:
            _, number, size = _SEAT.unpack(body)
            return _SEAT.pack(os.getppid(), number ^ 1, size)
        if len(body) == _INVITATION.size:
            return _INVITATION.pack(*invite(_INVITATION.unpack(body)))
        return body

    return _Pretending(forge)


def test_another_file_is_not_mapped(tmp_path: Path) -> None:
    """The descriptor that the other rank names has been closed since, and is another file's, as large as the window."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"x" * (1 << 20))
    with victim.open("r+b") as file:
        group = _process_beside(lambda own: (own[0], os.getpid(), file.fileno(), *own[3:]))
        with pytest.raises(
            nccl_ep.MismatchError, match=r"the window of rank 1, is /.*, expected /memfd:nccl_ep_window\."
        ):
            nccl_ep.Buffer.for_shapes(group, **SIZES)
    assert victim.read_bytes() == b"x" * (1 << 20)


def test_a_memfd_of_that_name_but_another_file_is_not_mapped() -> None:
    made = []

    def invite(own: tuple[Any, ...]) -> tuple[Any, ...]:
        mark, pid, fd, device, inode, token = own
        low, high = struct.unpack("<QQ", token)
        made.append(os.memfd_create(f"nccl_ep_window.{low:016x}{high:016x}"))
        os.ftruncate(made[0], os.fstat(fd).st_size)
        return mark, pid, made[0], device, inode, token

    with pytest.raises(nccl_ep.MismatchError, match=r"is not the window of rank 1: file .* with seals"):
        nccl_ep.Buffer.for_shapes(_process_beside(invite), **SIZES)
    assert os.pread(made[0], 4096, 0) == bytes(4096)
    os.close(made[0])


def test_a_window_keeps_its_size() -> None:
    seen = []

    def invite(own: tuple[Any, ...]) -> tuple[Any, ...]:
        fd, size = own[2], os.fstat(own[2]).st_size
        for other in (size - 4096, size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
        seen.append(os.fstat(fd).st_size == size)
        return own

    with nccl_ep.Buffer.for_shapes(_process_beside(invite), **SIZES):
        assert seen == [True]


# ---- What a failed creation leaves behind


class _LeavesAt:
    """Gives up at one round: does not enter it, or enters it and does not wait."""

    def __init__(self, group: Any, number: int, *, enters: bool = False) -> None:
        self._group, self._number, self._enters = group, number, enters

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        self._number -= 1
        if self._number == -1:
            if not self._enters:
                raise LookupError("enough")
            timeout = 0.1
        return list(self._group.allgather(mine, timeout))


def _held() -> tuple[int, int, int]:
    """Windows of this process: open files, mappings; and the memory that it has, in MiB."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    files = sum("nccl_ep_window" in os.readlink(link) for link in links if os.path.lexists(link))
    maps = sum("nccl_ep_window" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return files, maps, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _fail_often(rank: int, rounds: int) -> list[tuple[int, int, int]]:
    sizes = {**SIZES, "max_tokens": 64, "hidden": 4096}  # windows of several MiB
    held = []
    for number in [0, *range(rounds)]:
        for _ in range(3):
            end = _LeavesAt(rendezvous_of(dist.group.WORLD), number, enters=rank == 0)
            with pytest.raises(LookupError if rank else nccl_ep.TimeoutError):
                nccl_ep.Buffer.for_shapes(end, **sizes, timeout=PATIENCE)
            dist.barrier()
        held.append(_held())
    return held


def test_failed_creations_leave_nothing_of_processes(tmp_path: Path) -> None:
    for held in run_processes(2, _fail_often, tmp_path, 6):
        assert all(files == maps == 0 for files, maps, _ in held), held
        assert held[-1][2] < held[0][2] + 12, held


def test_failed_creations_leave_nothing_of_threads() -> None:
    sizes = {**SIZES, "max_tokens": 1024, "hidden": 4096}
    with nccl_ep.Buffer.for_shapes(ThreadGroup.make(1)[0], **sizes) as alone:
        window = alone.stats()["window_bytes"] >> 20  # of two ranks it is twice as large
    assert window > 30

    def mapped() -> int:
        """MiB in mappings that have room for a window: what malloc keeps for other threads has none."""
        found = re.findall(r"^(\w+)-(\w+) rw-p 00000000 00:00 0 +$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        sizes = [int(end, 16) - int(begin, 16) >> 20 for begin, end in found]
        return sum(size for size in sizes if size >= window)

    def fail_often() -> None:
        for number in range(6):
            for _ in range(3):
                is_over = threading.Event()

                def body(group: ThreadGroup, number: int = number, is_over: threading.Event = is_over) -> None:
                    end = _LeavesAt(_Following(group, is_over), number if group.rank() else 99)
                    with pytest.raises((LookupError, nccl_ep.TimeoutError)):
                        nccl_ep.Buffer.for_shapes(end, **sizes, timeout=PATIENCE)
                    is_over.set()

                run_ranks(2, body)

    fail_often()
    before = mapped()
    fail_often()
    assert mapped() < before + 4 * window, "18 tries, most of them with two windows"
