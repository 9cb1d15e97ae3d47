"""torch.compile of layers whose dispatch tells of its blocks of rows: an op of the user's takes them by their words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import nccl_ep
from nccl_ep.arrivals import Arrivals
from tests.support.processes import run_processes
from tests.training.moe import EXPERTS, HIDDEN, TOPK, make_buffer

TOKENS, ROWS = 6, 4
KINDS: dict[str, dict[str, Any]] = {
    "ll": {"mode": "ll", "layout": "expert_major"},
    "ll packed": {"mode": "ll", "layout": "packed", "expert_alignment": ROWS},
    "ht": {"mode": "ht", "layout": "packed", "expert_alignment": ROWS},
    "ht, exact": {"mode": "ht", "layout": "packed", "expert_alignment": ROWS, "capacity": "exact"},
}
WAYS: dict[str, Callable[..., nccl_ep.DispatchOutput]] = {
    "whole": nccl_ep.dispatch,
    "split": lambda *args, **how: nccl_ep.dispatch_send(*args, **how).receive(),
}
_given: dict[int, Arrivals] = {}  # by the address of their memory


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    _given.clear()


@torch.library.custom_op("nccl_ep_tests::multiply_arrived", mutates_args=())
def multiply_arrived(x: torch.Tensor, state: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each block's rows times their expert's matrix, in the order of arrival; 0 where no block has a row."""
    arrivals, y = _given[state.data_ptr()], torch.zeros_like(x)  # the memory itself, and no copy of it
    rows, out = x.view(-1, HIDDEN), y.view(-1, HIDDEN)
    layout: Any = "packed" if x.dim() == 2 else "expert_major"
    blocks = Arrivals.blocks_of(layout, x.shape[-2], experts.shape[0], ROWS)
    for block in arrivals.await_blocks(60.0, blocks=blocks):
        here = slice(block.first, block.first + block.rows)
        out[here] = rows[here] @ experts[block.expert]
    return y


@multiply_arrived.register_fake
def _(x: torch.Tensor, state: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layer:
    def __init__(self, buffer: nccl_ep.Buffer, kind: str, way: str = "whole") -> None:
        self.buffer, self.how, self.way = buffer, KINDS[kind], way
        local = EXPERTS // buffer.num_ranks
        generator = torch.Generator().manual_seed(buffer.rank)
        self.experts = torch.randn(local, HIDDEN, HIDDEN, generator=generator)
        self.arrivals = Arrivals(buffer, blocks=64, rows_per_block=ROWS)
        _given[self.arrivals.state.data_ptr()] = self.arrivals

    def __call__(self, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        how: dict[str, Any] = {"buffer": self.buffer, "num_experts": EXPERTS, "arrivals": self.arrivals, **self.how}
        if self.way == "early":
            pending = nccl_ep.dispatch_send(x, idx, **how, async_finish=True)
            rows = self.multiply(pending.early_output.x)
            return nccl_ep.combine_send(rows, pending.receive().handle, weights=None, async_finish=True).receive()
        out = WAYS[self.way](x, idx, **how)
        return nccl_ep.combine(self.multiply(out.x), out.handle, weights=None)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.ops.nccl_ep_tests.multiply_arrived(x, self.arrivals.state, self.experts)
        return rows


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    return x, torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)[1]


@pytest.mark.parametrize(
    ("backend", "kind", "way"),
    [
        *(("aot_eager", kind, "whole") for kind in KINDS),
        ("aot_eager", "ll packed", "split"),
        ("aot_eager", "ht", "early"),
        ("inductor", "ll", "early"),
        ("inductor", "ht, exact", "whole"),
    ],
)
def test_a_compiled_layer_takes_blocks_as_they_arrive(backend: str, kind: str, way: str) -> None:
    """The consumer sees the very memory, armed anew for every call, whose routing is new."""
    with make_buffer(None) as buffer:
        layer = Layer(buffer, kind, way)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for turn in range(3):
            x, idx = inputs(turn)
            want = layer(x, idx)
            assert torch.equal(compiled(x, idx), want)
            assert int(layer.arrivals.expected) == 2 * (turn + 1)


@pytest.mark.parametrize("kind", ["ll", "ht"])
def test_a_compiled_layer_of_two_ranks_has_the_eager_ones_bits(kind: str, tmp_path: Path) -> None:
    """In processes: what Dynamo has compiled in one thread, it keeps from others."""
    run_processes(2, _compiled, tmp_path, kind)


def _compiled(rank: int, kind: str) -> None:
    with make_buffer(dist.group.WORLD) as buffer:
        layer = Layer(buffer, kind)
        x, idx = inputs(rank)
        want = layer(x, idx)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, idx), want)


@pytest.mark.parametrize("kind", ["ll", "ht"])
def test_program_order_survives_compilation(kind: str) -> None:
    """The words are old before the dispatch begins, which runs beside the consumer: what awaits it stands behind."""
    with make_buffer(None) as buffer:
        layer = Layer(buffer, kind, "early")
        x, idx = inputs(0)
        want = layer(x, idx)
        got, codes = run_and_get_code(torch.compile(layer, fullgraph=True, options=nccl_ep.KEEP_PROGRAM_ORDER), x, idx)
        assert torch.equal(got, want)
        names = ("nccl_ep.begin_arrivals", "nccl_ep.run_beside", "nccl_ep.announce_rows", f"nccl_ep.{kind}_dispatch",
                 "nccl_ep_tests.multiply_arrived", "nccl_ep.await_beside", "nccl_ep.run_beside",
                 f"nccl_ep.{kind}_combine", "nccl_ep.await_beside")  # fmt: skip
        at = 0
        for name in names:
            at = codes[0].index(f"{name}.default(", at) + 1


def test_a_refused_dispatch_leaves_nothing_armed() -> None:
    with make_buffer(None) as buffer:
        layer = Layer(buffer, "ll")
        x, idx = inputs(0)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        layer.arrivals = Arrivals(buffer, blocks=1, rows_per_block=ROWS)
        with pytest.raises(ValueError, match="arrivals have room for 1 blocks of 4 rows"):
            compiled(x, idx)
        nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS)
        assert not layer.arrivals.words.any()
