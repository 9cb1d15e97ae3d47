"""``bench rivals``: what each system must be to take part, what is said of those that cannot, the table of README."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import records
from bench.rivals import interface, picture, run, table
from bench.workload import make_inputs
from tests import ROOT
from tests.bench.test_bench import shape
from tests.support.processes import run_python

RECORD = ROOT / "records/rivals_4xh200_2026-11-29.json"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NCCL_EP_REVISION": "r"}
    return run_python("-m", "bench", "rivals", *arguments, environment=environment, cwd=ROOT, timeout=600)


def test_the_table_of_readme_is_that_of_its_record() -> None:
    found = records.load([RECORD])
    lines = table.markdown(found)
    assert "\n".join(lines) in (ROOT / "README.md").read_text()
    assert RECORD.name in (ROOT / "README.md").read_text()
    assert sum(line.count("**") for line in lines) == 2 * len(table.columns(found))


def test_systems_on_cpu_ranks(tmp_path: Path) -> None:
    """One that takes part, one that is not installed, one that needs GPUs, one that nobody knows."""
    path, systems = tmp_path / "found.json", "tests.bench.stand_in,torch_all_to_all,flashinfer,nobodys"
    done = bench(
        "--device", "cpu", "--systems", systems, "--dtype", "bf16", "--tokens", "3", "--json", str(path), "--picture",
        str(tmp_path / "picture.svg"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = records.load([path])
    stand_in = [each for each in found if each["system"] == "tests.bench.stand_in"]
    measured = [each for each in stand_in if each["value"] is not None]
    assert {each["figure"] for each in measured} == {"event", "queued"}
    assert all((each["version"], each["note"], each["layout"]) == ("1.5", "does nothing", "expert_major")
               for each in measured)  # fmt: skip
    skipped = {each["skipped"] for each in stand_in if each["value"] is None}
    assert skipped == {"absent: No module named 'stand_in_of_ranks'", "has no high throughput"}
    others = {each["system"]: each.get("skipped", "") for each in found if each not in stand_in}
    assert others["flashinfer"] == "needs GPUs" and others["nobodys"].startswith("no such system: No module named")
    torchs = [each for each in found if each["system"] == "torch_all_to_all"]
    assert {(each["bench"], each["op"]) for each in torchs} == {("ll", "pair"), ("ht", "pair")}
    assert all(each["version"] == torch.__version__ and each["value"] > 0 for each in torchs)
    for text in ("| tests.bench.stand_in 1.5 |", "`all_to_all_single` |", "not measured: flashinfer: needs GPUs"):
        assert text in done.stdout
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_gpus() -> None:
    done = bench()
    assert done.returncode == 2 and "the systems need GPUs, and there is none here" in done.stderr


def test_preloads_are_files_of_systems(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "libnccl.so"
    file.write_text("")
    good = run.parse(["--device", "cpu", "--preload", f"nccl_ep_nvidia={file}"])
    assert good.preload == [f"nccl_ep_nvidia={file}"]
    for wrong in (f"nobodys={file}", "nccl_ep_nvidia=/nowhere", "nccl_ep_nvidia"):
        with pytest.raises(SystemExit):
            run.parse(["--device", "cpu", "--preload", wrong])
        assert f"--preload {wrong}: must be one of --systems, and a file" in capsys.readouterr().err
    given = ["--quick", "--preload", "a=b", "--preload=c=d", "--limit", "e=5", "--limit=f=6", "--seed", "3"]
    assert run._of_ranks(given) == ["--quick", "--seed", "3"]


def test_limits_are_seconds_of_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.parse(["--device", "cpu", "--limit", "flashinfer=7.5"]).limit == ["flashinfer=7.5"]
    for wrong in ("nobodys=5", "flashinfer=soon", "flashinfer=0", "flashinfer=nan", "flashinfer"):
        with pytest.raises(SystemExit):
            run.parse(["--device", "cpu", "--limit", wrong])
        assert f"--limit {wrong}: must be one of --systems, and seconds" in capsys.readouterr().err


def test_a_system_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it has measured counts, and the others have the whole time."""
    given: dict[str, float] = {}

    class Ended:
        def __init__(self, num_ranks: int) -> None:
            self.num_ranks = num_ranks

        def run(self, module: str, argv: list[str], settings: dict[str, str], deadline: float) -> str:
            assert "--limit" not in argv
            of_ranks = run.parse(argv[1:])
            (system,) = of_ranks.systems
            given[system] = deadline - time.monotonic()
            common = run._common(options, system, shape(), "cpu")
            records.save(of_ranks.json, [records.make(common, op="pair", figure="event", value=1.0)])
            return "the time limit ended rank 0, 1"

    monkeypatch.setattr(run, "Launcher", Ended)
    path = tmp_path / "found.json"
    argv = ["--device", "cpu", "--systems", "nccl_ep,torch_all_to_all", "--limit", "torch_all_to_all=7"]
    options = run.parse([*argv, "--json", str(path)])
    assert run.main([*argv, "--json", str(path)]) == 1  # ours was not whole
    assert given["torch_all_to_all"] == pytest.approx(7, abs=1) and given["nccl_ep"] > options.time_limit
    found = records.load([path])
    assert [(each["system"], each["value"], each.get("skipped")) for each in found] == [
        (system, *rest)
        for system in ("nccl_ep", "torch_all_to_all")
        for rest in ((1.0, None), (None, "the time limit ended rank 0, 1"))
    ]


