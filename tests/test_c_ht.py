"""High throughput through the C library: it computes what the oracle does, in every way that it can be asked."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from c_api import Library
from c_ht_case import WAYS, run_ht_case
from cases import generate


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (3, 1)])
def test_generated_cases_give_the_oracles_results(library: Library, num_ranks: int, domain_size: int) -> None:
    generated = (generate(seed) for seed in itertools.count(700))
    fitting = (c for c in generated if c.num_ranks == num_ranks and (c.domain_size or num_ranks) == domain_size)
    ways: Counter[str] = Counter()
    layouts = set()
    for case in itertools.islice(fitting, 40):
        ways += run_ht_case(library, case)
        layouts.add(case.layout)
    assert len(layouts) == 4
    assert all(ways[way] > 0 for way in WAYS), ways
