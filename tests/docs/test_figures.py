"""Figures in the documents come from records: the files that they name exist, and the comparison has the record's."""

import json
import re
from pathlib import Path

import pytest

ROOT = next(parent for parent in Path(__file__).resolve().parents if (parent / "pyproject.toml").is_file())
RECORDS = ROOT / "records"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SYSTEMS = ("nccl_ep", "deepep_v1", "nccl_ep_nvidia")  # the columns of the comparison


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_records_and_links_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`(?:records/)?(\w+_20\d\d-\d\d-\d\d\w?\.json)`", text)
    missing = {name for name in named if not (RECORDS / name).exists()}
    missing |= {link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (document.parent / link).exists()}
    assert not missing, f"{document.name} names what is not there: {missing}"


def test_every_record_is_named() -> None:
    """By a document, or by what computes with it: a record that nobody reads goes."""
    texts = [path.read_text() for path in (*DOCUMENTS, *(ROOT / "bench").glob("*.py"))]
    kept = sorted(RECORDS.glob("**/*.json"))
    assert kept and not [path.name for path in kept if not any(path.name in text for text in texts)]


@pytest.mark.parametrize("document", ["README.md", "docs/performance.md"])
def test_comparison_has_the_figures_of_its_record(document: str) -> None:
    records = json.loads((RECORDS / "rivals_2xh100_2026-11-25.json").read_text())
    assert all(record["source"] for record in records)
    known = {
        system: {
            record[name]
            for record in records
            if record["system"] == system
            for name in ("value", "most")
            if name in record
        }
        for system in SYSTEMS
    }
    (table,) = re.findall(
        r"^\|[^\n]*DeepEP V1[^\n]*NCCL EP[^\n]*\n\|-.*\n((?:\|.*\n)+)", _first_part(document), re.MULTILINE
    )
    rows = table.splitlines()
    assert len(rows) >= 4
    for row in rows:
        for system, cell in zip(SYSTEMS, row.strip("|").split("|")[1:], strict=True):
            figures = {
                float(figure.replace(",", "")) for figure in re.findall(r"(?<![\w.])\d[\d,]*\d(?:\.\d+)?|\d\.\d", cell)
            }
            assert figures <= known[system], (row, system, figures - known[system])


def _first_part(document: str) -> str:
    """Up to the first table but one that names the three."""
    return (ROOT / document).read_text().partition("## Try it")[0].partition("## Low latency")[0]