def test_operations_that_systems_have() -> None:
    """Rows that dispatch quantises, and rows that are FP8 before, are two operations."""
    has = {
        ("flashinfer", "ll"): {"bf16", "given_fp8"}, ("flashinfer", "ht"): {"bf16", "given_fp8"},
        ("nccl_ep_nvidia", "ll"): {"bf16", "fp8"}, ("nccl_ep_nvidia", "ht"): {"bf16", "given_fp8"},
        ("deepep_v1", "ll"): {"bf16", "fp8"}, ("deepep_v1", "ht"): {"bf16", "given_fp8"},
        ("nccl_ep", "ll"): {"bf16", "fp8", "given_fp8"}, ("nccl_ep", "ht"): {"bf16", "fp8", "given_fp8"},
        ("torch_all_to_all", "ll"): {"bf16", "fp8", "given_fp8"},
    }  # fmt: skip
    for (system, mode), dtypes in has.items():
        layouts = run.module_of(system).layouts
        assert {each for each in ("bf16", "fp8", "given_fp8") if layouts(mode, each)} == dtypes, (system, mode)
    assert run.parse(["--device", "cpu"]).dtype == ["bf16", "fp8", "given_fp8"]


def test_rows_that_are_fp8_already(tmp_path: Path) -> None:
    """Held against the tokens by ours and torch's."""
    path = tmp_path / "found.json"
    done = bench(
        "--device", "cpu", "--systems", "nccl_ep,torch_all_to_all", "--dtype", "given_fp8", "--tokens", "3",
        "--figures", "event", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = records.load([path])
    assert all(each["value"] is not None and each["dtype"] == "given_fp8" for each in found), found
    assert {each["figure"] for each in found} == {"event"}
    assert {(each["system"], each["bench"]) for each in found} == {
        (system, mode) for system in ("nccl_ep", "torch_all_to_all") for mode in ("ll", "ht")
    }
    assert {each["api"] for each in found if each["system"] == "nccl_ep"} == {"native", "ops"}


def rival(rank: int = 0, **changes: Any) -> interface.Rival:
    of = shape(num_ranks=2, **changes)
    world: Any = SimpleNamespace(rank=rank, num_ranks=2, device=torch.device("cpu"))
    return interface.Rival(world, of, make_inputs(of))


def test_wrong_rows_and_sums_are_seen() -> None:
    one = rival()
    rows = one.every("x")[one.here(one.every("topk_idx"))]
    interface.require_rows("rows", rows[torch.randperm(len(rows))], rows)
    wrong = rows.clone()
    wrong.view(torch.int16)[3, 5] ^= 1
    twice = torch.cat([rows[:-1], rows[:1]])
    for each, text in ((wrong, "not the rows"), (twice, "not the rows"), (rows[1:], f"{len(rows) - 1} rows came")):
        with pytest.raises(AssertionError, match=text):
            interface.require_rows("rows", each, rows)
    interface.require_rows("rows", rows * 1.01, rows, 0.05)
    with pytest.raises(AssertionError, match="their sum differs"):
        interface.require_rows("rows", rows * 1.2, rows, 0.05)
    y = one.given.x.float() * (one.given.weights * one.factors()[one.given.topk_idx]).sum(1, keepdim=True)
    one.require_sum(y.bfloat16())
    with pytest.raises(AssertionError, match="what came home differs"):
        one.require_sum(one.given.x.float() * one.given.weights.sum(1, keepdim=True))
    fp8 = rival(dtype="given_fp8", hidden=384)
    y = fp8.plain(fp8.given) * (fp8.given.weights * fp8.factors()[fp8.given.topk_idx]).sum(1, keepdim=True)
    fp8.require_sum(y.bfloat16())
    with pytest.raises(AssertionError, match="what came home differs"):  # without its scales
        fp8.require_sum(fp8.given.x.float() * y / fp8.plain(fp8.given))


def test_rows_of_fp8_are_those_of_their_scales() -> None:
    x = torch.randn(5, 256)
    rows, scales = interface.quantized(x)
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (5, 2)
    torch.testing.assert_close(interface.dequantized(rows, scales), x, rtol=0.07, atol=0.01)


def test_a_picture_of_the_record(tmp_path: Path) -> None:
    picture.draw(json.loads(RECORD.read_text()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
