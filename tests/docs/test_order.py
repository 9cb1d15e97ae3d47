"""Files that take longest begin before all others (tests/conftest.py), whatever order pytest found them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import ROOT
from tests.conftest import LONGEST, pytest_collection_modifyitems


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_the_longest_files_come_first_and_the_rest_as_before() -> None:
    found = ["api/test_b.py", *LONGEST[::-1], "api/test_a.py"]
    items: list[Any] = [SimpleNamespace(path=ROOT / "tests" / name, of=(name, i)) for name in found for i in range(2)]
    pytest_collection_modifyitems(items)
    wanted = [*LONGEST, "api/test_b.py", "api/test_a.py"]
    assert [item.of for item in items] == [(name, i) for name in wanted for i in range(2)]
