"""What is sent, and whether what came back is what the oracle says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nccl_ep import Buffer, combine, dispatch, reference
from nccl_ep.choices import Mode, QuantName

ROUTINGS = ("uniform", "skewed", "hot_expert", "all_local", "all_remote")
_GROUP = reference.FP8_GROUP
_ORACLE_ELEMENTS = 1 << 26  # of dispatched rows of all ranks, which bounds the oracle to seconds
_BLOCK_ELEMENTS = 1 << 26  # of rows that are worked on at a time, which bounds memory


@dataclass(frozen=True)
class Payload:
    """Rows as the caller gives them, what dispatch makes of them, and what is combined.

    group: elements of ``rows`` for each scale of the caller; 0: no scales. packed: numbers in an element.
    """

    rows: torch.dtype
    combined: torch.dtype
    quant: QuantName | None = None
    group: int = 0
    scales: torch.dtype = torch.float32
    packed: int = 1


_BF16 = torch.bfloat16
PAYLOADS = {
    "bf16": Payload(_BF16, _BF16),
    "fp16": Payload(torch.float16, torch.float16),
    "fp32": Payload(torch.float32, torch.float32),
    "fp8": Payload(_BF16, _BF16, "fp8"),
    "fp8_rounded": Payload(_BF16, _BF16, "fp8_rounded"),
    "fp8_ue8m0": Payload(_BF16, _BF16, "fp8_ue8m0"),
    "given_fp8": Payload(torch.float8_e4m3fn, _BF16, group=_GROUP),
    "given_int8": Payload(torch.int8, _BF16, group=_GROUP),
    "given_fp4": Payload(torch.uint8, _BF16, group=16, scales=torch.uint8, packed=2),  # 32 numbers a scale
}
DTYPES = tuple(PAYLOADS)


@dataclass(frozen=True)
class Shape:
    """One configuration. dtype: one of PAYLOADS. mode: "ll" or "ht". alignment: of packed.

    capacity: rows of an expert (expert_major) or in all (packed), None for the library's default; see ``fitted``.
    enable_shrink: of the buffer.
    """

    num_ranks: int
    tokens: int
    hidden: int
    topk: int
    num_experts: int
    dtype: str
    layout: str
    routing: str
    seed: int
    mode: Mode = "ll"
    alignment: int = 1
    capacity: int | None = None
    enable_shrink: bool = False

    @property
    def payload(self) -> Payload:
        return PAYLOADS[self.dtype]

    @property
    def quant(self) -> QuantName | None:
        return self.payload.quant

    @property
    def width(self) -> int:
        """Elements of a row as it is given."""
        return self.hidden // self.payload.packed

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    def dispatch_kwargs(self) -> dict[str, Any]:
        """Numbers of a dispatch, as the public function takes them."""
        return {
            "num_experts": self.num_experts, "mode": self.mode, "layout": self.layout, "capacity": self.capacity,
            "expert_alignment": self.alignment,
        }  # fmt: skip

    def output_rows(self) -> int:
        """That one rank's output has room for."""
        tokens = self.num_ranks * self.tokens
        if self.layout == "expert_major":
            return self.num_local * (tokens if self.capacity is None else self.capacity)
        if self.layout == "packed" and self.capacity is None:
            return tokens * min(self.topk, self.num_local) + self.num_local * (self.alignment - 1)
        return tokens if self.capacity is None else self.capacity

    def row_bytes(self) -> int:
        """Of a dispatched row, scales included."""
        payload = self.payload
        if payload.quant is not None:
            return self.hidden + 4 * -(-self.hidden // (4 * _GROUP if payload.quant == "fp8_ue8m0" else _GROUP))
        scales = -(-self.width // payload.group) * payload.scales.itemsize if payload.group else 0
        return self.width * payload.rows.itemsize + scales

    def combined_bytes(self) -> int:
        """Of a row on its way home."""
        return self.hidden * self.payload.combined.itemsize


@dataclass
class Given:
    """What one rank dispatches: x [T, width], topk_idx [T, K] int64, weights [T, K], scales [T, S] or None."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor
    scales: Tensor | None = None

    def to(self, device: torch.device) -> Given:
        scales = None if self.scales is None else self.scales.to(device)
        return Given(self.x.to(device), self.topk_idx.to(device), self.weights.to(device), scales)


def route(shape: Shape, rank: int, rng: torch.Generator) -> Tensor:
    """[T, K] distinct experts a token."""
    experts = torch.arange(shape.num_experts)
    is_local = experts // shape.num_local == rank
    allowed = torch.ones_like(is_local)
    if shape.routing == "all_local":
        allowed = is_local
    elif shape.routing == "all_remote":
        allowed = ~is_local
    if int(allowed.sum()) < shape.topk:
        raise ValueError(f"routing {shape.routing}: top-{shape.topk} of {int(allowed.sum())} experts")
    # The largest of log(p) + Gumbel noise are a draw without replacement with probabilities p. Whatever is drawn from
    # the seed alone is the same on all ranks.
    noise = -torch.log(-torch.log(torch.rand(shape.tokens, shape.num_experts, generator=rng).clamp(1e-9, 1 - 1e-7)))
    if shape.routing == "skewed":
        popularity = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(shape.seed))
        noise -= torch.log(1.0 + popularity)  # Zipf's law
    elif shape.routing == "hot_expert":  # every token names one expert, and the others as they come
        hot = torch.randint(shape.num_experts, (1,), generator=torch.Generator().manual_seed(shape.seed))
        noise[:, hot] = float("inf")
    return noise.masked_fill(~allowed, float("-inf")).topk(shape.topk, dim=1).indices


def make_inputs(shape: Shape) -> list[Given]:
    """Of all ranks: every rank can make every other's. Not to be written to: the next call may return the same."""
    payload = shape.payload
    like = next(
        name
        for name, each in PAYLOADS.items()
        if (each.rows, each.group, each.scales, each.packed)
        == (payload.rows, payload.group, payload.scales, payload.packed)
    )
    return list(_make_inputs(replace(shape, dtype=like, layout="", mode="ll", alignment=1, capacity=None)))


@lru_cache(maxsize=1)  # a second or more for thousands of tokens, and layouts and modes take turns with the same
def _make_inputs(shape: Shape) -> tuple[Given, ...]:
    made = []
    for rank in range(shape.num_ranks):
        rng = torch.Generator().manual_seed(shape.seed * 1009 + rank)
        x, scales = _rows(shape, rng)
        weights = torch.rand(shape.tokens, shape.topk, generator=rng)
        made.append(Given(x, route(shape, rank, rng), weights, scales))
    return tuple(made)


def _rows(shape: Shape, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Rows, and scales where the caller has quantised them."""
    payload, tokens, width = shape.payload, shape.tokens, shape.width
    if not payload.group:
        return torch.randn(tokens, width, generator=rng).to(payload.rows), None
    groups = -(-width // payload.group)
    if payload.packed > 1:
        scales = torch.randint(120, 132, (tokens, groups), generator=rng).to(payload.scales)
        return torch.randint(0, 256, (tokens, width), generator=rng).to(payload.rows), scales
    scales = (torch.rand(tokens, groups, generator=rng) + 0.5).to(payload.scales)
    return (8 * torch.randn(tokens, width, generator=rng)).to(payload.rows), scales


def fitted(shape: Shape, inputs: list[Given]) -> Shape:
    """With the smallest capacity, equal on all ranks, that holds this routing in packed and expert_major.

    The defaults hold any routing: at thousands of tokens they are many times what comes, and no program would
    take them.
    """
    ids = torch.cat([given.topk_idx.reshape(-1) for given in inputs])
    demand = torch.bincount(ids, minlength=shape.num_experts).view(shape.num_ranks, -1)
    if shape.layout == "expert_major":
        return replace(shape, capacity=int(demand.max()))
    if shape.layout == "packed":
        aligned = -(-demand // shape.alignment) * shape.alignment
        return replace(shape, capacity=int(aligned.sum(1).max()))
    return shape


def make_buffer(
    shape: Shape, device: torch.device, timeout: float, arena_bytes: int | None = None, group: Any = None,
    domain_size: int | None = None,
) -> Buffer:  # fmt: skip
    """A buffer for this shape. Collective. arena_bytes: high throughput's; see ``arena_bytes_for``. group: None for
    torch's world. domain_size: None for a single NVLink domain."""
    return Buffer.for_shapes(
        torch.distributed.group.WORLD if group is None else group, max_tokens=shape.tokens, hidden=shape.hidden,
        topk=shape.topk, num_experts=shape.num_experts, dtype=shape.payload.combined, mode=shape.mode,
        arena_bytes=arena_bytes, device=device, timeout=timeout, enable_shrink=shape.enable_shrink,
        domain_size=domain_size,
    )  # fmt: skip


def arena_bytes_for(shape: Shape, device: torch.device) -> int:
    """Room for what a measurement has at a time: four outputs (one of which goes as the next comes), one input of
    combine, and the granularity of the allocator: torch cuts blocks from segments of 20 MiB, for each
    stream."""
    rows = shape.output_rows()
    return rows * (4 * shape.row_bytes() + shape.combined_bytes()) + (64 << 20 if device.type == "cuda" else 1 << 20)


# ---- The oracle's view


def _columns(shape: Shape) -> Tensor:
    """Some of the columns, in whole groups of FP8, the last group always: operations treat columns alike."""
    groups = -(-shape.width // _GROUP)
    rows = shape.num_ranks * shape.output_rows()
    wanted = min(groups, max(2, _ORACLE_ELEMENTS // max(1, rows * _GROUP)))
    chosen = torch.randperm(groups - 1, generator=torch.Generator().manual_seed(shape.seed))[: wanted - 1]
    picked = torch.cat([chosen.sort().values, torch.tensor([groups - 1])])
    columns = (picked.unsqueeze(1) * _GROUP + torch.arange(_GROUP)).reshape(-1)
    return columns[columns < shape.width]


def expert(x: Tensor, valid: Tensor, payload: Payload) -> Tensor:
    """What stands for the experts: dispatched rows, each times a factor of its place. NaN where no row is.

    Packed bytes count as numbers, one after the other as many times as there are numbers in them.
    """
    flat = x.view(-1, x.shape[-1])
    width = flat.shape[1] * payload.packed
    made = torch.full((len(flat), width), float("nan"), dtype=payload.combined, device=x.device)
    places = valid.to(x.device).nonzero().squeeze(1)  # capacities are large, and most of their rows are not there
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for first in range(0, len(places), step):
        place = places[first : first + step]
        factor = 1 + (place % 61).to(torch.float32).unsqueeze(1) / 64
        rows = (flat[place].to(torch.float32) * factor).to(payload.combined)
        made[place] = torch.cat([rows] * payload.packed, 1)
    return made.view(*x.shape[:-1], width)


def _require_equal(name: str, mine: Tensor | None, theirs: Tensor | None) -> None:
    if (mine is None) != (theirs is None):
        raise AssertionError(f"{name} is {mine}, the oracle has {theirs}")
    if mine is not None and theirs is not None and (difference := reference.first_difference(mine, theirs)):
        raise AssertionError(f"{name} differs from the oracle: {difference}")


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Those columns of rows of any dtype."""
    whole = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    return whole[:, columns].contiguous().view(x.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class Checked:
    """Results held against the oracle, with which those of later runs are compared on the device.

    All of ids, weights, counts and places, and all bytes of all dispatched rows; of combine the columns that
    ``_columns`` chose.

    Attributes: out: of the dispatch. valid: bool [rows], those that exist. rows: what is combined, in the arena where
    there is one. y: what came home.
    """

    def __init__(self, shape: Shape, rank: int, inputs: list[Given], buffer: Buffer) -> None:
        """Raises AssertionError where a bit differs."""
        columns = _columns(shape)
        narrow = [reference.RankInput(_take(i.x, columns), i.topk_idx, i.weights, i.scales) for i in inputs]
        want = reference.dispatch(
            narrow, num_experts=shape.num_experts, max_tokens=shape.tokens, layout=shape.layout, quant=shape.quant,
            capacity=shape.capacity, expert_alignment=shape.alignment,
        )  # fmt: skip
        mine = want[rank]
        given = inputs[rank].to(buffer.device)
        out = dispatch(
            given.x, given.topk_idx, given.weights,
            buffer=buffer, quant=shape.quant, scales=given.scales, **shape.dispatch_kwargs(),
        )  # fmt: skip
        buffer.check()
        for name in ("counts", "demand", "overflow", "offsets", "row_expert", "total", "topk_idx", "weights"):
            _require_equal(name, getattr(out, name), getattr(mine, name))
        self._inputs = inputs
        # Rows by number: whose they are, and where they lie here.
        self._source, self._token, choice = torch.nonzero(mine.row_of >= 0, as_tuple=True)
        self._row = mine.row_of[self._source, self._token, choice]
        sent = [(i.x, i.scales) for i in inputs] if shape.quant is None else [
            reference.quantize_fp8(i.x, shape.quant) for i in inputs
        ]  # fmt: skip
        self._require_rows("x", out.x, [x for x, _ in sent])
        if out.scales is not None:
            self._require_rows("scales", out.scales, [scales for _, scales in sent if scales is not None])
        self.valid = mine.valid.to(buffer.device)
        self.out = out
        self.rows = expert(out.x, self.valid, shape.payload)
        if shape.mode == "ht":
            self.rows = buffer.empty(self.rows.shape, self.rows.dtype).copy_(self.rows)
        self.y = combine(self.rows, out.handle)
        buffer.check()
        rows = [expert(result.x, result.valid, shape.payload) for result in want]
        summed = reference.combine(rows, want, narrow, num_experts=shape.num_experts, layout=shape.layout)
        columns = torch.cat([columns + i * shape.width for i in range(shape.payload.packed)])
        _require_equal("combine's result", self.y[:, columns.to(self.y.device)], summed[rank])
        self._x = self._valid_bytes(out.x)

    def _require_rows(self, name: str, rows: Tensor, sent: list[Tensor]) -> None:
        """All bytes of all rows, on their device; the oracle has said which token is where. sent: by rank."""
        every, mine = _bytes(torch.cat(sent)).to(rows.device), _bytes(rows)
        mine = mine.view(-1, every.shape[1])
        index = (self._source * len(sent[0]) + self._token).to(rows.device)
        row = self._row.to(rows.device)
        step = max(1, _BLOCK_ELEMENTS // every.shape[1])
        wrong = torch.cat(
            [(mine[row[i : i + step]] != every[index[i : i + step]]).any(1) for i in range(0, len(row), step)]
            or [row.new_empty(0)]
        )
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {len(row)} rows differ from the oracle, first that of rank "
                f"{int(self._source[first])}'s token {int(self._token[first])}"
            )

    def _valid_bytes(self, x: Tensor) -> Tensor:
        return _bytes(x).flatten(0, -2)[self.valid]

    def require_same_x(self, x: Tensor) -> None:
        """Holds dispatched rows of another run against the checked ones. Raises AssertionError."""
        if not torch.equal(self._valid_bytes(x), self._x):
            raise AssertionError("dispatch: not the bits of the first run")

    def require_same(self, x: Tensor, y: Tensor) -> None:
        """The same for the results of both operations."""
        self.require_same_x(x)
        if not torch.equal(_bytes(y), _bytes(self.y)):
            raise AssertionError("combine: not the bits of the first run")

    def require_narrow(self, x: Tensor) -> None:
        """Holds rows that were dispatched with the first columns of every token against the oracle's places."""
        width = x.shape[-1]
        self._require_rows("narrow rows", x, [i.x[:, :width].contiguous() for i in self._inputs])
