"""What nccl_ep.record writes, beside what the routing says."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import recording
from nccl_ep.report.figures import figures
from nccl_ep.report.inputs import load
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT
from tests.deep_ep.low_latency_ranks import small_case
from tests.report import programs
from tests.report.programs import EXPERTS, HIDDEN, RANKS, ROW_BYTES, SIZES, STEPS, TOKENS


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def operations(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder / f"rank{rank}.jsonl") if "in_buffer" in line]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_rows_and_bytes_are_those_of_the_routing(tmp_path: Path, mode: str) -> None:
    sent = programs.recorded(tmp_path, mode)
    found = figures(load([tmp_path]).recorded)
    rows = programs.counted_rows()
    home = [list(column) for column in zip(*rows, strict=True)]
    assert found["sent"]["dispatch"]["rows"] == rows and found["sent"]["combine"]["rows"] == home
    for kind in ("dispatch", "combine"):
        counts = found["sent"][kind]["rows"]
        assert found["sent"][kind]["bytes"] == [[count * ROW_BYTES for count in row] for row in counts]
    # The windows count rows at their sender, and sums of HT, which are read, at their reader.
    both = [[a + b for a, b in zip(rows[r], home[r] if mode == "ll" else rows[r], strict=True)] for r in range(RANKS)]
    assert [each["rows_count"] for each in sent] == both
    assert [each["rows"] for each in sent] == [[count * ROW_BYTES for count in row] for row in both]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_the_load_is_that_of_all_ranks_tokens(tmp_path: Path, mode: str) -> None:
    programs.recorded(tmp_path, mode)
    found = figures(load([tmp_path]).recorded)
    choices = [programs.counted_choices(step) for step in range(STEPS)]
    assert found["experts"] == [sum(each) for each in zip(*choices, strict=True)]
    assert [each["max"] for each in found["load"]] == [max(each) for each in choices]
    ratios = [round(max(each) * EXPERTS / sum(each), 4) for each in choices]
    assert [each["max_over_mean"] for each in found["load"]] == ratios


def test_a_file_has_what_each_operation_was(tmp_path: Path) -> None:
    programs.recorded(tmp_path, "ll", "ht")
    for rank in range(RANKS):
        header, buffer, *rest, last, end = lines_of(tmp_path / f"rank{rank}.jsonl")
        assert (header["rank"], header["version"], header["process"]) == (rank, nccl_ep.__version__, os.getpid())
        assert (buffer["num_ranks"], buffer["device"]) == (RANKS, "cpu")
        names = [name for mode in ("", "ht ") for _ in range(STEPS) for name in (f"{mode}dispatch", f"{mode}combine")]
        assert [line["operation"] for line in rest] == names
        assert [line["number"] for line in rest] == [1, 1, 2, 2, 3, 3] * 2
        assert {(line["tokens"], line["hidden"], line["row_bytes"]) for line in rest} == {(TOKENS, HIDDEN, ROW_BYTES)}
        times = [time for line in rest for time in (line["begin_ns"], line["end_ns"])]
        assert times == sorted(times) and not any("has_failed" in line for line in rest)
        assert last["stats"]["calls"]["ht_combine"] == STEPS and end["recording_ended_ns"] >= times[-1]


def test_split_calls_exact_sizes_and_cached_dispatches_count_once(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> None:
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), programs.ids_of(group.rank(), 0)
        with nccl_ep.Buffer.for_shapes(group, mode="auto", late_weights=True, **SIZES) as buffer:
            out = nccl_ep.dispatch_send(x, ids, buffer=buffer, num_experts=EXPERTS).receive()
            weights = torch.ones(TOKENS, programs.TOPK)
            nccl_ep.combine_send(out.x, out.handle, weights=weights).receive()
            exact = nccl_ep.dispatch(
                x, ids, buffer=buffer, num_experts=EXPERTS, mode="ht", layout="flat", capacity="exact"
            )
            nccl_ep.dispatch_cached(x, exact.handle)
            nccl_ep.combine_weights(torch.ones(out.weights.shape), out.handle)

    with nccl_ep.record(tmp_path):
        run_ranks(RANKS, body)
    done = operations(tmp_path)
    assert [line["operation"] for line in done] == [
        "dispatch send", "dispatch receive", "combine send", "combine receive", "ht route", "ht send",
        "ht cached dispatch", "combine_weights",
    ]  # fmt: skip
    ids = programs.ids_of(0, 0)
    ranks = [{expert // 4 for expert in each if expert >= 0} for each in ids.tolist()]
    tokens = [sum(rank in each for each in ranks) for rank in range(RANKS)]
    choices = [int(((ids >= 4 * rank) & (ids < 4 * rank + 4)).sum()) for rank in range(RANKS)]
    # Weights that home ranks apply to a split combine: each choice is a row.
    assert [line.get("rows") for line in done] == [tokens, None, choices, None, None, tokens, tokens, None]
    found = figures(load([tmp_path]).recorded)
    assert [len(found["times"][name]) for name in ("LL dispatch", "LL combine", "HT dispatch")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "local", "topk", "tokens", "dtype"),
    [(1, 5, 5, 700, torch.int64), (3, 40, 7, 30, torch.int32), (18, 2, 32, 4, torch.int64)],
)
def test_counts_are_those_of_any_routing(
    tmp_path: Path, ranks: int, local: int, topk: int, tokens: int, dtype: torch.dtype
) -> None:
    """Top-k that does not divide a warp, several rounds of warps, more ranks than a warp counts in registers."""
    experts = ranks * local
    ids = torch.rand(ranks, tokens, experts, generator=torch.Generator().manual_seed(1)).topk(topk)[1]
    ids[:, ::3, topk // 2 :] = -1

    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=tokens, hidden=64, topk=topk, num_experts=experts, device="cpu"
        ) as buffer:
            x = torch.ones(tokens, 64).bfloat16()
            given = ids[group.rank()].to(dtype)
            out = nccl_ep.dispatch(x, given, buffer=buffer, num_experts=experts, layout="flat")
            nccl_ep.combine(out.x, out.handle)

    with nccl_ep.record(tmp_path):
        run_ranks(ranks, body)
    for rank in range(ranks):
        given = ids[rank].tolist()
        owners = [{expert // local for expert in each if expert >= 0} for each in given]
        rows = [sum(other in each for each in owners) for other in range(ranks)]
        choices = [sum(each.count(expert) for each in given) for expert in range(experts)]
        dispatch, combine = operations(tmp_path, rank)
        assert (dispatch["rows"], dispatch["choices"]) == (rows, choices)
        assert combine["rows"] == rows and "choices" not in combine


def test_deepep_methods_and_backward_passes_are_seen(tmp_path: Path) -> None:
    case = small_case(RANKS)

    def body(group: ThreadGroup) -> None:
        with nccl_ep.deep_ep.Buffer(group, low_latency_mode=True, num_rdma_bytes=1 << 20, device="cpu") as buffer:
            handle = case.send(buffer)[2]
            case.send_back(buffer, handle)
        x = torch.ones(TOKENS, HIDDEN, requires_grad=True)
        with nccl_ep.Buffer.for_shapes(group, dtype=torch.float32, **SIZES) as core:
            out = nccl_ep.dispatch(x, programs.ids_of(group.rank(), 0), buffer=core, num_experts=EXPERTS)
            nccl_ep.combine(out.x, out.handle).sum().backward()

    with nccl_ep.record(tmp_path):
        run_ranks(RANKS, body)
    done = operations(tmp_path)
    assert [line["operation"] for line in done if line["in_buffer"] == 0][:2] == ["dispatch", "combine"]
    assert [line["is_home_bound"] for line in done if line["in_buffer"] == 1][:2] == [False, True]
    assert len([line for line in done if line["in_buffer"] == 1]) > 2  # those of the backward pass


def test_a_compiled_function_is_recorded(tmp_path: Path) -> None:
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:

        @torch.compile(fullgraph=True, backend="aot_eager")
        def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS)
            return nccl_ep.combine(out.x, out.handle)

        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), programs.ids_of(0, 0)
        with nccl_ep.record(tmp_path):
            recorded = layer(x, ids)
        assert torch.equal(layer(x, ids), recorded)
    assert [line["operation"] for line in operations(tmp_path)] == ["dispatch", "combine"]


def test_an_operation_that_fails_is_marked_and_raises_as_ever(tmp_path: Path) -> None:
    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(group, **SIZES) as buffer:
            if group.rank() == 0:
                buffer.set_timeout(0.2)
                x = torch.ones(TOKENS, HIDDEN).bfloat16()
                with pytest.raises(nccl_ep.TimeoutError, match="rank 1"):
                    nccl_ep.dispatch(x, programs.ids_of(0, 0), buffer=buffer, num_experts=EXPERTS)

    with nccl_ep.record(tmp_path):
        run_ranks(RANKS, body)
    assert [line["has_failed"] for line in operations(tmp_path)] == [True]
    assert "Rank 0: 1 operations failed." in figures(load([tmp_path]).recorded)["notes"]


def test_one_recording_at_a_time_and_none_after_its_end(tmp_path: Path) -> None:
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:
        with nccl_ep.record(tmp_path / "made"):
            programs.exchange(buffer, 0, "ll", 0)
            with pytest.raises(nccl_ep.UsageError, match="made already"), nccl_ep.record(tmp_path):
                pass
        programs.exchange(buffer, 0, "ll", 0)
    assert len(operations(tmp_path / "made")) == 2 and list(tmp_path.glob("*.jsonl")) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file"), nccl_ep.record(tmp_path / "file"):
        pass


def test_none_begins_while_another_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = recording._C.stop_recording

    def slow_stop() -> tuple[int, str]:
        with pytest.raises(nccl_ep.UsageError, match="made already"), nccl_ep.record(tmp_path / "other"):
            pass
        return stop()

    monkeypatch.setattr(recording._C, "stop_recording", slow_stop)
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer, nccl_ep.record(tmp_path / "made"):
        programs.exchange(buffer, 0, "ll", 0)
    assert len(operations(tmp_path / "made")) == 2 and not (tmp_path / "other").exists()


PROGRAM = """
import nccl_ep
from tests.report import programs
with nccl_ep.Buffer.for_shapes(None, **programs.SIZES) as buffer:
    programs.exchange(buffer, 0, "ll", 0)
