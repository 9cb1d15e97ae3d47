"""The example model is served: the tokens of one rank, and the same bits whatever else is served, and where."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.moe_lm import ranks, serve, sizes
from examples.moe_lm.engine import Room
from examples.moe_lm.load import Request, make_load, percentile, summary
from examples.moe_lm.model import Model
from examples.moe_lm.one_rank import one_rank
from examples.moe_lm.ranks import Ranks
from examples.moe_lm.server import Progress, Server
from tests import ROOT
from tests.examples.ranks import SERVING, SIZES, fails, load, serve_each
from tests.support.processes import run_processes, run_python

Served = dict[str, list[Request]]
SAYS_NOTHING = "CPU ranks share the cores of this machine: their times say nothing about GPUs"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    found: Served = run_processes(2, serve_each, tmp_path_factory.mktemp("ranks"), timeout=600)[0]
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of the model on one rank, without a cache, each text computed anew."""
    options = serve.parse(SERVING.split())
    model = Model(sizes.sizes_of(options, "cpu", 1))
    model.initialise(options.seed)
    model.for_serving().use(one_rank)
    found = []
    for request in load(options, 1):
        text = request.prompt
        for _ in range(request.length):
            text = torch.cat([text, model(text.unsqueeze(0))[0][0, -1].argmax().view(1)])
        found.append(text[len(request.prompt) :].tolist())
    return found


