"""The fake of an op tells of its results what they are: over generated cases, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nccl_ep
from nccl_ep.testing import run_ranks
from tests.support.cases import generate
from tests.support.expected import Expected
from tests.support.harness import make_buffer
from tests.support.op_checks import described, faked

NUM_CASES = 60
COMBINED = (torch.bfloat16, torch.float16, torch.float32)


class Recorded(TorchDispatchMode):
    """Keeps name, arguments and the results' metadata of each op of ours in this thread."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], list[tuple[Any, ...]]]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "nccl_ep":
            self.calls.append((func._schema.name.removeprefix("nccl_ep::"), args, described(result)))
        return result


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_fakes_agree_with_real_results_over_generated_cases(mode: str) -> None:
    seen: set[str] = set()
    used = 0
    for seed in range(NUM_CASES):
        case = Expected(generate(seed))
        shape = case.case
        if shape.num_ranks > 4 or (mode == "ht" and shape.layout == "expert_major" and shape.capacity is None):
            continue
        used += 1
        calls: list[Any] = []

        def body(group: Any, case: Expected = case, calls: list[Any] = calls) -> None:
            given, kwargs = case.inputs[group.rank()], case.case.dispatch_kwargs()
            with make_buffer(case.case, group, mode="auto") as buffer:
                wants = given.x.dtype in COMBINED and case.case.quant is None
                x = given.x.clone().requires_grad_(wants)
                with Recorded(calls):
                    how = kwargs | {"mode": mode}
                    out = nccl_ep.dispatch(
                        x, given.topk_idx, given.topk_weights, buffer=buffer, scales=given.scales, **how
                    )
                    if wants:
                        nccl_ep.combine(out.x, out.handle).float().nan_to_num().sum().backward()

        run_ranks(shape.num_ranks, body)
        for name, args, made in calls:  # not in the ranks' threads: torch enters fake modes in one thread
            with torch.no_grad():
                assert faked(name, args) == made, name
            seen.add(name)
    assert used > NUM_CASES // 3
    backward = "ll_dispatch" if mode == "ll" else "ht_dispatch_cached"
    assert {f"{mode}_dispatch", f"{mode}_combine", backward} <= seen
