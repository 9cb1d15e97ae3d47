"""Ranks that take different operations hear of it. The error says what the others did.

GPUs, and ranks of several domains, wait for one another till the deadline. tests/api/test_disagreement.py has the rest.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.patience import DEADLINES, PATIENCE, Clock, Late, with_more_time

X, IDS = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 5], [1, 4], [2, 3], [0, -1]])
FORM: dict[str, Any] = {"num_experts": 6, "layout": "flat"}


def _buffer(group: ThreadGroup, **options: Any) -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=4, hidden=64, topk=2, num_experts=6, mode="auto", device="cpu", **options
    )


def _call(what: str, buffer: nccl_ep.Buffer, out: nccl_ep.DispatchOutput) -> None:
    """Till it fails: a CPU rank does in the call, one with a GPU some time after."""
    if what == "combine":
        nccl_ep.combine(out.x, out.handle)
    elif what == "scalars":
        nccl_ep.combine_weights(out.weights, out.handle)
    else:
        nccl_ep.dispatch(X, IDS, buffer=buffer, mode=what, **FORM)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        buffer.check()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (
            "ll",
            "combine",
            r"rank 1 called combine\(bf16, hidden 64, top-2, 6 experts, .*, wire bf16\)",
        ),
        ("combine", "ll", r"rank 1 called dispatch\(bf16, hidden 64, .* 0 bytes of scales a row\)"),
        ("ll", "ht", r"rank 1 called high-throughput dispatch\(bf16, hidden 64, .*\)"),
        ("ht", "ll", r"rank 1 called dispatch\(bf16, hidden 64, .*\)"),
        ("ht", "scalars", r"rank 1 called combine of weights\(.*\)"),
    ],
)
@pytest.mark.parametrize("domain_size", [3, 1])
def test_the_error_names_what_the_other_rank_called(mine: str, theirs: str, told: str, domain_size: int) -> None:
    waits = domain_size == 1 or _C.EMULATES_GPU

    def body(group: ThreadGroup, deadline: float) -> str:
        with _buffer(group, domain_size=domain_size) as buffer:
            out = nccl_ep.dispatch(X, IDS, buffer=buffer, **FORM)
            nccl_ep.combine(out.x, out.handle)
            buffer.set_timeout(deadline if waits else 2 * PATIENCE)
            group.allgather(b"", PATIENCE)
            with Clock(PATIENCE), pytest.raises(nccl_ep.TimeoutError if waits else nccl_ep.MismatchError) as failed:
                _call(theirs if group.rank() == 1 else mine, buffer, out)
            return str(failed.value)

    def run(deadline: float) -> None:
        texts = run_ranks(3, lambda group: body(group, deadline))
        if waits and [text.count("instead") for text in texts] != [1, 2, 1]:  # one had not called yet
            raise Late("; ".join(texts))
        for text in (texts[0], texts[2]):
            assert re.search(told + " instead" if waits else told, text), text
            assert not waits or "nothing of this call was heard from rank 1" in text, text
        assert waits or "instead" not in texts[1], texts[1]
        assert waits or re.search("rank 1 called .*, rank [02] called ", texts[1]), texts[1]

    with_more_time(run, (0.5, *DEADLINES[1:]))


def test_a_send_that_is_under_way_is_no_other_call() -> None:
    """Rank 1 has sent its combine, as all have, and only then stays away from the dispatch."""

    def body(group: ThreadGroup) -> str:
        with _buffer(group) as buffer:
            out = nccl_ep.dispatch(X, IDS, buffer=buffer, **FORM)
            pending = nccl_ep.combine_send(out.x, out.handle)
            buffer.set_timeout(0.5)
            group.allgather(b"", 60.0)
            if group.rank() == 1:
                group.allgather(b"", 60.0)
                return ""
            with pytest.raises(nccl_ep.TimeoutError) as failed:
                _call("ll", buffer, out)
            group.allgather(b"", 60.0)
            del pending
            return str(failed.value)

    for text in run_ranks(2, body)[:1]:
        assert "heard from rank 1" in text and "instead" not in text, text
