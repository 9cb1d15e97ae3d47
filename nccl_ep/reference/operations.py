"""The oracle's dispatch and combine, in the notation of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..marks import uncompiled
from .formats import (
    WIRE_FORMATS,
    compact,
    quantize,
    rounded_to_wire,
)
from .places import Placement, local_ids, place_by_expert, place_by_rank, reached_by, routing_of, stack

EXPERT_LAYOUTS = ("expert_major", "packed")
RANK_LAYOUTS = ("rank_major", "flat")
LAYOUTS = EXPERT_LAYOUTS + RANK_LAYOUTS
# What rows without a source hold without zero_padding: a test that compares them is wrong, and notices it.
_UNSPECIFIED_BYTE = 0x5A

_COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Bias = Tensor | Sequence[Tensor] | None


@dataclass
class RankInput:
    """What one rank passes to dispatch.

    x: [T, H], any dtype. topk_idx: [T, K] int64 or int32. topk_weights: [T, K] fp32, None for ones.
    scales: [T, S] of any dtype and strides, for rows that the caller quantised; None otherwise.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass
class DispatchResult:
    """What one rank receives; fields that a layout does not have are None.

    x: [L, C, H] | [N, H] | [R, M, H] | [N, H], scales likewise with S. topk_idx: [R, M, K] | [N, K], local
    ids or -1. weights: fp32 [L, C] | [N] | [R, M, K] | [N, K]. counts, demand: int32 [L] or [R].
    offsets: int32 [L + 1], row_expert: int32 [N] of local ids (packed). total: int32 [1] (flat).
    overflow: int32 [1].
    row_of: int64 [R, M, K]: where the row of (source, token, choice) lies in the output flattened to
    [rows, H]; -1 when the choice is not of this rank or its row was dropped.
    valid: bool [rows]: the rows that exist. All others are zero with zero padding, arbitrary without.
    """

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    weights: Tensor
    counts: Tensor
    offsets: Tensor | None
    row_expert: Tensor | None
    total: Tensor | None
    overflow: Tensor
    demand: Tensor
    row_of: Tensor
    valid: Tensor


def _check_world(inputs: Sequence[RankInput], num_experts: int) -> int:
    """Checks what all ranks must agree on; returns L. Raises ValueError."""
    if not inputs:
        raise ValueError("no ranks")
    if num_experts <= 0 or num_experts % len(inputs):
        raise ValueError(f"{num_experts} experts do not divide over {len(inputs)} ranks")
    first = inputs[0]
    for rank, given in enumerate(inputs):
        if given.x.dim() != 2 or given.topk_idx.dim() != 2 or len(given.x) != len(given.topk_idx):
            raise ValueError(f"rank {rank}: x must be [T, H] and topk_idx [T, K]")
        if given.topk_idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rank {rank}: topk_idx is {given.topk_idx.dtype}")
        if given.x.shape[1] != first.x.shape[1] or given.x.dtype != first.x.dtype:
            raise ValueError(f"rank {rank}: rows differ from those of rank 0")
        if given.topk_idx.shape[1] != first.topk_idx.shape[1]:
            raise ValueError(f"rank {rank}: K differs from that of rank 0")
        if given.topk_weights is not None and (
            given.topk_weights.shape != given.topk_idx.shape or given.topk_weights.dtype != torch.float32
        ):
            raise ValueError(f"rank {rank}: topk_weights must be fp32 [T, K]")
        if (given.scales is None) != (first.scales is None):
            raise ValueError(f"rank {rank}: scales on some ranks only")
        if given.scales is not None and first.scales is not None:
            ours, theirs = given.scales, first.scales
            alike = ours.dtype == theirs.dtype and ours.shape[1:] == theirs.shape[1:]
            if ours.dim() != 2 or len(ours) != len(given.x) or not alike:
                raise ValueError(f"rank {rank}: scales must be [T, S], alike on all ranks")
    return num_experts // len(inputs)


@uncompiled
def wire_rows(inputs: list[RankInput], *, num_experts: int) -> Tensor:
    """Rows that cross from source to destination at dispatch, one a token and destination.

    Returns int64 [R, R], [source, destination], the diagonal included. Combine moves the transpose.
    Raises ValueError when the ranks disagree on shapes.
    """
    num_local = _check_world(inputs, num_experts)
    max_tokens = max(len(given.x) for given in inputs)
    routing = routing_of([given.topk_idx for given in inputs], num_experts, max_tokens)
    return reached_by(routing, len(inputs), num_local).sum(-1).transpose(0, 1).contiguous()


# --- Dispatch


