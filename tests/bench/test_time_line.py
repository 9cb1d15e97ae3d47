"""``python -m bench time-line``: from raw stamps to records, and what it says where there are none."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as bench
from bench import options, records, stamps, time_line
from nccl_ep import _C
from nccl_ep.testing import ThreadGroup, run_ranks
from tests import ROOT
from tests.bench.test_bench import run

MISSED = 2**64 - 1


def test_a_stamp_has_first_median_and_last_of_the_warps_that_came() -> None:
    assert stamps.summary([30, MISSED, 10, 20, MISSED]) == (10, 20, 30)
    assert stamps.summary([4, 8]) == (4, 6, 8)
    assert stamps.summary([MISSED, MISSED]) is None and stamps.summary([]) is None


def test_a_time_line_has_the_medians_over_calls() -> None:
    """Of each figure by itself; stamps in the order of time; none of phases to which no warp came."""

    def call(start: int) -> stamps.Stamps:
        own = [start + 7, MISSED, MISSED]
        line = [[start, start, start + 2], [start + 50] * 3, [MISSED] * 3, [MISSED] * 3, own, [start + 90] * 3]
        return line + [[MISSED] * 3] * (len(stamps.STAMPS) - len(line))

    found = stamps.over_calls([call(0), call(5), call(100)])
    assert list(found.items()) == [
        ("kStart", (5, 5, 7)), ("kOwnDone", (12, 12, 12)), ("kEpochKnown", (55, 55, 55)), ("kEnd", (95, 95, 95)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="shorter"):  # a build without stamps, or with others
        stamps.over_calls([[]])


def test_names_are_those_of_the_sources() -> None:
    source = (ROOT / "csrc/cuda/testing/stamps.cuh").read_text()
    (body,) = re.findall(r"enum class Stamp : int \{(.*?)\};", source, re.DOTALL)
    assert tuple(re.findall(r"^ *(k\w+)", body, re.MULTILINE)) == (*stamps.STAMPS, "kCount")
    kernels = {kernel for ops in stamps.KERNELS.values() for each in ops.values() for kernel in each}
    files = [*(ROOT / "csrc/cuda/ll").glob("*.cu*"), *(ROOT / "csrc/cuda/ht").glob("*.cu*")]
    known = {name for file in files for name in re.findall(r'add_stamps_reader\("(\w+)"', file.read_text())}
    assert kernels == known
    assert sorted(stamps.KERNELS) == ["ht", "ll"] and all(_C.time_line(kernel) is not None for kernel in kernels)


def options_of(mode: str, layout: str, domain_size: int | None) -> argparse.Namespace:
    return argparse.Namespace(
        ranks=2, tokens=6, hidden=256, topk=2, experts=4, layout=layout, routing="uniform", num_sms=0, seed=1,
        mode=mode, alignment=8, iterations=3, domain_size=domain_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "layout", "domain_size"), [("ll", "expert_major", None), ("ht", "packed", None), ("ht", "packed", 1)]
)
def test_a_time_line_is_that_of_rank_0_without_the_first_calls(
    mode: str, layout: str, domain_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU ranks, with stamps of our own: the first calls, which warm up, do not count."""
    asked: list[str] = []
    calls = time_line._WARM_UP + 3

    def take(kernel: str) -> stamps.Stamps:
        asked.append(kernel)
        at = 0 if (asked.count(kernel) - 1) % calls >= time_line._WARM_UP else 10**6
        return [[at + 10 * phase, at + 10 * phase + 4, MISSED] for phase in range(len(stamps.STAMPS))]

    monkeypatch.setattr(time_line, "_C", argparse.Namespace(time_line=take))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    aligned: list[int] = []

    def body(group: ThreadGroup) -> list[records.Record]:
        cpu: Any = torch.device("cpu")
        options = options_of(mode, layout, domain_size)
        return time_line.measure(options, "fp8", cpu, group, lambda: aligned.append(group.rank()))

    mine, others = run_ranks(2, body)
    kernels = [(op, kernel) for op, each in stamps.KERNELS[mode].items() for kernel in each]
    assert others == [] and sorted(aligned) == sorted([0, 1] * len(stamps.KERNELS[mode]) * calls)
    assert sorted(asked) == sorted([kernel for _, kernel in kernels] * calls)
    got = [(r["op"], r["kernel"], r["stamp"], r["first"], r["value"], r["last"]) for r in mine]
    assert got == [
        (*kernel, stamp, 10 * phase, 10 * phase + 2, 10 * phase + 4)
        for kernel in kernels
        for phase, stamp in enumerate(stamps.STAMPS)
    ]
    first = mine[0]
    assert (first["bench"], first["figure"], first["unit"], first["dtype"]) == ("time_line", "time_line", "ns", "fp8")
    assert (first["mode"], first["layout"], first["alignment"]) == (mode, layout, 8 if layout == "packed" else 1)
    path = tmp_path / "records.json"
    records.save(path, mine)
    shown = run("-m", "bench", "table", str(path))
    assert shown.strip() == stamps.render(mine)
    domains = "" if domain_size is None else f" in domains of {domain_size}"
    assert shown.startswith(f"{mode}: 2 ranks{domains}, some GPU; 6 tokens") and re.search(
        r"_combine +kEnd +50 +52 +54", shown
    )


@pytest.mark.parametrize(
    ("has_gpu", "why"), [(True, "configure it with -DNCCL_EP_LAB=ON"), (False, "kernels of GPUs alone")]
)
def test_builds_without_stamps_are_told(
    has_gpu: bool, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(options, "_C", argparse.Namespace(has_cuda=lambda: True))
    monkeypatch.setattr(time_line, "_C", argparse.Namespace(time_line=lambda kernel: []))
    with pytest.raises(SystemExit) as exit:
        bench.main(["time-line", "--mode", "ht"])
    assert exit.value.code == 2 and why in capsys.readouterr().err
