"""Ranks of one GPU that claim several domains, with a NIC block in every launch: cases against the oracle.

Run as a program: a few cases, for sanitizers. On emulated GPUs NCCL_EP_EMULATOR_GPUS=1 puts all ranks on one.
"""

from __future__ import annotations

import dataclasses
import itertools

from nccl_ep import _C
from tests.gpu.layers import LAYOUTS
from tests.gpu.ranks import wide_case
from tests.gpu.sanitizers import run_arguments
from tests.ht.harness import HtCoverage, check_ht_case
from tests.support.cases import Case, generate
from tests.support.harness import check_case

DEVICE = "cpu" if _C.EMULATES_GPU else "cuda"
TOPOLOGIES = ((2, 1), (2, 2), (4, 1), (2, 3))  # domains, ranks of each


def wide_cases(topology: tuple[int, int]) -> list[Case]:
    """More tokens than channels and chunks, rows of several pieces."""
    ranks = topology[0] * topology[1]
    tokens = (96, 41, 0, 9, 96, 3)[:ranks]
    quants = (None, "fp8", "fp8_ue8m0", None)
    how = [{"layout": layout, "quant": quant} for layout, quant in zip(LAYOUTS, quants, strict=True)]
    return [wide_case(ranks, domain_size=topology[1], tokens=tokens, **each) for each in how]


def run_ll(case: Case, number: int, ll_network: str = "rail") -> None:
    check_case(
        case, staged=number % 3 == 1, network_seed=number % 4 * 31, num_sms=(0, 1, 3)[number % 3], device=DEVICE,
        ll_network=ll_network,
    )  # fmt: skip


def run_ht(case: Case, number: int, coverage: HtCoverage | None = None) -> None:
    outcome = check_ht_case(case, network_seed=number % 4 * 31, num_sms=(0, 1, 3)[number % 3], device=DEVICE)
    if coverage is not None:
        coverage.add(outcome)


def run_argument(text: str) -> None:
    """MODE:SEED, of two domains of two."""
    mode, seed = text.split(":")
    case = dataclasses.replace(generate(int(seed)), domain_size=2)
    (run_ll if mode == "ll" else run_ht)(case, 1)


def arguments(count: int) -> list[str]:
    seeds = (seed for seed in itertools.count() if generate(seed).num_ranks == 4)
    return [f"{mode}:{seed}" for seed in itertools.islice(seeds, count) for mode in ("ll", "ht")]


if __name__ == "__main__":
    run_arguments(run_argument)
