"""Buffers, banks, handles and tensors that are used again, and operations that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from tests.contract.bits import LAYOUTS, MODES, expect_rows, other_rows
from tests.contract.world import Rank, World
from tests.ht.harness import LARGE_ARENA
from tests.support.expected import Expected, run_case
from tests.support.harness import dispatch_case, garble, synchronize

ROUNDS = 7


class Reuse:
    world: World

    @pytest.mark.parametrize("mode", MODES)
    def test_banks_serve_many_rounds_of_other_shapes(self, mode: str) -> None:
        """Operations of other routings and layouts, so many that every bank is used again at each parity."""
        self.world.run(runs_rounds, mode)

    def test_both_modes_work_in_one_buffer(self) -> None:
        self.world.run(changes_modes)

    @pytest.mark.parametrize("mode", MODES)
    def test_handles_may_be_used_again_in_any_order(self, mode: str) -> None:
        """Several alive, used after others were made, in another order, more than once."""
        self.world.run(uses_handles_again, mode)

    @pytest.mark.parametrize("mode", MODES)
    def test_two_buffers_do_not_disturb_one_another(self, mode: str) -> None:
        self.world.run(interleaves_buffers, mode)

    def test_a_dispatch_and_a_combine_may_be_open_at_once(self) -> None:
        """A dispatch and a combine may be open at once, a second of a kind may not."""
        self.world.run(overlaps_open_sends)

    @pytest.mark.parametrize("mode", MODES)
    def test_operations_on_the_buffers_own_stream_are_waited_for(self, mode: str) -> None:
        if self.world.backend.is_one_launch:
            pytest.skip("here all ranks use one stream")
        self.world.run(runs_beside, mode)

    @pytest.mark.parametrize("mode", MODES)
    def test_inputs_may_be_overwritten_after_a_call(self, mode: str) -> None:
        self.world.run(overwrites_inputs, mode)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_cached_dispatch_goes_along_a_handle(self, layout: str) -> None:
        """Another payload along the routes of a dispatch, and of one before the last."""
        self.world.run(sends_along_handles, layout)

    def test_combine_reads_rows_of_the_arena_in_place(self) -> None:
        """Where combine reads them in place, and does not write to them; outputs live on beyond the buffer."""
        self.world.run(combines_in_the_arena)

    def test_buffers_work_one_after_the_other(self) -> None:
        self.world.run(makes_buffers)


def _cases(rank: Rank, count: int, **changes: Any) -> list[Expected]:
    return [rank.case(**{"seed": 20 + i, "layout": LAYOUTS[i % 4], **changes}) for i in range(count)]


def runs_rounds(rank: Rank, mode: str) -> None:
    cases = _cases(rank, 4, routing="some_none")
    with rank.buffer(cases[0].case) as buffer:
        for number in range(ROUNDS):
            case = cases[number % 4]
            run_case(case, buffer, mode=mode)  # two of combine's kind
            if number % 3 == 0:  # and an odd number, so that parities part
                case.combine(buffer, case.send(buffer, mode=mode).handle)
        buffer.check()


def changes_modes(rank: Rank) -> None:
    cases = _cases(rank, 6)
    with rank.buffer(cases[0].case) as buffer:
        for case, mode in zip(cases, ("ll", "ht", "ht", "ll", "ll", "ht"), strict=True):
            run_case(case, buffer, mode=mode)
        outs = [(case, case.send(buffer, mode=mode)) for case, mode in zip(cases, MODES * 3, strict=True)]
        for case, out in reversed(outs):
            case.combine(buffer, out.handle)


def uses_handles_again(rank: Rank, mode: str) -> None:
    cases = _cases(rank, 5)
    with rank.buffer(cases[0].case) as buffer:
        outs = [case.send(buffer, mode=mode) for case in cases]
        order = [4, 0, 3, 3, 1, 2, 0]
        for number in order:
            cases[number].combine(buffer, outs[number].handle)
            cases[number].combine_weights(buffer, outs[number].handle)
        for case, out in zip(cases, outs, strict=True):
            case.check_dispatch(out, rank.number)  # nothing has written to outputs


def interleaves_buffers(rank: Rank, mode: str) -> None:
    cases = _cases(rank, 2)
    with rank.buffer(cases[0].case) as one, rank.buffer(cases[1].case) as two:
        for _ in range(3):
            outs = [case.send(buffer, mode=mode) for case, buffer in zip(cases, (one, two), strict=True)]
            for case, buffer, out in reversed(list(zip(cases, (one, two), outs, strict=True))):
                case.check_dispatch(out, rank.number)
                case.combine(buffer, out.handle)
        one.destroy()
        with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
            nccl_ep.combine(outs[0].x, outs[0].handle)
        run_case(cases[1], two, mode=mode)


def _send(case: Expected, buffer: nccl_ep.Buffer, **options: Any) -> nccl_ep.Pending[nccl_ep.DispatchOutput]:
    given, how = case.given_on(buffer), {**case.case.dispatch_kwargs(), **options}
    return nccl_ep.dispatch_send(given.x, given.topk_idx, given.topk_weights, buffer=buffer, **how)


def overlaps_open_sends(rank: Rank) -> None:
    cases, number = _cases(rank, 4), rank.number
    with rank.buffer(cases[0].case) as buffer:
        rows = [case.rows[number].to(buffer.device) for case in cases]
        out = _send(cases[0], buffer).receive()
        for i in range(ROUNDS):
            now, later = i % 4, (i + 1) % 4
            dispatch = _send(cases[later], buffer)
            combine = nccl_ep.combine_send(rows[now], out.handle)
            for call in (lambda now=now: _send(cases[now], buffer), lambda now=now: cases[now].send(buffer, mode="ll")):
                with pytest.raises(nccl_ep.UsageError, match="was sent and has not been received"):
                    call()
            with pytest.raises(nccl_ep.UsageError, match="was sent and has not been received"):
                nccl_ep.combine(rows[now], out.handle)
            if i % 2:
                received, y = dispatch.receive(), combine.receive()
            else:
                y, received = combine.receive(), dispatch.receive()
            for pending in (dispatch, combine):
                with pytest.raises(nccl_ep.UsageError, match="received already"):
                    pending.receive()
            cases[now].check_combine(y.cpu(), number)
            cases[later].check_dispatch(received, number)
            out = received
        buffer.check()


def runs_beside(rank: Rank, mode: str) -> None:
    cases, number = _cases(rank, 4), rank.number
    with rank.buffer(cases[0].case) as buffer:
        rows = [case.rows[number].to(buffer.device) for case in cases]
        synchronize(buffer.device)
        outs = [pending.receive() for pending in [_send(c, buffer, mode=mode, async_finish=True) for c in cases]]
        sums = [nccl_ep.combine_send(each, out.handle, async_finish=True) for each, out in zip(rows, outs, strict=True)]
        for case, out, y in zip(cases, outs, sums, strict=True):
            case.check_dispatch(out, number)
            case.check_combine(y.receive().cpu(), number)
        buffer.check()


def overwrites_inputs(rank: Rank, mode: str) -> None:
    for case in _cases(rank, 4):
        with rank.buffer(case.case) as buffer:
            _overwrite_inputs(case, buffer, mode)


def _overwrite_inputs(case: Expected, buffer: nccl_ep.Buffer, mode: str) -> None:
    """On a stream, by the next kernel behind the operation, while other ranks may still be busy with it."""
    given = case.inputs[buffer.rank]
    for _ in range(3):
        x, ids, weights = (each.to(buffer.device, copy=True) for each in (given.x, given.topk_idx, given.topk_weights))
        out = case.send(buffer, reference.RankInput(x, ids, weights), mode=mode)
        garble(x, ids, weights)
        rows = buffer.empty(case.rows[buffer.rank].shape, case.rows[buffer.rank].dtype).copy_(case.rows[buffer.rank])
        y = nccl_ep.combine(rows, out.handle)
        garble(rows)
        values = case.values[buffer.rank].to(buffer.device, copy=True)
        scalars = nccl_ep.combine_weights(values, out.handle)
        garble(values, out.handle.tensor, out.handle.slots)
        synchronize(buffer.device)
        buffer.require_usable()
        case.check_dispatch(out, buffer.rank)
        case.check_combine(y.cpu(), buffer.rank)
        case.check_scalars(scalars.cpu(), buffer.rank)


def sends_along_handles(rank: Rank, layout: str) -> None:
    case, later = (rank.case(layout=layout, seed=seed, routing="duplicates") for seed in (30, 31))
    payloads = [other_rows(case.case, width, width) for width in (16, 272)]
    with rank.buffer(case.case, scale_bytes=64) as buffer:
        outs = [(each, each.send(buffer)) for each in (case, later)]
        for each, out in reversed(outs):
            for given in payloads:
                moved = nccl_ep.dispatch_cached(given[rank.number].to(buffer.device), out.handle)
                expect_rows(each.case, moved.x, given, rank.number)
            again = nccl_ep.dispatch_cached(each.inputs[rank.number].x.to(buffer.device), out.handle)
            valid = each.results[rank.number].valid.flatten()
            width = again.x.shape[-1]
            assert torch.equal(again.x.cpu().view(-1, width)[valid], out.x.cpu().view(-1, width)[valid])
        for each, out in outs:
            each.combine(buffer, out.handle)
        buffer.check()


def combines_in_the_arena(rank: Rank) -> None:
    cases, number = _cases(rank, 4), rank.number
    kept = []
    with rank.buffer(cases[0].case, arena_bytes=LARGE_ARENA) as buffer:
        for case in cases:
            out, wanted = case.send(buffer), case.rows[number]
            rows = buffer.empty(wanted.shape, wanted.dtype).copy_(wanted)
            case.combine_rows(buffer, out.handle, rows)
            assert not reference.first_difference(rows.cpu(), wanted), "combine's input was written to"
            kept.append((case, out))
        assert buffer.stats()["staged_dispatches"] == 0
        synchronize(buffer.device)
    for case, out in kept:
        case.check_dispatch(out, number)


def makes_buffers(rank: Rank) -> None:
    case = rank.case(layout="packed")
    for _ in range(5):
        with rank.buffer(case.case) as buffer:
            case.check_dispatch(dispatch_case(case.case, case.inputs[rank.number], buffer), rank.number)
        with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
            buffer.check()
        buffer.destroy()  # again
