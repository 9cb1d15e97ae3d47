"""What a buffer takes: the readings of memory, and the records that are made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import nccl_ep
from bench import measure_memory, memory, records
from nccl_ep.testing import ThreadGroup, run_ranks

MB = 1_000_000


def test_what_is_taken_is_read_behind_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 100 that others use, too, and of which torch has more for tensors in the end."""
    done: list[str] = []
    free, reserved = iter([70, 40] * 2), iter([5, 12])

    def read(_: object) -> tuple[int, int]:
        done.append("read")
        return next(free), 100

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", read)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: next(reserved))
    given = (lambda: done.append("make") or "made", torch.device("cuda", 0), lambda: done.append("meet"))
    assert memory.taken_by(*given) == ("made", 30)
    assert done == ["meet", "wait", "read", "make", "meet", "wait", "read"]
    assert memory.taken_by(*given, tensors=False) == ("made", 30 - 7)


def test_cpu_ranks_take_nothing_of_a_gpu() -> None:
    assert memory.taken_by(lambda: "made", torch.device("cpu"), tensors=False) == ("made", 0)


def test_records_are_of_the_rank_that_lost_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a kind that fails has one that says why; those after it are measured."""

    class Ended:
        def __init__(self, num_ranks: int) -> None:
            assert num_ranks == 3

        def run(self, module: str, argv: list[str], settings: dict[str, str], deadline: float) -> str:
            assert module == "bench.measure_memory"
            (folder,) = settings.values()
            kind, device = argv
            assert device == "cpu"
            if kind == "ll, cumem":
                return "rank 2 ended with code 1"
            for rank, total in enumerate((50, 70, 60)):
                found = {"memory": 40 * MB + 123_456, "memory_total": total * MB}
                Path(folder, str(rank)).write_text(json.dumps(found))
            return ""

    monkeypatch.setattr(measure_memory, "Launcher", Ended)
    path = tmp_path / "new" / "memory.json"
    kinds = [word for kind in ("ll, masks", "ll, cumem", "ht, 4096 tokens") for word in ("--kind", kind)]
    assert measure_memory.main([str(path), "--device", "cpu", "--ranks", "3", *kinds]) == 1
    found = records.load([path])
    told = [(each["op"], each["figure"], each["value"], each["tokens"], each.get("skipped")) for each in found]
    assert told == [
        ("ll, masks", "memory", 40.1, 128, None), ("ll, masks", "memory_total", 70.0, 128, None),
        ("ll, cumem", "memory", None, 128, "rank 2 ended with code 1"),
        ("ht, 4096 tokens", "memory", 40.1, 4096, None), ("ht, 4096 tokens", "memory_total", 70.0, 4096, None),
    ]  # fmt: skip
    assert {(each["bench"], each["unit"], each["ranks"]) for each in found} == {("memory", "MB", 3)}


def test_windows_of_cpu_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    assert measure_memory.main([str(path), "--device", "cpu", "--kind", "ll"]) == 0, capfd.readouterr().err
    (found,) = records.load([path])
    sizes = measure_memory.SIZES

    def window(group: ThreadGroup) -> int:
        with nccl_ep.Buffer.for_shapes(group, **sizes, device="cpu") as buffer:
            return int(buffer.stats()["window_bytes"])

    assert (found["op"], found["figure"], found["ranks"]) == ("ll", "memory", 2)
    assert found["value"] == round(run_ranks(2, window)[0] / MB, 1)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--ranks", "1"], "--ranks is 1, must be 2 or more"), (["--kind", "lll"], "invalid choice: 'lll'"),
        (["/dev/null"], "/dev/null is there and no file"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argv if argv[0].startswith("/") else [str(tmp_path / "memory.json"), *argv]
    with pytest.raises(SystemExit):
        measure_memory.main(["--device", "cpu", *given])
    assert told in capsys.readouterr().err


def test_it_starts_its_ranks_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        measure_memory.main([str(tmp_path / "memory.json")])
    assert "run it without torchrun" in capsys.readouterr().err
