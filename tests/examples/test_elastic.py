"""The example model is served while ranks are killed and replaced."""

from __future__ import annotations

import re
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from examples.moe_lm import elastic
from tests.examples.ranks import SIZES


def test_new_ranks_have_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python -m`` runs the program: it is ``__main__``, which a server of forks does not load."""
    preloads = []

    def serve(*_: Any) -> Any:
        preloads.append(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
        return SimpleNamespace(load=[], tokens={}, lost={}, deaths=1)

    monkeypatch.setattr(elastic, "__name__", "__main__")
    monkeypatch.setattr(elastic, "serve_with", serve)
    assert elastic.main([]) == 0
    assert preloads == [["examples.moe_lm.server"]]


@pytest.mark.slow
def test_requests_of_living_ranks_are_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = f"{SIZES} --slots 4 --prompt 3-12 --output 8-16 --requests 24 --kills 2 --check 1 --deadline 20"
    assert elastic.main(arguments.split()) == 0
    said = capfd.readouterr().out
    killed = re.findall(r"rank (\d) was killed, and requests \[(.*)\] are lost with it", said)
    assert len(killed) == 2
    lost = [number for _, numbers in killed for number in numbers.split(", ") if number]
    assert all(int(number) % 2 in {int(rank) for rank, _ in killed} for number in lost)  # of homes that died
    assert f"{24 - len(lost)} of 24 requests were served, {len(lost)} were lost with 2 ranks, 0 otherwise" in said
    assert "; 0 have other tokens" in said
