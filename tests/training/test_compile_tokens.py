"""Numbers of tokens of compiled layers: one compilation serves all of them, 0 and 1 too, where they are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import nccl_ep
from tests.training.moe import HIDDEN, make_buffer
from tests.training.test_compile import KINDS, Layer, check_equal, train_step

FIRST_NUMBERS = {"some": (8, 5, 1, 0, 3), "none": (0, 1, 8, 5), "one": (1, 0, 5, 2)}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counts:
    """A backend that runs graphs as they are, and counts the forward and the backward ones."""

    def __init__(self) -> None:
        self.made = [0, 0]
        self.backend = aot_autograd(
            fw_compiler=self._count(0),
            bw_compiler=self._count(1),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )  # as aot_eager

    def _count(self, which: int) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.made[which] += 1
            return make_boxed_func(graph.forward)

        return compile_graph


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        pytest.param(
            kind, first, id=f"{kind}-{first}",
            marks=() if first == "some" or kind in ("ll expert_major", "ht packed, exact") else pytest.mark.slow,
        )
        for kind in KINDS
        for first in FIRST_NUMBERS
    ],
)  # fmt: skip
def test_one_compilation_serves_all_numbers(kind: str, first: str) -> None:
    counts = Counts()
    with make_buffer(None, max_tokens=32) as buffer:
        layer, compiled = Layer(buffer, **KINDS[kind]), Layer(buffer, **KINDS[kind])
        compiled.compile(backend=counts.backend, fullgraph=True)
        for tokens in FIRST_NUMBERS[first]:
            x = torch.randn(tokens, HIDDEN)
            check_equal(train_step(compiled, x, mark=True), train_step(layer, x))
            assert counts.made == [1, 1]


@pytest.mark.parametrize(
    "kind", ["ll packed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ht packed", "ht packed, exact"))]
)
def test_inductor_compiles_once_for_all_numbers(kind: str) -> None:
    counter = CompileCounterWithBackend("inductor")
    with make_buffer(None, max_tokens=32) as buffer:
        layer, compiled = Layer(buffer, **KINDS[kind]), Layer(buffer, **KINDS[kind])
        compiled.compile(backend=counter, fullgraph=True)
        for tokens in (8, 5, 1, 0, 3):
            x = torch.randn(tokens, HIDDEN)
            check_equal(train_step(compiled, x, mark=True), train_step(layer, x))
        assert counter.frame_count == 1


def test_ids_and_weights_of_the_caller() -> None:
    """Several tensors of as many tokens, in a layer that adds what comes home to what it was given."""
    counts = Counts()
    with make_buffer(None) as buffer:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, idx, weights, buffer=buffer, num_experts=4, layout="packed")
            return x + nccl_ep.combine(2 * out.x, out.handle)

        compiled = torch.compile(layer, backend=counts.backend, fullgraph=True)
        for tokens in (1, 8, 0, 5):
            weights, idx = torch.rand(tokens, 4).topk(2)
            given = torch.randn(tokens, HIDDEN), idx, weights
            nccl_ep.mark_tokens(*given)
            torch.testing.assert_close(compiled(*given), layer(*given))
        assert counts.made == [1, 0]


def test_batches_of_sequences() -> None:
    """[batch, sequence, hidden], of which both lengths change, and the batch may be empty."""
    counts = Counts()
    with make_buffer(None, max_tokens=32) as buffer:
        layer = Layer(buffer, **KINDS["ht packed"])

        def block(x: torch.Tensor) -> torch.Tensor:
            return x + layer(x.flatten(0, 1)).view(x.shape)

        compiled = torch.compile(block, backend=counts.backend, fullgraph=True)
        for batch, length in ((2, 7), (1, 1), (0, 3), (4, 5), (1, 8)):
            x = torch.randn(batch, length, HIDDEN)
            want = block(x)
            nccl_ep.mark_tokens(x, dim=(0, -2))
            torch.testing.assert_close(compiled(x), want)
        assert counts.made == [1, 1]


def test_marks_inside_of_a_compiled_layer_do_nothing() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        nccl_ep.mark_tokens(x)
        return x + 1

    x = torch.randn(3, 2)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), x + 1)


def test_what_cannot_be_marked_is_named() -> None:
    x = torch.randn(3, 2)
    with pytest.raises(TypeError, match=r"tensors\[1\] is 3, must be a tensor"):
        nccl_ep.mark_tokens(x, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dim is 2, but tensors\[0\] has shape \[3, 2\]"):
        nccl_ep.mark_tokens(x, dim=2)
    with pytest.raises(TypeError, match=r"dim is .first., must be an integer"):
        nccl_ep.mark_tokens(x, dim=("first",))  # type: ignore[arg-type]
    nccl_ep.mark_tokens(x, dim=torch.tensor(1))  # type: ignore[arg-type]
    assert x._dynamo_unbacked_indices == {1}  # type: ignore[attr-defined]


def test_unmarked_numbers_take_a_compilation_for_0_and_for_1() -> None:
    """What docs/training.md says of a layer that is warmed up instead."""
    counts = Counts()
    with make_buffer(None, max_tokens=32) as buffer:
        layer = Layer(buffer, **KINDS["ht packed"])
        layer.compile(backend=counts.backend, fullgraph=True)
        for tokens in (8, 5, 1, 0):
            train_step(layer, torch.randn(tokens, HIDDEN))
        warm = list(counts.made)
        for tokens in (3, 0, 1, 7, 32):
            train_step(layer, torch.randn(tokens, HIDDEN))
        assert counts.made == warm


def test_a_setting_of_torch_lets_the_second_compilation_serve_all_numbers() -> None:
    """The other way of docs/training.md, without marks."""
    counts = Counts()
    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes_mark_as="unbacked"),
        make_buffer(None, max_tokens=32) as buffer,
    ):
        layer, compiled = Layer(buffer, **KINDS["ht packed"]), Layer(buffer, **KINDS["ht packed"])
        compiled.compile(backend=counts.backend, fullgraph=True)
        for tokens in (8, 1, 0, 5, 32):
            x = torch.randn(tokens, HIDDEN)
            check_equal(train_step(compiled, x), train_step(layer, x))
        assert counts.made == [2, 2]
