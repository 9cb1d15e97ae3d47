"""Ranks that disagree, about a buffer or a call: all hear of it at once and can go on."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import make_buffer
from tests.support.patience import PATIENCE, Clock

BASE: dict[str, Any] = {
    "hidden": 64,
    "topk": 2,
    "dtype": torch.bfloat16,
    "experts": 4,
    "max_tokens": 8,
    "quant": None,
    "scales": 0,
}
CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden": 128}, "hidden 64", "hidden 128"),
    ({"topk": 3}, "top-2", "top-3"),
    ({"dtype": torch.float16}, r"dispatch\(bf16", r"dispatch\(fp16"),
    ({"dtype": torch.uint8}, r"dispatch\(bf16", r"dispatch\(8 bits"),
    ({"quant": "fp8"}, "quant none", "quant fp8"),
    ({"quant": "fp8_ue8m0"}, "quant none", "quant fp8_ue8m0"),
    ({"quant": "mxfp8"}, "quant none", "quant mxfp8"),
    ({"quant": "nvfp4_swizzled"}, "quant none", "quant nvfp4_swizzled"),
    ({"max_tokens": 7}, "max_tokens 8", "max_tokens 7"),
    ({"experts": 6}, "4 experts", "6 experts"),
    ({"scales": 3}, "0 bytes of scales", "12 bytes of scales"),
]


def _call(buffer: nccl_ep.Buffer, **changes: Any) -> nccl_ep.DispatchOutput:
    how = {**BASE, **changes}
    x = torch.ones(7, how["hidden"]).to(how["dtype"])
    ids = torch.arange(how["topk"]).repeat(7, 1)
    return nccl_ep.dispatch(
        x, ids, buffer=buffer, num_experts=how["experts"], max_tokens=how["max_tokens"], quant=how["quant"],
        scales=torch.ones(7, how["scales"]) if how["scales"] else None,
    )  # fmt: skip


def _expect_mismatch(
    num_ranks: int, domain_size: int, call: Callable[[nccl_ep.Buffer, bool], Any], mine: str, other: str
) -> None:
    """The last rank makes another call than the others; all see both, and go on with a new buffer."""
    odd, again = num_ranks - 1, ThreadGroup.make(num_ranks)
    good = Expected(plain_case(num_ranks, domain_size=domain_size))

    def make(group: ThreadGroup) -> nccl_ep.Buffer:
        return nccl_ep.Buffer.for_shapes(
            group, max_tokens=16, hidden=512, topk=8, num_experts=8 * num_ranks, device="cpu", timeout=PATIENCE,
            domain_size=domain_size,
        )  # fmt: skip

    def body(group: ThreadGroup) -> None:
        rank, buffer = group.rank(), make(group)
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError) as caught:
            call(buffer, rank == odd)
        text, peer = str(caught.value), 0 if rank == odd else odd
        ours, theirs = (other, mine) if rank == odd else (mine, other)
        assert re.search(rf"rank {rank} called [^)]*{ours}.*\), rank {peer} called [^)]*{theirs}", text), text
        assert "; were buffers made in the same order on all ranks?" in text, text
        for later in (lambda: good.dispatch(buffer), buffer.check):
            with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match="different calls"):
                later()
        with Clock(PATIENCE / 2):
            buffer.destroy()
        with make(again[rank]) as fresh:
            good.run(fresh)

    run_ranks(num_ranks, body)


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize(("changes", "mine", "other"), CALLS, ids=[str(*change[0].items()) for change in CALLS])
def test_ranks_with_different_dispatches_are_told_both(
    changes: dict[str, Any], mine: str, other: str, num_ranks: int, domain_size: int
) -> None:
    if "experts" in changes:
        base, changes = {"experts": 2 * num_ranks}, {"experts": 3 * num_ranks}
        mine, other = f"{2 * num_ranks} experts", f"{3 * num_ranks} experts"
    else:
        base = {}
    _expect_mismatch(
        num_ranks, domain_size, lambda buffer, is_odd: _call(buffer, **(changes if is_odd else base)), mine, other
    )


COMBINES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any], str, str]] = [
    ("hidden", lambda o: nccl_ep.combine(o.x, o.handle), lambda o: nccl_ep.combine(o.x.repeat(1, 1, 2), o.handle),
     "hidden 64", "hidden 128"),
    ("dtype", lambda o: nccl_ep.combine(o.x, o.handle), lambda o: nccl_ep.combine(o.x.half(), o.handle),
     r"combine\(bf16", r"combine\(fp16"),
    ("wire", lambda o: nccl_ep.combine(o.x, o.handle),
     lambda o: nccl_ep.combine(o.x, o.handle, wire_dtype=torch.float32), "wire bf16", "wire fp32"),
    ("weights", lambda o: nccl_ep.combine(o.x, o.handle),
     lambda o: nccl_ep.combine(o.x, o.handle, weights=torch.ones(7, 2)), r"combine\(",
     "combine with weights of the home"),
    ("scalars", lambda o: nccl_ep.combine(o.x, o.handle), lambda o: nccl_ep.combine_weights(o.weights, o.handle),
     r"combine\(", "combine of weights"),
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize(("usual", "odd", "mine", "other"), [c[1:] for c in COMBINES], ids=[c[0] for c in COMBINES])
def test_ranks_with_different_combines_are_told_both(
    usual: Callable[[Any], Any], odd: Callable[[Any], Any], mine: str, other: str, num_ranks: int, domain_size: int
) -> None:
    def call(buffer: nccl_ep.Buffer, is_odd: bool) -> None:
        out = _call(buffer, experts=2 * num_ranks)
        (odd if is_odd else usual)(out)

    _expect_mismatch(num_ranks, domain_size, call, mine, other)


HANDLE_STEPS: dict[str, Callable[[nccl_ep.DispatchOutput], Any]] = {
    "combine": lambda out: nccl_ep.combine(out.x, out.handle),
    "home": lambda out: nccl_ep.combine(out.x, out.handle, weights=_ones(out)),
    "split": lambda out: nccl_ep.combine_send(out.x, out.handle).receive(),
    "split home": lambda out: nccl_ep.combine_send(out.x, out.handle, weights=_ones(out)).receive(),
    "scalars": lambda out: nccl_ep.combine_weights(out.weights, out.handle),
}


def _ones(out: nccl_ep.DispatchOutput) -> torch.Tensor:
    return torch.ones(out.handle.num_tokens, out.handle.topk)


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("step", "late_weights"), [*((each, False) for each in HANDLE_STEPS), ("split home", True)])
def test_ranks_with_handles_of_different_dispatches_are_told_both(
    step: str, num_ranks: int, domain_size: int, late_weights: bool
) -> None:
    """The dispatches are equal in all, so that nothing else tells their handles apart. A rank has no tokens."""
    odd, again = num_ranks - 1, ThreadGroup.make(num_ranks)

    def make(group: ThreadGroup) -> nccl_ep.Buffer:
        return nccl_ep.Buffer.for_shapes(
            group, max_tokens=8, hidden=64, topk=2, num_experts=2 * num_ranks, device="cpu", timeout=PATIENCE,
            domain_size=domain_size, late_weights=late_weights,
        )  # fmt: skip

    def body(group: ThreadGroup) -> None:
        rank, buffer = group.rank(), make(group)
        tokens = 0 if rank == 1 else 7
        x, ids = torch.ones(tokens, 64, dtype=torch.bfloat16), torch.arange(2).repeat(tokens, 1)

        def send(buffer: nccl_ep.Buffer) -> nccl_ep.DispatchOutput:
            return nccl_ep.dispatch(x, ids, torch.ones(tokens, 2), buffer=buffer, num_experts=2 * num_ranks)

        made = [send(buffer) for _ in range(3)]
        for out in made[::-1]:  # the same one on all ranks, in any order and more than once, and a copy of one of them
            copied = dataclasses.replace(out.handle, tensor=out.handle.tensor.clone())
            given = dataclasses.replace(out, handle=copied) if rank == odd else out
            for each in HANDLE_STEPS.values():
                assert each(given)[:, 0].tolist() == [1 if each is HANDLE_STEPS["scalars"] else 2] * tokens
        mine = 2 if rank == odd else 0
        peers = str(odd) if rank != odd else "[0-9]"
        text = (
            rf"ranks gave handles of different dispatches to combine {1 + 3 * len(HANDLE_STEPS)}: rank {rank} that of "
            rf"dispatch {1 + mine}, rank {peers} that of dispatch {3 - mine}"
        )
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=text):
            HANDLE_STEPS[step](made[mine])
            buffer.check()
        for later in (lambda: send(buffer), buffer.check):
            with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=f"the buffer has failed: {text}"):
                later()
        buffer.destroy()
        with make(again[rank]) as fresh:
            assert HANDLE_STEPS[step](send(fresh)).shape[0] == tokens

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("mix", range(1, 4))
def test_a_handle_that_covers_what_is_awaited_is_refused(mix: int, masks: bool) -> None:
    """Bit r of the mix: rank r gives the later one, rank 2 the earlier. For all that is awaited a sum would come."""

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        buffer = nccl_ep.Buffer.for_shapes(
            group, max_tokens=2, hidden=64, topk=1, num_experts=3, device="cpu", timeout=PATIENCE, enable_shrink=masks
        )
        x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0], [2]])
        outs = [nccl_ep.dispatch(x * value, ids, buffer=buffer, num_experts=3) for value in (1, 2)]
        out = outs[mix >> rank & 1]
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match="gave handles of different dispatches"):
            nccl_ep.combine(out.x, out.handle)
            buffer.check()
        buffer.destroy()

    run_ranks(3, body)


def test_backward_passes_give_the_handles_of_their_own_dispatches() -> None:
    """Two layers in one graph of gradients, whose dispatches and combines take turns."""

    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=4, hidden=64, topk=2, num_experts=4, dtype=torch.float32, device="cpu", timeout=PATIENCE
        ) as buffer:
            ids = torch.tensor([[0, 2], [1, 3], [3, 0]])
            x, weights = torch.ones(3, 64, requires_grad=True), torch.full((3, 2), 0.5, requires_grad=True)
            first = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=4)
            second = nccl_ep.dispatch(2 * x, ids.flip(0), weights, buffer=buffer, num_experts=4)
            total = sum(nccl_ep.combine(out.x, out.handle).sum() for out in (second, first))
            total.backward()
            assert x.grad is not None and x.grad[:, 0].tolist() == [3] * 3
            assert weights.grad is not None and weights.grad.tolist() == [[192] * 2] * 3

    run_ranks(2, body)


def test_a_combine_that_brings_gradients_of_weights_is_another_call() -> None:
    """Of ranks that want unequal gradients in high throughput, the backward passes are unequal."""

    def body(group: ThreadGroup) -> str:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=7, hidden=64, topk=2, num_experts=4, dtype=torch.float32, mode="ht", device="cpu",
            timeout=PATIENCE,
        ) as buffer:  # fmt: skip
            x = torch.ones(7, 64).requires_grad_()
            weights = torch.ones(7, 2).requires_grad_(group.rank() == 0)
            out = nccl_ep.dispatch(
                x, torch.arange(2).repeat(7, 1), weights, buffer=buffer, num_experts=4, mode="ht", layout="packed"
            )
            with pytest.raises(nccl_ep.MismatchError) as caught:
                nccl_ep.combine(out.x, out.handle).sum().backward()
            return str(caught.value)

    for text in run_ranks(2, body):
        assert text.count("with a scalar for each choice, as gradients of weights are") == 1


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("domain_size", (1, 2), r"the domain size: rank {0} has {1}, rank {2} has {3}$"),
        ("max_tokens", (8, 9), r"max_tokens: rank {0} has {1}, rank {2} has {3}; were buffers made in the same order"),
        ("hidden", (64, 512), r"hidden: rank {0} has {1}, rank {2} has {3}; were buffers made in the same order"),
        ("topk", (2, 9), r"topk: rank {0} has {1}, rank {2} has {3}; were buffers made in the same order"),
        ("mode", ("ll", "auto"), r"mode: rank {0} has {1}, rank {2} has {3}; were buffers made in the same order"),
        ("ll_network", ("rail", "mesh"), r"low latency's way between domains \(ll_network\): rank {0} has {1}"),
        ("window", ("nccl", "cumem"), r"what windows are made by \(window\): rank {0} has "),
    ],
)
def test_disagreement_when_the_buffer_is_made(name: str, values: tuple[Any, Any], text: str) -> None:
    again = ThreadGroup.make(2)
    good = Expected(plain_case(2))

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        shape = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cpu", "timeout": PATIENCE}
        where = text.format(rank, values[rank], 1 - rank, values[1 - rank])
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match="the ranks disagree about " + where):
            nccl_ep.Buffer.for_shapes(group, **{**shape, name: values[rank]})
        with make_buffer(good.case, again[rank]) as buffer:
            good.run(buffer)

    run_ranks(2, body)


def test_ranks_tell_one_another_the_version_of_the_package() -> None:
    heard = []

    class Listening(ThreadGroup):
        def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
            heard.append(mine)
            return super().allgather(mine, timeout)

    with nccl_ep.Buffer(Listening(ThreadGroup.make(1)[0]._world, 0), device="cpu"):
        line = f"the library's version={nccl_ep.__version__}\n".encode()
        assert any(line in words for words in heard), heard


def test_ranks_of_different_versions_make_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose words at the meeting are those of another version."""

    class Older(ThreadGroup):
        def allgather(self, mine: bytes, timeout: float) -> list[bytes]:
            return super().allgather(re.sub(rb"the wire format=\d+", b"the wire format=0", mine), timeout)

    ends = ThreadGroup.make(2)
    ends[1] = Older(ends[1]._world, 1)

    def body(group: ThreadGroup) -> None:
        with pytest.raises(nccl_ep.MismatchError, match=r"wire format: rank \d has \d+, rank \d has \d+"):
            nccl_ep.Buffer(ends[group.rank()], device="cpu")

    run_ranks(2, body)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {  # usual, odd, whether all dispatch before
    "modes": (lambda c: c.dispatch(mode="ll"), lambda c: c.dispatch(mode="ht"), False),
    "modes that were chosen": (lambda c: c.dispatch(mode="auto"), lambda c: c.dispatch(mode="auto", most=4096), False),
    "exact sizes": (lambda c: c.dispatch(mode="ll"), lambda c: c.dispatch(mode="auto", capacity="exact"), False),
    "ll dispatch and combine": (lambda c: c.dispatch(mode="ll"), lambda c: c.combine("ll"), True),
    "ht dispatch and combine": (lambda c: c.dispatch(mode="ht"), lambda c: c.combine("ht"), True),
    "combines of both modes": (lambda c: c.combine("ll"), lambda c: c.combine("ht"), True),
    "split": (lambda c: c.dispatch_send().receive(), lambda c: c.combine("ll"), True),
}