def _as_bytes(tensors: Sequence[Tensor], max_tokens: int) -> tuple[Tensor, torch.dtype]:
    """Tensors [T, n] of any dtype and strides as uint8 [R * M, bytes], with their dtype."""
    rows = [compact(tensor).view(torch.uint8) for tensor in tensors]
    return stack(rows, max_tokens, 0).flatten(0, 1), tensors[0].dtype


def _move_rows(
    source: Tensor,
    taken: Tensor,
    put: Tensor,
    rows: int,
    dtype: torch.dtype,
    fill: int,
) -> Tensor:
    """Byte rows `taken` of `source` at rows `put` of a new [rows, ...] of `dtype`; bytes `fill` elsewhere."""
    moved = torch.full((rows, source.shape[1]), fill, dtype=torch.uint8)
    moved[put] = source[taken]
    return moved.view(dtype)


@uncompiled
def dispatch(
    inputs: list[RankInput],
    *,
    num_experts: int,
    max_tokens: int,
    layout: str,
    capacity: int | None = None,
    expert_alignment: int = 1,
    quant: str | None = None,
    zero_padding: bool = False,
) -> list[DispatchResult]:
    """What every rank receives when rank r calls dispatch with inputs[r].

    capacity is C (expert_major) or N (packed, flat); None takes the default of the layout. quant is one of
    QUANT_MODES or BLOCK_MODES and excludes scales in the inputs, but for "nvfp4", whose one scale they are. Those that
    it makes are given row by row in every mode. Raises ValueError for arguments that make no sense.
    """
    tensor_scales: list[Tensor | None] = [None] * len(inputs)
    if quant is not None and quant.startswith("nvfp4"):
        tensor_scales = [given.scales for given in inputs]
        inputs = [replace(given, scales=None) for given in inputs]
    num_local = _check_world(inputs, num_experts)
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}")
    if capacity is not None and (layout == "rank_major" or capacity < 0):
        raise ValueError(f"capacity {capacity} in layout {layout}")
    if expert_alignment < 1 or (expert_alignment > 1 and layout != "packed"):
        raise ValueError(f"expert_alignment {expert_alignment} in layout {layout}")
    if any(len(given.x) > max_tokens for given in inputs):
        raise ValueError(f"a rank has more than {max_tokens} tokens")
    if quant is not None and inputs[0].scales is not None:
        raise ValueError("quant and scales exclude each other")

    if quant is not None:
        quantized = [quantize(given.x, quant, scale) for given, scale in zip(inputs, tensor_scales, strict=True)]
        payloads = [pair[0] for pair in quantized]
        scales: list[Tensor] | None = [pair[1] for pair in quantized]
    else:
        payloads = [given.x for given in inputs]
        scales = [given.scales for given in inputs if given.scales is not None] or None

    routing = routing_of([given.topk_idx for given in inputs], num_experts, max_tokens)
    weights = _dispatch_weights(inputs, max_tokens)
    moved_x = _as_bytes(payloads, max_tokens)
    moved_scales = None if scales is None else _as_bytes(scales, max_tokens)
    fill = 0 if zero_padding else _UNSPECIFIED_BYTE

    results = []
    for rank, given in enumerate(inputs):
        local = local_ids(routing, rank, num_local)
        if layout in EXPERT_LAYOUTS:
            placement = place_by_expert(local, num_local, layout, capacity, expert_alignment)
        else:
            placement = place_by_rank(local, layout, capacity)
        idx_dtype = given.topk_idx.dtype
        results.append(_received(placement, local, weights, idx_dtype, layout, moved_x, moved_scales, fill))
    return results


def _dispatch_weights(inputs: Sequence[RankInput], max_tokens: int) -> Tensor:
    """The weights of the dispatch, fp32 [R, M, K]."""
    ones = [torch.ones(entry.topk_idx.shape, dtype=torch.float32) for entry in inputs]
    given = [one if entry.topk_weights is None else entry.topk_weights for one, entry in zip(ones, inputs, strict=True)]
    return stack(given, max_tokens, 0.0)


