"""A small layer of each layout, on ranks of any device."""

from __future__ import annotations

from typing import Any

import nccl_ep
from tests.support.cases import Case
from tests.support.expected import Expected, plain_case
from tests.support.harness import case_buffer

LAYOUTS = ("flat", "packed", "expert_major", "rank_major")


def capacity_of(layout: str, num_ranks: int, tokens: int) -> int | None:
    return num_ranks * tokens if layout == "expert_major" else None


def layer(num_ranks: int, layout: str, seed: int, **changes: Any) -> Expected:
    tokens = 24
    plain: dict[str, Any] = {
        "num_experts": 4 * num_ranks, "topk": 4, "hidden": 256, "expert_alignment": 4 if layout == "packed" else 1,
        "max_tokens": tokens, "tokens": (tokens,) * num_ranks, "capacity": capacity_of(layout, num_ranks, tokens),
    }  # fmt: skip
    return Expected(plain_case(num_ranks, layout=layout, seed=seed, **{**plain, **changes}))


def layer_buffer(case: Case, group: Any, device: Any, mode: str = "ht", **options: Any) -> nccl_ep.Buffer:
    return case_buffer(case, group, mode=mode, device=device, **options)
