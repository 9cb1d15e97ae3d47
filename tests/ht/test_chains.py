"""What the GPU tests of high throughput do on a rank, on CPU ranks: it is right there, and it sees what is wrong."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.gpu import ht_ranks
from tests.gpu.ht_chains import HT_CHAINS, HtChain, ht_chain_buffer
from tests.support.cases import generate


def test_chains_move_the_epochs_apart_and_have_every_operation() -> None:
    assert all(len(letters) % 2 == 1 for letters in HT_CHAINS)
    sent = [sum(letter in "dfh" for letter in letters) for letters in HT_CHAINS]
    assert {number % 2 for number in sent} == {0, 1}, "the kinds' epochs always move alike"
    assert {*"dfhcs"} == {*"".join(HT_CHAINS)}


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "given"])
@pytest.mark.parametrize("letters", HT_CHAINS)
def test_chains_are_right(letters: str, given: bool) -> None:
    def body(group: ThreadGroup) -> tuple[int, int, int]:
        with ht_chain_buffer(group, "cpu") as buffer:
            chain = HtChain(letters, buffer, given=given, seed=1)
            for _ in range(3):
                chain.run()
                chain.renew()
            stats = buffer.stats()
            return int(chain.wrong), stats["ht_dispatches"], stats["ht_combines"]

    sent = sum(letter in "dfh" for letter in letters)
    assert run_ranks(2, body) == [(0, 3 * sent, 3 * (len(letters) - sent))] * 2


@pytest.mark.parametrize("name", ["combine", "combine_weights", "dispatch_cached"])
def test_a_wrong_bit_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = getattr(nccl_ep, name), itertools.count()

    def wrong_once(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if next(calls) == 2:
            rows = result.x if name == "dispatch_cached" else result
            rows.view(torch.int16)[0, 0] ^= 1
        return result

    monkeypatch.setattr(nccl_ep, name, wrong_once)
    with ht_chain_buffer(None, "cpu") as buffer:
        chain = HtChain("dfchcsc", buffer, given=False)
        chain.ids[:, 0] = torch.arange(4)  # the token whose bit is wrong is sent
        for _ in range(4):
            chain.run()
        assert int(chain.wrong) > 0


# ---- The bodies of tests/gpu/ht_ranks.py


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_buffer_serves_every_case(num_ranks: int) -> None:
    cases = [ht_ranks.ExpectedHt(case) for case in ht_ranks.cuda_cases(6, num_ranks)]
    run_ranks(num_ranks, partial(ht_ranks.run_in_one_buffer, cases=cases, device="cpu"))


def test_a_case_that_differs_is_seen() -> None:
    case = ht_ranks.ExpectedHt(next(c for c in map(generate, range(100)) if c.num_ranks == 1 and c.tokens[0] > 2))
    with ht_ranks.shared_ht_buffer(None, [case.case], device="cpu") as buffer:
        case.run(buffer)
        case.scalars[0][0, 0] += 1
        with pytest.raises(AssertionError, match="scalars"):
            case.run(buffer)


@pytest.mark.parametrize("body", [ht_ranks.live_outputs, ht_ranks.overwrite_inputs, ht_ranks.both_modes])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_high_throughput_keeps_each_promise(body: Any, num_ranks: int) -> None:
    run_ranks(num_ranks, lambda group: body(group, "cpu"))


def test_ranks_may_have_layouts_of_their_own() -> None:
    run_ranks(4, lambda group: ht_ranks.own_layouts(group, "cpu"))