def _received(
    placement: Placement,
    local: Tensor,
    weights: Tensor,
    idx_dtype: torch.dtype,
    layout: str,
    payload: tuple[Tensor, torch.dtype],
    scales: tuple[Tensor, torch.dtype] | None,
    fill: int,
) -> DispatchResult:
    """The tensors of one rank, given where its rows go."""
    topk = local.shape[-1]
    shape = placement.shape
    rows = int(torch.Size(shape).numel())
    row_of = placement.row_of
    flat_row_of = row_of.reshape(-1)
    picks = torch.nonzero(flat_row_of >= 0).reshape(-1)
    put = flat_row_of[picks]
    tokens = picks.div(topk, rounding_mode="floor")

    valid = torch.zeros(rows, dtype=torch.bool)
    valid[put] = True
    x = _move_rows(payload[0], tokens, put, rows, payload[1], fill)
    s = None if scales is None else _move_rows(scales[0], tokens, put, rows, scales[1], fill)

    topk_idx = None
    if layout in EXPERT_LAYOUTS:
        row_weights = torch.zeros(rows, dtype=torch.float32)
        row_weights[put] = weights.reshape(-1)[picks]
        row_weights = row_weights.view(shape)
    else:
        topk_idx = torch.full((rows, topk), -1, dtype=idx_dtype)
        row_weights = torch.zeros(rows, topk, dtype=torch.float32)
        choice = picks % topk
        topk_idx[put, choice] = local.reshape(-1)[picks].to(idx_dtype)
        row_weights[put, choice] = weights.reshape(-1)[picks]
        topk_idx = topk_idx.view(*shape, topk)
        row_weights = row_weights.view(*shape, topk)

    return DispatchResult(
        x=x.view(*shape, x.shape[-1]),
        scales=None if s is None else s.view(*shape, s.shape[-1]),
        topk_idx=topk_idx,
        weights=row_weights,
        counts=placement.counts.to(torch.int32),
        offsets=placement.offsets,
        row_expert=placement.row_expert,
        total=placement.total,
        overflow=(placement.demand - placement.counts).sum().reshape(1).to(torch.int32),
        demand=placement.demand.to(torch.int32),
        row_of=row_of,
        valid=valid,
    )


# --- Combine


class _Sum:
    """fp32 sums of rows that start from their first term instead of from 0, which would lose a -0."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.value = torch.zeros(rows, hidden, dtype=torch.float32)
        self.started = torch.zeros(rows, dtype=torch.bool)

    def add(self, where: Tensor, terms: Tensor) -> None:
        """Adds terms [n, H] to the distinct rows `where` [n]."""
        old = self.value[where]
        self.value[where] = torch.where(self.started[where].unsqueeze(1), old + terms, terms)
        self.started[where] = True


def _partial(rows: Tensor, row_of: Tensor, weights: Tensor | None, rank_layout: bool) -> Tensor:
    """One rank's partials [tokens, H] fp32 before rounding, for row_of [tokens, K] with -1 for absent."""
    partial = _Sum(len(row_of), rows.shape[1])
    if rank_layout:
        # All local choices of a token share its one row, which the caller has weighted already.
        row_of = row_of.amax(1, keepdim=True)
    for k in range(row_of.shape[1]):
        tokens = torch.nonzero(row_of[:, k] >= 0).reshape(-1)
        if len(tokens):
            terms = rows[row_of[tokens, k]].to(torch.float32)
            if weights is not None and not rank_layout:
                terms = terms * weights[tokens, k].unsqueeze(1)
            partial.add(tokens, terms)
    return partial.value


