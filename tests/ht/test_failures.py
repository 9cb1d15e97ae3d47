"""High throughput with ranks that fall silent, die, or make other calls: the others hear of it in time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.api.test_failures import expect_the_dead_to_be_missed, expect_timeout
from tests.ht.harness import HT_STEPS, ht_step
from tests.support.expected import Expected, plain_case
from tests.support.patience import PATIENCE, Clock, raises_at_once, with_more_time
from tests.support.processes import processes


def _buffer(num_ranks: int, group: Any, domain_size: int) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=8, hidden=64, topk=2, num_experts=2 * num_ranks, mode="ht", device="cpu", timeout=PATIENCE,
        domain_size=domain_size,
    )  # fmt: skip


def _run(case: Expected, buffer: nccl_ep.Buffer) -> nccl_ep.DispatchOutput:
    out = case.send(buffer)
    case.check_dispatch(out, buffer.rank)
    case.combine(buffer, out.handle)
    return out


def _step(case: Expected, buffer: nccl_ep.Buffer, phase: str) -> Callable[[], Any]:
    """What all ranks do together first, and the step that one of them leaves out."""
    return ht_step(phase, case, buffer, _run(case, buffer))


def _expect_failure(
    case: Expected, buffer: nccl_ep.Buffer, phase: str, group: Any, missing: int, deadline: float
) -> None:
    step = _step(case, buffer, phase)
    group.allgather(b"", PATIENCE)
    kind = "dispatch" if phase in ("dispatch", "exact", "cached") else "combine"
    waited = "op header" if buffer.rank // buffer.domain_size == missing // buffer.domain_size else "arrival signal"
    pattern = (
        rf"{waited} of rank {missing} in high-throughput {kind} \d+ "
        rf"\(expected \d+, saw \d+\); nothing of this call was heard from rank {missing};"
    )
    expect_timeout(buffer, deadline, missing, pattern, step)
    for call in (step, lambda: case.send(buffer), buffer.check, lambda: buffer.empty([1])):
        raises_at_once(deadline, nccl_ep.TimeoutError, f"failed: .*rank {missing}", call)
    with Clock(deadline + PATIENCE / 2):
        buffer.destroy()


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(3, 3), (4, 2), (3, 1)], ids=["memory", "domains", "network"])
@pytest.mark.parametrize("phase", HT_STEPS)
def test_a_silent_rank_is_named_in_each_phase(phase: str, num_ranks: int, domain_size: int) -> None:
    case = Expected(plain_case(num_ranks, layout="packed", domain_size=domain_size))

    def run(deadline: float) -> None:
        gone = threading.Semaphore(0)

        def body(group: ThreadGroup) -> None:
            buffer = _buffer(num_ranks, group, domain_size)
            if group.rank() == 1:
                _step(case, buffer, phase)
                group.allgather(b"", PATIENCE)
                for _ in range(num_ranks - 1):
                    assert gone.acquire(timeout=2 * PATIENCE)
                return
            try:
                _expect_failure(case, buffer, phase, group, 1, deadline)
            finally:
                gone.release()

        run_ranks(num_ranks, body)

    def go_on(group: ThreadGroup) -> None:
        with _buffer(num_ranks, group, domain_size) as fresh:
            _run(case, fresh)

    with_more_time(run)
    run_ranks(num_ranks, go_on)


def test_the_outputs_of_a_failed_dispatch_are_empty() -> None:
    """Given outputs leave nothing that looks like rows: counts 0, ids -1, weights 0."""
    case, seen = Expected(plain_case(2, layout="flat", combine_weights="none")), threading.Event()

    def body(group: ThreadGroup) -> None:
        buffer = _buffer(2, group, 2)
        out = case.send(buffer)
        if group.rank() == 1:
            assert seen.wait(PATIENCE)
            return
        buffer.set_timeout(0.3)
        assert int(out.total) > 0
        with pytest.raises(nccl_ep.TimeoutError):
            case.send(buffer, out=out)
        assert out._info.tolist() == [0] * 6
        assert out.topk_idx is not None and out.topk_idx.eq(-1).all() and out.weights.eq(0).all()
        seen.set()

    run_ranks(2, body)


# ---- Ranks as processes, killed in the middle of something


def _loop_until_killed(rank: int, victim: int, domain_size: int, seed: int, deadline: float) -> str:
    case = Expected(plain_case(4, layout="flat", domain_size=domain_size))
    with _buffer(4, dist.group.WORLD, domain_size) as buffer:
        _run(case, buffer)
        buffer.set_timeout(deadline)
        if rank == victim:
            threading.Timer(0.02 + seed * 0.013, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with Clock(deadline + PATIENCE / 2), pytest.raises(nccl_ep.TimeoutError) as caught:
            while True:
                out = _run(case, buffer)
                nccl_ep.dispatch_cached(case.inputs[rank].x, out.handle)
        return str(caught.value)


@pytest.mark.parametrize(("domain_size", "seed"), [(4, 1), (4, 2), (2, 3), (1, 4)])
def test_a_rank_killed_in_the_middle_of_something_is_named(domain_size: int, seed: int, tmp_path: Path) -> None:
    def run(deadline: float) -> None:
        folder = tmp_path / str(deadline)
        folder.mkdir()
        with processes(4, _loop_until_killed, folder, 1, domain_size, seed, deadline) as world:
            expect_the_dead_to_be_missed(world, (0, 2, 3), 1, "high-throughput")

    with_more_time(run)


# ---- Ranks that make other calls

BASE: dict[str, Any] = {"hidden": 64, "dtype": torch.bfloat16, "quant": None, "extra": 0, "capacity": None, "topk": 2}
CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden": 32}, "hidden 64", "hidden 32"),
    ({"dtype": torch.float16}, r"dispatch\(bf16", r"dispatch\(fp16"),
    ({"quant": "fp8"}, "quant none, 0 bytes", "quant fp8, 4 bytes"),
    ({"extra": 1}, "0 bytes of scales", "16 bytes of scales"),
    ({"topk": 1}, "top-2", "top-1"),
    ({"capacity": "exact"}, r"high-throughput dispatch\(", r"counts of a high-throughput dispatch\("),
]


def _call(buffer: nccl_ep.Buffer, **changes: Any) -> nccl_ep.DispatchOutput:
    how = {**BASE, **changes}
    x, ids = torch.ones(7, how["hidden"]).to(how["dtype"]), torch.arange(how["topk"]).repeat(7, 1)
    return nccl_ep.dispatch(
        x, ids, buffer=buffer, num_experts=2 * buffer.num_ranks, mode="ht", layout="flat", quant=how["quant"],
        capacity=how["capacity"], extra=[torch.ones(7, 4)] * how["extra"],
    )  # fmt: skip


def _expect_mismatch(
    num_ranks: int, domain_size: int, call: Callable[[nccl_ep.Buffer, bool], Any], mine: str, other: str
) -> None:
    odd = num_ranks - 1

    def body(group: ThreadGroup) -> None:
        rank, buffer = group.rank(), _buffer(num_ranks, group, domain_size)
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError) as caught:
            call(buffer, rank == odd)
        text, peer = str(caught.value), 0 if rank == odd else odd
        ours, theirs = (other, mine) if rank == odd else (mine, other)
        assert re.search(rf"rank {rank} called [^)]*{ours}.*\), rank {peer} called [^)]*{theirs}", text), text
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match="different calls"):
            buffer.check()
        buffer.destroy()

    run_ranks(num_ranks, body)


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("changes", "mine", "other"), CALLS, ids=[str(*change[0].items()) for change in CALLS])
def test_ranks_with_different_dispatches_are_told_both(
    changes: dict[str, Any], mine: str, other: str, num_ranks: int, domain_size: int
) -> None:
    _expect_mismatch(
        num_ranks, domain_size, lambda buffer, is_odd: _call(buffer, **(changes if is_odd else {})), mine, other
    )


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("odd", ["scalars", "wire", "cached"])
def test_ranks_with_different_combines_are_told_both(odd: str, num_ranks: int, domain_size: int) -> None:
    texts = {"scalars": (r"combine\(", r"combine of weights\("), "wire": ("wire bf16", "wire fp32")}

    def call(buffer: nccl_ep.Buffer, is_odd: bool) -> None:
        out = _call(buffer)
        if odd == "cached":
            nccl_ep.dispatch_cached(torch.ones(7, 64, dtype=torch.bfloat16), out.handle) if is_odd else _call(buffer)
        elif is_odd and odd == "scalars":
            nccl_ep.combine_weights(out.weights, out.handle)
        else:
            nccl_ep.combine(out.x, out.handle, wire_dtype=torch.float32 if is_odd and odd == "wire" else None)

    mine, other = texts.get(odd, (r"high-throughput dispatch\(", r"cached high-throughput dispatch\("))
    _expect_mismatch(num_ranks, domain_size, call, mine, other)


HANDLE_STEPS: dict[str, Callable[[nccl_ep.DispatchOutput, nccl_ep.Handle, torch.Tensor], Any]] = {
    "combine": lambda out, handle, x: nccl_ep.combine(out.x, handle),
    "home": lambda out, handle, x: nccl_ep.combine(out.x, handle, weights=torch.ones(len(x), 2)),
    "scalars": lambda out, handle, x: nccl_ep.combine_weights(out.weights, handle),
    "cached": lambda out, handle, x: nccl_ep.dispatch_cached(x, handle),
}


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("step", HANDLE_STEPS)
def test_ranks_with_handles_of_different_dispatches_are_told_both(
    step: str, capacity: str | None, num_ranks: int, domain_size: int
) -> None:
    """The dispatches are equal in all, so that nothing else tells their handles apart. A rank has no tokens."""
    odd = num_ranks - 1

    def body(group: ThreadGroup) -> None:
        rank, buffer = group.rank(), _buffer(num_ranks, group, domain_size)
        tokens = 0 if rank == 1 else 7
        x, ids = torch.ones(tokens, 64, dtype=torch.bfloat16), torch.arange(2).repeat(tokens, 1)
        made = [
            nccl_ep.dispatch(
                x, ids, torch.ones(tokens, 2), buffer=buffer, num_experts=2 * num_ranks, mode="ht",
                layout="packed", capacity=capacity,
            )
            for _ in range(3)
        ]  # fmt: skip
        numbers = [1, 3, 5] if capacity else [1, 2, 3]  # counts and rows of exact sizes are an operation each
        for out in made[::-1]:  # the same one on all ranks, in any order, and a copy of one of them
            copied = dataclasses.replace(out.handle, tensor=out.handle.tensor.clone())
            handle = copied if rank == odd else out.handle
            assert nccl_ep.combine(out.x, handle)[:, 0].tolist() == [2] * tokens
            nccl_ep.dispatch_cached(x, handle)
        kind, epoch = ("dispatch", numbers[-1] + (5 if capacity else 4)) if step == "cached" else ("combine", 4)
        mine = 2 if rank == odd else 0
        peers = str(odd) if rank != odd else "[0-9]"
        text = (
            rf"ranks gave handles of different dispatches to high-throughput {kind} {epoch}: rank {rank} that of "
            rf"dispatch {numbers[mine]}, rank {peers} that of dispatch {numbers[2 - mine]}"
        )
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=text):
            HANDLE_STEPS[step](made[mine], made[mine].handle, x)
            buffer.check()
        with Clock(PATIENCE / 2), pytest.raises(nccl_ep.MismatchError, match=f"the buffer has failed: {text}"):
            buffer.check()
        buffer.destroy()

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("step", ["combine", "cached"])
def test_a_changed_handle_fails_the_buffer_and_touches_no_memory(step: str) -> None:
    """Rows far beyond another rank's are found amid the call: no memory is touched there, the buffer has failed."""
    num_tokens, topk = 4, 2

    def body(group: ThreadGroup) -> None:
        buffer = _buffer(2, group, 2)
        x = torch.ones(num_tokens, 64, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 2]] * num_tokens)
        out = nccl_ep.dispatch(
            x, ids, torch.rand(num_tokens, topk), buffer=buffer, num_experts=4, mode="ht", layout="flat", capacity=16
        )
        rows = buffer.empty(out.x.shape, out.x.dtype).copy_(out.x)
        route = out.handle.tensor.clone()
        first = 8 + num_tokens * topk  # behind the counts of ranks and experts, and the ids
        assert route[first : first + num_tokens * topk].tolist() == [4 * buffer.rank + i // 2 for i in range(8)]
        if buffer.rank == 0:
            route[first : first + num_tokens * topk] = 1 << 30
        handle = dataclasses.replace(out.handle, tensor=route)

        def call() -> Any:
            return nccl_ep.combine(rows, handle) if step == "combine" else nccl_ep.dispatch_cached(x, handle)

        group.allgather(b"", PATIENCE)
        if buffer.rank == 1:
            buffer.set_timeout(2.0)
            with pytest.raises(nccl_ep.TimeoutError, match="rank 0"):
                call()
        else:
            kind = "combine" if step == "combine" else "dispatch"
            text = rf"handle that rank 0 gave to high-throughput {kind} \d+ .* was changed: row 1073741824 of rank 0,.*"
            text += "; were buffers made in the same order on all ranks"
            for again in (call, buffer.check):
                with pytest.raises(ValueError, match=text):
                    again()
        group.allgather(b"", PATIENCE)
        buffer.destroy()

    run_ranks(2, body)


def test_extra_tensors_in_another_order_are_told_to_both() -> None:
    """Of the same bytes in sum: each rank would write past the other's rows."""

    def body(group: ThreadGroup) -> None:
        with _buffer(2, group, 2) as buffer:
            x, ids = torch.ones(4, 16, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 4)
            extra = [torch.ones(4, 16, dtype=torch.uint8), torch.ones(4, 48, dtype=torch.uint8)]
            how: dict[str, Any] = {"buffer": buffer, "num_experts": 4, "mode": "ht", "layout": "flat", "capacity": 16}
            nccl_ep.dispatch(x, ids, **how, extra=extra)
            with pytest.raises(nccl_ep.MismatchError, match=r"extra tensors, order \d+\), rank \d called .* order"):
                nccl_ep.dispatch(x, ids, **how, extra=extra[:: 1 - 2 * buffer.rank])

    run_ranks(2, body)


@pytest.mark.parametrize("other", [order for order in itertools.permutations((16, 32, 48)) if order != (16, 32, 48)])
def test_three_extra_tensors_in_another_order_are_told_to_both(other: tuple[int, ...]) -> None:
    def body(group: ThreadGroup) -> None:
        with _buffer(2, group, 2) as buffer:
            x, ids = torch.ones(4, 16, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 4)
            extra = [torch.ones(4, bytes, dtype=torch.uint8) for bytes in ((16, 32, 48), other)[buffer.rank]]
            how: dict[str, Any] = {"buffer": buffer, "num_experts": 4, "mode": "ht", "layout": "flat", "capacity": 16}
            with pytest.raises(nccl_ep.MismatchError, match=r"order \d+\), rank \d called .* order"):
                nccl_ep.dispatch(x, ids, **how, extra=extra)

    run_ranks(2, body)
