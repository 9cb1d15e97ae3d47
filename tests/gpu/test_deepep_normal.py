"""DeepEP's normal mode on GPUs, against the oracle. Skipped where high throughput is not built for CUDA."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep import normal_ranks
from tests.deep_ep.normal_ranks import (
    normal_arguments,
    normal_buffer,
    normal_cases,
    replay_in_place_over_nccl,
    replay_new_routing,
    replay_over_nccl,
    run_program,
    small_case,
)  # fmt: skip
from tests.support.gpus import WORLDS, busy, in_processes, needs_gpu, num_replays, on_one_gpu, ranks_on_gpus
from tests.support.processes import run_processes

pytestmark = needs_gpu
ARENA = 256 << 20  # bytes of a window whose results lie in its arena


@functools.cache
def _problem() -> str:
    """Why there is no high throughput, if so."""
    with normal_buffer(None, device="cuda") as buffer:
        arguments = {name: each.cuda() for name, each in _cpu_arguments().items()}
        try:
            buffer.dispatch(**arguments)
        except nccl_ep.UsageError as error:
            if "not built for" in str(error):
                return str(error)
            raise
    return ""


def _cpu_arguments() -> dict[str, torch.Tensor]:
    with normal_buffer(None) as buffer:
        return normal_arguments(buffer)


@pytest.fixture(autouse=True)
def _needs_high_throughput() -> None:
    if _problem():
        pytest.skip(_problem())


@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2, 4))
def test_generated_cases_on_one_gpu_give_the_oracles_bits(num_ranks: int) -> None:
    """One rank in turn on the current stream, beside it, after an event; several share a stream."""
    cases = normal_cases(20 if num_ranks == 4 else 30, num_ranks, domain_size=None)

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group, device="cuda") as buffer:
            for number, case in enumerate(cases):
                options: dict[str, Any] = {"async_finish": True} if number % 3 == 1 and num_ranks == 1 else {}
                if number % 3 == 2 and num_ranks == 1:
                    options = {"previous_event": buffer.capture()}
                case.run(buffer, **options)
            buffer.require_usable()

    run_ranks(num_ranks, body)


def _worst_case() -> tuple[Any, dict[str, Any]]:
    """A case of one rank whose dispatch waits for nothing on the host, and its arguments."""
    case = small_case(1)
    case.with_topk, case.worst, case.alignment = True, 12, 1
    given = case.inputs[0]
    arguments = {"x": given.x.cuda(), "topk_idx": given.topk_idx.cuda(), "topk_weights": given.topk_weights.cuda()}
    return case, {**arguments, "num_worst_tokens": 12}


def test_previous_event_is_all_that_is_waited_for() -> None:
    """What the current stream does after the event neither delays the operation nor is delayed by its start."""
    case, arguments = _worst_case()
    with normal_buffer(None, device="cuda") as buffer:
        case.run(buffer)
        arguments |= case.ask_layout(buffer)
        options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
        # What torch loads at its first use waits for the whole GPU.
        buffer.dispatch(**arguments, previous_event=buffer.capture(), **options)[-1].current_stream_wait()
        torch.cuda.synchronize()
        previous = buffer.capture()
        slow = busy(200)
        received = buffer.dispatch(**arguments, previous_event=previous, **options)
        buffer.get_comm_stream().synchronize()
        assert received[-1].event.query() and not slow.query()
        received[-1].current_stream_wait()
        case.check_received(0, received)

        # And the other way round: it starts no earlier than its event.
        torch.cuda.synchronize()
        slow = busy(200)
        received = buffer.dispatch(**arguments, previous_event=buffer.capture(), async_finish=True)
        assert not slow.query() and not received[-1].event.query()
        received[-1].current_stream_wait()
        case.check_received(0, received)


def test_without_async_finish_the_current_stream_waits() -> None:
    case, arguments = _worst_case()
    with normal_buffer(None, device="cuda") as buffer:
        layout = case.ask_layout(buffer)
        with torch.cuda.stream(buffer.get_comm_stream()):
            busy(100)
        received = buffer.dispatch(**arguments, **layout, previous_event=buffer.capture())
        assert received[-1].event is None
        case.check_received(0, received)
        combined, _, event = case.send_back(buffer, received[4], previous_event=buffer.capture())
        assert event.event is None
        case.check_combined(0, combined)


def test_results_of_several_layers_live_at_once() -> None:
    """Each in its own memory, whatever stream it came from, and its memory is used again."""
    cases = normal_cases(12, 1, domain_size=None)
    with normal_buffer(None, device="cuda", num_nvl_bytes=ARENA) as buffer:
        for _ in range(3):
            received = [case.send(buffer, async_finish=number % 2 == 1) for number, case in enumerate(cases)]
            for number, (case, each) in enumerate(zip(cases, received, strict=True)):
                normal_ranks.wait(each[-1], {"async_finish": number % 2 == 1})
                handle = case.check_received(0, each)
                combined, _, _ = case.send_back(buffer, handle)
                case.check_combined(0, combined)
        assert buffer.stats()["staged_dispatches"] < buffer.stats()["ht_dispatches"]


@pytest.mark.parametrize("is_async", [False, True])
def test_replays_follow_new_routing(is_async: bool) -> None:
    assert replay_new_routing(None, "cuda", is_async, num_replays(18)) > 0


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_graphs_of_ranks_in_processes_follow_new_routing(num_ranks: int, tmp_path: Path) -> None:
    replays = in_processes(num_replays(120))
    got = run_processes(num_ranks, replay_over_nccl, tmp_path, replays, timeout=150.0)
    assert got == [2 * replays] * num_ranks


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_graphs_need_no_staging_copies(num_ranks: int, tmp_path: Path) -> None:
    replays = in_processes(num_replays(60))
    got = run_processes(num_ranks, replay_in_place_over_nccl, tmp_path, replays, timeout=150.0)
    counts = {"ht_dispatches": 2 * replays, "ht_combines": replays, "staged_dispatches": 0, "staged_combines": 0}
    assert got == [counts] * num_ranks


@ranks_on_gpus
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_program_written_for_deepep_runs(num_ranks: int, tmp_path: Path) -> None:
    assert run_processes(num_ranks, run_program, tmp_path, num_ranks, "cuda", timeout=150.0) == [24] * num_ranks
