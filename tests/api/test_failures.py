"""Ranks that die, stop or fall silent: the others hear of it in time and can go on."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.bootstrap import rendezvous_of
from nccl_ep.config import pack_dispatch
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer, make_buffer
from tests.support.patience import PATIENCE, Clock, Late, raises_at_once, with_more_time
from tests.support.processes import Processes, processes

PHASES = (
    "creation",
    "dispatch",
    "receive",  # the others have sent and wait, the missing rank never sent
    "between send and receive",  # the missing rank has sent, which the others receive; they miss it in what follows
    "combine",
    "weighted combine",
)


def _weighted(case: Expected, buffer: nccl_ep.Buffer, handle: nccl_ep.Handle) -> torch.Tensor:
    rank = buffer.rank
    return nccl_ep.combine(case.rows[rank], handle, weights=torch.ones(case.inputs[rank].topk_idx.shape))


def _steps(case: Expected, buffer: nccl_ep.Buffer, phase: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What all ranks do together; then two steps without one of them: the first must fail, and so must the second."""
    if phase == "dispatch":
        case.run(buffer)
        return lambda: case.dispatch(buffer), buffer.check
    out, given = case.dispatch(buffer), case.inputs[buffer.rank]

    def send() -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
        return nccl_ep.dispatch_send(
            given.x, given.topk_idx, given.topk_weights, buffer=buffer, **case.case.dispatch_kwargs()
        )

    def combine() -> None:
        case.combine(buffer, out.handle)

    if phase == "receive":
        return lambda: send().receive(), combine
    if phase == "between send and receive":
        pending = send()

        def receive() -> None:
            case.check_dispatch(pending.receive(), buffer.rank)
            combine()

        return receive, combine
    if phase == "combine":
        return combine, lambda: nccl_ep.combine_weights(case.values[buffer.rank], out.handle)
    return lambda: _weighted(case, buffer, out.handle), combine


def expect_timeout(buffer: nccl_ep.Buffer, deadline: float, missing: int, pattern: str, step: Callable[[], Any]) -> str:
    """The step must fail in time, and say that it waited for the missing rank and has not heard of that one alone."""
    buffer.set_timeout(deadline)
    with Clock(deadline + PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError) as caught:
        step()
    text = str(caught.value)
    named = re.search(r"of rank (\d+) in .*heard from rank ([\d, ]+);", text)
    assert named, text
    if {named[1], *named[2].split(", ")} != {str(missing)}:
        raise Late(text)
    assert re.search(rf"rank {buffer.rank} waited {deadline:g} s for the {pattern}", text), text
    expected, saw = map(int, re.findall(r"expected (\d+), saw (\d+)", text)[0])
    assert expected > saw
    return text


def _expect_failure(
    case: Expected, buffer: nccl_ep.Buffer, phase: str, group: Any, missing: int, deadline: float
) -> str:
    """The step without the missing rank must fail in time and say why, and all that comes after must fail at once."""
    step, later_step = _steps(case, buffer, phase)
    group.allgather(b"", PATIENCE)  # what the missing rank does send is on its way
    waited = "arrival signal" if buffer.domain_size < buffer.num_ranks else "op header"
    kind = "dispatch" if phase in ("dispatch", "receive") else "combine"
    pattern = (
        rf"{waited} of rank {missing} in {kind} \d+ \(expected \d+, saw \d+\); "
        rf"nothing of this call was heard from rank {missing};"
    )
    text = expect_timeout(buffer, deadline, missing, pattern, step)
    given = case.inputs[buffer.rank]
    later: list[Callable[[], Any]] = [
        lambda: case.dispatch(buffer),
        lambda: nccl_ep.dispatch_send(
            given.x, given.topk_idx, buffer=buffer, num_experts=case.case.num_experts, max_tokens=8
        ),
        later_step,
        buffer.check,
        buffer.require_usable,
        lambda: buffer.set_timeout(1.0),
    ]
    for call in later:
        raises_at_once(deadline, nccl_ep.TimeoutError, f"failed: .*rank {missing}", call)
    with Clock(deadline + PATIENCE / 2):
        buffer.destroy()
    with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
        buffer.check()
    return text


