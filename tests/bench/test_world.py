"""The worlds of ranks that the benchmark and the doctor start: who else of the machine could take part."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench import world
from tests import ROOT
from tests.bench.listening_ranks import listeners


def test_ranks_and_their_starter_listen_to_nobody_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.listening_ranks"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert not list(tmp_path.iterdir()), "the store's folder is still there"


def test_a_process_that_listens_to_others_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert f"00000000:{port:04X}" in listeners("self")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not any(each.endswith(f":{server.getsockname()[1]:04X}") for each in listeners("self"))


def test_what_ranks_send_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that takes a rank's place sends a pickle."""
    told = []

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return told.append, ("unpickled",)

    text = pickle.dumps(Bomb())

    def all_gather(out: list[world.torch.Tensor], mine: world.torch.Tensor, group: object) -> None:
        if mine.dtype == world.torch.int64:
            out[0].fill_(len(text))
        else:
            out[0] = world.torch.tensor(list(text), dtype=world.torch.uint8)

    monkeypatch.setattr(world.dist, "all_gather", all_gather)
    end = world.World.__new__(world.World)
    end.num_ranks, end._host = 1, None
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        end._gather("x")
    assert not told


def test_gpus_go_on_together_whatever_their_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of so many cycles parts GPUs whose clocks differ: nothing but the collective stands behind it."""
    queued: list[str] = []
    monkeypatch.setattr(world, "_sleep", lambda cycles: queued.append(f"pause {cycles}"))
    monkeypatch.setattr(world.dist, "all_reduce", lambda _: queued.append("collective"))
    end = world.World.__new__(world.World)
    end._token = world.torch.zeros(1)
    end.align()
    assert queued == [f"pause {world._PAUSE_CYCLES}", "collective"]
