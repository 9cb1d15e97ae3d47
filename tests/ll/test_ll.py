"""Low-latency dispatch and combine on CPU ranks: bit for bit what the oracle says, for many random cases."""

import os

import pytest

from tests.support.cases import ENOUGH, generate, seeds
from tests.support.coverage import Coverage
from tests.support.expected import large_cases
from tests.support.harness import check_case

NUM_CASES = int(os.environ.get("NCCL_EP_CASES", "10000" if os.environ.get("NCCL_EP_TEST_ALL") else ENOUGH))


def test_generated_cases_give_the_oracles_bits(capsys: pytest.CaptureFixture[str]) -> None:
    coverage = Coverage()
    for seed in seeds(NUM_CASES):
        case = generate(seed)
        results = check_case(case, staged=seed % 3 == 1, network_seed=seed % 4)
        coverage.add(case, results)
    with capsys.disabled():
        print("\n" + coverage.report())
    assert not coverage.missing()


def test_large_cases_give_the_oracles_bits() -> None:
    for number, case in enumerate(large_cases()):
        check_case(case, staged=number % 3 == 1)
