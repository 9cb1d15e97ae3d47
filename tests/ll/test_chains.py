"""The chains of the GPU tests on CPU ranks: operations in a row, and that their checks see what is wrong."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu.chains import CHAINS, HOWS, Chain, How, chain_buffer, quantised
from tests.gpu.delays import BATCH, SEARCHES, stress

LETTERS = sorted({*CHAINS, *(search.letters for search in SEARCHES.values() if not search.is_ht)})


def test_chains_move_the_epochs_apart() -> None:
    assert all(len(letters) % 2 == 1 for letters in CHAINS)
    parities = {(letters.count("d") % 2, letters.count("c") % 2) for letters in CHAINS}
    assert parities == {(1, 0), (0, 1)}


@pytest.mark.parametrize("to_rank_0", [False, True])
@pytest.mark.parametrize("letters", LETTERS)
def test_chains_are_right(letters: str, to_rank_0: bool) -> None:
    def body(group: ThreadGroup) -> tuple[str, int, int]:
        with chain_buffer(group, "cpu") as buffer:
            chain = Chain(letters, buffer, seed=1, to_rank_0=to_rank_0)
            before = chain.ids.clone()
            problem = stress(chain, chain.run, 1, group)
            stats = buffer.stats()
            assert not torch.equal(before, chain.ids)
            return problem, stats["dispatches"], stats["combines"]

    calls = letters.count("d"), letters.count("c")
    assert run_ranks(3, body) == [("", *(BATCH * each for each in calls))] * 3


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_chains_of_other_kinds_are_right(how: How) -> None:
    def body(group: ThreadGroup) -> tuple[int, int]:
        with chain_buffer(group, "cpu") as buffer:
            for letters in CHAINS:
                chain = Chain(letters, buffer, seed=1, how=how)
                for _ in range(5):
                    chain.run()
                    chain.renew()
                assert chain.finish() == 0
            stats = buffer.stats()
            return stats["calls"]["split"], stats["dispatches"] + stats["combines"]

    calls = 6 * sum(map(len, CHAINS))
    assert run_ranks(3, body) == [(calls if how.is_staged else 0, calls)] * 3


def test_what_chains_quantise_is_the_oracles() -> None:
    x = torch.randn(50, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    for mine, theirs in zip(quantised(x), reference.quantize_fp8(x, "fp8"), strict=True):
        assert not reference.first_difference(mine, theirs)


def test_a_wrong_bit_is_seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    combine, calls, lock = nccl_ep.combine, itertools.count(), threading.Lock()

    def wrong_once(*args: Any, **options: Any) -> torch.Tensor:
        y = combine(*args, **options)
        with lock:
            if next(calls) == 150:
                y.view(torch.int16)[-1, -1] ^= 1
        return y

    def body(group: ThreadGroup) -> str:
        with chain_buffer(group, "cpu") as buffer:
            chain = Chain("ddccc", buffer)
            return stress(chain, chain.run, 80, group)

    monkeypatch.setattr(nccl_ep, "combine", wrong_once)
    texts = run_ranks(2, body)
    assert re.fullmatch(r"after 40 runs: rank [01]: 1 wrong elements", texts[0]) and texts[1] == texts[0]


def test_an_error_is_seen_by_all() -> None:
    def body(group: ThreadGroup) -> str:
        with chain_buffer(group, "cpu") as buffer:
            chain = Chain("dcc", buffer)
            calls = itertools.count()

            def run() -> None:
                if next(calls) == 45:
                    if buffer.rank == 1:
                        raise nccl_ep.UsageError("gone")
                    buffer.set_timeout(0.5)
                chain.run()

            return stress(chain, run, 80, group)

    texts = run_ranks(2, body)
    assert re.match(r"after 80 runs: rank 0: TimeoutError: .*rank 1.*; rank 1: UsageError: gone$", texts[0], re.DOTALL)
    assert texts[1] == texts[0]


def test_an_error_of_something_else_is_not_found() -> None:
    def run() -> None:
        raise RuntimeError("no memory")

    def body(group: ThreadGroup) -> None:
        with chain_buffer(group, "cpu") as buffer, pytest.raises(RuntimeError, match="no memory"):
            stress(Chain("dcc", buffer), run, 1, group)

    run_ranks(1, body)
