"""What is refused, and what becomes of ranks that make different calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nccl_ep
from tests.contract.bits import MODES
from tests.contract.world import Rank, World
from tests.ht.harness import ht_step
from tests.support.expected import Expected, run_case
from tests.support.harness import NO_BUFFER, of_no_buffer, synchronize
from tests.support.patience import PATIENCE, Clock, of_living_ranks


@dataclass
class Scene:
    """A rank with a good buffer, good arguments, a good dispatch behind it, and one of a buffer that is gone."""

    mode: str
    case: Expected
    buffer: nccl_ep.Buffer
    out: nccl_ep.DispatchOutput
    lost: nccl_ep.Handle

    def dispatch(self, **changes: Any) -> Any:
        given = self.case.given_on(self.buffer)
        x, ids = changes.pop("x", given.x), changes.pop("topk_idx", given.topk_idx)
        how = {**self.case.case.dispatch_kwargs(), "mode": self.mode, **changes}
        return nccl_ep.dispatch(x, ids, buffer=self.buffer, **how)

    def combine(self, rows: torch.Tensor | None = None, handle: nccl_ep.Handle | None = None, **changes: Any) -> Any:
        return nccl_ep.combine(self.out.x if rows is None else rows, handle or self.out.handle, **changes)

    def changed(self, **changes: Any) -> nccl_ep.Handle:
        return dataclasses.replace(self.out.handle, **changes)

    def tokens(self, count: int) -> dict[str, torch.Tensor]:
        x = torch.zeros(count, 144, dtype=torch.bfloat16, device=self.buffer.device)
        return {"x": x, "topk_idx": torch.zeros(count, 3, dtype=torch.int64, device=self.buffer.device)}


Refused = tuple[Callable[[Scene], Any], type[Exception], str]
USAGE = nccl_ep.UsageError
REFUSED: dict[str, Refused] = {
    "x elsewhere": (lambda s: s.dispatch(x=torch.zeros(8, 144, device="meta")), ValueError, "x is on meta, the buffer"),
    "x shape": (lambda s: s.dispatch(x=s.out.x[0]), ValueError, r"x has shape \[144\], must be"),
    "odd rows": (lambda s: s.dispatch(**{**s.tokens(1), "x": s.tokens(1)["x"][:, :4].contiguous()}), ValueError,
                 "must be a multiple of 16"),
    "ids dtype": (lambda s: s.dispatch(**{**s.tokens(1), "topk_idx": torch.zeros(1, 3, device=s.buffer.device)}),
                  ValueError, "topk_idx is torch.float32, must be"),
    "too many tokens": (lambda s: s.dispatch(**s.tokens(9)), ValueError, "9 tokens, but max_tokens is 8"),
    "odd experts": (lambda s: s.dispatch(num_experts=2 * s.buffer.num_ranks + 1), ValueError, "do not divide over"),
    "capacity": (lambda s: s.dispatch(capacity=-3), ValueError, "capacity is -3, must not be negative"),
    "capacity of rank_major": (lambda s: s.dispatch(layout="rank_major", capacity=8), ValueError,
                               "layout rank_major always holds max_tokens rows"),
    "no such mode": (lambda s: s.dispatch(mode="fast"), ValueError, "mode is 'fast', must be one of"),
    "num_sms": (lambda s: s.dispatch(num_sms=-1), ValueError, "num_sms is -1, must not be negative"),
    "rows elsewhere": (lambda s: s.combine(s.out.x.to("meta")), ValueError, "rows is on meta, the buffer"),
    "rows shape": (lambda s: s.combine(s.out.x[:-1]), ValueError, "rows has shape"),
    "rows dtype": (lambda s: s.combine(s.out.x.to(torch.int16)), ValueError, "rows is torch.int16, must be"),
    "weights of flat": (lambda s: s.combine(weights=s.case.given_on(s.buffer).topk_weights), ValueError,
                        "are already weighted"),
    "bias shape": (lambda s: s.combine(bias=s.out.x), ValueError, "bias has shape"),
    "out elsewhere": (lambda s: s.combine(out=s.out.x.to("meta")), ValueError, "out is on meta, the buffer"),
    "values shape": (lambda s: nccl_ep.combine_weights(s.out.weights[:, 0], s.out.handle), ValueError,
                     "values has shape|values have"),
    "handle of a destroyed buffer": (lambda s: s.combine(handle=s.lost), USAGE, "was destroyed"),
    "handle of no buffer": (lambda s: s.combine(handle=of_no_buffer(s.out.handle)), USAGE,
                            f"number {NO_BUFFER}, is gone"),
    "handle of other ranks": (lambda s: s.combine(handle=s.changed(num_ranks=9)), USAGE, "is of 9 ranks, its buffer"),
    "handle of more tokens": (lambda s: s.combine(handle=s.changed(max_tokens=80)), ValueError, "has shape|window is"),
    "handle of another top-k": (lambda s: s.combine(handle=s.changed(topk=30)), ValueError, "has shape|window is"),
    "handle elsewhere": (lambda s: s.combine(handle=s.changed(tensor=s.out.handle.tensor.to("meta"))), ValueError,
                         "handle is on meta"),
}  # fmt: skip
LL_REFUSED: dict[str, Refused] = {
    "cached": (lambda s: nccl_ep.dispatch_cached(s.tokens(8)["x"], s.out.handle), USAGE, 'is of mode "ll"'),
    "exact": (lambda s: s.dispatch(capacity="exact"), ValueError, "exact"),
    "given outputs": (lambda s: s.dispatch(out=s.out), ValueError, "out is for high throughput"),
}
HT_REFUSED: dict[str, Refused] = {
    "halves": (lambda s: nccl_ep.combine_send(s.out.x, s.out.handle), ValueError, "is not split"),
    "no capacity": (lambda s: s.dispatch(layout="expert_major", capacity=None), ValueError, "capacity"),
    "tokens of another dispatch": (lambda s: nccl_ep.dispatch_cached(s.tokens(9)["x"], s.out.handle), ValueError,
                                   r"must be \[\d, hidden\], as in the dispatch"),
}  # fmt: skip
COUNTED = ("dispatches", "combines", "ht_dispatches", "ht_combines", "calls", "dropped_rows", "invalid_ids")

# Of the last rank, where the others make the first call.
DISPATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "hidden": ({"hidden": 128}, "hidden 144", "hidden 128"),
    "top-k": ({"topk": 2}, "top-3", "top-2"),
    "dtype": ({"dtype": torch.float16}, "(bf16", "(fp16"),
    "quant": ({"quant": "fp8"}, "quant none", "quant fp8"),
}


class Errors:
    world: World

    @pytest.mark.parametrize("mode", MODES)
    def test_a_refused_call_sends_nothing(self, mode: str) -> None:
        """One rank's, each before a good call of all: nothing was sent or launched for it."""
        self.world.run(refuses_and_works_on, mode)

    @pytest.mark.parametrize("what", DISPATCHES)
    @pytest.mark.parametrize("mode", MODES)
    def test_ranks_with_different_dispatches_are_told_both(self, mode: str, what: str) -> None:
        if self.world.backend.is_one_launch and what != "hidden":
            pytest.skip("here one kernel, chosen for rank 0, runs for all ranks")
        changes, mine, other = DISPATCHES[what]
        for text in self.world.run(makes_another_dispatch, mode, changes):
            assert "ranks made different calls in" in text and "dispatch(" in text
            assert mine in text and other in text, text

    @pytest.mark.parametrize("mode", MODES)
    def test_combine_beside_combine_weights_is_told_to_both(self, mode: str) -> None:
        if self.world.backend.is_one_launch:
            pytest.skip("here ranks that call different operations meet on the host")
        for text in self.world.run(makes_another_combine, mode):
            assert "ranks made different calls in" in text
            assert "combine(" in text and "combine of weights(" in text, text

    @pytest.mark.parametrize(
        ("mode", "step"),
        [
            ("ll", "combine"),
            ("ll", "weighted combine"),
            ("ll", "scalars"),
            ("ht", "combine"),
            ("ht", "scalars"),
            ("ht", "cached"),
        ],
    )
    def test_handles_of_different_dispatches_are_told_to_all(self, mode: str, step: str) -> None:
        for rank, text in enumerate(self.world.run(gives_another_handle, mode, step)):
            mine, other = (1, 2) if rank < self.world.num_ranks - 1 else (2, 1)
            kind = ("high-throughput " if mode == "ht" else "") + ("dispatch 3" if step == "cached" else "combine 3")
            pattern = rf"different dispatches to {kind}: rank {rank} that of dispatch {mine}, rank \d that of"
            assert re.search(rf"{pattern} dispatch {other}\b", text), text


