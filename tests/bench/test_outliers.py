"""bench.measure_outliers: what it notes of the hosts."""

from types import SimpleNamespace
from typing import Any, cast

from bench.measure import Effort
from bench.measure_outliers import EAGER, Subject
from bench.operations import Operations


def test_queued_pairs_have_a_time_of_the_host_for_each_sample() -> None:
    calls: list[int] = []
    rank = SimpleNamespace(is_cuda=False, gate=SimpleNamespace(wait=lambda: None), synchronize=lambda: None, times=[])
    subject = cast(Any, Subject.__new__(Subject))
    subject.name, subject.rank = EAGER, rank
    subject.calls = Operations({"pair": lambda: calls.append(len(calls))})
    subject.effort = Effort(warm_up=3, iterations=5, chain=0, host_calls=0)
    ((figure, body),) = subject.figures()
    samples = body()
    assert figure == "queued" and len(samples["pair"]) == 5 and len(calls) == 8
    assert len(rank.times) == 5 and sorted(rank.times) == rank.times