def _wake_up(case: Expected, buffer: nccl_ep.Buffer, step: Callable[[], Any], deadline: float) -> None:
    """The missing rank goes on when the others are gone. What they had sent is there, and so is their memory."""
    buffer.set_timeout(deadline)
    with pytest.raises(nccl_ep.TimeoutError):
        step()
        case.dispatch(buffer)
        case.dispatch(buffer)
    raises_at_once(deadline, nccl_ep.TimeoutError, "failed", lambda: case.dispatch(buffer))
    buffer.destroy()


def _expect_no_buffer(case: Expected, group: Any, missing: int, deadline: float) -> str:
    with Clock(deadline + PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError) as caught:
        case_buffer(case.case, group, timeout=deadline, device="cpu")
    text = str(caught.value)
    assert f"rank {rendezvous_of(group).rank()} waited {deadline} s for all ranks to make or grow the buffer" in text
    assert "nothing was heard from rank" in text and missing in map(int, text.split("from rank ")[1].split(", ")), text
    return text


# ---- Ranks as threads: a rank that never calls


@pytest.mark.parametrize("domain_size", [3, 1], ids=["memory", "network"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_silent_rank_is_named_in_each_phase(phase: str, domain_size: int) -> None:
    case = Expected(plain_case(3, domain_size=domain_size))

    def run(deadline: float) -> None:
        ends = ThreadGroup.make(3)
        told = threading.Semaphore(0)

        def body(group: ThreadGroup) -> None:
            rank = group.rank()
            is_silent = rank == 1
            if phase == "creation":
                if not is_silent:
                    _expect_no_buffer(case, ends[rank], 1, deadline)
                return
            buffer = case_buffer(case.case, group, timeout=PATIENCE, device="cpu")
            if is_silent:
                step, _ = _steps(case, buffer, phase)
                group.allgather(b"", PATIENCE)
                assert told.acquire(timeout=2 * PATIENCE) and told.acquire(timeout=2 * PATIENCE)
                _wake_up(case, buffer, step, deadline)
                return
            try:
                _expect_failure(case, buffer, phase, group, 1, deadline)
            finally:
                told.release()

        run_ranks(3, body)

    def go_on(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, timeout=PATIENCE, device="cpu") as fresh:
            case.run(fresh)
            case.run(fresh, staged=True)

    with_more_time(run)
    run_ranks(3, go_on)


@pytest.mark.parametrize("domain_size", [2, 1], ids=["memory", "network"])
def test_destroying_a_failed_buffer_waits_for_nobody(domain_size: int) -> None:
    """Of several, since one cannot be destroyed again: see raises_at_once."""
    case, deadline = Expected(plain_case(2, domain_size=domain_size)), 0.3
    seen = threading.Event()

    def body(group: ThreadGroup) -> list[float]:
        mine = [ends[group.rank()] for ends in worlds]
        buffers, took = [case_buffer(case.case, each, timeout=PATIENCE, device="cpu") for each in mine], []
        if group.rank() == 1:
            assert seen.wait(2 * PATIENCE)
            return []
        for buffer in buffers:
            buffer.set_timeout(deadline)
            with pytest.raises(nccl_ep.TimeoutError):
                case.dispatch(buffer)
            start = time.monotonic()
            buffer.destroy()
            took.append(time.monotonic() - start)
        seen.set()
        return took

    worlds = [ThreadGroup.make(2) for _ in range(8)]
    took = run_ranks(2, body)[0]
    assert min(took) < deadline / 2, took


def test_a_test_that_sees_a_difference_tells_the_failure_first() -> None:
    """On GPUs operations end without an error on the host: what they gave is compared before anybody asks."""
    is_over = threading.Event()

    def body(group: ThreadGroup) -> None:
        case = Expected(plain_case(2))
        with case_buffer(case.case, group) as buffer:
            group.allgather(b"", PATIENCE)
            if group.rank() == 0:
                buffer.set_timeout(0.2)
                with pytest.raises(nccl_ep.TimeoutError):
                    case.dispatch(buffer)
                is_over.set()
                case.check_combine(torch.ones(8, 64).bfloat16(), 0)
            assert is_over.wait(PATIENCE)

    with pytest.raises(AssertionError) as caught:
        run_ranks(2, body)
    assert re.match(r"TimeoutError: the buffer has failed: rank 0 waited .* of rank 1 ", str(caught.value))
    assert "combined: " in str(caught.value)


def test_the_outputs_of_a_failed_dispatch_are_empty() -> None:
    """Out-variants leave nothing that looks like rows: counts 0, ids -1, weights 0."""
    case = Expected(plain_case(2, layout="flat", combine_weights="none"))
    ends = ThreadGroup.make(2)

    def body(group: ThreadGroup) -> None:
        buffer = case_buffer(case.case, ends[group.rank()], timeout=PATIENCE, device="cpu")
        if group.rank() == 1:
            return
        buffer.set_timeout(0.3)
        shape, given = case.case, case.inputs[0]
        rows = shape.num_ranks * shape.max_tokens
        outs = [
            torch.zeros(rows, shape.hidden, dtype=torch.bfloat16), torch.zeros(0), torch.full((rows, 2), 9.0),
            torch.full((rows, 2), 9), torch.zeros(0, dtype=torch.int32), torch.full((6,), 9, dtype=torch.int32),
            torch.zeros_like(case_handle),
        ]  # fmt: skip
        args = (
            given.x,
            None,
            given.topk_idx,
            given.topk_weights,
            rows,
            pack_dispatch(
                {
                    "num_experts": shape.num_experts,
                    "topk": shape.topk,
                    "max_tokens": shape.max_tokens,
                    "layout": 3,
                }
            ),
        )
        with pytest.raises(nccl_ep.TimeoutError, match="waited"):
            torch.ops.nccl_ep.ll_dispatch_out(buffer._seq, *args, *outs)
        assert outs[5].tolist() == [0] * 6
        assert outs[3].eq(-1).all() and outs[2].eq(0).all()

    case_handle = torch.zeros(4 + 16 + 16 + 16, dtype=torch.int32)
    run_ranks(2, body)


# ---- Ranks as processes: killed, or stopped


def _live_or_end(rank: int, num_ranks: int, number: int, deadline: float) -> list[str | Late]:
    """In each phase one rank of those left sends itself the signal; the others must notice, and go on without it."""
    alive = list(range(num_ranks))
    texts: list[str | Late] = []
    for phase in PHASES:
        missing = len(alive) // 2  # its rank among those left
        victim = alive[missing]
        case = Expected(plain_case(len(alive)))
        group = dist.new_group(alive, use_local_synchronization=True)
        if phase == "creation":
            if rank == victim:
                os.kill(os.getpid(), number)
                return ["woken"]
            texts.append(_expect_no_buffer(case, group, missing, deadline))
        else:
            buffer, meeting = case_buffer(case.case, group, timeout=PATIENCE, device="cpu"), rendezvous_of(group)
            if rank == victim:
                step, _ = _steps(case, buffer, phase)
                meeting.allgather(b"", PATIENCE)
                os.kill(os.getpid(), number)
                _wake_up(case, buffer, step, deadline)
                return ["woken"]
            try:
                texts.append(_expect_failure(case, buffer, phase, meeting, missing, deadline))
            except Late as late:
                texts.append(late)
        alive.remove(victim)
    case = Expected(plain_case(len(alive)))
    group = dist.new_group(alive, use_local_synchronization=True)
    with case_buffer(case.case, group, timeout=PATIENCE, device="cpu") as buffer:
        case.run(buffer)
    return texts


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_of_killed_and_stopped_ranks_go_on(number: int, tmp_path: Path) -> None:
    """Eight processes, of which one ends in each phase; at last the two that are left run bit for bit."""
    num_ranks = 2 + len(PHASES)
    alive, victims = list(range(num_ranks)), []
    for _ in PHASES:
        victims.append(alive.pop(len(alive) // 2))

    def run(deadline: float) -> None:
        folder = tmp_path / str(deadline)
        folder.mkdir()
        with processes(num_ranks, _live_or_end, folder, num_ranks, int(number), deadline) as world:
            for rank in alive:
                outcome = world.wait(rank)
                assert not outcome.error, outcome.error
                assert outcome.exitcode == 0 and len(outcome.value) == len(PHASES)
                for late in outcome.value:
                    if isinstance(late, Late):
                        raise late
            for victim in victims:
                if number == signal.SIGSTOP:
                    world.send_signal(victim, signal.SIGCONT)
                outcome = world.wait(victim)
                assert not outcome.error, outcome.error
                expected = (-int(number), None) if number == signal.SIGKILL else (0, ["woken"])
                assert (outcome.exitcode, outcome.value) == expected

    with_more_time(run)


def _loop_until_killed(rank: int, victim: int, domain_size: int | None, seed: int, deadline: float) -> str:
    case = Expected(plain_case(3, domain_size=domain_size))
    with make_buffer(case.case, dist.group.WORLD, network_seed=seed) as buffer:
        case.run(buffer)
        buffer.set_timeout(deadline)
        if rank == victim:
            threading.Timer(random.Random(seed).random() * 0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with Clock(deadline + PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError) as caught:
            while True:
                case.run(buffer, staged=rank == 0)
        return str(caught.value)


def expect_the_dead_to_be_missed(world: Processes, survivors: Sequence[int], dead: int, kind: str) -> None:
    texts = []
    for rank in survivors:
        outcome = world.wait(rank)
        assert not outcome.error and outcome.exitcode == 0, outcome.error
        texts.append(outcome.value)
        assert "the buffer has failed: rank" in texts[-1]
    # Who is missed by a rank that had all from the dead may be one that waited for it; the first names the dead.
    if not any(re.search(rf"of rank {dead} in {kind}", text) for text in texts):
        raise Late("; ".join(texts))
    assert world.wait(dead).exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("domain_size", "seed"), [(None, 1), (None, 2), (1, 3)])
def test_a_rank_killed_in_the_middle_of_something_is_named(domain_size: int | None, seed: int, tmp_path: Path) -> None:
    def run(deadline: float) -> None:
        folder = tmp_path / str(deadline)
        folder.mkdir()
        with processes(3, _loop_until_killed, folder, 1, domain_size, seed, deadline) as world:
            expect_the_dead_to_be_missed(world, (0, 2), 1, "")

    with_more_time(run)


# ---- Deadlines


def test_a_deadline_can_be_changed_while_a_rank_waits() -> None:
    case, ends, is_given_up = Expected(plain_case(2)), ThreadGroup.make(2), threading.Event()

    def body(group: ThreadGroup) -> None:
        buffer = case_buffer(case.case, ends[group.rank()], timeout=PATIENCE, device="cpu")
        for seconds in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=rf"timeout is {seconds:g} s, must be positive"):
                buffer.set_timeout(seconds)
        case.run(buffer)
        buffer.set_timeout(0.2)
        if group.rank() == 0:
            with Clock(PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError, match=r"rank 0 waited 0\.2 s for"):
                case.dispatch(buffer)
            is_given_up.set()
        else:
            buffer.set_timeout(1e6)
            assert is_given_up.wait(PATIENCE)
            case.check_dispatch(case.dispatch(buffer), 1)  # rank 0 has sent its share before it gave up

    run_ranks(2, body)


def test_a_slow_rank_is_waited_for() -> None:
    case = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        with case_buffer(case.case, group, timeout=PATIENCE, device="cpu") as buffer:
            if group.rank() == 1:
                time.sleep(0.7)
            case.run(buffer)

    run_ranks(2, body)
