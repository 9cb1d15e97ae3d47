"""What ranks over NCCL's GIN do (tests/gin_loopback/gin_ranks.py), tried on emulated GPUs: a machine with two GPUs
is seldom there, and no place to find that a test is wrong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gin_loopback import gin_ranks, worlds
from tests.gin_loopback.gin_ranks import World
from tests.support.patience import PATIENCE, Clock, with_more_time


def _world(group: ThreadGroup, domain_size: int) -> World:
    return World(group.rank(), group.size(), domain_size, torch.device("cpu"), given=group)


def test_bodies_that_tests_name_are_there() -> None:
    tests = ast.parse(Path(__file__).parents[1].joinpath("gpu/test_gin.py").read_text())
    texts = {node.value for node in ast.walk(tests) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    bodies = {text for text in texts if re.fullmatch(r"(ll|ht|probe|make)_\w+", text)}
    assert len(bodies) > 10
    assert [body for body in sorted(bodies) if not callable(getattr(gin_ranks, body, None))] == []


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "GRACE", 0.2)

    def start(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code])

    sleeps, failed = start("import time; time.sleep(600)"), start("raise SystemExit(1)")
    failed.wait()
    try:
        with Clock(PATIENCE / 2):
            assert worlds._await([failed, sleeps], PATIENCE, ()) == [1]
        assert worlds._await([failed, sleeps], 0.3, (0,)) == [1]  # it is expected to die
    finally:
        sleeps.kill()
        sleeps.wait()
    assert worlds._await([start(""), start("")], 30.0, ()) == []


@pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2)])
def test_the_body_of_low_latency_runs_every_case(ranks: int, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Forth and back."""
    for found in run_ranks(ranks, lambda group: gin_ranks.ll_cases(_world(group, size), 1, 100)):
        assert found["cases"] == 5 and found["dispatches"] == 10 and 0 < found["slowest"] <= found["seconds"]
    said = capsys.readouterr().out
    for rank in range(ranks):
        assert f"rank {rank}: run 10 of 10" in said and f"rank {rank}: has let go of the buffer" in said


@pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")
@pytest.mark.parametrize(("seconds", "runs"), [(600.0, 12), (0.0, 4)])
def test_the_body_of_high_throughput_runs_what_the_time_allows(seconds: float, runs: int) -> None:
    """Forth and back, or as many as the time allows, the same number on all ranks."""
    for found in run_ranks(2, lambda group: gin_ranks.ht_cases(_world(group, 1), 1, 500, seconds)):
        assert found["cases"] == 6 and found["runs"] == runs <= found["dispatches"]


@pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")
def test_the_body_of_masks_parts_and_meets() -> None:
    with_more_time(
        lambda deadline: run_ranks(2, lambda group: gin_ranks.ll_masks(_world(group, 1), "dispatch", deadline))
    )


@pytest.mark.skipif(not _C.EMULATES_GPU, reason="no emulated GPU: make emulated")
def test_a_wait_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The log says which run, and the error what was waited for, before a test's time is up."""
    run_case = gin_ranks.run_case

    def run_or_stay_away(case: Any, buffer: Any, **how: Any) -> None:
        if buffer.rank != 1:
            buffer.set_timeout(3.0)
            run_case(case, buffer, **how)

    monkeypatch.setattr(gin_ranks, "run_case", run_or_stay_away)

    def body(group: ThreadGroup) -> str:
        try:
            gin_ranks.ll_cases(_world(group, 1), 1, 100)
        except Exception as error:
            return str(error)
        return ""

    texts = run_ranks(2, body)
    told = (
        r"rank 0 waited 3 s for the [a-z ]+ of rank 1 in dispatch 1 .*; rank 1 is on node 1, of which no rank was heard"
    )
    assert re.search(told, texts[0]) and not texts[1]
    said = capsys.readouterr().out
    assert re.search(f"rank 0: TimeoutError in run 1: .*{told}", said)
