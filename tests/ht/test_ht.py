"""High-throughput dispatch and combine on CPU ranks: bit for bit what the oracle says, for many random cases."""

from __future__ import annotations

import os

import pytest

from tests.ht.harness import HtCoverage, check_ht_case
from tests.support.cases import ENOUGH, generate, seeds
from tests.support.coverage import Coverage

NUM_CASES = int(os.environ.get("NCCL_EP_CASES", "6000" if os.environ.get("NCCL_EP_TEST_ALL") else ENOUGH))


def test_generated_cases_give_the_oracles_bits(capsys: pytest.CaptureFixture[str]) -> None:
    coverage, ht_coverage = Coverage(), HtCoverage()
    for seed in seeds(NUM_CASES):
        case = generate(seed)
        outcome = check_ht_case(case, network_seed=seed % 4)
        coverage.add(case, outcome.results)
        ht_coverage.add(outcome)
    with capsys.disabled():
        print("\n" + coverage.report() + "\n" + ht_coverage.report())
    if NUM_CASES >= ENOUGH:
        assert not coverage.missing() + ht_coverage.missing()
