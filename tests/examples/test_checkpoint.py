"""A checkpoint is the old one or the new one, whole, whatever happens in save(). load() names a wrong file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from examples.moe_lm import checkpoint, files
from examples.moe_lm.checkpoint import INDEX, CheckpointError
from examples.moe_lm.model import Model
from examples.moe_lm.sizes import Sizes
from tests.support.processes import processes

SIZES = Sizes(hidden=16, layers=1, heads=2, experts=4, expert_inner=8, shared_inner=8)
OF_SAVING = (checkpoint.__file__, files.__file__)


def make(value: float, rank: int = 0, num_ranks: int = 1, sizes: Sizes = SIZES) -> tuple[Model, torch.optim.AdamW]:
    """All parameters have this value, and all moments twice as much."""
    model = Model(sizes, rank, num_ranks)
    optimiser = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    for values in checkpoint._moments(model, optimiser).values():
        for moment in values.values():
            moment.fill_(2 * value)
    return model, optimiser


def save(folder: Path, value: int) -> None:
    checkpoint.save(str(folder), *make(value), value)


def values_of(model: Model, optimiser: torch.optim.AdamW) -> list[float]:
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [moment / 2 for values in checkpoint._moments(model, optimiser).values() for moment in values.values()]
    return sorted({float(value) for tensor in tensors for value in tensor.unique()})


def loaded(folder: Path) -> int:
    """The step of the checkpoint, all of whose numbers are of this step."""
    model, optimiser = make(0)
    step = checkpoint.load(str(folder), model, optimiser)
    assert values_of(model, optimiser) == [step]
    assert {int(optimiser.state[parameter]["step"]) for parameter in model.parameters()} == {step}
    return step


def stop_at(place: int, stop: Callable[[], None]) -> Any:
    """A trace function that calls ``stop`` at the ``place``th line of saving that is reached for the first time."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in OF_SAVING:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
            if len(reached) > place:
                stop()
        return trace

    return trace


