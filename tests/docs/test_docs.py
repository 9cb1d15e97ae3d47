"""The documents are true where a machine can tell: their code runs, and what they name exists."""

import os
import re
from math import comb
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.gpus import needs_gpu, several_gpus
from tests.support.processes import run_python

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOK = sorted((ROOT / "docs/notebook").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIME_LIMIT = 600  # seconds, for a block or an example
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def blocks(language: str) -> list:
    """A parameter for each block of a language, named after its document and line."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match[1] == language:
                found.append(pytest.param(match[2], id=f"{document.relative_to(ROOT)}:{line}"))
    return found


def run(*arguments: str, **variables: str) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
    done = run_python(*arguments, cwd=ROOT, environment=environment, timeout=TIME_LIMIT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("code", [block for block in blocks("python") if "LOCAL_RANK" not in block.values[0]])
def test_a_python_block_runs(code: str) -> None:
    run("-c", code)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, id="cpu"),
        pytest.param({}, marks=[*needs_gpu, several_gpus], id="gpus"),
    ],
)
def test_the_program_of_readme_prints_what_came(variables: dict[str, str], tmp_path: Path) -> None:
    """It is started by torchrun, on GPUs where there are some."""
    (code,) = [block.values[0] for block in blocks("python") if "LOCAL_RANK" in block.values[0]]
    program = tmp_path / "moe.py"
    program.write_text(code)
    text = run(*TORCHRUN, str(program), **variables)
    said = re.findall(r"rank (\d) on (\S+): (\[[\d, ]+\]) rows came for its experts", text)
    places = [["0", "cpu"], ["1", "cpu"]] if variables else [["0", "cuda:0"], ["1", "cuda:1"]]
    assert sorted([rank, place] for rank, place, _ in said) == places, text
    assert sum(sum(map(int, re.findall(r"\d+", rows))) for *_, rows in said) == 2 * 128 * 2  # ranks, tokens, choices


def test_documents_have_the_blocks_that_matter() -> None:
    names = " ".join(str(block.id) for block in blocks("python"))
    assert all(name in names for name in ("README.md", "semantics.md", "wire_format.md")), names
    for document in DOCUMENTS:
        languages = [match[1] for match in BLOCK.finditer(document.read_text())]
        assert document.read_text().count("```") == 2 * len(languages), f"{document.name}: a fence is not closed"
        unknown = set(languages) - {"python", "sh", "text"}
        assert not unknown, f"{document.name}: blocks of {unknown} would be checked by nobody"


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+(?: [\w-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    targets = {name for names in make_targets() for name in names.split()}
    shell = "\n".join(match[2] for match in BLOCK.finditer(text) if match[1] == "sh")
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    indented = re.findall(r"^    (.+)$", text, re.MULTILINE)
    missing = []
    for target in re.findall(r"^make ([\w-]+)", "\n".join([shell, *spans, *indented]), re.MULTILINE):
        if target not in targets:
            missing.append(f"make {target}")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        if not (document.parent / link).exists():
            missing.append(f"link {link}")

    # `folder/file`, or `folder/file.cc: name` for something that stands in it.
    path = r"(?:csrc|nccl_ep|tests|tools|examples|docs|cmake|bench|records)/[\w./*-]*"
    for span in [*spans, *re.findall(path, shell)]:
        match = re.fullmatch(rf"({path})(?:: (\w+))?", span)
        if match is None:
            continue
        files = list(ROOT.glob(match[1].rstrip("/")))
        if not files:
            missing.append(match[1])
        elif match[2] and not re.search(rf"\b{match[2]}\b", files[0].read_text()):
            missing.append(span)
    assert not missing, f"{document.name} names what is not there: {missing}"


def names_in(*documents: str) -> set[str]:
    return set(re.findall(r"\w+", "\n".join((ROOT / document).read_text() for document in documents)))


def test_documents_tell_every_public_name_and_method() -> None:
    """What a user may call is in the README or in the docs' semantics, DeepEP's methods in their own document."""
    import nccl_ep

    internal = {"__version__", "EpError", "Handle", "Pending", "Quant"}
    native = names_in("README.md", "docs/semantics.md")
    assert not set(nccl_ep.__all__) - internal - native
    methods = {name for name in dir(nccl_ep.Buffer) if not name.startswith("_")}
    assert not methods - native - names_in("docs/deepep.md")


LONGEST = 160  # characters of a line


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md", *NOTEBOOK], ids=lambda path: path.name)
def test_no_line_is_too_long_to_read(document: Path) -> None:
    lines = document.read_text().splitlines()
    assert not [f"{number}: {line[:60]}" for number, line in enumerate(lines, 1) if len(line) > LONGEST]


def test_every_place_has_the_version() -> None:
    """`nccl_ep/_version.py` is where it is written; the other places repeat it."""
    import nccl_ep

    assert (
        re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == nccl_ep.__version__
    )
    header = (ROOT / "csrc/include/nccl_epx.h").read_text()
    assert (
        ".".join(re.findall(r"^#define NCCL_EPX_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.MULTILINE))
        == nccl_ep.__version__
    )
    for place in ("docs/c_api.md", "examples/c/CMakeLists.txt"):
        asked = re.findall(r"find_package\(ncclep ([\d.]+)", (ROOT / place).read_text())
        assert asked == [nccl_ep.__version__.rpartition(".")[0]], place


def test_rows_that_leave_a_node_are_counted_alike() -> None:
    """By the pages on several nodes: top-8 of 256 experts, uniform, between two nodes of 8 GPUs."""
    a_rank, a_node = 8 * (1 - comb(240, 8) / comb(256, 8)), 1 - comb(128, 8) / comb(256, 8)
    (row,) = re.findall(r"^\| 2 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "docs/network.md").read_text(), re.M)
    assert row == ("4.00", f"{a_rank:.2f}", f"{a_node:.2f}")
    said = (ROOT / "docs/network_protocol.md").read_text()
    (counts,) = re.findall(r"that is ([\d.]+) row a token .*? a row a\s+rank would be ([\d.]+) and", said, re.DOTALL)
    assert counts == (f"{a_node:.2f}", f"{a_rank:.2f}")


def test_tests_that_contributing_names_exist() -> None:
    filters = re.findall(r"--gtest_filter='(\w+)\.", (ROOT / "CONTRIBUTING.md").read_text())
    sources = "\n".join(path.read_text() for path in (ROOT / "tests/cpp").glob("**/*.cc"))
    assert filters and set(filters) <= set(re.findall(r"^TEST(?:_[FP])?\((\w+),", sources, re.MULTILINE))


@pytest.mark.parametrize("options", ["", "--ranks 1", "--ranks 3 --processes"], ids=["default", "one", "processes"])
def test_the_example_of_low_latency_checks_itself(options: str) -> None:
    text = run("examples/ll_moe_layer.py", "--device", "cpu", *options.split())
    for sentence in ("rows crossed between ranks", "The transport counted the same", "as expected of bf16",
                     "the same bits every time"):  # fmt: skip
        assert sentence in text, text


LARGE = "--device cuda --tokens 4096 --hidden 7168"


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        pytest.param("", "ht", id="default"),
        pytest.param("--ranks 1 --tokens 9", "ll", id="one"),
        pytest.param("--ranks 3 --processes --tokens 1400 --hidden 512", "ht", id="processes"),
        pytest.param(LARGE, "ht", marks=needs_gpu, id="gpu"),
        pytest.param(f"{LARGE} --ranks 2 --processes", "ht", marks=[*needs_gpu, several_gpus], id="gpus"),
    ],
)
def test_the_example_of_high_throughput_checks_itself(options: str, mode: str) -> None:
    """mode: of a call of all tokens whose sizes are known."""
    text = run("examples/ht_moe_layer.py", *options.split())
    assert text.count("as expected of bf16") == 5, text
    for sentence in ('mode="auto" took "ht"', "of 4 dispatches to their final place", "gave the same bits"):
        assert sentence in text, text
    modes = re.findall(r'tokens a rank: mode="auto" took "(\w+)", y is as above', text)
    assert modes == ["ll", mode], text


@pytest.mark.parametrize(
    "start",
    [
        pytest.param((), id="threads"),
        pytest.param(TORCHRUN, id="processes"),
        pytest.param(TORCHRUN, marks=[*needs_gpu, several_gpus], id="gpus"),
    ],
)
def test_the_training_example_lowers_its_loss(start: tuple[str, ...]) -> None:
    """Processes take a GPU each where there are GPUs."""
    text = run(*start, "examples/training_layer.py")
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)
    assert len(losses) == 2 and all(float(last) < float(first) / 5 for first, last in losses), text


@pytest.mark.slow
def test_the_compiled_example_compiles_once() -> None:
    text = run("examples/compiled_moe_layer.py")
    seen = re.findall(r"(\d+) tokens: .*, (\d) compilations", text)
    assert seen == [("32", "1"), ("17", "1"), ("1", "1"), ("0", "1")], text
