"""Buffers that live: many at a time, operations of all shapes through one, sends in flight, ranks out of step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep, reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, expected_cases, plain_case, shared_buffer
from tests.support.harness import combine_options, garble, make_buffer

# (ranks, ranks in a domain, seed of the network)
WORLDS = [(4, 4, 0), (4, 2, 0), (4, 2, 5), (4, 1, 3), (3, 3, 0), (3, 1, 9), (1, 1, 0)]
IDS = [f"{ranks}x{domain}-seed{seed}" for ranks, domain, seed in WORLDS]


def _pause(random_: random.Random) -> None:
    """Puts this rank out of step with the others, now and then."""
    if random_.random() < 0.3:
        time.sleep(random_.random() * 0.003)


# ---- One buffer, all sorts of operations


@pytest.mark.parametrize(("num_ranks", "domain_size", "seed"), WORLDS, ids=IDS)
def test_one_buffer_serves_all_shapes_in_turn(num_ranks: int, domain_size: int, seed: int) -> None:
    cases = expected_cases(20, num_ranks=num_ranks, domain_size=domain_size)
    assert len({case.case.layout for case in cases}) == 4
    order = random.Random(seed).choices(range(len(cases)), k=60)

    def body(group: ThreadGroup) -> None:
        pauses = random.Random(1000 * seed + group.rank())
        with shared_buffer(group, cases, domain_size=domain_size, network_seed=seed) as buffer:
            for number, index in enumerate(order):
                _pause(pauses)
                cases[index].run(buffer, staged=number % 3 == 1)
            assert buffer.stats()["dispatches"] == len(order)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("ll_network", ["rail", "mesh"])
def test_ways_between_domains_give_the_same_bits(ll_network: str) -> None:
    cases = expected_cases(4, num_ranks=4, domain_size=2)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases, domain_size=2, network_seed=3, ll_network=ll_network) as buffer:
            for case in cases:
                case.run(buffer)

    run_ranks(4, body)


def test_a_window_of_given_bytes_serves_shapes_unknown_when_it_was_made() -> None:
    cases = expected_cases(6, num_ranks=2)

    def body(group: ThreadGroup) -> None:
        with deep_ep.Buffer(group, 0, 16 << 20, low_latency_mode=True, device="cpu", timeout=60.0) as buffer:
            for case in cases:
                case.run(buffer.core)

    run_ranks(2, body)


# ---- Several of everything


def test_handles_of_several_buffers_may_be_used_in_any_order() -> None:
    """Three buffers; handles of all are open at once, and are used in another order than they were made."""
    cases = expected_cases(9, num_ranks=3)
    groups = [ThreadGroup.make(3) for _ in range(3)]

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        buffers = [shared_buffer(groups[i][rank], cases, network_seed=i) for i in range(3)]
        for repeat in range(3):
            outs = [case.dispatch(buffers[i % 3]) for i, case in enumerate(cases)]
            for i in random.Random(repeat).sample(range(len(cases)), len(cases)):
                cases[i].combine(buffers[i % 3], outs[i].handle)
                cases[i].combine_weights(buffers[i % 3], outs[i].handle)
        buffers[1].destroy()  # the others go on
        cases[0].run(buffers[0])
        cases[2].run(buffers[2])
        for buffer in buffers:
            buffer.destroy()

    run_ranks(3, body)


@pytest.mark.parametrize(("domain_size", "seed"), [(2, 0), (1, 4)])
def test_a_handle_is_used_again_and_again(domain_size: int, seed: int) -> None:
    cases = expected_cases(5, num_ranks=2, domain_size=domain_size)

    def body(group: ThreadGroup) -> None:
        with shared_buffer(group, cases, domain_size=domain_size, network_seed=seed) as buffer:
            first = cases[0].dispatch(buffer)
            kept = first.handle.tensor.clone()
            for case in cases[1:]:
                case.run(buffer)
                cases[0].combine(buffer, first.handle)
                cases[0].combine(buffer, first.handle, staged=True)
            assert torch.equal(first.handle.tensor, kept)
            cases[0].check_dispatch(first, group.rank())  # outputs are nobody's staging

    run_ranks(2, body)


# ---- Sends in flight


def _send(case: Expected, buffer: nccl_ep.Buffer) -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
    given = case.case.rank_input(buffer.rank)
    pending = nccl_ep.dispatch_send(
        given.x, given.topk_idx, given.topk_weights, buffer=buffer, scales=given.scales, **case.case.dispatch_kwargs()
    )
    garble(given.x, given.topk_idx, given.topk_weights, given.scales)
    return pending


def _send_back(case: Expected, handle: nccl_ep.Handle, rank: int) -> nccl_ep.Pending[torch.Tensor]:
    rows = case.rows[rank].clone()
    kwargs = combine_options(case.case, rank, rows.device)
    pending = nccl_ep.combine_send(rows, handle, **kwargs)
    garble(rows, *(kwargs[name] for name in ("weights", "topk_idx") if isinstance(kwargs[name], torch.Tensor)))
    return pending


def _orders(seed: int, alike: bool) -> Iterator[str]:
    """Interleavings of send and receive of a dispatch (D, d) and of a combine (C, c). Ranks that choose each for
    themselves have to send before they wait."""
    choices = random.Random(seed)
    while True:
        yield choices.choice(["DCdc", "DCcd", "CDcd", "CDdc"] + alike * ["DdCc", "CcDd"])


@pytest.mark.parametrize("alike", [True, False], ids=["same-order", "own-order"])
@pytest.mark.parametrize(("num_ranks", "domain_size", "seed"), WORLDS, ids=IDS)
def test_a_dispatch_in_flight_with_a_combine_disturbs_nothing(
    num_ranks: int, domain_size: int, seed: int, alike: bool
) -> None:
    cases = expected_cases(8, num_ranks=num_ranks, domain_size=domain_size)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        orders, pauses = _orders(seed if alike else seed + 100 * rank, alike), random.Random(rank)
        with shared_buffer(group, cases, domain_size=domain_size, network_seed=seed) as buffer:
            out = cases[0].dispatch(buffer)
            for number in range(24):
                now, later = cases[number % len(cases)], cases[(number + 1) % len(cases)]
                pending: dict[str, Any] = {}
                for step in next(orders):
                    _pause(pauses)
                    if step == "D":
                        pending["d"] = _send(later, buffer)
                    elif step == "C":
                        pending["c"] = _send_back(now, out.handle, rank)
                    elif step == "d":
                        following = pending["d"].receive()
                        later.check_dispatch(following, rank)
                    else:
                        now.check_combine(pending["c"].receive(), rank)
                out = following

    run_ranks(num_ranks, body)


# ---- Inputs are free when an operation is done


@pytest.mark.parametrize(("num_ranks", "domain_size", "seed"), WORLDS[:-1], ids=IDS[:-1])
def test_inputs_are_overwritten_while_a_peer_is_delayed(num_ranks: int, domain_size: int, seed: int) -> None:
    """The last rank sends, sleeps, and reads what the others sent long after they have garbled their inputs."""
    cases = expected_cases(4, num_ranks=num_ranks, domain_size=domain_size, first=50)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        late = rank == num_ranks - 1
        with shared_buffer(group, cases, domain_size=domain_size, network_seed=seed) as buffer:
            for case in cases:
                if late:
                    pending = _send(case, buffer)
                    time.sleep(0.03)
                    out = pending.receive()
                else:
                    given = case.case.rank_input(rank)
                    out = nccl_ep.dispatch(
                        given.x, given.topk_idx, given.topk_weights, buffer=buffer, scales=given.scales,
                        **case.case.dispatch_kwargs(),
                    )  # fmt: skip
                    garble(given.x, given.topk_idx, given.topk_weights, given.scales)
                case.check_dispatch(out, rank)
                garble(out.x, out.weights, out.topk_idx, out.counts)  # the outputs are the caller's
                rows = case.rows[rank].clone()
                kwargs = combine_options(case.case, rank, rows.device)
                back = nccl_ep.combine_send(rows, out.handle, **kwargs)  # of weights given here all send, or none
                if late:
                    time.sleep(0.03)
                got = back.receive()
                biases = kwargs["bias"] if isinstance(kwargs["bias"], tuple) else (kwargs["bias"],)
                tensors = (kwargs["weights"], kwargs["topk_idx"], *biases)
                garble(rows, *(each for each in tensors if isinstance(each, torch.Tensor)))
                case.check_combine(got, rank)
                values = case.values[rank].clone()
                if late:
                    time.sleep(0.01)
                scalars = nccl_ep.combine_weights(values, out.handle)
                garble(values, out.handle.tensor)
                case.check_scalars(scalars, rank)

    run_ranks(num_ranks, body)


# ---- The same bits, always


@pytest.mark.parametrize("domain_size", [4, 2, 1])
@pytest.mark.parametrize("layout", ["expert_major", "packed", "rank_major", "flat"])
def test_bits_are_the_same_whatever_the_timing(layout: str, domain_size: int) -> None:
    """20 seeds of the network and of the ranks' delays, fused and staged; padding is zero, so that every bit counts."""
    alignment = 4 if layout == "packed" else 1
    case = Expected(
        plain_case(4, layout=layout, domain_size=domain_size, zero_padding=True, expert_alignment=alignment, seed=77)
    )

    def body(group: ThreadGroup) -> list[list[torch.Tensor]]:
        rank, given = group.rank(), case.inputs[group.rank()]
        runs = []
        for seed in range(1, 21):
            pauses = random.Random(100 * seed + rank)
            with make_buffer(case.case, ThreadGroup(worlds[seed]._world, rank), network_seed=seed) as buffer:
                for staged in (False, True):
                    _pause(pauses)
                    sent: Any = nccl_ep.dispatch_send if staged else nccl_ep.dispatch
                    out = sent(
                        given.x, given.topk_idx, given.topk_weights, buffer=buffer, **case.case.dispatch_kwargs()
                    )
                    _pause(pauses)
                    out = out.receive() if staged else out
                    _pause(pauses)
                    back: Any = nccl_ep.combine_send if staged else nccl_ep.combine
                    y = back(case.rows[rank], out.handle)
                    _pause(pauses)
                    y = y.receive() if staged else y
                    kept = (out.x, out.weights, out.topk_idx, out.counts, out.demand, out.offsets, out.row_expert)
                    runs.append([tensor for tensor in (*kept, y) if tensor is not None])
                    case.check_combine(y, rank)
        return runs

    worlds = {seed: ThreadGroup.make(4)[0] for seed in range(1, 21)}
    for runs in run_ranks(4, body):
        assert len(runs) == 40
        for run in runs[1:]:
            for tensor, first in zip(run, runs[0], strict=True):
                assert torch.equal(tensor.view(torch.uint8), first.view(torch.uint8))


