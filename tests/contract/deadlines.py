"""A rank that does not come, or comes late."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import nccl_ep
from tests.contract.world import Rank, World
from tests.ht.harness import ht_step
from tests.support.expected import Expected, run_case
from tests.support.harness import synchronize
from tests.support.patience import PATIENCE, Clock, Late, raises_at_once, with_more_time

MISSING = 1
PHASES = {
    "ll": ("dispatch", "receive", "combine", "scalars"),
    "ht": ("dispatch", "exact", "cached", "combine", "scalars"),
}


class Deadlines:
    world: World

    @pytest.mark.parametrize(("mode", "phase"), [(mode, phase) for mode in PHASES for phase in PHASES[mode]])
    def test_a_rank_that_does_not_come(self, mode: str, phase: str) -> None:
        if self.world.backend.is_one_launch:
            pytest.skip("here an operation does not begin before all ranks have called")
        with_more_time(partial(self._expect_timeouts, mode, phase))

    def _expect_timeouts(self, mode: str, phase: str, deadline: float) -> None:
        texts = self.world.run(waits_in_vain, mode, phase, deadline)
        kind = "combine" if phase in ("combine", "scalars") else "dispatch"
        for number, text in enumerate(texts):
            if number == MISSING:
                continue
            pattern = rf"rank {number} waited {deadline:g} s for the [a-z -]+ of rank (\d+) in ([a-z-]+ )?{kind} \d+ "
            named = re.search(pattern + r"\(expected \d+, saw \d+\)", text)
            assert named, text
            if not self._is_missed(int(named[1]), text):  # a living rank was slow
                raise Late(text)

    def _is_missed(self, named: int, text: str) -> bool:
        """The missing rank is named, or one whose words come by way of it, and then the text names it too."""
        backend = self.world.backend
        if named == MISSING or not backend.has_rail:
            return named == MISSING
        assert backend.domain_size is not None
        is_by_way = named % backend.domain_size == MISSING % backend.domain_size
        return (
            is_by_way
            and re.search(rf"nothing of this call was heard from rank ([\d, ]*, )?{MISSING}\b", text) is not None
        )

    def test_a_rank_that_comes_late(self) -> None:
        """Within the deadline of now, after one that would have been too short."""
        self.world.run(waits_for_the_late)


def _step(mode: str, phase: str, case: Expected, buffer: nccl_ep.Buffer) -> Callable[[], Any]:
    """A call whose inputs are ready, after others that all ranks make."""
    out = case.send(buffer, mode=mode)
    synchronize(buffer.device)
    if mode == "ht":
        return ht_step(phase, case, buffer, out)
    given = case.given_on(buffer)

    def receive() -> None:
        nccl_ep.dispatch_send(given.x, given.topk_idx, buffer=buffer, **case.case.dispatch_kwargs()).receive()

    steps: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: case.send(buffer, given, mode="ll"),
        "receive": receive,
        "combine": lambda: nccl_ep.combine(out.x, out.handle),
        "scalars": lambda: nccl_ep.combine_weights(out.weights, out.handle),
    }
    return steps[phase]


def waits_in_vain(rank: Rank, mode: str, phase: str, deadline: float) -> str:
    """What a rank hears that waits for MISSING; later calls and the end of the buffer wait for nobody."""
    case, text = rank.case(), ""
    with rank.buffer(case.case) as buffer:
        run_case(case, buffer, mode=mode)
        step = _step(mode, phase, case, buffer)
        buffer.set_timeout(deadline)
        rank.meet()
        if rank.number != MISSING:
            text = _expect_timeout(case, buffer, step, mode, deadline)
        rank.meet()
        with Clock(deadline + PATIENCE / 2):
            buffer.destroy()
    with rank.buffer(case.case) as fresh:  # in the same process
        run_case(case, fresh, mode=mode)
    return text


def _expect_timeout(case: Expected, buffer: nccl_ep.Buffer, step: Callable[[], Any], mode: str, deadline: float) -> str:
    given = case.given_on(buffer)
    with Clock(deadline + PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError) as caught:
        step()
        synchronize(buffer.device)
        buffer.check()
    later: tuple[Callable[[], Any], ...] = (
        lambda: case.send(buffer, given, mode=mode),
        lambda: case.send(buffer, given, mode="ht" if mode == "ll" else "ll"),
        lambda: buffer.empty([1]),
        lambda: buffer.set_timeout(1.0),
        buffer.check,
        buffer.require_usable,
    )
    for call in later:
        raises_at_once(deadline, nccl_ep.TimeoutError, "the buffer has failed", call)
    return str(caught.value)


def waits_for_the_late(rank: Rank) -> None:
    case = rank.case()
    with rank.buffer(case.case) as buffer:
        run_case(case, buffer)
        rank.meet()
        buffer.set_timeout(0.2)
        buffer.set_timeout(PATIENCE)
        rank.meet()  # the deadline may be that of the world
        if rank.number == MISSING:
            time.sleep(0.6)
        run_case(case, buffer)
        run_case(case, buffer, mode="ht")
        buffer.check()
