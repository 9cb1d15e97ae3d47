"""What is sent, and whether what came back is what the oracle says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nccl_ep import Buffer, DispatchOutput, combine, dispatch, reference

ROUTINGS = ("uniform", "skewed", "all_local", "all_remote")
_GROUP = reference.FP8_GROUP
_ORACLE_ELEMENTS = 1 << 26  # of dispatched rows of all ranks, which bounds the oracle to seconds


@dataclass(frozen=True)
class Shape:
    """One configuration. dtype: "bf16" or "fp8" (quantised by dispatch; combine is bf16)."""

    num_ranks: int
    tokens: int
    hidden: int
    topk: int
    num_experts: int
    dtype: str
    layout: str
    routing: str
    seed: int

    @property
    def quant(self) -> str | None:
        return "fp8" if self.dtype == "fp8" else None

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    def row_bytes(self) -> int:
        """Of a dispatched row, scales included."""
        if self.quant is None:
            return 2 * self.hidden
        return self.hidden + 4 * -(-self.hidden // _GROUP)


@dataclass
class Given:
    """What one rank dispatches: x [T, H] bf16, topk_idx [T, K] int64, weights [T, K]."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Given:
        return Given(self.x.to(device), self.topk_idx.to(device), self.weights.to(device))


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
    # The largest of log(p) + Gumbel noise are a draw without replacement with probabilities p.
    noise = -torch.log(-torch.log(torch.rand(shape.tokens, shape.num_experts, generator=rng).clamp(1e-9, 1 - 1e-7)))
    if shape.routing == "skewed":
        popularity = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(shape.seed))
        noise -= torch.log(1.0 + popularity)  # Zipf's law; the same experts are hot on all ranks
    return noise.masked_fill(~allowed, float("-inf")).topk(shape.topk, dim=1).indices


def make_inputs(shape: Shape) -> list[Given]:
    """Of all ranks: every rank can make every other's."""
    made = []
    for rank in range(shape.num_ranks):
        rng = torch.Generator().manual_seed(shape.seed * 1009 + rank)
        x = torch.randn(shape.tokens, shape.hidden, generator=rng).to(torch.bfloat16)
        weights = torch.rand(shape.tokens, shape.topk, generator=rng)
        made.append(Given(x, route(shape, rank, rng), weights))
    return made


# ---- The oracle's view


def _columns(shape: Shape) -> Tensor:
    """Some of the columns, in whole groups of FP8, the last group always: operations treat columns alike."""
    groups = -(-shape.hidden // _GROUP)
    rows = shape.num_ranks * shape.num_local * shape.num_ranks * shape.tokens
    wanted = min(groups, max(2, _ORACLE_ELEMENTS // max(1, rows * _GROUP)))
    chosen = torch.randperm(groups - 1, generator=torch.Generator().manual_seed(shape.seed))[: wanted - 1]
    picked = torch.cat([chosen.sort().values, torch.tensor([groups - 1])])
    columns = (picked.unsqueeze(1) * _GROUP + torch.arange(_GROUP)).reshape(-1)
    return columns[columns < shape.hidden]


def _blocks(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """rows [N, H] in blocks of a bounded size, each with the number of its first row."""
    step = max(1, (1 << 28) // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]


def expert(x: Tensor, valid: Tensor) -> Tensor:
    """What stands for the experts: dispatched rows, each times a factor of its place, in bf16. NaN where no row is."""
    flat = x.view(-1, x.shape[-1])
    made = torch.empty(flat.shape, dtype=torch.bfloat16, device=x.device)
    for first, block in _blocks(flat):
        place = torch.arange(first, first + len(block), device=x.device)
        factor = 1 + (place % 61).to(torch.float32).unsqueeze(1) / 64
        made[first : first + len(block)] = (block.to(torch.float32) * factor).to(torch.bfloat16)
    made[~valid.to(x.device)] = float("nan")
    return made.view(*x.shape)


def _require_equal(name: str, mine: Tensor | None, theirs: Tensor | None) -> None:
    if (mine is None) != (theirs is None):
        raise AssertionError(f"{name} is {mine}, the oracle has {theirs}")
    if mine is not None and theirs is not None and (difference := reference.first_difference(mine, theirs)):
        raise AssertionError(f"{name} differs from the oracle: {difference}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class Checked:
    """Results held against the oracle, with which those of later runs are compared on the device."""

    def __init__(self, shape: Shape, rank: int, inputs: list[Given], buffer: Buffer) -> None:
        """Raises AssertionError where a bit differs."""
        columns = _columns(shape)
        narrow = [reference.RankInput(i.x[:, columns].contiguous(), i.topk_idx, i.weights) for i in inputs]
        want = reference.dispatch(
            narrow, num_experts=shape.num_experts, max_tokens=shape.tokens, layout=shape.layout, quant=shape.quant
        )
        mine = want[rank]
        given = inputs[rank].to(buffer.device)
        out = dispatch(
            given.x, given.topk_idx, given.weights,
            buffer=buffer, num_experts=shape.num_experts, layout=shape.layout, quant=shape.quant,
        )  # fmt: skip
        buffer.check()
        for name in ("counts", "demand", "overflow", "offsets", "row_expert", "total", "topk_idx", "weights"):
            _require_equal(name, getattr(out, name), getattr(mine, name))
        self._check_rows(shape, inputs, out, mine)
        self.valid = mine.valid.to(buffer.device)
        self.out = out
        self.rows = expert(out.x, self.valid)
        self.y = combine(self.rows, out.handle)
        buffer.check()
        rows = [expert(result.x, result.valid) for result in want]
        summed = reference.combine(rows, want, narrow, num_experts=shape.num_experts, layout=shape.layout)
        _require_equal("combine's result", self.y[:, columns.to(self.y.device)], summed[rank])
        self._x = self._valid_bytes(out.x)

    @staticmethod
    def _check_rows(shape: Shape, inputs: list[Given], out: DispatchOutput, want: reference.DispatchResult) -> None:
        """All bytes of all rows, on the device; the oracle says which token is where."""
        sent = [(i.x, None) for i in inputs] if shape.quant is None else [
            reference.quantize_fp8(i.x, shape.quant) for i in inputs
        ]  # fmt: skip
        source, token, choice = torch.nonzero(want.row_of >= 0, as_tuple=True)
        row = want.row_of[source, token, choice].to(out.x.device)
        index = (source * shape.tokens + token).to(out.x.device)
        pairs = [("x", out.x, [x for x, _ in sent])]
        if out.scales is not None:
            pairs.append(("scales", out.scales, [scales for _, scales in sent if scales is not None]))
        for name, mine, theirs in pairs:
            expected = _bytes(torch.cat(theirs).to(mine.device))[index]
            wrong = (_bytes(mine).view(-1, expected.shape[1])[row] != expected).any(1)
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                raise AssertionError(
                    f"{name}: {int(wrong.sum())} of {len(row)} rows differ from the oracle, first that of rank "
                    f"{int(source[first])}'s token {int(token[first])}"
                )

    def _valid_bytes(self, x: Tensor) -> Tensor:
        return _bytes(x).flatten(0, -2)[self.valid]

    def require_same(self, x: Tensor, y: Tensor) -> None:
        """Compares the results of another run of the same calls with the checked ones. Raises AssertionError."""
        if not torch.equal(self._valid_bytes(x), self._x):
            raise AssertionError("dispatch: not the bits of the first run")
        if not torch.equal(_bytes(y), _bytes(self.y)):
            raise AssertionError("combine: not the bits of the first run")