@pytest.mark.parametrize("quant", [None, "fp8"])
@pytest.mark.parametrize(("layout", "weights"), [("expert_major", "dispatch"), ("packed", "tensor"), ("flat", None)])
def test_a_token_does_not_depend_on_its_batch_nor_on_its_home(
    layout: str, weights: str | None, quant: str | None
) -> None:
    """The same 5 tokens alone at rank 0, alone at rank 2, and in the middle of full batches at rank 1."""
    ranks, experts, hidden, topk, most = 3, 6, 128, 3, 16
    made = torch.Generator().manual_seed(5)
    x = torch.randn(5, hidden, generator=made).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=made)[:topk] for _ in range(5)])
    w = torch.rand(5, topk, generator=made)

    def batch(home: int, others: bool, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
        own = (x, ids, w) if rank == home else (x[:0], ids[:0], w[:0])
        if not others:
            return *own, slice(0, len(own[0]))
        noise = torch.Generator().manual_seed(100 + rank)
        before, after = 4 + rank, 6
        parts = [
            (torch.randn(n, hidden, generator=noise).to(x.dtype), torch.randint(0, experts, (n, topk), generator=noise),
             torch.rand(n, topk, generator=noise))
            for n in (before, after)
        ]  # fmt: skip
        joined = [torch.cat([parts[0][i], own[i], parts[1][i]])[:most] for i in range(3)]
        return joined[0], joined[1], joined[2], slice(before, before + len(own[0]))

    def experts_of(out: nccl_ep.DispatchOutput, rank: int) -> torch.Tensor:
        """Rows that depend on the token's row and on the expert alone."""
        rows = out.x.to(torch.float32)
        if out.scales is not None:
            rows = rows * out.scales.repeat_interleave(128, -1)
        local = torch.arange(experts // ranks)
        if layout == "expert_major":
            return (rows * (1.1 + rank * 2 + local).view(-1, 1, 1)).to(x.dtype)
        if layout == "packed":
            assert out.row_expert is not None
            return (rows * (1.1 + rank * 2 + out.row_expert).view(-1, 1)).to(x.dtype)
        assert out.topk_idx is not None
        return (rows * (out.weights * (out.topk_idx + 1.1 + rank * 2)).sum(-1, keepdim=True)).to(x.dtype)

    def body(group: ThreadGroup) -> dict[int, torch.Tensor]:
        rank, got = group.rank(), {}
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=most, hidden=hidden, topk=topk, num_experts=experts, device="cpu", timeout=60.0
        ) as buffer:
            for number, (home, others) in enumerate([(0, False), (2, False), (1, True), (1, False)]):
                bx, bi, bw, mine = batch(home, others, rank)
                out = nccl_ep.dispatch(bx, bi, bw, buffer=buffer, num_experts=experts, layout=layout, quant=quant)
                how = {"dispatch": "dispatch", "tensor": bw, None: None}[weights]
                y = nccl_ep.combine(experts_of(out, rank), out.handle, weights=how)
                if rank == home:
                    got[number] = y[mine]
        return got

    merged: dict[int, torch.Tensor] = {}
    for got in run_ranks(ranks, body):
        merged.update(got)
    assert len(merged) == 4 and merged[0].abs().sum() > 0
    for y in merged.values():
        assert not reference.first_difference(y, merged[0])


@pytest.mark.parametrize("late_weights", [False, True])
@pytest.mark.parametrize(("ranks", "most"), [(4, 32), (8, 64)])
def test_the_window_of_a_large_model_s_decoding_is_small(ranks: int, most: int, late_weights: bool) -> None:
    """MB, of 128 tokens in bf16 with room for scales: far less than DeepEP's and NCCL EP's buffers take."""
    most += 26 if late_weights else 0

    def body(group: ThreadGroup) -> int:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=128, hidden=7168, topk=8, num_experts=256, device="cpu", late_weights=late_weights
        ) as buffer:
            return int(buffer.stats()["window_bytes"])

    assert all(0.9 * most < size / 1e6 <= most for size in run_ranks(ranks, body))