WAYS = (
    "nccl_ep, fixed", "nccl_ep, auto", "nccl_ep, fixed, overlap", "nccl_ep_arrivals, fixed", "all_to_all_single, fixed",
    "deep_ep, fixed",
    "all on rank 0", "arriving", "nccl_ep, rebalanced", "nccl_ep, rebalanced, overlap",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_one_rank(way: str, served: Served, expected: list[list[int]]) -> None:
    assert [request.tokens for request in served[way]] == expected
    assert len({token for tokens in expected for token in tokens}) > 5, "else it would prove little"


def bits_of(requests: list[Request]) -> list[torch.Tensor]:
    return [torch.stack(request.logits) for request in requests]


@pytest.mark.parametrize(
    "way",
    [
        "nccl_ep, auto", "nccl_ep, fixed, overlap", "all on rank 0", "arriving", "alone, on another rank",
        "nccl_ep, rebalanced", "nccl_ep, rebalanced, overlap",
    ],
)  # fmt: skip
def test_bits_do_not_depend_on_batch_or_rank(way: str, served: Served) -> None:
    for got, want in zip(bits_of(served[way]), bits_of(served["nccl_ep, fixed"]), strict=False):
        assert torch.equal(got, want)
    assert len(served[way]) >= 3


def test_experts_that_begin_while_rows_come_have_the_bits_of_one_step_behind_the_other(served: Served) -> None:
    got, want = bits_of(served["nccl_ep_arrivals, fixed"]), bits_of(served["nccl_ep_arrivals, one behind"])
    assert len(got) == len(want) >= 3
    assert all(torch.equal(*each) for each in zip(got, want, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_experts_move_while_requests_are_served(overlap: bool, served: Any) -> None:
    """The bits are those of experts that stay: a sum of two float32 products is the same in every order."""
    found = served[f"placements, {overlap}"]
    assert len(found) >= 2 and [each["step"] for each in found] == [3 * (1 + i) for i in range(len(found))]
    assert found[0]["moves"] >= 2 and all(1 <= each["after"] <= each["before"] for each in found)


def test_check_finds_the_bits_of_one_rank(served: Any) -> None:
    found = served["check"]
    assert found["tokens"] > 10
    assert (found["gap"], found["close"], found["different"], found["at_once_different"]) == (0, 0, 0, 0)
    assert (found["changed_logits"], found["changed_again"], found["changed_alone"]) == (0, 0, 0)
    assert found["rounding"] < 1e-4


def test_the_check_sees_other_experts(served: Any) -> None:
    """Of the same tokens, with one rank's weights drawn from another seed."""
    found = served["check of other weights"]
    assert found["changed_logits"] == 6 and found["different"] > 5 and found["largest_gap"] > 0.1


def test_both_modes_serve_and_requests_are_spread(served: Any) -> None:
    assert served["modes"] == ["ht", "ll"]
    assert {request.home for request in served["nccl_ep, fixed"]} == {0, 1}
    assert {request.home for request in served["all on rank 0"]} == {0}


def test_times_are_told_in_order(served: Served) -> None:
    for request in served["arriving"]:
        assert request.is_done and len(request.times) == request.length
        assert request.arrival <= request.times[0] and request.times == sorted(request.times)


REFUSED = (
    "its prompt of 5 and 500 tokens more do not fit, a slot has 32",
    "its prompt of 5 and 28 tokens more do not fit, a slot has 32",
    "its prompt has 0 tokens, must have 1 to 12",
    "its prompt has 13 tokens, must have 1 to 12",
    "its prompt has the token -1, must be 0 to 255",
    "its prompt has the token 256, must be 0 to 255",
    f"its prompt has the token {1 << 40}, must be 0 to 255",
    *(f"it wants {length} tokens, must be a whole number of 1 or more" for length in (0, -3, 2.5, True, None)),
    *6 * ["its prompt is no tensor of whole numbers with one dimension"],
    *(f"its arrival is {arrival}, must be a number of 0 or more" for arrival in (-1.0, math.inf, math.nan, "now")),
    *(f"its home is {home}, must be 0 to 1" for home in (-1, 2, 1.5, "all")),
    "it was served before",
)


def test_a_bad_request_is_refused_and_the_others_are_served(served: Served, expected: list[list[int]]) -> None:
    """The others have the same bits as without it, and so have those that come afterwards."""
    for way in ("with bad ones", "after bad ones"):
        good = [each for each in served[way] if each.number < 100]
        assert [each.tokens for each in good] == expected[: len(good)] and all(each.refused is None for each in good)
        for got, want in zip(bits_of(good), bits_of(served["nccl_ep, fixed"]), strict=False):
            assert torch.equal(got, want)
    for way in ("with bad ones", "bad ones alone"):
        bad = [each for each in served[way] if each.number >= 100]
        assert tuple(each.refused for each in bad) == REFUSED
        assert all(each.times == [] for each in bad)
    figures = summary(served["with bad ones"], 2.0)
    assert figures["requests"] == 9 + len(REFUSED) and len(figures["refused"]) == len(REFUSED)
    assert figures["tokens"] == sum(len(tokens) for tokens in expected)


def test_what_is_no_request_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it need be as a request has it: the others are served, and the summary can be written."""
    server = Server.__new__(Server)
    server.world = Ranks(0, 1, torch.device("cpu"), None, None)
    server.room, server.sizes = Room(2, 32, 1, 12), sizes.Sizes()
    good, prompt = Request(1, 0.0, 0, torch.arange(3), 2), torch.arange(3)
    odd: list[Any] = [None, {"prompt": prompt}, 3]
    odd += [Request(number, 0.0, 0, prompt, 2) for number in ([2], np.int64(3), None)]
    odd += [Request(4, 0.0, 0, prompt, 2, **more) for more in ({"tokens": np.ones(2)}, {"times": None}, {"logits": ()})]
    assert server._admit([*odd, good]) == [good]
    said = capsys.readouterr().out
    assert "request  is refused: it is a NoneType, must be a Request\n" in said and said.count("is refused") == len(odd)
    found = summary([each for each in [*odd, good] if isinstance(each, Request)], 1.0)
    assert list(json.loads(json.dumps(found))["refused"]) == ["[2]", "np.int64(3)", "None", "4"]


def test_the_program_says_what_it_serves_and_no_nan(tmp_path: Path) -> None:
    """One request of one token has no time between tokens. On three ranks two have nothing to serve."""
    arguments = f"{SIZES} --experts 6 --ranks 3 --requests 1 --output 1 --report {tmp_path}/report.json"
    done = run_python("-m", "examples.moe_lm.serve", *arguments.split(), environment=os.environ, cwd=ROOT, timeout=300)
    said = done.stdout
    assert "TPOT       - /       -" in said and "nan" not in said.lower() and done.stderr == ""
    assert said.splitlines()[0] == "serving 1 requests, all at once, nccl_ep, on 3 CPU ranks .."
    assert said.splitlines()[1] == "6 requests before, which set up what does not count .."
    step = r"step     1  rank 0's requests:   0 wait,   0 in slots,   1 done       1 tokens +[0-9.]+ ms a step"
    assert re.fullmatch(step, said.splitlines()[2])
    assert said.splitlines()[4:] == [f"wrote {tmp_path}/report.json", SAYS_NOTHING]
    (figures,) = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)["figures"]
    assert figures["tpot_p50_ms"] is None and figures["tokens"] == 1


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("raises", "rank 1 failed: IndexError: of rank 1 alone"),
        ("is killed", "rank 1 has ended without a word: SIGKILL"),
        ("goes", "rank 1 has ended without a word: exit code 7"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_words(how: str, first: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = serve.parse(["--device", "cpu", "--ranks", "2"])
    options.how = how
    begin = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        ranks.run(fails, options)
    said = capfd.readouterr().err.splitlines()
    assert ended.value.code == 1 and said[0].startswith(first), said
    assert time.monotonic() - begin < 100, "nobody waits for the deadline of 100 seconds"


# ---- Parts


def test_load_is_the_same_for_a_seed() -> None:
    how: dict[str, Any] = {"prompt": (3, 9), "output": (2, 5)}
    slow, fast = make_load(200, 10.0, 2, **how), make_load(200, 20.0, 4, **how)
    assert all(torch.equal(a.prompt, b.prompt) and a.length == b.length for a, b in zip(slow, fast, strict=True))
    assert all(3 <= len(each.prompt) <= 9 and 2 <= each.length <= 5 for each in slow)
    assert slow[-1].arrival == pytest.approx(2 * fast[-1].arrival) and 15 < slow[-1].arrival < 27
    assert [each.home for each in fast[:5]] == [0, 1, 2, 3, 0]


def test_deepeps_calls_are_not_called_deepep(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {f"{key}_p{share}_ms": 1.0 for key in ("ttft", "tpot", "itl") for share in (50, 99)}
    serve._show({"exchange": "deep_ep", "overlap": False, "rate": 20.0, "tokens_per_s": 5.0, **shares})
    said = capsys.readouterr().out
    assert said.startswith("DeepEP's calls over nccl_ep ") and "deep_ep" not in said and "20 requests/s" in said


@pytest.mark.parametrize(("rank", "every"), [(0, 3), (1, 3), (0, 0)])
def test_a_line_of_progress_each_so_many_steps(rank: int, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And one of the steps at the end; the time is that of the steps since the line before."""
    progress = Progress(SimpleNamespace(rank=rank), every, 9)  # type: ignore[arg-type]
    for step in range(1, 8):
        progress.tokens += 4
        progress.step(step / 1000, waiting=8 - step, serving=1)
    for _ in range(2):
        progress.tell()
    said = capsys.readouterr().out.splitlines()
    assert said == ([] if rank or not every else [
        "step     3  rank 0's requests:   5 wait,   1 in slots,   3 done      12 tokens      2.00 ms a step",
        "step     6  rank 0's requests:   2 wait,   1 in slots,   6 done      24 tokens      5.00 ms a step",
        "step     7  rank 0's requests:   1 wait,   1 in slots,   7 done      28 tokens      7.00 ms a step",
    ])  # fmt: skip


def test_the_summary_has_the_percentiles_of_latency() -> None:
    one = Request(0, 1.0, 0, torch.zeros(1), 3, [1, 2, 3], [1.5, 1.6, 1.8])
    two = Request(1, 2.0, 0, torch.zeros(1), 1, [1], [2.1])
    found = summary([one, two], 2.0)
    assert found["tokens"] == 4 and found["tokens_per_s"] == 2.0
    assert found["ttft_p50_ms"] == pytest.approx(100) and found["ttft_p99_ms"] == pytest.approx(500)
    assert found["tpot_p50_ms"] == pytest.approx(150)
    assert found["itl_p50_ms"] == pytest.approx(100) and found["itl_p99_ms"] == pytest.approx(200)
    assert percentile(list(range(1, 101)), 0.99) == 99 and percentile([], 0.5) is None


def test_what_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ("--exchange nccl", "nccl is none of nccl_ep, nccl_ep_arrivals, all_to_all_single, deep_ep"),
        ("--prompt 8-32 --output 4-16 --max-length 32", "--max-length is 32, prompt and output need 49"),
    ):
        with pytest.raises(SystemExit):
            serve.parse(arguments.split())
        assert text in capsys.readouterr().err
