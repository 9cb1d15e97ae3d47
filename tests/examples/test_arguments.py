"""Mistakes on the command lines of train and serve: one line, before a rank starts, with the argument and its value."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.moe_lm import elastic, serve, sizes, train
from examples.moe_lm.engine import Engine, Room
from examples.moe_lm.model import Model
from examples.moe_lm.one_rank import one_rank
from tests import ROOT
from tests.examples.test_checkpoint import data, save
from tests.support.processes import run_python

OF_BOTH = [
    ("--ranks 0", "--ranks is 0, must be a whole number of 1 or more"),
    ("--ranks -1", "--ranks is -1, must be a whole number of 1 or more"),
    ("--ranks two", "--ranks is two, must be a whole number of 1 or more"),
    ("--device tpu", "argument --device: invalid choice: 'tpu'"),
    ("--device cuda", "--device is cuda, "),
    ("--hidden 0", "--hidden is 0, must be a whole number of 1 or more"),
    ("--hidden 63", "--hidden is 63, must be an even multiple of --heads, 4"),
    ("--hidden 60 --heads 4", "--hidden is 60, must be an even multiple of --heads, 4"),
    ("--hidden 6 --heads 1", "--hidden is 6, rows must be multiples of 16 bytes"),
    ("--hidden 12 --heads 1 --dtype bf16", "--hidden is 12, rows must be multiples of 16 bytes"),
    ("--heads 0", "--heads is 0, must be a whole number of 1 or more"),
    ("--layers 0", "--layers is 0, must be a whole number of 1 or more"),
    ("--experts 0", "--experts is 0, must be a whole number of 1 or more"),
    ("--experts 9", "--experts is 9, must be a multiple of the 2 ranks with experts"),
    ("--experts 8 --ranks 3 --sequences 3", "--experts is 8, must be a multiple of the 3 ranks with experts"),
    ("--topk 9", "--topk is 9, must be at most 32 and at most --experts, 8"),
    ("--topk 33 --experts 64", "--topk is 33, must be at most 32 and at most --experts, 64"),
    ("--topk 0", "--topk is 0, must be a whole number of 1 or more"),
    ("--expert-inner 0", "--expert-inner is 0, must be a whole number of 1 or more"),
    ("--size huge", "argument --size: invalid choice: 'huge'"),
    ("--seed -1", "--seed is -1, must be a whole number of 0 to 4294967295"),
    ("--exchange nccl", "--exchange is nccl: nccl is none of nccl_ep, "),
    ("--exchange nccl_ep,nccl_ep", "--exchange is nccl_ep,nccl_ep, names something twice"),
    ("--exchange nccl_ep,", "--exchange is nccl_ep,:  is none of nccl_ep, "),
    ("--report {tmp}", "--report is '{tmp}', a folder; must be a file to write"),
    (f"--report {{tmp}}/{'x' * 201}", "--report: has a name of 201 bytes, must have at most 200"),
    ("--report {tmp}/file/report.json", "--report is '{tmp}/file': {tmp}/file is no folder"),
    ("--load {tmp}/saved --report {tmp}/saved/checkpoint.json {own}", "/checkpoint.json, in the checkpoint of --load"),
    ("--ranks 2147483648", "--ranks is 2147483648, must be at most 2147483647"),
    ("--hidden 16416", "--hidden is 16416, rows must be multiples of 16 bytes up to 65536"),
    ("--experts 200000", "--experts is 200000, must be at most 65534 on a rank"),
    ("--load {tmp}/nosuch", "--load is {tmp}/nosuch: {tmp}/nosuch is no folder"),
    ("--load {tmp}/file", "--load is {tmp}/file: {tmp}/file is no folder"),
    ("--load {tmp}", "--load is {tmp}: {tmp} is no checkpoint of examples.moe_lm.train: it has no checkpoint.json"),
    ("--load {tmp}/saved", "{tmp}/saved has a model of other sizes: expert_inner is 8 there and 64 here, "),
    ("--load {tmp}/cut {own}", "/0.bin has "),
    ("--no-such 1", "unrecognized arguments: --no-such 1"),
]  # fmt: skip
OF_TRAIN = [
    ("--steps 0", "--steps is 0, must be a whole number of 1 or more"),
    ("--steps 1.5", "--steps is 1.5, must be a whole number of 1 or more"),
    ("--sequences 0", "--sequences is 0, must be a whole number of 1 or more"),
    ("--sequences 2147483646", "--sequences is 2147483646: with --length 68719476672 tokens of a rank, at most 2147"),
    ("--sequences 5", "--sequences is 5, must be a multiple of the 2 ranks"),
    ("--sequences 4 --ranks 3 --experts 9", "--sequences is 4, must be a multiple of the 3 ranks"),
    ("--length 0", "--length is 0, must be a whole number of 1 or more"),
    ("--length 100000000", "--length is 100000000, must be at most 3774871, as there is no more text"),
    ("--lr 0", "--lr is 0, must be a number above 0"),
    ("--lr nan", "--lr is nan, must be a number above 0"),
    ("--lr inf", "--lr is inf, must be a number above 0"),
    ("--log-every 0", "--log-every is 0, must be a whole number of 1 or more"),
    ("--profile-at -2", "--profile-at is -2, must be a whole number of -1 or more"),
    ("--a2sgd-average -1", "--a2sgd-average is -1, must be a whole number of 0 or more"),
    ("--expert-parallel 0", "--expert-parallel is 0, must be a whole number of 1 or more"),
    ("--expert-parallel 3", "--expert-parallel is 3, must divide the 2 ranks"),
    ("--expert-parallel 4", "--expert-parallel is 4, must divide the 2 ranks"),
    ("--compile nosuch", "--compile is nosuch, which is no backend of torch"),
    ("--compile inductor --no-compile", "--compile is inductor, and --no-compile is there, too"),
    ("--fp8 --exchange nccl_ep_arrivals", "--fp8 is there, but nccl_ep_arrivals has no FP8"),
    ("--fp8 --dtype bf16 --exchange nccl_ep,all_to_all_single", "--fp8 is there, but all_to_all_single has no FP8"),
    ("--fp8 --dtype fp32", "--fp8 is there, but --dtype is fp32, must be bf16"),
    ("--dense-grads zero", "argument --dense-grads: invalid choice: 'zero'"),
    ("--save {tmp}/new --report {tmp}/new", "--report is {tmp}/new, in the checkpoint of --save, {tmp}/new: must be"),
    ("--save {tmp}/new --report {tmp}/new/a/b", "--report is {tmp}/new/a/b, in the checkpoint of --save, {tmp}/new"),
    ("--save {tmp}/file", "--save is '{tmp}/file': {tmp}/file is no folder"),
    ("--save {tmp}/file/more", "--save is '{tmp}/file/more': {tmp}/file is no folder"),
    (
        "--load {tmp}/saved --save {tmp}/saved --exchange nccl_ep,all_to_all_single {own}",
        "--load and --save are both {tmp}/saved: the second --exchange would load the first's",
    ),
]  # fmt: skip
OF_SERVE = [
    ("--requests 0", "--requests is 0, must be a whole number of 1 or more"),
    ("--rates -1", "--rates is -1, must be a number of 0 or more"),
    ("--rates 10,-1", "--rates is -1, must be a number of 0 or more"),
    ("--rates nan", "--rates is nan, must be a number of 0 or more"),
    ("--rates inf", "--rates is inf, must be a number of 0 or more"),
    ("--rates ten", "--rates is ten, must be a number of 0 or more"),
    ("--prompt 0-4", "--prompt is 0-4, must be A-B with 1 <= A <= B"),
    ("--prompt 9-4", "--prompt is 9-4, must be A-B with 1 <= A <= B"),
    ("--prompt some", "--prompt is some, must be A-B with 1 <= A <= B"),
    ("--prompt 1-2000000", "--prompt is 2000000, must be at most 419429, as there is no more text"),
    ("--output 0-4", "--output is 0-4, must be A-B with 1 <= A <= B"),
    ("--output 4-2147483648", "--output is 4-2147483648, must be at most 2147483647"),
    ("--output 4-", "--output is 4-, must be A-B with 1 <= A <= B"),
    ("--prefill-batch 1000000000", "--prefill-batch is 1000000000: with --prompt 32000000000 tokens, at most 21474836"),
    ("--slots 0", "--slots is 0, must be a whole number of 1 or more"),
    ("--slots -2", "--slots is -2, must be a whole number of 1 or more"),
    ("--slots 3 --overlap on", "--slots is 3, must be a multiple of 2 for --overlap on"),
    ("--prefill-batch 0", "--prefill-batch is 0, must be a whole number of 1 or more"),
    ("--max-length 0", "--max-length is 0, must be a whole number of 1 or more"),
    ("--prompt 8-32 --output 4-16 --max-length 32", "--max-length is 32, prompt and output need 49"),
    ("--prompt 8-32 --output 4-500 --max-length 64", "--max-length is 64, prompt and output need 533"),
    ("--overlap maybe", "--overlap is maybe: maybe is none of off, on"),
    ("--overlap on --exchange deep_ep", "--overlap is on, but nccl_ep is not in --exchange"),
    ("--rebalance 5 --exchange nccl_ep,deep_ep", "--rebalance is 5, but --exchange is nccl_ep,deep_ep"),
    ("--rebalance 5 --copies 9", "--copies is 9, must be at most 4: a rank has an expert once"),
    ("--check -1", "--check is -1, must be a whole number of 0 or more"),
    ("--check 4 --exchange deep_ep", "--check is 4, but nccl_ep is not in --exchange"),
    ("--check 4 --load {tmp}/saved {own}", "--check is 4, it compares seeded weights, without --load"),
    ("--log-every 0", "--log-every is 0, must be a whole number of 1 or more"),
    ("--gap -0.5", "--gap is -0.5, must be a number of 0 or more"),
    ("--mode ll", "argument --mode: invalid choice: 'll'"),
]  # fmt: skip
OWN = "--hidden 16 --layers 1 --heads 2 --experts 4 --expert-inner 8 --shared-inner 8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file, a checkpoint of other sizes and one that was cut."""
    found = tmp_path_factory.mktemp("arguments")
    (found / "file").write_text("")
    save(found / "saved", 1)
    shutil.copytree(found / "saved", found / "cut")
    data(found / "cut").write_bytes(b"")
    return found


