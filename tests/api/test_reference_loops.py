"""The oracle against loops over single rows, on generated cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nccl_ep import reference as ref
from nccl_ep.reference import RankInput
from tests.support import cases
from tests.support.contents import as_bytes

Choice = tuple[int, int, int, int]  # source, token, k, expert


def _listed(case: cases.Case, given: list[RankInput]) -> list[Choice]:
    """Every choice that names an expert, in order."""
    return [
        (source, token, k, expert)
        for source, entry in enumerate(given)
        for token, row in enumerate(entry.topk_idx.tolist())
        for k, expert in enumerate(row)
        if 0 <= expert < case.num_experts
    ]


def _looped_rows(case: cases.Case, listed: list[Choice]) -> list[dict[tuple[int, ...], int]]:
    """A rank's {(source, token, k): row}, dropped rows left out."""
    local = case.num_experts // case.num_ranks
    slots = case.num_ranks * case.max_tokens
    room = slots if case.capacity is None else case.capacity
    where: list[dict[tuple[int, ...], int]] = []
    for rank in range(case.num_ranks):
        mine = [choice for choice in listed if choice[3] // local == rank]
        rows: dict[tuple[int, ...], int] = {}
        start = 0
        for expert in range(rank * local, (rank + 1) * local):
            named = [choice[:3] for choice in mine if choice[3] == expert]
            if case.layout == "expert_major":
                rows.update({c: expert % local * room + i for i, c in enumerate(named) if i < room})
            elif case.layout == "packed":
                worst = slots * min(case.topk, local) + local * (case.expert_alignment - 1)
                align = case.expert_alignment
                end = -(-worst // align) * align if case.capacity is None else case.capacity
                rows.update({c: start + i for i, c in enumerate(named) if start + i < end})
                start += -(-len(named) // align) * align
        if case.layout in ref.RANK_LAYOUTS:
            tokens = sorted({choice[:2] for choice in mine})
            for source, token, k, _ in mine:
                ahead = [other for other in tokens if other < (source, token)]
                if case.layout == "rank_major":
                    same = sum(other[0] == source for other in ahead)
                    rows[source, token, k] = source * case.max_tokens + same
                elif len(ahead) < room:
                    rows[source, token, k] = len(ahead)
        where.append(rows)
    return where


def _added(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _looped_combine(
    case: cases.Case,
    listed: list[Choice],
    where: list[dict[tuple[int, ...], int]],
    given: list[RankInput],
    rows: list[Tensor],
    options: dict[str, Any],
    home: tuple[int, int],
) -> Tensor:
    """combine of one token, by the letter."""
    source, token = home
    out_dtype = case.out_dtype or case.rows_dtype
    wire = case.wire_dtype or out_dtype
    factors, masks, biases = options["weights"], options["topk_idx"], options["bias"]
    weights: Any = given[source].topk_weights if factors else None
    if isinstance(factors, list):
        weights = factors[source]
    local = case.num_experts // case.num_ranks
    domain_rows: list[Tensor] = []
    partials: list[Tensor] = []
    size = case.domain_size or case.num_ranks
    for first in range(0, case.num_ranks, size):
        partials = []
        for rank in range(first, first + size):
            choices = [c for c in listed if c[:2] == home and c[3] // local == rank]
            if not choices:
                continue
            terms = []
            for k in [c[2] for c in choices][: 1 if case.layout in ref.RANK_LAYOUTS else None]:
                masked = isinstance(masks, list) and not 0 <= int(masks[source][token, k]) < case.num_experts
                if (source, token, k) in where[rank] and not masked:
                    row = rows[rank].reshape(-1, case.hidden)[where[rank][source, token, k]].float()
                    weighted = weights is not None and case.layout in ref.EXPERT_LAYOUTS
                    terms.append(row * weights[token, k] if weighted else row)
            partial = _added(terms) if terms else torch.zeros(case.hidden)
            partials.append(ref.rounded_to_wire(partial[None], wire)[0])
        if partials and size < case.num_ranks:
            domain_rows.append(ref.rounded_to_wire(_added(partials)[None], wire)[0])
    added = [bias[token].float() for bias in biases[source]] if isinstance(biases, list) else []
    terms = partials if size == case.num_ranks else domain_rows
    if case.scale == 1:
        terms, added = added + terms, []
    total = _added(terms) if terms else torch.zeros(case.hidden)
    if case.scale != 1:
        total = total * torch.tensor(case.scale)
    return _added([total, *added]).to(out_dtype)


def test_the_oracle_agrees_with_plain_loops() -> None:
    for seed in range(250):
        case = cases.generate(seed)
        if sum(case.tokens) * case.topk * case.num_ranks > 400:
            continue
        given = case.inputs()
        listed = _listed(case, given)
        where = _looped_rows(case, listed)
        results = ref.dispatch(given, **case.dispatch_kwargs())
        for rows, result in zip(where, results, strict=True):
            placed = [tuple(index) for index in (result.row_of >= 0).nonzero().tolist()]
            found = {index: int(result.row_of[index]) for index in placed}
            assert found == rows, case.describe()
            assert sorted(set(rows.values())) == result.valid.nonzero().flatten().tolist()
            assert int(result.counts.sum()) == len(set(rows.values()))
            for (source, token, _), row in rows.items():
                sent = given[source].x
                if case.quant is not None:
                    sent = ref.quantize_fp8(sent, case.quant)[0]
                got = as_bytes(result.x).reshape(-1, case.hidden)[row]
                assert ref.bits_equal(got, as_bytes(sent[token])), case.describe()
        returned = [case.expert(result.x, result, rank) for rank, result in enumerate(results)]
        options = case.combine_kwargs()
        combined = ref.combine(returned, results, given, **options)
        for source, out in enumerate(combined):
            for token in range(case.tokens[source]):
                home = (source, token)
                expected = _looped_combine(case, listed, where, given, returned, options, home)
                assert ref.bits_equal(out[token], expected), (
                    home, ref.first_difference(out[token], expected), case.describe()
                )  # fmt: skip
