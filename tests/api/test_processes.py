"""Ranks as processes: shared memory instead of a heap, gloo for the meeting, and ends that nobody wished for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import nccl_ep
from nccl_ep import reference
from nccl_ep.bootstrap import rendezvous_of
from tests.ht.harness import HtPlan, ht_buffer, oracle, oracle_kwargs, run_on_rank
from tests.support.expected import Expected, expected_cases, plain_case, shared_buffer
from tests.support.harness import check_dispatch, make_buffer
from tests.support.processes import run_processes


def _run_cases(rank: int, num_ranks: int, count: int, domain_size: int | None, network_seed: int) -> tuple[int, int]:
    cases = expected_cases(count, num_ranks=num_ranks, domain_size=domain_size)
    group = rendezvous_of(dist.group.WORLD)
    with shared_buffer(group, cases, domain_size=domain_size, network_seed=network_seed) as buffer:
        for number, case in enumerate(cases):
            case.run(buffer, staged=number % 2 == 1)
        return buffer.domain_size, buffer.stats()["dispatches"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_processes_give_the_oracles_bits(num_ranks: int, tmp_path: Path) -> None:
    assert run_processes(num_ranks, _run_cases, tmp_path, num_ranks, 12, None, 0) == [(num_ranks, 12)] * num_ranks


def _run_ht_cases(rank: int, num_ranks: int, count: int, domain_size: int | None, network_seed: int) -> list[int]:
    group, done = rendezvous_of(dist.group.WORLD), []
    for case in (each.case for each in expected_cases(count, num_ranks=num_ranks, domain_size=domain_size)):
        plan, inputs = HtPlan.of(case), case.inputs()
        results = oracle(inputs, oracle_kwargs(case, plan, inputs))
        rows = [case.expert(result.x, result, each) for each, result in enumerate(results)]
        with ht_buffer(case, plan, group, network_seed=network_seed) as buffer:
            got = run_on_rank(case, plan, buffer, inputs[rank], results[rank])
        check_dispatch(got.dispatched, results[rank], case.describe())
        combined = reference.combine(rows, results, inputs, **case.combine_kwargs())
        assert not reference.first_difference(got.combined, combined[rank]), case.describe()
        done.append(case.seed)
    return done


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, None), (4, None), (4, 2)])
def test_high_throughput_is_bit_exact(num_ranks: int, domain_size: int | None, tmp_path: Path) -> None:
    got = run_processes(num_ranks, _run_ht_cases, tmp_path, num_ranks, 8, domain_size, 3)
    assert len(got[0]) == 8 and got == got[:1] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(8, None), (8, 2), (8, 4)])
def test_high_throughput_of_more_processes_gives_the_oracles_bits(
    num_ranks: int, domain_size: int | None, tmp_path: Path
) -> None:
    got = run_processes(num_ranks, _run_ht_cases, tmp_path, num_ranks, 4, domain_size, 3, timeout=600.0)
    assert len(got[0]) == 4 and got == got[:1] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(8, None), (8, 2), (9, 3)])
def test_more_processes_and_domains_give_the_oracles_bits(
    num_ranks: int, domain_size: int | None, tmp_path: Path
) -> None:
    got = run_processes(num_ranks, _run_cases, tmp_path, num_ranks, 6, domain_size, 7, timeout=600.0)
    assert got == [(domain_size or num_ranks, 6)] * num_ranks


@pytest.mark.parametrize("network_seed", [0, 7])
def test_two_domains_with_a_network_between_processes_give_the_oracles_bits(network_seed: int, tmp_path: Path) -> None:
    assert run_processes(4, _run_cases, tmp_path, 4, 6, 2, network_seed) == [(2, 6)] * 4


def _use_subgroup(rank: int) -> list[int]:
    everybody = Expected(plain_case(4))
    pair = Expected(plain_case(2))
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    assert rank in dist.get_process_group_ranks(group)
    with make_buffer(everybody.case, dist.group.WORLD) as world, make_buffer(pair.case, group) as buffer:
        for _ in range(3):
            pair.run(buffer)
            everybody.run(world)
        return [buffer.rank, buffer.num_ranks, world.rank, world.num_ranks]


def test_a_group_of_some_ranks_works_beside_the_world(tmp_path: Path) -> None:
    got = run_processes(4, _use_subgroup, tmp_path)
    assert [numbers[2:] for numbers in got] == [[rank, 4] for rank in range(4)]
    assert [numbers[1] for numbers in got] == [2] * 4
    assert sorted([got[0][0], got[2][0]]) == sorted([got[1][0], got[3][0]]) == [0, 1]


def _be_outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(
        TypeError, match=r"this process is no member of the group: torch\.distributed\.new_group gave"
    ) as caught:
        nccl_ep.Buffer(group, device="cpu")
    return str(caught.value)


def test_a_rank_outside_the_group_is_refused(tmp_path: Path) -> None:
    run_processes(2, _be_outside, tmp_path)


# ---- Ends without destroy(). Interpreters of their own, because multiprocessing ends its children without a shutdown.

_SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import nccl_ep

signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"a handler that returns\\n"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it, and so would their children
rank, store, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
if end == "making":
    print("ready", flush=True)
    if rank == 1:
        time.sleep(600)
buffer = nccl_ep.Buffer.for_shapes(
    dist.group.WORLD, max_tokens=4, hidden=64, topk=2, num_experts=4, device="cpu", domain_size=1
)
x, ids = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 4)
out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=4)
assert nccl_ep.combine(out.x, out.handle, weights=None).eq(2).all()
pending = nccl_ep.dispatch_send(x, ids, buffer=buffer, num_experts=4)  # left open, too
buffer.set_timeout(2.0 if end == "exception" else 300.0)
print("ready", flush=True)
if end == "exception":
    if rank == 1:
        raise LookupError("rank 1 gives up")
    out = pending.receive()
    nccl_ep.combine(out.x, out.handle)  # rank 1 never comes
elif rank == 0:
    out = pending.receive()
    nccl_ep.combine(out.x, out.handle)
time.sleep(600)
"""


