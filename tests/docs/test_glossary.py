"""docs/glossary.md: one meaning a word, and no word that went comes back."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
GONE = (
    "aim_first",
    "look_ahead",
    "greets",
    "RailPartCounters",
    "kEarlyPart",
    "ArenaSegments::Block",
    "sending half",
    "receiving half",
    "further_row_bytes",
)


def test_a_term_has_one_line() -> None:
    lines = re.findall(r"^\| ([^|]+) \| [^|]", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = Counter(term.strip() for line in lines if line != "term" for term in line.split(","))
    assert len(terms) > 80
    assert [term for term, count in terms.items() if count > 1] == []


def test_names_that_went_do_not_come_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for folder in ("csrc", "nccl_ep", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".h", ".cc", ".cu", ".cuh", ".py", ".md") and "notebook" not in path.parts
        for word in GONE
        if word in path.read_text()
    ]
    assert found == []