"""


def test_a_full_disk_ends_the_recording_and_no_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer, nccl_ep.record(tmp_path):
        for step in range(60):
            programs.exchange(buffer, 0, "ll", step)
    assert caplog.text.count("the recording of rank 0 is cut off: [Errno 28] No space left on device") == 1
    with nccl_ep.record(tmp_path / "other"):
        pass


def test_a_file_that_ends_in_between_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "rank0.jsonl")
    reader = os.open(tmp_path / "rank0.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer, nccl_ep.record(tmp_path):
        programs.exchange(buffer, 0, "ll", 0)
        os.close(reader)
        for step in range(1, 3):
            programs.exchange(buffer, 0, "ll", step)
    assert caplog.text.count("the recording of rank 0 is cut off: [Errno 32] Broken pipe") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_amid_the_writing_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ctrl-C, and what the handler of a server raises."""
    flush = recording._File.flush
    done: list[int] = []

    def interrupted(file: recording._File) -> None:
        if done == [0]:
            signal.raise_signal(number)
        flush(file)

    def end(*_: Any) -> None:
        sys.exit(7)

    monkeypatch.setattr(recording._File, "flush", interrupted)
    before = signal.signal(number, end if number == signal.SIGTERM else signal.default_int_handler)
    try:
        with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer, nccl_ep.record(tmp_path):
            with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
                for step in range(5):
                    programs.exchange(buffer, 0, "ll", step)
                    done.append(step)
            assert done == [0]
            monkeypatch.undo()
            programs.exchange(buffer, 0, "ll", 5)
    finally:
        signal.signal(number, before)
    assert raised.type is (SystemExit if number == signal.SIGTERM else KeyboardInterrupt)
    assert "interrupted" in [each.name for each in raised.traceback]
    assert len(operations(tmp_path)) >= 4


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raises, as a job in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("is_before", [True, False])
def test_a_signal_around_the_line_of_a_buffer_leaves_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    write, rang = recording._File.write, []

    def interrupted(file: recording._File, line: dict[str, Any]) -> None:
        if not is_before:
            write(file, line)
        if "buffer" in line and not rang:
            rang.append(line)
            signal.raise_signal(signal.SIGINT)
        if is_before:
            write(file, line)

    monkeypatch.setattr(recording._File, "write", interrupted)
    with nccl_ep.record(tmp_path):
        with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:
            with pytest.raises(KeyboardInterrupt):
                programs.exchange(buffer, 0, "ll", 0)
            programs.exchange(buffer, 0, "ll", 0)
        with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:
            programs.exchange(buffer, 0, "ll", 0)
    (found,) = load([tmp_path]).recorded
    assert [each["buffer"] for each in found.buffers] == [0, 1] and all("stats" in each for each in found.buffers)
    assert [line["in_buffer"] for line in found.operations][-4:] == [0, 0, 1, 1]


