"""The example model on the GPUs that there are: trained by grouped GEMMs, served by CUDA graphs, and profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.test_docs import run
from tests.support.gpus import NUM_GPUS, needs_gpu

pytestmark = needs_gpu
SMALL = f"--size small --ranks {NUM_GPUS}"


def test_the_model_is_trained_and_served_on_gpus(tmp_path: Path) -> None:
    run(
        "-m", "examples.moe_lm.train", *SMALL.split(), "--sequences", str(4 * NUM_GPUS), "--length", "128",
        "--steps", "12", "--lr", "1e-3", "--exchange", "nccl_ep,all_to_all_single", "--save", f"{tmp_path}/checkpoint",
        "--report", f"{tmp_path}/train.json",
    )  # fmt: skip
    ours, plain = (
        json.loads((tmp_path / f"train_{name}.json").read_text()) for name in ("nccl_ep", "all_to_all_single")
    )
    assert ours["losses"] == pytest.approx(plain["losses"], abs=0.05)
    for report in (ours, plain):
        assert report["tokens_per_s"] > 0 and report["exchange_ms"] > 0
        assert {"GEMM", "attention"} <= {event["kind"] for event in report["layer"]}
    run(
        "-m", "examples.moe_lm.serve", *SMALL.split(), "--load", f"{tmp_path}/checkpoint", "--rates", "100",
        "--profile", "--exchange", "nccl_ep,all_to_all_single,deep_ep", "--overlap", "off,on",
        "--report", f"{tmp_path}/serve.json",
    )  # fmt: skip
    report = json.loads((tmp_path / "serve.json").read_text())
    assert len(report["figures"]) == len(report["profiles"]) == 4
    for each in report["profiles"]:
        kinds = {event["kind"] for event in each["layer"]}
        assert kinds >= ({"all_to_all"} if each["exchange"] == "all_to_all_single" else {"dispatch", "combine"})


def test_tokens_are_those_of_one_rank_and_bits_a_requests_own(tmp_path: Path) -> None:
    """One rank's logits have the same bits. So has a request with others, alone and at another home, in one batch and
    in two."""
    report = tmp_path / "serve.json"
    run(
        "-m", "examples.moe_lm.serve", *SMALL.split(), "--check", "8", "--overlap", "off,on",
        "--report", str(report),
    )  # fmt: skip
    checks = json.loads(report.read_text())["checks"]
    assert len(checks) == 2 and checks[0]["logits"] == checks[1]["logits"], checks
    for check in checks:
        assert check["tokens"] > 30 and check["different"] == 0 and check["changed_logits"] == 0
        assert (check["changed_again"], check["changed_alone"], check["changed_repeats"]) == (0, 0, 0), check
