"""Every model of transformers whose experts can be replaced, with its experts shared out, beside itself on one rank."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks")

from nccl_ep.integrations.transformers import use_expert_parallel  # noqa: E402
from nccl_ep.testing import run_ranks  # noqa: E402
from tests.frameworks.tiny_models import VOCABULARY, experts_classes, model_type_of, run, tiny_model  # noqa: E402


def result_of(model: Any, rank: int) -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY, (2, 7 + rank), generator=torch.Generator().manual_seed(rank))
    return run(model, ids)


@pytest.mark.parametrize("name", experts_classes())
def test_every_model(name: str) -> None:
    stock = tiny_model(name)
    want = [result_of(stock, rank) for rank in range(2)]

    def body(group: Any) -> torch.Tensor:
        model = copy.deepcopy(stock)
        with use_expert_parallel(model, group, max_tokens=32, timeout=60.0) as buffer:
            found = result_of(model, group.rank())
            buffer.check()
            return found

    for found, wanted in zip(run_ranks(2, body, 120.0), want, strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_the_page_lists_them() -> None:
    types = sorted({model_type_of(name) for name in experts_classes()})
    page = (Path(__file__).parents[2] / "docs/migrating_from_deepep.md").read_text()
    listed = re.search(r"beside itself on\s+one\.\n\n(.*?)\.\n\n", page, re.DOTALL)
    assert listed is not None and listed[1].replace(",", " ").split() == types
