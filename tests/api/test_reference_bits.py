"""The oracle's bits follow from the numbers alone: not from hidden, K, a compiled caller or the default dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nccl_ep import reference
from nccl_ep.reference import RankInput

RANKS, EXPERTS, TOKENS, HIDDEN = 2, 64, 8, 512
WIRES: tuple[torch.dtype | str | None, ...] = (None, torch.float32, "fp8", "logfmt")


def given(topk: int, hidden: int = HIDDEN, spare: int = 0) -> list[RankInput]:
    """All ranks' tokens. `spare`: choices of no expert, in front of each of the others."""
    made = []
    for rank in range(RANKS):
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(TOKENS, HIDDEN, generator=draw)[:, :hidden].to(torch.bfloat16).contiguous()
        ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:topk] for _ in range(TOKENS)])
        weights = torch.rand(TOKENS, topk, generator=draw)
        ids, weights = (
            torch.nn.functional.pad(each.unsqueeze(2), (spare, 0), value=fill).flatten(1)
            for each, fill in ((ids, -1), (weights, 7))
        )
        made.append(RankInput(x, ids, weights))
    return made


def returned(inputs: list[RankInput], layout: str, **options: Any) -> list[Tensor]:
    """What combine gives of rows as dispatch gives them."""
    shape: dict[str, Any] = {"num_experts": EXPERTS, "layout": layout}
    results = reference.dispatch(inputs, max_tokens=TOKENS, zero_padding=True, **shape)
    return reference.combine([each.x for each in results], results, inputs, **shape, **options)


def summed_by_hand(inputs: list[RankInput], rank: int, token: int) -> Tensor:
    """The token's row by the letter of docs/semantics.md, one column after the other, in numbers of Python."""
    entry, local = inputs[rank], EXPERTS // RANKS
    assert entry.topk_weights is not None
    columns = []
    for number in entry.x[token].tolist():
        total: Tensor | None = None
        for home in range(RANKS):
            partial: Tensor | None = None
            for expert, weight in zip(entry.topk_idx[token].tolist(), entry.topk_weights[token], strict=True):
                if expert // local == home:
                    term = torch.tensor(number, dtype=torch.float32) * weight
                    partial = term if partial is None else partial + term
            if partial is not None:
                total = partial if total is None else total + partial
        assert total is not None
        columns.append(total)
    return torch.stack(columns)


@pytest.mark.parametrize("topk", [8, 32])
@pytest.mark.parametrize("layout", ["expert_major", "packed"])
def test_sums_go_by_k_and_by_rank(layout: str, topk: int) -> None:
    inputs = given(topk, hidden=40)
    out = returned(inputs, layout, wire_dtype=torch.float32, out_dtype=torch.float32)
    for rank, token in ((0, 0), (1, TOKENS - 1)):
        assert out[rank][token].equal(summed_by_hand(inputs, rank, token))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("topk", [8, 32])
def test_a_column_does_not_depend_on_hidden(topk: int, wire: torch.dtype | str | None) -> None:
    """Of block formats a block of 128 columns."""
    widths = (128, 256) if isinstance(wire, str) else (8, 40, 136, 256)
    whole = returned(given(topk), "packed", wire_dtype=wire)
    for hidden in widths:
        part = returned(given(topk, hidden), "packed", wire_dtype=wire)
        assert all(reference.bits_equal(p, w[:, :hidden].contiguous()) for p, w in zip(part, whole, strict=True))


@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_a_sum_does_not_depend_on_choices_of_no_expert(layout: str) -> None:
    plain, spread = returned(given(8), layout), returned(given(8, spare=3), layout)
    assert all(reference.bits_equal(a, b) for a, b in zip(plain, spread, strict=True))


def numbers() -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(9, 272, generator=draw) * torch.exp2(6 * torch.randn(9, 272, generator=draw))


GIVEN, NUMBERS = given(4), numbers()


def quantised() -> list[Tensor]:
    return [each for mode in reference.QUANT_MODES for each in reference.quantize_fp8(NUMBERS, mode)]


def rounded() -> list[Tensor]:
    return [reference.rounded_to_wire(NUMBERS, wire) for wire in (torch.bfloat16, torch.float16, "fp8", "logfmt")]


def weights_home() -> list[Tensor]:
    shape: dict[str, Any] = {"num_experts": EXPERTS, "layout": "packed"}
    results = reference.dispatch(GIVEN, max_tokens=TOKENS, **shape)
    return reference.combine_weights([each.weights for each in results], results, GIVEN, **shape)


WORKS: dict[str, Callable[[], list[Tensor]]] = {
    **{f"over {wire}": functools.partial(returned, GIVEN, "packed", wire_dtype=wire) for wire in WIRES},
    "flat": functools.partial(returned, GIVEN, "flat"),
    "weights": weights_home,
    "quantised": quantised,
    "rounded": rounded,
}


def require_same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert not reference.first_difference(one, other)


@pytest.mark.parametrize("name", WORKS)
def test_a_compiled_caller_changes_nothing(name: str) -> None:
    """The compiler gets the caller's operations, and none of the oracle's."""
    seen = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        seen.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def caller(x: Tensor) -> list[Tensor]:
        return [x * 2, *WORKS[name](), x + 1]

    want = WORKS[name]()
    torch._dynamo.reset()
    doubled, *got, more = torch.compile(caller, backend=backend)(NUMBERS)
    torch._dynamo.reset()
    require_same(got, want)
    assert doubled.equal(NUMBERS * 2) and more.equal(NUMBERS + 1)
    assert len(seen) == 2 and {each.__name__ for each in seen} == {"mul", "add"}, seen


@pytest.mark.parametrize("name", WORKS)
def test_the_default_dtype_changes_nothing(name: str) -> None:
    want = WORKS[name]()
    torch.set_default_dtype(torch.float64)
    try:
        got = WORKS[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    require_same(got, want)
