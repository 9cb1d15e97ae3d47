"""Figures in the documents come from records: the files that they name exist, and the comparison has the record's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = next(parent for parent in Path(__file__).resolve().parents if (parent / "pyproject.toml").is_file())
RECORDS = ROOT / "records"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NAMES = {"NCCL EP": "nccl_ep_nvidia", "FlashInfer": "flashinfer", "torch": "torch_all_to_all", "nccl_ep": "nccl_ep"}


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


FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])")


def figures_in(cell: str) -> list[str]:
    """Numbers that are measurements: no code, no numbers of SMs."""
    plain = re.sub(r"`[^`]*`|FP8|BF16|DeepEP V1|\(\d[^)]*SMs?\)", "", cell)
    return [figure.replace(",", "") for figure in FIGURE.findall(plain)]


def tables(text: str) -> list[list[list[str]]]:
    """Of each table its rows, heads first, without the line below them."""
    found = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)
    split = [
        [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in each.splitlines()] for each in found
    ]
    return [[each[0], *each[2:]] for each in split]


def test_comparison_with_deepep_has_the_figures_of_its_record() -> None:
    """README's sentence too, whose figures are those of the table."""
    records = json.loads((RECORDS / "rivals_4xh100_2026-11-28.json").read_text())
    assert all(record["source"] for record in records)
    _, after = (ROOT / "docs/performance.md").read_text().split("\n## Beside DeepEP V1\n")
    rows = tables(after.split("\n## ")[0])[0][1:]
    cells = [pair for row in rows for pair in zip(("nccl_ep", "deepep_v1"), row[1:], strict=True)]
    assert len(cells) >= 20
    said = re.search(r"DeepEP V1 takes ([\d.]+), .* takes ([\d.]+), and ([\d,]+) where .* takes ([\d,]+)",
                     (ROOT / "README.md").read_text().replace("\n", " "))  # fmt: skip
    assert said
    cells += zip(("deepep_v1", "nccl_ep", "deepep_v1", "nccl_ep"), said.groups(), strict=True)
    for system, cell in cells:
        for figure in figures_in(cell):
            values = [
                (record["value"], record.get("most"))
                for record in records
                if record["system"] == system and record["figure"] != "kernel"
            ]
            assert any(float(figure) in each for each in values), (cell, system, figure)


def sections(document: str) -> list[Any]:
    """A parameter for each section whose tables are measurements."""
    parts = re.split(r"^## (.*)$", (ROOT / document).read_text(), flags=re.MULTILINE)
    return [pytest.param(body, id=name) for name, body in zip(parts[1::2], parts[2::2], strict=True) if tables(body)]


def is_of(record: dict[str, Any], row: str, column: str, dtype: str | None) -> bool:
    """Whether a record can be what stands in that row and column: by operation, tokens, machine, layout, dtype."""
    words = f"{row} {column}"
    operations = {"dispatch": "dispatch", "cached": "dispatch", "combine": "combine", "both": "pair", "window": "pair"}
    wanted = {operation for word, operation in operations.items() if word in words}
    layouts = {layout for layout in ("expert_major", "flat", "packed") if layout in words}
    said = re.search(r"(?<!\w)([\d,]+) tokens", words) or re.fullmatch(r"(\d+)", column)
    machine = re.search(r"(two|four) (H\d00)s", words)
    kinds = {
        "eager": ("event", "queued"),
        "kernels": ("kernel",),
        "altogether": ("memory_total",),
        "window": ("memory",),
        "MB": ("memory",),
        "us": ("host", "event", "queued"),
    }
    kind = next((kind for word, kind in kinds.items() if word in words.split()), ("graph", "graph_pdl"))
    return (
        ("launch" in row or not wanted or record["bench"] == "memory" or record["op"].split()[0].rstrip(",") in wanted)
        and (not said or record["tokens"] == int(said[1].replace(",", "")))
        and (not machine or (record["ranks"], machine[2] in record["device"]) == ((2, 4)[machine[1] == "four"], True))
        and (len(layouts) != 1 or record["layout"] in layouts)
        and (dtype is None or record["dtype"] == dtype)
        and ("FP8 already" not in words or record["dtype"] == "given_fp8")
        and record["system"] == NAMES.get(column, record["system"])
        and record.get("cached", False) in (None, "cached" in words)
        and (column.strip('`"') not in ("bf16", "fp8", "logfmt") or record.get("wire") == column.strip('`"'))
        and record["figure"] in kind
        and (record["system"] == "floor_wire") == (column == "floor")
    )


@pytest.mark.parametrize("section", sections("docs/performance.md"))
def test_performance_has_the_figures_of_the_records_it_names(section: str) -> None:
    named = set(re.findall(r"`(\w+_20\d\d-\d\d-\d\d\w?\.json)`", section))
    assert named, "tables without a record"
    records = [record for file in named for record in json.loads((RECORDS / file).read_text())]
    if any(record["system"] == "deepep_v1" for record in records):
        return  # the test above has it
    for heads, *rows in tables(section):
        machine = ""
        for name, *cells in rows:
            machine = (re.findall(r"(?:two|four) H\d00s", name) or [machine])[0]
            for column, cell in zip(heads[1:], cells, strict=True):
                if column in ("SMs", "record"):
                    continue
                row = f"{machine} {name} {heads[0]}"
                figures = figures_in(cell)
                for place, figure in enumerate(figures):
                    both = "BF16; FP8" in f"{name} {column}" and len(figures) == 2
                    dtype = ("bf16", "fp8")[place] if both else None
                    half = 0.5 * 10 ** -len(figure.partition(".")[2])
                    known = [record["value"] for record in records if is_of(record, row, column, dtype)]
                    assert any(abs(value - float(figure)) <= half * 1.001 for value in known), (name, column, figure)
