"""The committed pictures are what their script makes, and each is shown somewhere."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = next(parent for parent in Path(__file__).resolve().parents if (parent / "pyproject.toml").is_file())
FOLDER = ROOT / "docs/pictures"
MADE = runpy.run_path(str(FOLDER / "make_pictures.py"))["PICTURES"]


@pytest.mark.parametrize("name", sorted(MADE))
def test_picture_is_what_the_script_makes(name: str) -> None:
    text = MADE[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == text, "run python docs/pictures/make_pictures.py"
    assert float(ElementTree.fromstring(text).attrib["width"]) <= 900, "wider than a README is shown"


def test_every_picture_has_its_script_and_a_place() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(MADE)
    shown = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert all(f"pictures/{name}" in shown for name in MADE)