KILLED = """
import os, signal, sys
import nccl_ep
from tests.report import programs
with nccl_ep.record(sys.argv[1]), nccl_ep.Buffer.for_shapes(None, **programs.SIZES) as buffer:
    programs.exchange(buffer, 0, "ll", 0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_what_it_has_recorded(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert [line["operation"] for line in operations(tmp_path)] == ["dispatch", "combine"]
    notes = figures(load([tmp_path]).recorded)["notes"]
    assert "rank0.jsonl has no end: its process was killed, or its disk was full." in notes


LEFT_OPEN = """
import sys
import nccl_ep
from tests.report import programs
sys.kept = nccl_ep.record(sys.argv[1])  # goes behind the modules
sys.kept.__enter__()
buffer = nccl_ep.Buffer.for_shapes(None, **programs.SIZES)
programs.exchange(buffer, 0, "ll", 0)
"""


def test_a_block_that_the_end_of_the_program_leaves_open_is_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    assert [line["operation"] for line in operations(tmp_path)] == ["dispatch", "combine"]
    lines = lines_of(tmp_path / "rank0.jsonl")
    assert "stats" in lines[-2] and "recording_ended_ns" in lines[-1]


FORKS = """
import multiprocessing, sys
import nccl_ep
from tests.report import programs

