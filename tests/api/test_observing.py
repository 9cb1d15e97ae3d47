"""What a buffer tells of itself: counters, messages, ranges for profilers."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT
from tests.deep_ep.low_latency_ranks import small_case
from tests.support.expected import Expected, plain_case, shared_buffer
from tests.support.processes import run_python

SIZES = {"max_tokens": 3, "hidden": 64, "topk": 2, "num_experts": 2, "device": "cpu"}


# ---- Counters


def test_stats_count_what_was_done() -> None:
    case, deepep = Expected(plain_case(2)), small_case(2)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case, deepep]) as buffer:
            fresh, of_ht = buffer.stats(), {"ht_dispatch": 0, "ht_combine": 0}
            assert fresh["calls"] == {"dispatch": 0, "combine": 0, "combine_weights": 0, "split": 0, **of_ht}
            assert fresh["window_bytes"] > 0 and fresh["scratch_bytes"] == 0
            assert [fresh[name] for name in ("mode", "backend", "device", "domain_size")] == ["ll", "cpu", "cpu", 2]
            case.run(buffer)
            case.run(buffer, staged=True)
            handle = deepep.send(buffer)[2]
            deepep.check_combine(deepep.send_back(buffer, handle, zero_copy=True)[0], group.rank())
            stats = buffer.stats()
            assert stats["calls"] == {"dispatch": 3, "combine": 3, "combine_weights": 2, "split": 2, **of_ht}
            assert (stats["dispatches"], stats["combines"]) == (3, 5)
            assert stats["scratch_bytes"] == 2 * 16 * 64 * 2
            assert (stats["dropped_rows"], stats["invalid_ids"]) == (0, 0)

    run_ranks(2, body)


def test_stats_count_dropped_rows_and_invalid_ids() -> None:
    x, ids = torch.ones(3, 64).bfloat16(), torch.tensor([[0, 5], [0, -2], [0, -1]])
    with nccl_ep.Buffer.for_shapes(None, **SIZES, on_invalid_ids="count") as buffer:
        for _ in range(2):
            nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2, capacity=2)
        assert (buffer.stats()["dropped_rows"], buffer.stats()["invalid_ids"]) == (2, 4)
        with pytest.raises(ValueError, match="4 expert ids out of range"):
            buffer.check()
        assert (buffer.stats()["dropped_rows"], buffer.stats()["invalid_ids"]) == (2, 0)
        with pytest.raises(ValueError, match="max_tokens"):
            nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2, max_tokens=1)
        assert buffer.stats()["calls"]["dispatch"] == 2  # what was refused is no call
    assert buffer.stats()["calls"]["dispatch"] == 2


# ---- Messages


def test_a_buffers_life_is_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    x, ids = torch.ones(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    with caplog.at_level(logging.DEBUG, logger="nccl_ep"):
        with nccl_ep.Buffer.for_shapes(None, **SIZES, name="watched") as buffer:
            for _ in range(3):
                nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2)
        buffer.destroy()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "DEBUG", "INFO"]
    assert "made <nccl_ep.Buffer watched: rank 0 of 1, cpu>" in told[0][1] and "window of" in told[0][1]
    assert told[1][1].startswith("watched serves") and "max_tokens=3" in told[1][1]
    assert told[2][1] == "destroying <nccl_ep.Buffer watched: rank 0 of 1, cpu>"


def test_a_failure_is_logged_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    case = small_case(2)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, [case]) as buffer:
            if group.rank() == 0:
                buffer.set_timeout(0.2)
                with pytest.raises(nccl_ep.TimeoutError):
                    case.send(buffer)

    with caplog.at_level(logging.ERROR, logger="nccl_ep"):
        run_ranks(2, body)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "waited 0.2 s for the" in caplog.text and "heard from rank 1" in caplog.text


PROGRAM = """
import torch, nccl_ep, nccl_ep.deep_ep
x, ids = torch.ones(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
sizes = dict(max_tokens=3, hidden=64, topk=2, num_experts=2, device="cpu")
with nccl_ep.Buffer.for_shapes(None, **sizes, mode="auto", name="layer") as buffer:
    out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2)
    nccl_ep.combine(out.x, out.handle)
    out = nccl_ep.dispatch_send(x, ids, buffer=buffer, num_experts=2).receive()
    nccl_ep.combine_send(out.x, out.handle).receive()
    nccl_ep.combine_weights(out.weights, out.handle)

    view = nccl_ep.deep_ep.Buffer.of(buffer)
    rows, _, handle, _, hook = view.low_latency_dispatch(x, ids, 3, 2, use_fp8=False, return_recv_hook=True)
    hook()
    view.low_latency_combine(rows, ids, torch.ones(3, 2), handle)

    for capacity in (6, "exact"):
        out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=2, mode="ht", layout="flat", capacity=capacity)
        nccl_ep.combine(out.x, out.handle)
    nccl_ep.dispatch_cached(x, out.handle)

    per_rank, _, per_expert, is_in_rank, _ = view.get_dispatch_layout(ids, 2)
    rows, _, _, _, handle, _ = view.dispatch(x, None, per_rank, None, is_in_rank, per_expert, ids, torch.ones(3, 2))
    view.combine(rows, handle)
    view.dispatch(x, handle)
