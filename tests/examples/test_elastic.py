"""The example model is served while ranks are killed and replaced."""

from __future__ import annotations

import re

import pytest

from examples.moe_lm import elastic
from tests.examples.ranks import SIZES


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
