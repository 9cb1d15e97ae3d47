"""High throughput through the C library: it computes what the oracle does, in every way that it can be asked."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from nccl_ep.testing import run_ranks
from tests.c.c_api import Library, Refused
from tests.c.case import has_c_form
from tests.c.ht_case import WAYS, run_ht_case, run_route_that_fails, run_route_that_fails_over_nccl
from tests.support.cases import generate
from tests.support.expected import plain_case
from tests.support.gpus import on_one_gpu, ranks_on_gpus
from tests.support.patience import PATIENCE
from tests.support.processes import run_processes


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (3, 1)])
def test_generated_cases_give_the_oracles_results(library: Library, num_ranks: int, domain_size: int) -> None:
    generated = filter(has_c_form, map(generate, itertools.count(700)))
    fitting = (c for c in generated if c.num_ranks == num_ranks and (c.domain_size or num_ranks) == domain_size)
    ways: Counter[str] = Counter()
    layouts = set()
    for case in itertools.islice(fitting, 40 if num_ranks == 1 else 32):
        ways += run_ht_case(library, case)
        layouts.add(case.layout)
    assert len(layouts) == 4
    assert all(ways[way] > 0 for way in WAYS), ways


def test_a_route_that_fails_leaves_the_group_usable(library: Library) -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)
    run_ranks(2, lambda group: run_route_that_fails(library, group, "cpu", barrier.wait))


def require_gpu(library: Library) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    try:
        run_ht_case(library, plain_case(1, layout="flat"), device="cuda")
    except Refused as error:
        if "high throughput is not built for cuda" not in error.text:
            raise
        pytest.skip(error.text)


@pytest.mark.gpu
@ranks_on_gpus
def test_a_route_that_fails_over_nccl(library: Library, library_file: Path, tmp_path: Path) -> None:
    require_gpu(library)
    run_processes(2, run_route_that_fails_over_nccl, tmp_path, library_file, timeout=PATIENCE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2, 4))
def test_high_throughput_on_one_gpu_gives_the_oracles_bits(library: Library, num_ranks: int) -> None:
    require_gpu(library)
    generated = filter(has_c_form, map(generate, itertools.count(700)))
    fitting = (case for case in generated if case.num_ranks == num_ranks)
    ways: Counter[str] = Counter()
    for case in itertools.islice(fitting, 24):
        ways += run_ht_case(library, dataclasses.replace(case, domain_size=None), device="cuda")
    assert all(ways[way] > 0 for way in WAYS[:5]), ways