"""


def _run(**variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NVTX", "NCCL_EP"))}
    program = f"import nccl_ep\nnccl_ep.log.set_up()\n{PROGRAM}"  # nccl_ep was imported before
    done = run_python("-c", program, environment=clean | variables, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("level", "words"),
    [("debug", ["INFO", "DEBUG"]), ("INFO", ["INFO"]), ("error", []), ("loud", ["NCCL_EP_LOG is 'loud', must be"])],
)
def test_the_environment_chooses_the_level_of_the_log(level: str, words: list[str]) -> None:
    told = _run(NCCL_EP_LOG=level)
    for word in ("INFO", "DEBUG", "NCCL_EP_LOG"):
        assert (word in told) == any(word in expected for expected in words), told
    for word in words:
        assert word in told


def test_the_environment_is_read_at_the_import() -> None:
    environment = os.environ | {"NCCL_EP_LOG": "loud"}
    program = [sys.executable, "-c", "import nccl_ep"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert "NCCL_EP_LOG is 'loud', must be" in done.stderr


def test_nothing_is_logged_without_asking() -> None:
    assert "nccl_ep" not in _run()


# ---- Ranges


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tool for NVTX, compiled here."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    include = next((Path(p) / "include" for p in places if p and (Path(p) / "include/nvtx3").exists()), None)
    if include is None or shutil.which("g++") is None:
        pytest.skip("no CUDA toolkit here: the build has no ranges")
    source = ROOT / "tests/api/nvtx_listener.cc"
    library = tmp_path_factory.mktemp("listener") / "liblistener.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-isystem{include}", source, "-ldl"]
    subprocess.run([*map(str, command), "-o", str(library)], check=True)
    return library


RANGES = [
    "dispatch 1", "combine 1", "dispatch send 2", "dispatch receive 2", "combine send 2", "combine receive 2",
    "combine_weights 3", "dispatch send 3", "dispatch receive 3", "combine 4", "ht dispatch 1", "ht combine 1",
    "ht route 2", "ht send 3", "ht combine 2", "ht cached dispatch 4", "ht route 5", "ht send 6", "ht combine 3",
    "ht cached dispatch 7",
]  # fmt: skip


@pytest.mark.parametrize(("asked", "is_on"), [({}, True), ({"NCCL_EP_NVTX": "0"}, False)])
def test_a_profiler_sees_a_range_for_each_operation(
    listener: Path, tmp_path: Path, asked: dict[str, str], is_on: bool
) -> None:
    """A tool that is attached sees every operation, unless it is told not to."""
    names = tmp_path / "names"
    _run(NVTX_INJECTION64_PATH=str(listener), NVTX_LISTENER_FILE=str(names), **asked)
    lines = names.read_text().splitlines() if names.exists() else []
    ours = [line for line in lines if line.startswith("layer ")]
    assert ours == [f"layer {name}" for name in RANGES if is_on]
    if is_on:
        first = lines.index(ours[0])
        assert lines[first + 1] == "end", "a range ends with its operation"
