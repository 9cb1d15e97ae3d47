"""Extra tensors of a low-latency dispatch: in the places of x's rows, bit for bit, as in high throughput."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import reference
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.gpus import needs_gpu

MOST, HIDDEN, TOPK, EXPERTS = 6, 32, 3, 4  # EXPERTS: of a rank
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Plan:
    """A dispatch: its shape is that of all ranks, its contents follow from seed and rank."""

    seed: int
    layout: str
    num_ranks: int
    extra: tuple[tuple[int, torch.dtype], ...]  # bytes of a row, dtype
    quant: str | None
    has_scales: bool
    capacity: int

    @classmethod
    def draw(cls, seed: int, num_ranks: int) -> Plan:
        rng = random.Random(seed)
        layout = reference.LAYOUTS[seed % 4]
        quant, has_scales = rng.choice([(None, False), (None, False), ("fp8", False), (None, True)])
        extra = tuple((16 * rng.randint(1, 9), rng.choice(DTYPES)) for _ in range(rng.randint(1, 3)))
        return cls(seed, layout, num_ranks, extra, quant, has_scales, rng.choice([4, 3 * MOST * num_ranks]))

    def bits(self, rank: int, stream: int, rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Any bits; words of all ones among them, which mean something on the wire."""
        made = torch.Generator().manual_seed((self.seed * 64 + rank) * 64 + stream)
        words = torch.randint(-(2**31), 2**31, (rows, row_bytes // 4), generator=made, dtype=torch.int64)
        words[torch.rand(words.shape, generator=made) < 0.2] = -1
        return words.to(torch.int32).view(dtype)

    def arguments(self, rank: int) -> dict[str, Any]:
        rows = random.Random(self.seed * 64 + rank).randint(0, MOST)
        made = torch.Generator().manual_seed(self.seed * 64 + rank)
        scores = torch.rand(rows, EXPERTS * self.num_ranks, generator=made)
        weights, ids = scores.topk(TOPK)
        return {
            "x": torch.randn(rows, HIDDEN, generator=made).bfloat16(),
            "topk_idx": torch.where(weights < 0.5, -1, ids),
            "topk_weights": weights,
            "extra": [self.bits(rank, i, rows, *what) for i, what in enumerate(self.extra)],
            "scales": self.bits(rank, 9, rows, 4, torch.float32) if self.has_scales else None,
        }

    def options(self) -> dict[str, Any]:
        limited = {} if self.layout == "rank_major" else {"capacity": self.capacity}
        return {
            "num_experts": EXPERTS * self.num_ranks, "layout": self.layout, "quant": self.quant, "zero_padding": True,
            **limited,
        }  # fmt: skip


def _buffer(group: ThreadGroup | None, num_ranks: int, device: str = "cpu") -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=MOST, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * num_ranks, scale_bytes=640,
        mode="auto", device=device,
    )  # fmt: skip


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _dispatch(plan: Plan, mode: str, **arguments: Any) -> nccl_ep.DispatchOutput:
    """Some of them beside the caller's stream."""
    if plan.seed % 3 == 0:
        return nccl_ep.dispatch_send(mode=mode, async_finish=True, **arguments).receive()
    return nccl_ep.dispatch(mode=mode, **arguments)


def _check(plan: Plan, buffer: nccl_ep.Buffer) -> None:
    """Both modes of one buffer give the same."""
    home = plan.arguments(buffer.rank)
    given = {name: _to(value, buffer.device) for name, value in home.items()}
    low, high = (_dispatch(plan, mode, buffer=buffer, **given, **plan.options()) for mode in ("ll", "ht"))
    assert low.x.shape == high.x.shape and _same(low.x, high.x), plan
    assert len(low.extra) == len(plan.extra), plan
    for i, (mine, wanted) in enumerate(zip(low.extra, high.extra, strict=True)):
        assert mine.shape == wanted.shape and _same(mine, wanted), (plan, i)
    assert (low.scales is None) == (high.scales is None) == (plan.quant is None and not plan.has_scales)
    if plan.has_scales:
        assert _same(low.scales, high.scales), plan
    for name in ("counts", "demand", "overflow", "weights"):
        assert torch.equal(getattr(low, name), getattr(high, name)), (plan, name)
    weighted = plan.layout in ("expert_major", "packed")
    rows = low.x.to(torch.bfloat16)
    combined, wanted = (
        nccl_ep.combine(rows, out.handle, weights="dispatch" if weighted else None) for out in (low, high)
    )
    assert combined.shape == given["x"].shape and _same(combined, wanted), plan


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [each.to(device) for each in value]
    return value if value is None else value.to(device)


def _check_plans(num_ranks: int, device: str) -> list[Plan]:
    plans = [Plan.draw(seed, num_ranks) for seed in range(40)]

    def body(group: ThreadGroup) -> None:
        with _buffer(group, num_ranks, device) as buffer:
            for plan in plans:
                _check(plan, buffer)

    run_ranks(num_ranks, body)
    return plans


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_extra_tensors_are_those_of_high_throughput(num_ranks: int) -> None:
    plans = _check_plans(num_ranks, "cpu")
    assert {plan.layout for plan in plans if len(plan.extra) == 3 and plan.quant is None} == set(reference.LAYOUTS)


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    def test_extra_tensors_are_those_of_high_throughput(self, num_ranks: int) -> None:
        _check_plans(num_ranks, "cuda")


def test_one_tensor_travels_in_the_rows_of_x() -> None:
    """One operation for x and one more tensor, one more for each that follows."""
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [3, -1, -1]])
    more = torch.arange(16, dtype=torch.int64).view(2, 8)
    with _buffer(None, 1) as buffer:
        for count, quant, expected in ((1, None, 1), (2, None, 2), (3, None, 3), (1, "fp8", 2)):
            before = buffer.stats()["dispatches"]
            out = nccl_ep.dispatch(x, ids, extra=[more] * count, quant=quant, buffer=buffer, num_experts=EXPERTS)
            assert buffer.stats()["dispatches"] - before == expected
            assert all(each[0, 0].equal(more[0]) and each[3, 0].equal(more[1]) for each in out.extra)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ([torch.zeros(2, 8)] * 4, "4 extra tensors, at most 3"),
        ([torch.zeros(3, 8)], r"extra 0 has shape \[3, 8\], must be \[2, elements of a row\]"),
        ([torch.zeros(2)], r"extra 0 has shape \[2\], must be"),
        ([torch.zeros(2, 8), torch.zeros(2, 3)], "extra 1 has rows of 12 bytes, must be a multiple of 16"),
        ([torch.zeros(2, 0)], "extra 0 has rows of 0 bytes"),
        ([torch.zeros(8, 2).t()], r"extra 0 of shape \[2, 8\] is not contiguous"),
        ([torch.zeros(2, 8, device="meta")], "extra 0 is on meta, the buffer on cpu"),
        ([torch.zeros(2, 1024)], "window is too small"),
        ([torch.zeros(2, 8), torch.zeros(2, 1024)], "window is too small .* rows of 4128 bytes"),
    ],
)
def test_bad_extra_tensors_are_refused_and_nothing_is_sent(extra: list[torch.Tensor], text: str) -> None:
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [3, -1, -1]])
    with _buffer(None, 1) as buffer:
        with pytest.raises(ValueError, match=text):
            nccl_ep.dispatch(x, ids, extra=extra, buffer=buffer, num_experts=EXPERTS)
        assert buffer.stats()["dispatches"] == 0
        assert nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=EXPERTS).extra == ()