def body():
    with nccl_ep.Buffer.for_shapes(None, **programs.SIZES) as buffer:
        programs.exchange(buffer, 0, "ll", 0)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    context.set_forkserver_preload(["nccl_ep", "tests.report.programs"] if sys.argv[2] == "preloaded" else [])
    if sys.argv[2] == "recorded":
        body()
        body()
    child = context.Process(target=body)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "what", "buffers"),
    [
        ("fork", "", 1), ("fork", "recorded", 2), ("forkserver", "preloaded", 1),
        pytest.param("forkserver", "", 1, marks=pytest.mark.slow), pytest.param("spawn", "", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_environment_records_processes_that_a_program_makes(
    tmp_path: Path, method: str, what: str, buffers: int
) -> None:
    """But no fork of one that has recorded, whose file it would overwrite."""
    (tmp_path / "forks.py").write_text(FORKS)
    environment = os.environ | {"NCCL_EP_RECORD": str(tmp_path / "made"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "forks.py"), method, what]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["rank0.jsonl"]
    lines = lines_of(tmp_path / "made/rank0.jsonl")
    assert [line["operation"] for line in lines if "in_buffer" in line] == ["dispatch", "combine"] * buffers
    assert len([line for line in lines if "stats_of" in line]) == buffers
    assert "recording_ended_ns" in lines[-1]


def test_a_fork_of_a_recorded_process_may_record_for_itself(tmp_path: Path) -> None:
    with nccl_ep.record(tmp_path / "parent"), nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:
        programs.exchange(buffer, 0, "ll", 0)
        child = os.fork()
        if child == 0:
            try:
                with nccl_ep.record(tmp_path / "child"), nccl_ep.Buffer.for_shapes(None, **SIZES) as own:
                    programs.exchange(own, 0, "ll", 0)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        programs.exchange(buffer, 0, "ll", 1)
    assert [len(operations(tmp_path / name)) for name in ("parent", "child")] == [4, 2]


@pytest.mark.parametrize("path", ["", b"folder", 3])
def test_what_is_no_folder_is_named(path: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"path is .*, must be that of a folder"), nccl_ep.record(path):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = f"^{tmp_path}/file is a file, must be a folder$"
    with pytest.raises(FileExistsError, match=text), nccl_ep.record(tmp_path / "file"):
        pass


def test_a_recording_that_nobody_enters_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what other tests have left may say something, too
    caplog.clear()
    nccl_ep.record(tmp_path / "folder")
    gc.collect()
    said, how = f"nccl_ep.record('{tmp_path}/folder') alone records nothing", "write 'with' in front"
    assert caplog.messages == [f"{said}: {how}; NCCL_EP_RECORD records a process"]
    assert not (tmp_path / "folder").exists()
    caplog.clear()

    @nccl_ep.record(tmp_path / "folder")
    def recorded() -> None:
        with nccl_ep.Buffer.for_shapes(None, **SIZES) as buffer:
            programs.exchange(buffer, 0, "ll", 1)

    recorded()
    del recorded
    gc.collect()
    assert len(operations(tmp_path / "folder")) == 2 and caplog.messages == []


def test_an_environment_that_cannot_be_recorded_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NCCL_EP_RECORD", f"{tmp_path}/file/more")
    with pytest.raises(nccl_ep.SystemError, match=f"NCCL_EP_RECORD is '{tmp_path}/file/more': "):
        recording.set_up()


def test_the_environment_records_a_program(tmp_path: Path) -> None:
    environment = os.environ | {"NCCL_EP_RECORD": str(tmp_path / "made"), "RANK": "8"}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, check=True, timeout=300)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["process8.rank0.jsonl"]
    lines = lines_of(tmp_path / "made/process8.rank0.jsonl")
    assert [line["operation"] for line in lines[2:4]] == ["dispatch", "combine"] and "stats" in lines[4]
