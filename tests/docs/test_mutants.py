"""Mutants can be planted, the tests that are said to see them exist, and docs/mutants.md has them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT
from tests.fuzz.kinds import KINDS
from tests.mutants import COLUMNS, MUTANTS, RUNS_IT_NOT, Mutant, is_test, listed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_what_a_mutant_changes_stands_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted_in(text) != text


def exists(test: str) -> bool:
    if test.startswith("--"):
        found = re.fullmatch(r"--kinds (\w+) --seed \d+ --rounds 1", test)
        return found is not None and found[1] in KINDS
    if test.startswith("ep_tests "):
        suite, name = test.split()[1].split(".")
        head = f"TEST({suite}, {name})"
        return any(head in path.read_text() for path in (ROOT / "tests/cpp").rglob("*.cc"))
    file, *_, name = test.split("::")
    beside = (ROOT / file).parent.glob("*.py")  # where suites of several files stand
    return (ROOT / file).exists() and any(f"def {name.split('[')[0]}(" in path.read_text() for path in beside)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_column_names_a_test_or_says_why_not(mutant: Mutant) -> None:
    said = {column: mutant.seen_by(column) for column in COLUMNS}
    for text in said.values():
        why_not = text == RUNS_IT_NOT or re.fullmatch(r"not in \d+ s|not by `[\w/.]+`( and `[\w/.]+`)*", text)
        assert exists(text) if is_test(text) else why_not, text
    assert any(map(is_test, said.values())), "nothing sees it: it wants a test"


def test_make_emulated_runs_what_is_named_of_it() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nemulated:")[1].split("\n\n")[0]
    run = ("tests/gpu/test_emulated.py", *re.findall(r"tests/[\w/]+(?:\.py)?", recipe))
    named = {file for each in MUTANTS for file in re.findall(r"tests/[\w/]+\.py", each.emulated)}
    assert len(named) >= 5
    assert not [file for file in named if not file.startswith(run)]


def test_the_document_has_all_of_them() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert listed() in (ROOT / "docs/mutants.md").read_text(), "python tools/mutants.py --list prints them"


# ---- tools/mutants.py


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools/mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_tells_a_test_that_sees_a_mutant_from_one_that_does_not(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {"three": "double(3) == 6", "bad": "double(2) == 5"}
    files = {
        "doubles.py": "def double(x):\n    return 2 * x\n",
        "tests/test_doubles.py": "from doubles import double\n"
        + "".join(f"def test_{name}():\n    assert {what}\n" for name, what in tests.items()),
    }
    for name, text in files.items():
        (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sources" / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path / "sources"], check=True)
    monkeypatch.setattr(tool, "ROOT", tmp_path / "sources")
    monkeypatch.setattr(tool.Tree, "build", lambda *_: None)
    tree = tool.Tree(tmp_path / "copy", 1)

    def faults(test: str) -> list[str]:
        mutant = Mutant("m", "", "doubles.py", "2 * x", "x + 2", "", test=f"tests/test_doubles.py::{test}")
        return list(tool.faults_of(tree, mutant, ["test", "emulated"]))

    assert faults("test_three") == []
    assert faults("test_bad") == ["tests/test_doubles.py::test_bad fails without m"]
    with pytest.raises(ValueError, match="test_none did not run"):
        faults("test_none")
    monkeypatch.setattr(tool.Tree, "passes", lambda *_: True)
    assert faults("test_three") == ["tests/test_doubles.py::test_three passes with m"]
    assert (tmp_path / "copy/doubles.py").read_text() == files["doubles.py"]