@uncompiled
def combine(
    rows: list[Tensor],
    results: list[DispatchResult],
    inputs: list[RankInput],
    *,
    num_experts: int,
    layout: str,
    weights: str | list[Tensor] | None = "dispatch",
    topk_idx: list[Tensor] | None = None,
    bias: Sequence[Bias] | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | str | None = None,
    scale: float = 1.0,
    domain_size: int | None = None,
) -> list[Tensor]:
    """What every rank gets when rank r combines rows[r], shaped like results[r].x, in bf16, fp16 or fp32.

    weights: "dispatch", None, or (expert layouts) one fp32 [T, K] a rank. topk_idx, with weights given as
    tensors: [T, K] a rank; what names no expert there takes the row out. bias, in flat: a tensor [T, H], a
    pair of them, or None, a rank. wire_dtype: out_dtype, fp32, "fp8" or "logfmt". scale: of the sums of rows.
    domain_size: ranks a domain of the topology, a divisor of R.
    Returns [T, H] a rank, of out_dtype: that of rows, or fp32. Raises ValueError for combinations that combine refuses.
    """
    num_local = _check_world(inputs, num_experts)
    num_ranks, max_tokens, topk = results[0].row_of.shape
    _check_combine(rows, layout, weights, topk_idx, bias, num_ranks, domain_size)
    hidden = rows[0].shape[-1]
    out_dtype = rows[0].dtype if out_dtype is None else out_dtype
    wire_dtype = out_dtype if wire_dtype is None else wire_dtype
    if wire_dtype in WIRE_FORMATS:
        if hidden % 16 or out_dtype == torch.float32 or any(given.dtype != out_dtype for given in rows):
            raise ValueError(f"wire {wire_dtype} for rows [.., {hidden}] of {rows[0].dtype} and output {out_dtype}")
    elif any(out_dtype not in (given.dtype, torch.float32) for given in rows):
        raise ValueError(f"rows of {rows[0].dtype} for output {out_dtype}")
    elif wire_dtype not in (out_dtype, torch.float32):
        raise ValueError(f"wire dtype {wire_dtype} for output {out_dtype}")

    tokens = num_ranks * max_tokens
    routing = routing_of([given.topk_idx for given in inputs], num_experts, max_tokens)
    reached = reached_by(routing, num_ranks, num_local).view(num_ranks, tokens)
    factors: Tensor | None = None
    if isinstance(weights, list):
        factors = stack(weights, max_tokens, 0.0).view(tokens, topk)
    elif weights == "dispatch":
        factors = _dispatch_weights(inputs, max_tokens).view(tokens, topk)
    named = None if topk_idx is None else routing_of(topk_idx, num_experts, max_tokens).view(tokens, topk) >= 0

    total = _Sum(tokens, hidden)
    if scale == 1:
        _add_biases(total, bias, max_tokens)
    domain_size = domain_size or num_ranks
    for first in range(0, num_ranks, domain_size):
        # The only domain sums straight into the result; several leave one rounded row each.
        inside = total if domain_size == num_ranks else _Sum(tokens, hidden)
        for rank in range(first, first + domain_size):
            row_of = results[rank].row_of.view(tokens, topk)
            if named is not None:
                row_of = torch.where(named, row_of, -1)
            partial = _partial(rows[rank].reshape(-1, hidden), row_of, factors, layout in RANK_LAYOUTS)
            sent = torch.nonzero(reached[rank]).reshape(-1)
            inside.add(sent, rounded_to_wire(partial[sent], wire_dtype))
        if inside is not total:
            sent = torch.nonzero(inside.started).reshape(-1)
            total.add(sent, rounded_to_wire(inside.value[sent], wire_dtype))

    if scale != 1:
        total.value *= torch.tensor(scale, dtype=torch.float32)
        total.started[:] = True
        _add_biases(total, bias, max_tokens)
    summed = total.value.to(out_dtype).view(num_ranks, max_tokens, hidden)
    return [summed[rank, : len(given.x)].clone() for rank, given in enumerate(inputs)]


def _add_biases(total: _Sum, bias: Sequence[Bias] | None, max_tokens: int) -> None:
    for rank, entry in enumerate(bias or ()):
        if entry is not None:
            for term in [entry] if isinstance(entry, Tensor) else entry:
                total.add(torch.arange(len(term)) + rank * max_tokens, term.to(torch.float32))


def _check_combine(
    rows: Sequence[Tensor],
    layout: str,
    weights: str | list[Tensor] | None,
    topk_idx: list[Tensor] | None,
    bias: Sequence[Bias] | None,
    num_ranks: int,
    domain_size: int | None,
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}")
    if any(given.dtype not in _COMBINE_DTYPES for given in rows):
        raise ValueError("combine takes bf16, fp16 or fp32")
    if isinstance(weights, str) and weights != "dispatch":
        raise ValueError(f"unknown weights {weights!r}")
    if isinstance(weights, list) and layout in RANK_LAYOUTS:
        raise ValueError(f"{layout} takes no weights at combine")
    if topk_idx is not None and not isinstance(weights, list):
        raise ValueError("topk_idx at combine goes with weights given as tensors")
    if bias is not None and layout != "flat":
        raise ValueError("a bias needs the flat layout")
    if domain_size is not None and (domain_size < 1 or num_ranks % domain_size):
        raise ValueError(f"domains of {domain_size} do not divide {num_ranks} ranks")


@uncompiled
def combine_weights(
    values: list[Tensor],
    results: list[DispatchResult],
    inputs: list[RankInput],
    *,
    num_experts: int,
    layout: str,
) -> list[Tensor]:
    """Sends one scalar of every choice home.

    values: a rank's [L, C] | [N] (one a row), or [R, M, K] | [N, K] (one a row and choice), fp32.
    Returns fp32 [T, K] a rank, 0 for choices without a row. Raises ValueError.
    """
    _check_world(inputs, num_experts)
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}")
    num_ranks, max_tokens, topk = results[0].row_of.shape
    home = torch.zeros(num_ranks, max_tokens, topk, dtype=torch.float32)
    for result, value in zip(results, values, strict=True):
        sent = result.row_of >= 0
        row = result.row_of[sent]
        if layout in EXPERT_LAYOUTS:
            home[sent] = value.reshape(-1)[row]
        else:
            home[sent] = value.reshape(-1, topk)[row, torch.nonzero(sent)[:, 2]]
    return [home[rank, : len(given.x)].clone() for rank, given in enumerate(inputs)]
