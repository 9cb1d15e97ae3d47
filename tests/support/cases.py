"""Random small cases for property tests: a case is a pure function of its seed.

A test makes `case = generate(seed)`, runs the library on `case.inputs()` with `case.dispatch_kwargs()`,
holds the outcome against `nccl_ep.reference`, then does the same for combine with the rows of
`case.expert(...)` and `case.combine_kwargs()`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nccl_ep import reference
from nccl_ep.block_scales import e2m1_numbers
from nccl_ep.reference import DispatchResult, RankInput
from tests.support.contents import EXPONENTS, FLOATS, FP4, content_of, tensor_of, with_strides

OPAQUE = (torch.float8_e4m3fn, torch.int8, torch.uint8, *FP4)
SCALE_DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.uint8, *EXPONENTS)
SCALE_STRIDES = ("row", "column", "padded")
ROUTINGS = (
    "uniform", "skewed", "one_expert", "one_rank", "none", "some_none", "duplicates", "out_of_range",
)  # fmt: skip
# Drawn for some cases in place of one of those: see _sharpened().
CROWDED = "crowded"
TOKENS = ("ragged", "some_zero", "all_zero", "full")
CAPACITIES = ("default", "ample", "overflowing")
COMBINE_WEIGHTS = ("dispatch", "tensor", "masked", "none")

_OUT_OF_RANGE_32 = (-2, -1000, 2**31 - 1, -(2**31))
SCALES = (1.0, 2.5, 0.1, -3.0)
_OUT_OF_RANGE_64 = (*_OUT_OF_RANGE_32, 2**32, 2**40 + 1, -(2**63))

# Purposes of random streams, so that no two tensors of a case share one.
_STREAM_X, _STREAM_SCALES, _STREAM_ROUTING, _STREAM_WEIGHTS, _STREAM_EXPERT, _STREAM_COMBINE = range(6)


@dataclass(frozen=True)
class Case:
    """One property-test case; the tensors follow from the fields.

    tokens: T of every rank. scales_*: for payloads quantised by the caller. combine_weights: one of COMBINE_WEIGHTS.
    biases: how many (flat). domain_size None: one domain. content: of the payload; weights_content: of the weights of
    dispatch and of combine; rows_content: of combine's rows and biases. They are CONTENTS.
    """

    seed: int
    num_ranks: int
    num_experts: int
    topk: int
    hidden: int
    max_tokens: int
    tokens_kind: str
    tokens: tuple[int, ...]
    routing: str
    idx_dtype: torch.dtype
    dtype: torch.dtype
    content: str
    quant: str | None
    scales_dtype: torch.dtype | None
    scales_width: int
    scales_strides: str
    layout: str
    capacity_kind: str
    capacity: int | None
    expert_alignment: int
    zero_padding: bool
    with_weights: bool
    weights_content: str
    rows_dtype: torch.dtype
    rows_content: str
    out_dtype: torch.dtype | None
    wire_dtype: torch.dtype | str | None
    combine_weights: str
    biases: int
    domain_size: int | None
    keep_nan: bool
    scale: float = 1.0

    @property
    def home_bytes(self) -> int:
        """Of a rank's sum of a token on its way home, by docs/wire_format.md."""
        blocks = -(-self.hidden // 128)
        if self.wire_dtype == "fp8":
            return -(-(self.hidden + 4 * blocks) // 16) * 16
        if self.wire_dtype == "logfmt":
            return -(-(self.hidden * 5 // 4 + 4 * blocks) // 16) * 16
        wire = self.wire_dtype or self.out_dtype or self.rows_dtype
        assert isinstance(wire, torch.dtype)
        return self.hidden * wire.itemsize

    # --- inputs

    def inputs(self) -> list[RankInput]:
        """The tensors of all ranks, the same at every call."""
        return [self.rank_input(rank) for rank in range(self.num_ranks)]

    def dispatch_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of reference.dispatch (without topk_weights and scales, which are inputs)."""
        return {
            "num_experts": self.num_experts,
            "max_tokens": self.max_tokens,
            "layout": self.layout,
            "capacity": self.capacity,
            "expert_alignment": self.expert_alignment,
            "quant": self.quant,
            "zero_padding": self.zero_padding,
        }

    def combine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of reference.combine; lists hold one entry a rank."""
        of_ranks = [self.rank_combine_kwargs(rank) for rank in range(self.num_ranks)]
        kwargs = of_ranks[0] | {"num_experts": self.num_experts, "layout": self.layout, "domain_size": self.domain_size}
        for name in ("weights", "topk_idx", "bias"):
            if isinstance(kwargs[name], Tensor | tuple):
                kwargs[name] = [each[name] for each in of_ranks]
        return kwargs

    @property
    def is_weighted_at_home(self) -> bool:
        return self.combine_weights in ("tensor", "masked")

    def rank_combine_kwargs(self, rank: int) -> dict[str, Any]:
        """Those of one rank, which a rank's combine takes."""
        other = None if self.combine_weights == "none" else "dispatch"
        return {
            "weights": self._home_weights(rank) if self.is_weighted_at_home else other,
            "topk_idx": self._masked_ids(rank) if self.combine_weights == "masked" else None,
            "bias": self._bias(rank) if self.biases else None,
            "out_dtype": self.out_dtype,
            "wire_dtype": self.wire_dtype,
            "scale": self.scale,
        }

    def expert(self, rows: Tensor, result: DispatchResult, rank: int) -> Tensor:
        """Combine input of `rank` for its dispatched `rows`, on their device, in rows_dtype.

        With plain content, elementwise in `rows`, with other factors in every row, so that rows of a token differ;
        opaque payloads are ignored. Rows that `result` (the oracle's) does not call valid are NaN.
        """
        rng = self._rng(_STREAM_EXPERT, rank)
        shape = (result.valid.numel(), self.hidden)
        if self.rows_content != "plain":
            made = content_of(rng, *shape, self.rows_dtype, self.rows_content)
            made[~result.valid] = float("nan")
            return made.view(rows.shape).to(rows.device)
        spread = np.float32(10.0) ** rng.integers(-2, 3, shape).astype(np.float32)
        made = tensor_of(rng.standard_normal(shape, dtype=np.float32) * spread)
        if self.dtype in FLOATS:
            given = rows.detach().cpu()
            is_packed = given.dtype == torch.float4_e2m1fn_x2
            given = (e2m1_numbers(given) if is_packed else given.to(torch.float32)).reshape(shape)
            if not self.keep_nan:
                given = torch.nan_to_num(given, nan=1.0, posinf=3.0, neginf=-3.0).clamp(-1e4, 1e4)
            made = given * tensor_of(rng.standard_normal(shape, dtype=np.float32)) + made
        made[~result.valid] = float("nan")
        return made.to(self.rows_dtype).view(*rows.shape[:-1], self.hidden).to(rows.device)

    def scalars(self, result: DispatchResult, rank: int) -> Tensor:
        """Values for combine_weights at `rank`, shaped like result.weights; NaN where no row is."""
        rng = self._rng(_STREAM_COMBINE, rank, 3)
        values = tensor_of(rng.standard_normal(tuple(result.weights.shape), dtype=np.float32))
        if values.numel():  # of no rows, the width would be anything
            values.view(result.valid.numel(), -1)[~result.valid] = float("nan")
        return values

    def describe(self) -> str:
        """One line that says what the case is."""
        short = {name: show(value) for name, value in vars(self).items()}
        return "Case(" + ", ".join(f"{name}={value}" for name, value in short.items()) + ")"

    # --- tensors of one rank

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])

    def rank_input(self, rank: int) -> RankInput:
        """Those of one rank."""
        tokens = self.tokens[rank]
        x = content_of(self._rng(_STREAM_X, rank), tokens, self.hidden, self.dtype, self.content)
        weights = None
        if self.with_weights:
            rng = self._rng(_STREAM_WEIGHTS, rank)
            weights = content_of(rng, tokens, self.topk, torch.float32, self.weights_content)
        scales = None
        if self.scales_dtype is not None:
            rng = self._rng(_STREAM_SCALES, rank)
            scales = content_of(rng, tokens, self.scales_width, self.scales_dtype, self.content)
            scales = with_strides(scales, self.scales_strides)
        return RankInput(x, self.rank_ids(rank), weights, scales)

    def rank_ids(self, rank: int) -> Tensor:
        """Of ``rank_input``, topk_idx."""
        return tensor_of(_route(self, self._rng(_STREAM_ROUTING, rank), self.tokens[rank])).to(self.idx_dtype)

    def _home_weights(self, rank: int) -> Tensor:
        rng = self._rng(_STREAM_COMBINE, rank, 0)
        return content_of(rng, self.tokens[rank], self.topk, torch.float32, self.weights_content)

    def _masked_ids(self, rank: int) -> Tensor:
        """The ids of the dispatch with some choices, and some whole tokens, taken out: they name no expert."""
        ids = self.rank_ids(rank)
        rng = self._rng(_STREAM_COMBINE, rank, 1)
        gone = (rng.random(tuple(ids.shape)) < 0.3) | (rng.random((len(ids), 1)) < 0.15)
        wrong = torch.tensor([-1, *wrong_ids(self)])
        picked = rng.integers(-len(wrong), len(wrong), gone.shape).clip(0)  # -1 is picked most
        return torch.where(tensor_of(gone), wrong[tensor_of(picked)], ids).to(ids.dtype)

    def _bias(self, rank: int) -> tuple[Tensor, ...]:
        rng = self._rng(_STREAM_COMBINE, rank, 2)
        dtype = self.out_dtype or self.rows_dtype
        made = [content_of(rng, self.tokens[rank], self.hidden, dtype, self.rows_content) for _ in range(self.biases)]
        return tuple(made)


def show(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


# --- routing


def wrong_ids(case: Case) -> tuple[int, ...]:
    """Ids that name no expert of the case."""
    wrong = _OUT_OF_RANGE_64 if case.idx_dtype == torch.int64 else _OUT_OF_RANGE_32
    return (case.num_experts, case.num_experts + 1, *wrong)


def _route(case: Case, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Expert ids int64 [tokens, K] of the routing kind of the case."""
    experts, topk = case.num_experts, case.topk
    shape = (tokens, topk)
    ids = np.full(shape, -1, dtype=np.int64)
    common = np.random.default_rng([case.seed, _STREAM_ROUTING])
    if case.routing == "none":
        return ids
    if case.routing == "one_expert":
        expert = int(common.integers(experts))
        ids[np.arange(tokens), rng.integers(0, topk, tokens)] = expert
        return ids
    if case.routing == "duplicates":
        few = rng.integers(0, experts, (tokens, 2))
        pick = rng.integers(0, 2, shape)
        ids = np.take_along_axis(few, pick, 1)
        return np.where(rng.random(shape) < 0.15, -1, ids)

    choose = np.arange(experts)
    if case.routing == "one_rank":
        local = experts // case.num_ranks
        choose = choose[:local] + local * int(common.integers(case.num_ranks))
    score = rng.random((tokens, len(choose)))
    if case.routing == CROWDED:  # experts of a few ranks, so that a token has several on each
        score += np.repeat(rng.random((tokens, case.num_ranks)) * 2, experts // case.num_ranks, 1)
    if case.routing == "skewed":
        score -= np.linspace(0.0, 1.5, len(choose))
    named = min(topk, len(choose))
    columns = np.sort(rng.permutation(topk)[:named])
    ids[:, columns] = choose[np.argsort(-score, 1)[:, :named]]
    if case.routing == "some_none":
        ids[(rng.random(shape) < 0.3) | (rng.random((tokens, 1)) < 0.2)] = -1
    if case.routing == "out_of_range":
        wrong = wrong_ids(case)
        where = rng.random(shape) < 0.25
        ids[where] = np.array(wrong, dtype=np.int64)[rng.integers(0, len(wrong), int(where.sum()))]
    return ids


# --- the generator


def _hidden(rng: random.Random, dtype: torch.dtype, quant: str | None, large: bool) -> int:
    """A row length whose rows are multiples of 16 bytes, of any number of chunks, odd ones as well."""
    step = 16 if quant is not None else 16 // dtype.itemsize
    most = 2048 if large else 512
    length = rng.choice([rng.randint(1, most), rng.randint(1, 128), 128, 256, 384, most])
    return max(step, length // step * step)


def _tokens(rng: random.Random, kind: str, num_ranks: int, max_tokens: int) -> tuple[int, ...]:
    if kind == "all_zero":
        return (0,) * num_ranks
    if kind == "full":
        return (max_tokens,) * num_ranks
    tokens = [rng.randint(0 if kind == "ragged" else 1, max_tokens) for _ in range(num_ranks)]
    if kind == "some_zero":
        for rank in rng.sample(range(num_ranks), max(1, num_ranks // 3)):
            tokens[rank] = 0
    return tuple(tokens)


def _capacity(rng: random.Random, kind: str, layout: str, rows: int, topk: int, slack: int) -> int | None:
    """`rows`: R * M. An overflowing capacity is small; whether it overflows is up to the routing."""
    if kind == "default" or layout == "rank_major":
        return None
    if kind == "overflowing":
        return rng.randint(1, max(1, rows // 4))
    # Named k times, an expert gets k rows of a token; twice is what the routings mostly make of it.
    factor = {"flat": 1, "expert_major": min(topk, 2), "packed": topk}[layout]
    return rows * factor + slack


def _combine_fields(rng: random.Random, hidden: int, layout: str, num_ranks: int) -> dict[str, Any]:
    # Rows of every dtype on the way have to be multiples of 16 bytes, too.
    floats = [dtype for dtype in FLOATS if hidden * dtype.itemsize % 16 == 0]
    out_dtype = rng.choice([None, None, *floats])
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    expert_layout = layout in reference.EXPERT_LAYOUTS
    rows_dtype = rng.choice(floats)
    if out_dtype not in (None, rows_dtype):  # rows are added up to their own dtype, or to float32
        out_dtype = torch.float32
    return {
        "rows_dtype": rows_dtype,
        "rows_content": "plain",
        "out_dtype": out_dtype,
        "wire_dtype": rng.choice([None, None, torch.float32]),
        "combine_weights": rng.choice(COMBINE_WEIGHTS if expert_layout else ("dispatch", "none")),
        "biases": rng.choice([0, 1, 2]) if layout == "flat" else 0,
        "domain_size": rng.choice([None, rng.choice(divisors)]),
        "keep_nan": rng.random() < 0.3,
    }


def _sharpened(case: Case, rng: random.Random) -> Case:
    """The case, often with what seldom meets by chance: sums of signed zeros, ranks that drop all rows of a token."""
    changes: dict[str, Any] = {
        "rows_content": rng.choice(["plain"] * 7 + ["few"] * 4 + ["special", "words"]),
        "weights_content": rng.choice([case.weights_content] * 4 + ["few"]),
        "content": rng.choice([case.content] * 6 + ["few"]),
    }
    if rng.random() < 0.25:
        changes["rows_content"] = "few"
        if case.routing in ROUTINGS[:4]:
            changes["routing"] = CROWDED
        if case.layout != "rank_major":
            rows = sum(case.tokens) * (case.topk if case.layout == "packed" else 1)
            changes["capacity"] = rng.choice([0, 1, rng.randint(1, 4), rng.randint(0, rows // 4 + 1)])
            changes["capacity_kind"] = "overflowing"
    return replace(case, **changes)


def _narrowed(case: Case, rng: random.Random) -> Case:
    """The case, if its types allow it sometimes with sums that travel in a block format."""
    is_narrow = case.rows_dtype.itemsize == 2 and case.out_dtype in (None, case.rows_dtype)
    if case.wire_dtype is not None or not is_narrow or case.hidden % 16 or rng.random() < 0.5:
        return case
    return replace(case, wire_dtype=rng.choice(reference.WIRE_FORMATS))


def _scaled(case: Case, rng: random.Random) -> Case:
    """The case, now and then with a factor of its sums."""
    return replace(case, scale=rng.choice(SCALES[1:])) if rng.random() < 0.3 else case


def seeds(count: int) -> tuple[int, ...]:
    """The first ones. ENOUGH of them have every bucket of tests/support/coverage.py."""
    return (*range(count), *(seed for seed in _RARE if seed >= count))


ENOUGH = 560
_RARE = (917,)  # a top-k of 32


def generate(seed: int) -> Case:
    """The case of a seed (>= 0)."""
    rng = random.Random(f"nccl_ep case {seed}")
    large = rng.random() < 0.03
    num_ranks = rng.choice([1, 2, 2, 3, 4, 4, rng.randint(1, 8), rng.randint(5, 16)])
    num_experts = num_ranks * rng.choice([n for n in (1, 2, 3, 4, 8, 16) if n * num_ranks <= 64])
    topk = rng.choice([1, 2, 4, 8, rng.randint(2, 8), rng.randint(1, 32)])
    quant = rng.choice([None, None, None, *reference.QUANT_MODES])
    opaque = quant is None and rng.random() < 0.35
    dtype = rng.choice(OPAQUE if opaque else FLOATS if quant is None else FLOATS[:2])
    hidden = _hidden(rng, dtype, quant, large)
    max_tokens = rng.choice([1, 2, rng.randint(1, 24), rng.randint(1, 64 if large else 24)])
    # The default capacities make E * R * M rows: keep them few, or a case is no longer a matter of ms.
    while num_experts * num_ranks * max_tokens * hidden > (2**22 if large else 2**19) and max_tokens > 2:
        max_tokens //= 2

    scales_dtype = None
    if quant is None and rng.random() < (0.8 if opaque else 0.1):
        scales_dtype = rng.choice(SCALE_DTYPES)
    layout = rng.choice(reference.LAYOUTS)
    capacity_kind = "default" if layout == "rank_major" else rng.choice(CAPACITIES)
    tokens_kind = rng.choice([*TOKENS, *(("ragged", "some_zero", "full", "full") * 3)])
    content = rng.choice(("plain", "words", "special"))
    rows = num_ranks * max_tokens
    case = Case(
        seed=seed,
        num_ranks=num_ranks,
        num_experts=num_experts,
        topk=topk,
        hidden=hidden,
        max_tokens=max_tokens,
        tokens_kind=tokens_kind,
        tokens=_tokens(rng, tokens_kind, num_ranks, max_tokens),
        routing=rng.choice([*ROUTINGS, *((*ROUTINGS[:4], *ROUTINGS[5:]) * 3)]),
        idx_dtype=rng.choice([torch.int32, torch.int64]),
        dtype=dtype,
        content=content,
        quant=quant,
        scales_dtype=scales_dtype,
        scales_width=rng.choice([-(-hidden // 128), -(-hidden // 512), rng.randint(1, 9)]),
        scales_strides=rng.choice(SCALE_STRIDES),
        layout=layout,
        capacity_kind=capacity_kind,
        capacity=_capacity(rng, capacity_kind, layout, rows, topk, rng.randint(0, 5)),
        expert_alignment=rng.choice([1, 2, 3, 8, 16]) if layout == "packed" else 1,
        zero_padding=rng.random() < 0.4,
        with_weights=rng.random() < 0.8,
        weights_content="words" if rng.random() < 0.1 else "plain",
        **_combine_fields(rng, hidden, layout, num_ranks),
    )
    case = _sharpened(case, random.Random(f"nccl_ep sharp case {seed}"))
    case = _narrowed(case, random.Random(f"nccl_ep narrow case {seed}"))
    return _scaled(case, random.Random(f"nccl_ep scale case {seed}"))


def cases_of(topology: tuple[int, int], count: int, first: int = 0) -> list[Case]:
    """The first generated cases of so many ranks, in these domains. topology: domains, ranks of each."""
    domains, size = topology
    fitting = (case for case in map(generate, itertools.count(first)) if case.num_ranks == domains * size)
    return [replace(case, domain_size=size) for case in itertools.islice(fitting, count)]
