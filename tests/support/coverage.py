"""Which kinds of cases a test has run: a histogram of the generator's properties."""

from __future__ import annotations

from collections import Counter

import torch

from nccl_ep import reference
from nccl_ep.reference import DispatchResult
from tests.support.cases import (
    CAPACITIES,
    COMBINE_WEIGHTS,
    CROWDED,
    OPAQUE,
    ROUTINGS,
    SCALE_DTYPES,
    SCALE_STRIDES,
    SCALES,
    TOKENS,
    Case,
    show,
)
from tests.support.contents import CONTENTS, FLOATS

_EXPECTED: dict[str, tuple[object, ...]] = {
    "ranks": tuple(range(1, 17)),
    "topk": tuple(range(1, 33)),
    "dtype": tuple(show(dtype) for dtype in FLOATS + OPAQUE),
    "quant": ("None", *reference.QUANT_MODES),
    "short last group": (False, True),
    "odd chunks": (False, True),
    "scales": ("None", *(f"{show(d)} {s}" for d in SCALE_DTYPES for s in SCALE_STRIDES)),
    "content": CONTENTS,
    "layout": reference.LAYOUTS,
    "capacity": tuple(
        f"{layout} {kind}"
        for layout in reference.LAYOUTS
        for kind in (CAPACITIES if layout != "rank_major" else ("default",))
    ),
    "overflow": tuple(
        f"{layout} {happened}"
        for layout in reference.LAYOUTS
        for happened in ((False, True) if layout != "rank_major" else (False,))
    ),
    "alignment > 1": (False, True),
    "zero padding": (False, True),
    "index dtype": ("int32", "int64"),
    "routing": (*ROUTINGS, CROWDED),
    "tokens": TOKENS,
    "duplicates": (False, True),
    "zero-token ranks": ("no", "some", "all"),
    "fewer than max_tokens everywhere": (False, True),
    "invalid ids": (False, True),
    "dispatch weights": ("none", *CONTENTS[:2], "few"),
    "combine weights": tuple(
        f"{layout} {kind}"
        for layout in reference.LAYOUTS
        for kind in (COMBINE_WEIGHTS if layout in reference.EXPERT_LAYOUTS else ("dispatch", "none"))
    ),
    "rows dtype": tuple(show(dtype) for dtype in FLOATS),
    "rows content": CONTENTS,
    "out dtype": ("None", *(show(dtype) for dtype in FLOATS)),
    "wire dtype": ("None", "float32", *reference.WIRE_FORMATS),
    "wider wire": (False, True),
    "biases": (0, 1, 2),
    "scale": SCALES,
    "domains": ("one", "several", "one rank each"),
}


class Coverage:
    """How many cases fell into each bucket of each property, and which buckets stayed empty."""

    def __init__(self) -> None:
        self.cases = 0
        self.counts: dict[str, Counter[object]] = {name: Counter() for name in _EXPECTED}

    def add(self, case: Case, results: list[DispatchResult]) -> None:
        """Counts a case, given what the oracle's dispatch made of it."""
        self.cases += 1
        for name, bucket in self._buckets(case, results).items():
            self.counts[name][bucket] += 1

    @staticmethod
    def _buckets(case: Case, results: list[DispatchResult]) -> dict[str, object]:
        ids = torch.cat([given.topk_idx.to(torch.int64) for given in case.inputs()])
        inside = (ids >= 0) & (ids < case.num_experts)
        ordered = torch.where(inside, ids, -1 - torch.arange(case.topk)).sort(1).values
        repeated = bool((ordered[:, 1:] == ordered[:, :-1]).any())
        idle = sum(tokens == 0 for tokens in case.tokens)
        domain = case.domain_size or case.num_ranks
        overflow = any(int(result.overflow) > 0 for result in results)
        scales = "None" if case.scales_dtype is None else f"{show(case.scales_dtype)} {case.scales_strides}"
        wire = case.wire_dtype or case.out_dtype or case.rows_dtype
        row_bytes = case.hidden * (1 if case.quant else case.dtype.itemsize)
        return {
            "ranks": case.num_ranks,
            "topk": case.topk,
            "dtype": show(case.dtype),
            "quant": str(case.quant),
            "short last group": case.quant is not None and case.hidden % 128 != 0,
            "odd chunks": row_bytes // 16 % 2 == 1,
            "scales": scales,
            "content": case.content,
            "layout": case.layout,
            "capacity": f"{case.layout} {case.capacity_kind}",
            "overflow": f"{case.layout} {overflow}",
            "alignment > 1": case.expert_alignment > 1,
            "zero padding": case.zero_padding,
            "index dtype": show(case.idx_dtype),
            "routing": case.routing,
            "tokens": case.tokens_kind,
            "duplicates": repeated,
            "zero-token ranks": "no" if idle == 0 else "all" if idle == case.num_ranks else "some",
            "fewer than max_tokens everywhere": max(case.tokens) < case.max_tokens,
            "invalid ids": bool((~inside & (ids != -1)).any()),
            "dispatch weights": case.weights_content if case.with_weights else "none",
            "combine weights": f"{case.layout} {case.combine_weights}",
            "rows dtype": show(case.rows_dtype),
            "rows content": case.rows_content,
            "out dtype": show(case.out_dtype),
            "wire dtype": show(case.wire_dtype),
            "wider wire": wire == torch.float32 and (case.out_dtype or case.rows_dtype) != torch.float32,
            "biases": case.biases,
            "scale": case.scale,
            "domains": "one" if domain == case.num_ranks else "one rank each" if domain == 1 else "several",
        }

    def missing(self) -> list[str]:
        """The empty buckets, as "property: bucket"."""
        return [
            f"{name}: {bucket}"
            for name, expected in _EXPECTED.items()
            for bucket in expected
            if self.counts[name][bucket] == 0
        ]

    def report(self) -> str:
        """The histogram, a line for each property."""
        lines = [f"{self.cases} cases"]
        for name, expected in _EXPECTED.items():
            counted = ", ".join(f"{bucket}: {self.counts[name][bucket]}" for bucket in expected)
            lines.append(f"  {name}: {counted}")
        missing = self.missing()
        lines.append(f"  empty buckets: {', '.join(missing) if missing else 'none'}")
        return "\n".join(lines)