def refuses_and_works_on(rank: Rank, mode: str) -> None:
    case = rank.case()
    with rank.buffer(case.case) as gone:
        lost = case.send(gone, mode=mode).handle
        synchronize(gone.device)
    with rank.buffer(case.case) as buffer:
        scene = Scene(mode, case, buffer, case.send(buffer, mode=mode), lost)
        problems = []
        for name, refused in {**REFUSED, **(LL_REFUSED if mode == "ll" else HT_REFUSED)}.items():
            if rank.number == rank.size - 1:
                problems += _problems_with(name, refused, scene)
            case.check_dispatch(case.send(buffer, mode=mode), rank.number)
        run_case(case, buffer, mode=mode)
        buffer.check()
        assert not problems, "\n".join(problems)


def _problems_with(name: str, refused: Refused, scene: Scene) -> list[str]:
    call, error, text = refused
    synchronize(scene.buffer.device)
    before = scene.buffer.stats()
    try:
        call(scene)
        return [f"{name}: was not refused"]
    except Exception as caught:
        if not isinstance(caught, error) or not re.search(text, str(caught)):
            return [f"{name}: {type(caught).__name__}: {caught}"]
    synchronize(scene.buffer.device)
    after = scene.buffer.stats()
    return [f"{name}: {key} was {before[key]}, is {after[key]}" for key in COUNTED if before[key] != after[key]]


