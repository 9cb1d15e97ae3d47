"""The program that tells which operators of the server give a row other bits in another place."""

import pytest
import torch

from examples.moe_lm import bits
from examples.moe_lm.check import _first_change
from examples.moe_lm.load import Request

SMALL = [
    "--device", "cpu", "--ranks", "2",
    "--slots", "8", "--prefill-batch", "4", "--max-prompt", "16", "--max-length", "32",
]  # fmt: skip


def test_operators_of_cpu_ranks_have_the_same_bits(capfd: pytest.CaptureFixture[str]) -> None:
    assert bits.main(SMALL) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 29 and all(line.endswith("the same bits") for line in lines)


def test_an_operator_that_looks_at_the_place_is_found() -> None:
    x = torch.randn(32, 16)

    def uneven(rows: torch.Tensor) -> torch.Tensor:
        """Adds up the last rows' halves, the other rows as they are."""
        halves = rows[:, :8].sum(1) + rows[:, 8:].sum(1)
        return torch.cat([rows[:24].sum(1), halves[24:]]).unsqueeze(1)

    (case,) = bits.moved("uneven", uneven, (x,), 4, False)
    assert case.rows == 96 and 0 < case.moved <= 48
    assert f"OTHER BITS in {case.moved} of 96 rows" in str(case)
    (case,) = bits.moved("even", lambda rows: rows * 2, (x,), 4, False)
    assert (case.moved, case.repeated) == (0, 0)
    calls = iter(range(100))
    (case,) = bits.moved("restless", lambda rows: rows + next(calls), (x,), 4, False)
    assert (case.moved, case.repeated) == (96, 320) and "320 in 10 repeats" in str(case)


def test_what_changed_first_is_told() -> None:
    def request(cache: list[int], *logits: float) -> Request:
        return Request(0, 0.0, 0, torch.zeros(1), 2, logits=[torch.full((4,), each) for each in logits], cache=cache)

    one = request([5, 6], 1.0, 2.0)
    assert _first_change(one, request([5, 6], 1.0, 2.0)) is None
    assert _first_change(one, request([5, 6], 1.0, 2.5)) == ("token 1", 0.5)
    assert _first_change(one, request([5, 7], 1.0, 2.5)) == ("prefill, layer 1", 0.0)
