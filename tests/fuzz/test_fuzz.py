"""Ten seconds of the fuzz, of a seed that is new each time; `make fuzz` takes as long as it is told."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.__main__ import run
from tests.fuzz.kinds import KINDS


def test_ten_seconds_of_random_cases_find_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    kinds = [kind for kind in KINDS if kind != "processes"]
    assert run(random.SystemRandom().randrange(1 << 30), 10.0, 1 << 40, kinds) >= 1


@pytest.mark.slow
def test_random_cases_of_processes_find_nothing() -> None:
    run(random.SystemRandom().randrange(1 << 30), 10.0, 3, ["processes"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "processes"])
def test_a_round_follows_from_its_seed(kind: str) -> None:
    """One that failed can be run again."""
    for _ in range(2):
        run(5, 60.0, 1, [kind])


def test_what_fails_can_be_run_again(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(seed: int) -> None:
        assert seed < 12, "a mistake"

    monkeypatch.setitem(KINDS, "extra", fail)
    with pytest.raises(AssertionError, match="a mistake"):
        run(10, 60.0, 100, ["extra"])
    assert "again: python -m tests.fuzz --kinds extra --seed 12 --rounds 1" in capfd.readouterr().out