def test_a_split_dispatch_takes_no_extra_tensors() -> None:
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [3, -1, -1]])
    with _buffer(None, 1) as buffer:
        given: dict[str, Any] = {"buffer": buffer, "num_experts": EXPERTS}
        with pytest.raises(ValueError, match="1 extra tensors, but a split dispatch takes none: pass async_finish"):
            nccl_ep.dispatch_send(x, ids, extra=[torch.zeros(2, 8)], **given)
        with pytest.raises(TypeError, match="extra is a Tensor, must be a tuple or a list of tensors"):
            nccl_ep.dispatch_send(x, ids, extra=torch.zeros(2, 8), async_finish=True, **given)
        assert buffer.stats()["dispatches"] == 0 and nccl_ep.dispatch_send(x, ids, **given).receive().extra == ()


def test_extra_tensors_under_compile_are_the_eager_ones() -> None:
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [3, -1, -1]])
    more = [torch.arange(16, dtype=torch.int64).view(2, 8), torch.ones(2, 4)]
    with _buffer(None, 1) as buffer:

        def layer(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return nccl_ep.dispatch(x, ids, extra=[a, b], buffer=buffer, num_experts=EXPERTS, zero_padding=True).extra

        wanted = layer(x, *more)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, *more)
        assert all(_same(a, b) for a, b in zip(compiled, wanted, strict=True))


@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_ids_out_of_range_are_counted_once(layout: str) -> None:
    """However many operations the extra tensors take, and in high throughput."""
    x, ids = torch.ones(2, 8), torch.tensor([[0, 9], [1, -5]])
    extra = [torch.zeros(2, 4, dtype=torch.int32) for _ in range(3)]
    sizes: dict[str, Any] = {"max_tokens": 2, "hidden": 8, "topk": 2, "num_experts": 2, "dtype": x.dtype}
    sizes |= {"scale_bytes": 64, "mode": "auto", "on_invalid_ids": "count"}
    with nccl_ep.Buffer.for_shapes(None, **sizes, device="cpu") as buffer:
        for mode in ("ll", "ht"):
            for count in range(4):
                nccl_ep.dispatch(
                    x, ids, buffer=buffer, num_experts=2, extra=extra[:count], mode=mode, layout=layout, capacity=None
                    if layout == "rank_major" else 4,
                )  # fmt: skip
                assert buffer.stats()["invalid_ids"] == 2
                first = r"(9 at token 0|-5 at token 1), k 1"  # a GPU's threads come in any order
                with pytest.raises(ValueError, match=rf"^2 expert ids out of range .* the first is {first}"):
                    buffer.check()