class _Calls:
    """Of one rank, in both modes."""

    def __init__(self, buffer: nccl_ep.Buffer) -> None:
        self.x, self.ids = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 3)
        self.given: dict[str, Any] = {"buffer": buffer, "num_experts": 4}
        self.before: dict[str, nccl_ep.DispatchOutput] = {}

    def dispatch(self, mode: str, most: int = 8, **how: Any) -> nccl_ep.DispatchOutput:
        return nccl_ep.dispatch(self.x, self.ids, mode=mode, max_tokens=most, layout="flat", **self.given, **how)

    def dispatch_send(self) -> Any:
        return nccl_ep.dispatch_send(self.x, self.ids, max_tokens=8, **self.given)

    def combine(self, mode: str) -> torch.Tensor:
        out = self.before[mode]
        return nccl_ep.combine(out.x, out.handle)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_different_places_of_headers(num_ranks: int, way: str) -> None:
    """Low latency and high throughput, dispatch and combine: each rank looks where the others could be."""
    usual, odd, dispatches_before = WAYS[way]

    def body(group: ThreadGroup) -> str:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=4096, hidden=64, topk=2, num_experts=4, mode="auto", device="cpu", timeout=PATIENCE
        ) as buffer:
            calls = _Calls(buffer)
            if dispatches_before:
                calls.before = {mode: calls.dispatch(mode) for mode in ("ll", "ht")}
            with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError) as caught:
                (odd if group.rank() == num_ranks - 1 else usual)(calls)
            return str(caught.value)

    for rank, text in enumerate(run_ranks(num_ranks, body)):
        other = 0 if rank == num_ranks - 1 else num_ranks - 1
        assert re.search(rf"rank {rank} called .*, rank {other} called ", text), text


def test_calls_that_overtake_are_no_disagreement() -> None:
    """A rank that is late between two sends, and one that is ahead by a whole call of another place."""

    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=8, hidden=64, topk=2, num_experts=4, mode="auto", device="cpu", timeout=PATIENCE
        ) as buffer:
            calls = _Calls(buffer)
            calls.before = {mode: calls.dispatch(mode) for mode in ("ll", "ht")}
            for late in range(4):
                pending = calls.dispatch_send()
                if group.rank() == late % 2:
                    time.sleep(0.1)
                calls.combine("ll")
                if group.rank() == late // 2:
                    time.sleep(0.1)
                calls.combine("ht")
                pending.receive()
                calls.dispatch("ht")

    run_ranks(2, body)