def test_a_rank_killed_at_any_line_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    found = []
    for place in range(1000):
        folder = tmp_path / str(place)
        save(folder, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
        if child == 0:
            sys.settrace(stop_at(place, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            with contextlib.suppress(BaseException):
                save(folder, 2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(loaded(folder))
        save(folder, 3)
        assert loaded(folder) == 3
        assert len(os.listdir(folder)) == 2, "index and data, and nothing that was left behind"
        shutil.rmtree(folder)
        if code == 0:
            break
    assert len(found) > 60 and found == sorted(found) and found.count(2) > 5, found


def _killed(rank: int, folder: str, victim: int, function: str) -> str:
    def trace(frame: FrameType, _: str, __: Any) -> None:
        if frame.f_code.co_name == function and frame.f_code.co_filename in OF_SAVING:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        sys.settrace(trace)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save(folder, *make(2, rank, 2), 2)
    return str(raised.value)


@pytest.mark.parametrize(
    ("victim", "function", "step"), [(0, "_replace_index", 1), (1, "_write_tensors", 1), (0, "_remove_other_data", 2)]
)
def test_one_of_two_ranks_killed_leaves_a_whole_checkpoint(
    tmp_path: Path, victim: int, function: str, step: int
) -> None:
    folder = tmp_path / "saved"
    save(folder, 1)
    with processes(2, _killed, tmp_path, str(folder), victim, function) as world:
        assert world.wait(victim).exitcode == -signal.SIGKILL
        survivor = world.wait(1 - victim)
    if function != "_remove_other_data":
        assert f"{folder}: a rank is gone" in survivor.value, survivor.error
    assert loaded(folder) == step


def _without_room(rank: int, folder: str, victim: int, room: int) -> str:
    if rank == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save(folder, *make(2, rank, 2), 2)
    return str(raised.value)


def test_no_room_for_one_of_two_ranks_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(folder, 1)
    with processes(2, _without_room, tmp_path, str(folder), 1, 1000) as world:
        told = [world.wait(rank).value for rank in range(2)]
    assert told[0] == told[1] and "1.bin" in told[0] and "File too large" in told[0] and "(rank 1)" in told[0]
    assert loaded(folder) == 1 and len(os.listdir(folder)) == 2


def test_no_room_for_the_index_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole = checkpoint.write_whole

    def write(*args: Any) -> None:
        monkeypatch.setattr(files.os, "fsync", no_room)
        write_whole(*args)

    monkeypatch.setattr(checkpoint, "write_whole", write)
    with pytest.raises(CheckpointError, match=f"No space left on device: '{tmp_path}/{INDEX}'"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert loaded(tmp_path) == 1 and len(os.listdir(tmp_path)) == 2


# ---- What is no checkpoint, or none of this model


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def data(folder: Path) -> Path:
    (found,) = folder.glob("data-*/0.bin")
    return found


def flip(path: Path, place: int) -> None:
    numbers = bytearray(path.read_bytes())
    numbers[place] ^= 1
    path.write_bytes(numbers)


def link(folder: Path, path: Path) -> None:
    """What is outside of the checkpoint, as an archive of somebody may have it."""
    outside = folder.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def as_dcp(folder: Path) -> None:
    """What torch.distributed.checkpoint writes."""
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / ".metadata").write_bytes(pickle.dumps({}))
    (folder / "__0_0.distcp").write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "{folder} is no folder"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("")), "{folder} is no folder"),
    "empty": (lambda f: (f / INDEX).unlink(), "{folder} is no checkpoint of examples.moe_lm.train: it has no {index}"),
    "dcp": (as_dcp, "{folder} is no checkpoint of examples.moe_lm.train: it has no {index}"),
    "index cut": (lambda f: os.truncate(f / INDEX, 500), "{folder}/{index} is damaged, it is no JSON"),
    "index empty": (lambda f: os.truncate(f / INDEX, 0), "{folder}/{index} is damaged, it is no JSON"),
    "index binary": (lambda f: (f / INDEX).write_bytes(b"\xff\x80"), "{folder}/{index} is damaged, it is no JSON"),
    "a list": (lambda f: (f / INDEX).write_text("[]"), '{folder}/{index} does not say "format"'),
    "another format": (lambda f: edit(f, lambda i: i.update(format="2")), '{folder}/{index} does not say "format"'),
    "no step": (lambda f: edit(f, lambda i: i.pop("step")), "{folder}/{index} is damaged: KeyError: 'step'"),
    "no tensor": (
        lambda f: edit(f, lambda i: i["tensors"].pop("model.embedding")),
        "{folder}/{index} has no tensor model.embedding of shape [256, 16]",
    ),
    "outside": (lambda f: edit(f, lambda i: i.update(data="../saved")), "{folder}/{index} is damaged: ValueError"),
    "data elsewhere": (lambda f: link(f, data(f).parent), " is a link, must be a folder"),
    "data file elsewhere": (lambda f: link(f, data(f)), "/0.bin is a link, must be a file"),
    "sizes": (
        lambda f: edit(f, lambda i: i.update(sizes=[[1, 2]])), "{folder}/{index} is damaged: AttributeError",
    ),
    "negative": (
        lambda f: edit(f, lambda i: i["tensors"]["model.embedding"].update(first=-4)),
        "{folder}/{index} is damaged: ValueError",
    ),
    "a deep index": (lambda f: (f / INDEX).write_text("[" * 100_000), "{folder}/{index} is damaged, it is no JSON"),
    **{
        f"step {step}": (
            lambda f, step=step: edit(f, lambda i: i.update(step=step)),
            "{folder}/{index} is damaged: ValueError: step has ",
        )
        for step in (math.inf, math.nan, -5, 1.5, True, "7", 1 << 70, None)
    },
    **{
        f"data {name}": (
            lambda f, name=name: edit(f, lambda i: i.update(data=name)),
            f"{{folder}}/{{index}} is damaged: ValueError: data is {name!r}, no folder of save()",
        )
        for name in ("", ".", "..", "a\0b", "x" * 5000)
    },
    **{
        f"file {name}": (
            lambda f, name=name: edit(f, lambda i: i["tensors"]["model.embedding"].update(file=name)),
            f"{{folder}}/{{index}} is damaged: ValueError: model.embedding is in {name!r}, no file of save()",
        )
        for name in ("", "..", "a\0b", "x" * 5000)
    },
    **{
        f"{name} {value}": (
            lambda f, at=name, value=value: edit(f, lambda i: i["tensors"]["model.embedding"].update({at: value})),
            "{folder}/{index} is damaged: ",
        )
        for name, value in (
            ("shape", "ab"), ("shape", [[1]]), ("shape", [256.0, 16.0]), ("shape", [1 << 80]), ("shape", [math.inf]),
            ("shape", None), ("first", 0.5), ("first", "0"), ("crc32", "x"), ("crc32", None),
        )
    },
    "data cut": (lambda f: os.truncate(data(f), data(f).stat().st_size - 1), "/0.bin has "),
    "data empty": (lambda f: os.truncate(data(f), 0), "/0.bin has 0 bytes, must have "),
    "data longer": (lambda f: data(f).write_bytes(data(f).read_bytes() + b"1"), "/0.bin has "),
    "data gone": (lambda f: data(f).unlink(), "/0.bin is missing"),
    "a bit": (lambda f: flip(data(f), 1000), "/0.bin is damaged: "),
    "last bit": (lambda f: flip(data(f), -1), "/0.bin is damaged: "),
    "of another save": (
        lambda f: (save(f.parent / "other", 2), shutil.copy(data(f.parent / "other"), data(f))),
        "/0.bin is damaged: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_told_by_file(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "saved"
    save(folder, 1)
    do, text = DAMAGES[damage]
    do(folder)
    model, optimiser = make(7)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(str(folder), model, optimiser)
    assert text.format(folder=folder, index=INDEX) in str(raised.value) and str(folder) in str(raised.value)
    assert values_of(model, optimiser) == [7], "nothing was loaded"


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    sizes = Sizes(hidden=32, layers=1, heads=2, experts=8, expert_inner=8, shared_inner=8)
    model, optimiser = make(7, sizes=sizes)
    with pytest.raises(CheckpointError, match=f"{tmp_path} has a model of other sizes: experts is 4 there and 8 here"):
        checkpoint.load(str(tmp_path), model, optimiser)
    assert values_of(model, optimiser) == [7]


def test_where_nothing_can_be_saved_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file: FileExistsError|{tmp_path}/file: NotADirectoryError"):
        save(tmp_path / "file", 1)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("mine")
    save(tmp_path / "kept", 1)
    assert (tmp_path / "kept" / "notes").read_text() == "mine" and loaded(tmp_path / "kept") == 1


def test_what_the_user_has_beside_it_stays(tmp_path: Path) -> None:
    """Folders of a like name, and what a process of this number had begun to write when it was killed."""
    mine = tmp_path / "data-2026-training" / "notes"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / f"{INDEX}.{os.getpid()}.new").write_text("half")
    (tmp_path / f"{INDEX}.0123abcd.new").write_text("half")
    for step in (1, 2):
        save(tmp_path, step)
    assert mine.read_text() == "mine" and loaded(tmp_path) == 2
    assert not (tmp_path / f"{INDEX}.0123abcd.new").exists() and len(list(tmp_path.glob("data-*"))) == 2


def test_a_folder_that_cannot_be_made_is_found_before() -> None:
    with pytest.raises(CheckpointError, match="/proc/nosuch: FileNotFoundError"):
        checkpoint.prepare("/proc/nosuch")


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    """A report to a pipe, as /dev/null and /dev/stdout are like it, and to a link."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        files.write_whole(path, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
    assert link.is_symlink() and target.read_text() == "text"
    with pytest.raises(OSError, match="File name too long"):
        files.write_whole(tmp_path / ("x" * 250), "text")


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "one", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    shutil.rmtree(tmp_path / "one")
    assert sorted(path.suffix for path in (tmp_path / "copy").rglob("*") if path.is_file()) == [".bin", ".json"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(where, name, refuse)
    assert loaded(tmp_path / "copy") == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_loads_it(tmp_path: Path, num_ranks: int) -> None:
    whole, optimiser = make(1)
    whole.initialise(3)
    checkpoint.save(str(tmp_path), whole, optimiser, 5)
    own = SIZES.experts // num_ranks
    for rank in range(num_ranks):
        model, optimiser = make(0, rank, num_ranks)
        assert checkpoint.load(str(tmp_path), model, optimiser) == 5
        for (name, mine), all_of_it in zip(model.named_parameters(), whole.parameters(), strict=True):
            part = all_of_it[rank * own : (rank + 1) * own] if ".experts." in name else all_of_it
            assert torch.equal(mine, part), name
