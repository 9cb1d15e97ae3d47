"""A collective of ranks through a store of torch: over what earlier ones have left there, late, and again."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from .errors import EpError, MismatchError, SystemError, TimeoutError


def late(rank: int, timeout: float, missing: list[int]) -> TimeoutError:
    """The error of a rank that waited in vain for the others in ``allgather``."""
    return TimeoutError(
        f"rank {rank} waited {timeout} s for all ranks to make or grow the buffer, or to clean its masks; "
        f"nothing was heard from rank {', '.join(map(str, missing))}"
    )


class KeyStore:
    """A store under a prefix, whose errors say what was lost. Python handles no signal while a store waits, so nothing
    here waits for a key."""

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        self._store, self._rank = PrefixStore(prefix, store), rank

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise SystemError(
                f"rank {self._rank} cannot reach the store of its process group, through which the ranks meet: {reason}"
            ) from error

    def set(self, key: str, value: bytes) -> None:
        with self._told():
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken, the stub forgot them

    def has(self, *keys: str) -> bool:
        with self._told():
            return bool(self._store.check(list(keys)))

    def take(self, keys: list[str]) -> list[bytes]:
        """Of keys that are there, and that no rank deletes meanwhile."""
        with self._told():
            return list(self._store.multi_get(keys))

    def peek(self, key: str) -> bytes | None:
        """Of a key that another rank may delete at any time."""
        nothing = "-"
        try:
            value = self._store.compare_set(key, nothing, nothing)
            return None if value == nothing.encode() else bytes(value)
        except RuntimeError:  # a store that has no compare_set, as some of users' own; it has no delete_key either
            return self.take([key])[0] if self.has(key) else None

    def count(self, key: str) -> int:
        with self._told():
            return int(self._store.add(key, 1))

    def delete(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can, and a lost one is noticed by the next call
            for key in keys:
                self._store.delete_key(key)


class StoreMeeting:
    """One collective of the ranks.

    Rank 0 draws the name of the meeting and writes it into ``call``. Every other rank answers under that name with a
    token, and rank 0 repeats all tokens in ``roster``. A rank that finds its own token there knows that the name is of
    now, and rank 0 knows it of the answers. Whoever tries again draws a new name or token; ranks that still wait for
    each other see it: until the first round is over, rank 0 takes the token of a rank that is not the one in the
    roster, and the others follow a new call. Keys of a round are deleted when all ranks have read them.
    """

    def __init__(self, store: KeyStore, place: str, rank: int, size: int) -> None:
        self._store, self._place = store, place
        self._rank, self._size = rank, size  # where not all ranks meet, the seat and the number of seats
        self._call = f"{place}call"
        self.name = ""  # of the meeting, once it was joined
        self._round = 0
        self._tokens: list[bytes] = []  # rank 0: of the others, as in the roster

    def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
        if self._size == 1:
            return [mine]
        wait = _Wait(timeout, lambda missing: self._late(timeout, missing))
        if not self.name:
            self.name = self._invite(wait) if self._rank == 0 else self._answer(wait)
        keys = self._keys(self._round)
        self._store.set(keys[self._rank], mine)
        while not self._store.has(*keys):
            if self._round == 0 and self._rank == 0:
                self._renew_roster()
            elif self._round == 0 and self._is_called_anew() and not self._store.has(*keys):
                self._store.delete(keys[self._rank])
                self.name = self._answer(wait)
                keys = self._keys(0)
                self._store.set(keys[self._rank], mine)
            wait.pause(lambda keys=keys: self._missing(keys))  # type: ignore[misc]
        texts = self._store.take(keys)
        # Who is in this round has joined, and has read the round before.
        if self._round > 0:
            self._store.delete(self._keys(self._round - 1)[self._rank])
        elif self._rank == 0:
            self._store.delete(self._call, f"{self.name}/roster", f"{self.name}/again")
        self._round += 1
        return texts

    @contextlib.contextmanager
    def until_left(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.leave(failed=True)
            raise
        self.leave(failed=False)

    def leave(self, failed: bool) -> None:
        """The last one to leave deletes what is left. A rank that dies leaves some keys behind."""
        if not self.name:
            return
        with contextlib.suppress(SystemError):
            left = f"{self.name}/left"
            if self._store.count(left) == self._size:
                now = self._round  # where one has failed, others may be a round before or behind
                for number in range(max(now - 1, 0), now + 2) if failed else [now - 1]:
                    self._store.delete(*self._keys(number))
                self._store.delete(left)

    def _invite(self, wait: _Wait) -> str:
        earlier = self._store.peek(self._call)
        name = self._new_name()
        self._store.set(self._call, name.encode())
        if earlier:  # of a try that failed
            before = earlier.decode(errors="replace")
            self._store.delete(*self._answers(before), f"{before}/roster", f"{before}/again")
        answers = self._answers(name)
        while not self._store.has(*answers):
            wait.pause(lambda: self._missing(answers, first=1))
        self._tokens = self._store.take(answers)
        self._store.set(f"{name}/roster", b" ".join(self._tokens))
        return name

    def _renew_roster(self) -> None:
        """Whoever does not find its own token there has come in the place of one that gave up."""
        token = self._store.peek(f"{self.name}/again")
        if token is None or token in self._tokens:
            return
        answers = [self._store.peek(key) for key in self._answers(self.name)]  # gone of those who have joined
        if self._store.has(*self._keys(0)):  # who has read them may have begun the next collective, by this call
            return
        self._tokens = [new or old for new, old in zip(answers, self._tokens, strict=True)]
        self._store.set(f"{self.name}/roster", b" ".join(self._tokens))

    def _is_called_anew(self) -> bool:
        """Rank 0 gave up, and tries again, or another has come in its place. Or this meeting is over for it."""
        called = self._store.peek(self._call)
        return called is not None and called.decode(errors="replace") != self.name

    def _answer(self, wait: _Wait) -> str:
        token, name = secrets.token_hex(16).encode(), ""
        while True:
            called = self._store.peek(self._call)
            if called and (new := called.decode(errors="replace")) != name and self._accepts(new):
                name = new
                self._store.set(self._answers(name)[self._rank - 1], token)
            if name and (roster := self._store.peek(f"{name}/roster")):
                tokens = roster.split()
                if len(tokens) == self._size - 1 and tokens[self._rank - 1] == token:
                    self._store.delete(self._answers(name)[self._rank - 1])
                    return name
                self._store.set(f"{name}/again", token)
            wait.pause(lambda name=name: (name and self._missing(self._answers(name), first=1)) or [0])  # type: ignore[misc]

    def _new_name(self) -> str:
        return self._place + secrets.token_hex(16)

    def _accepts(self, name: str) -> bool:
        """Whether this rank is to answer under that name."""
        return True

    def _late(self, timeout: float, missing: list[int]) -> EpError:
        return late(self._rank, timeout, missing)

    def _keys(self, number: int) -> list[str]:
        return [f"{self.name}/{number}/{rank}" for rank in range(self._size)]

    def _answers(self, name: str) -> list[str]:
        return [f"{name}/answer/{rank}" for rank in range(1, self._size)]

    def _missing(self, keys: list[str], first: int = 0) -> list[int]:
        """The ranks, from the first on, whose keys are not there."""
        return [rank for rank, key in enumerate(keys, first) if not self._store.has(key)]


class Replacement(StoreMeeting):
    """A meeting of which the newcomer does not know who comes, until it is called.

    Ranks are seated in their order, the newcomer behind them. The first calls under a name that says who is left out.
    """

    def __init__(self, store: KeyStore, newcomer: int, left_out: Sequence[int], rank: int, size: int) -> None:
        super().__init__(store, f"replace/{newcomer}/", rank=1, size=2)
        self._newcomer, self._world = newcomer, size
        self._own, self._left_out = rank, sorted(left_out)
        self._is_known = rank != newcomer
        self._refused: list[int] | None = None  # whom the first rank leaves out, if this one does not
        self.seats: list[int] = []
        if self._is_known:
            self._sit(self._left_out)

    def _sit(self, left_out: list[int]) -> None:
        away = {*left_out, self._newcomer}
        self.seats = [*(rank for rank in range(self._world) if rank not in away), self._newcomer]
        self._rank, self._size = self.seats.index(self._own), len(self.seats)

    def _new_name(self) -> str:
        return f"{super()._new_name()}/{'-'.join(map(str, self._left_out))}"

    def _accepts(self, name: str) -> bool:
        left_out = [int(rank) for rank in name.rsplit("/", 1)[1].split("-") if rank]
        if not self._is_known:
            self._sit(left_out)
        elif left_out != self._left_out:  # of an earlier try, maybe
            self._refused = left_out
            return False
        return True

    def _late(self, timeout: float, missing: list[int]) -> EpError:
        if not self._is_known and not self.seats:
            return TimeoutError(
                f"rank {self._own} waited {timeout} s to take its place, and no rank has called replace({self._own})"
            )
        if self._refused is not None and not self.name:
            return MismatchError(
                f"the ranks disagree about who meets the new rank {self._newcomer}: rank {self.seats[0]} leaves out "
                f"ranks {self._refused}, rank {self._own} has masked {self._left_out}"
            )
        ranks = ", ".join(str(self.seats[seat]) for seat in missing)
        return TimeoutError(
            f"rank {self._own} waited {timeout} s for rank {self._newcomer} to be replaced; nothing was heard from "
            f"rank {ranks}"
        )


class _Wait:
    """Polling with a deadline, less and less often."""

    def __init__(self, timeout: float, late: Callable[[list[int]], EpError]) -> None:
        self._late = late
        self._deadline = time.monotonic() + timeout
        self._seconds = 0.0005

    def pause(self, missing: Callable[[], list[int]]) -> None:
        """Raises what ``late`` makes of them behind the deadline, unless the last rank has just come."""
        if time.monotonic() > self._deadline and (ranks := missing()):
            raise self._late(ranks)
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, 0.02)