def expect_mismatch(
    rank: Rank, case: Expected, buffer: nccl_ep.Buffer, call: Callable[[], Any], said: str = "made different calls"
) -> str:
    """The call must fail so on all ranks, and so must later ones; a new buffer works. Returns the text."""
    with Clock(of_living_ranks(PATIENCE) / 2), pytest.raises(nccl_ep.MismatchError) as caught:
        call()
        synchronize(buffer.device)
        buffer.check()
    for later in (lambda: case.send(buffer, mode="ll"), lambda: case.send(buffer), buffer.check):
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=said):
            later()
    rank.meet()
    with Clock(PATIENCE / 2):
        buffer.destroy()
    with rank.buffer(case.case) as fresh:
        run_case(case, fresh)
    return str(caught.value)


def makes_another_dispatch(rank: Rank, mode: str, changes: dict[str, Any]) -> str:
    case, other = rank.case(), rank.case(**changes)
    buffer = rank.buffer(case.case)
    mine = other if rank.number == rank.size - 1 else case
    return expect_mismatch(rank, case, buffer, lambda: mine.send(buffer, mode=mode))


def makes_another_combine(rank: Rank, mode: str) -> str:
    case = rank.case()
    buffer = rank.buffer(case.case)
    out = case.send(buffer, mode=mode)

    def call() -> None:
        if rank.number == rank.size - 1:
            nccl_ep.combine_weights(out.weights, out.handle)
        else:
            nccl_ep.combine(out.x, out.handle)

    return expect_mismatch(rank, case, buffer, call)


def gives_another_handle(rank: Rank, mode: str, step: str) -> str:
    # Rows of the layout flat have their weights in low latency.
    case = rank.case(**({"layout": "expert_major"} if (mode, step) == ("ll", "weighted combine") else {}))
    buffer = rank.buffer(case.case)
    first, second = (case.send(buffer, mode=mode) for _ in range(2))
    for out in (second, first):  # all give the same: that is right
        case.combine(buffer, out.handle)
    call = ht_step(step, case, buffer, second if rank.number == rank.size - 1 else first)
    return expect_mismatch(rank, case, buffer, call, "handles of different dispatches")