def _leave(end: str, directory: Path, interrupt: bool) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", _SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(directory / "store"), end], text=True, stdout=-1, stderr=-1)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        if interrupt:
            time.sleep(1.0)  # by when rank 0 waits
            for process in ranks:
                process.send_signal(signal.SIGUSR1)
            for process in ranks:
                assert process.stdout is not None
                assert process.stdout.readline() == "a handler that returns\n", process.communicate()[1]
            for process in ranks:
                process.send_signal(signal.SIGINT)
        ended = ["".join(process.communicate(timeout=100)) for process in ranks]
        return [(process.returncode, text) for process, text in zip(ranks, ended, strict=True)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_rank_that_leaves_by_an_exception_is_named(tmp_path: Path) -> None:
    (code0, text0), (code1, text1) = _leave("exception", tmp_path, interrupt=False)
    assert (code0, code1) == (1, 1), text0 + text1
    assert "TimeoutError: the buffer has failed: rank 0 waited 2 s" in text0
    assert text1.rstrip().endswith("LookupError: rank 1 gives up"), text1


@pytest.mark.parametrize("where", ["ctrl-c", "making"])
def test_ctrl_c_ends_every_wait(where: str, tmp_path: Path) -> None:
    """Rank 0 waits in an operation (or for the other to make a buffer) with minutes to go, rank 1 in Python. A handler
    that returns does not end the wait."""
    for rank, (code, text) in enumerate(_leave(where, tmp_path, interrupt=True)):
        assert code == -signal.SIGINT and text.rstrip().endswith("KeyboardInterrupt"), (rank, text)
        assert "TimeoutError" not in text, (rank, text)