@pytest.mark.parametrize(("arguments", "text"), [*OF_BOTH, *OF_TRAIN])
def test_train_says_what_is_wrong(arguments: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(train, arguments, text, folder, capsys)


@pytest.mark.parametrize(("arguments", "text"), [*OF_BOTH, *OF_SERVE])
def test_serve_says_what_is_wrong(arguments: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(serve, arguments.replace("--sequences 3", ""), text, folder, capsys)


def assert_refused(program: Any, arguments: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"tmp": folder, "own": OWN}
    with pytest.raises(SystemExit) as ended:
        program.parse(["--device", "cpu", *arguments.format(**names).split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"python -m {program.__name__}: ") and text.format(**names) in line


@pytest.mark.parametrize(
    ("name", "count", "text"),
    [
        ("", "two", "RANK is set and WORLD_SIZE is 'two': torchrun sets both"),
        ("", "", "RANK is set and WORLD_SIZE is '': torchrun sets both"),
        ("", "0", "RANK is 0, must be less than WORLD_SIZE, 0"),
        ("--ranks 3", "2", "--ranks is 3, torchrun has started 2"),
        ("", "3", "--experts is 8, must be a multiple of the 3"),
    ],
)
def test_ranks_of_torchrun_refuse_the_same(
    name: str, count: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(SystemExit):
        serve.parse(["--device", "cpu", *name.split()])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "text"),
    [
        ("ll_moe_layer", "--ranks 0", "--ranks is 0, must be 1 or more"),
        ("ht_moe_layer", "--tokens -1", "--tokens is -1, must be 1 or more"),
        ("ht_moe_layer", "--hidden 7", "--hidden is 7, must be a multiple of 8"),
        ("two_nodes", "", "torchrun starts this program on every node"),
    ],
)
def test_small_examples_say_what_is_wrong(
    program: str, arguments: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / f"{program}.py"
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 2 and f"{path.name}: error: {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--kills x", "--kills is x, must be a whole number of 0 or more"),
        ("--deadline nan", "--deadline is nan, must be a number above 0"),
        ("--ranks 1", "--kills is 1, must be 0 for 1 rank: another one must live"),
        ("--exchange deep_ep", "--exchange is deep_ep, must be nccl_ep"),
        ("--rates 1,2.5", "--rates is 1,2.5, must be one"),
        ("--log-every 3", "--log-every is there, but this program has it not: see --help"),
        ("--report r.json", "--report is there, but this program has it not: see --help"),
    ],
)
def test_elastic_says_what_is_wrong(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic.parse(["--device", "cpu", *arguments.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"python -m examples.moe_lm.elastic: {text}"


def test_elastic_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic.parse(["--help"])
    said = capsys.readouterr().out
    assert "--kills" in said and "python -m examples.moe_lm.serve" in said


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK | os.X_OK)
    assert_refused(train, "--save {tmp}", "--save is '{tmp}': {tmp} cannot be written to", tmp_path, capsys)


def test_what_is_right_is_taken(folder: Path) -> None:
    options = train.parse(f"--device cpu --load {folder}/saved --save {folder}/saved {OWN} --steps 1".split())
    assert (options.steps, options.load) == (1, f"{folder}/saved")
    assert train.parse(["--device", "cpu", "--save", f"{folder}/new/er", "--report", "r.json"]).report == "r.json"
    arguments = "--rates 0,10,2.5 --prompt 7 --output 1-1 --overlap off,on"
    options = serve.parse(["--device", "cpu", *arguments.split()])
    assert (options.rates, options.prompt, options.output) == ([0.0, 10.0, 2.5], (7, 7), (1, 1))
    assert options.overlap == ["off", "on"]


def test_no_rank_starts_where_a_folder_is_missing(tmp_path: Path) -> None:
    program = ("-m", "examples.moe_lm.train", "--device", "cpu", "--load", str(tmp_path / "nosuch"))
    done = run_python(*program, environment=os.environ, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == f"python -m examples.moe_lm.train: --load is {tmp_path}/nosuch: {tmp_path}/nosuch is no folder\n"
    )


def test_what_no_memory_holds_is_named() -> None:
    options = serve.parse(["--device", "cpu", "--ranks", "1"])
    model = Model(sizes.sizes_of(options, "cpu", 1))
    with pytest.raises(MemoryError, match=r"no room for 2147483647 slots \(--slots\) of 1048576 tokens \(--max-length"):
        Engine(model, Room(2**31 - 1, 1 << 20, 1, 8), one_rank, [one_rank], graphs=False)


@pytest.mark.parametrize("program", [serve, train])
def test_python_may_leave_texts_out_of_programs(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -OO``."""
    monkeypatch.setattr(program, "__doc__", None)
    with pytest.raises(SystemExit):
        program.parse(["--device", "cpu", "--seed", "-1"])
    assert "--seed is -1" in capsys.readouterr().err
