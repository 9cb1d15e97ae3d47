"""Gathers the pages of the site, docs/ and what it links to, and writes those that are made from the sources.

    python -m tools.site.pages FOLDER

FOLDER has the tree of the sources, so links stay as they are. README.md is the page `index` there.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from .header import page_of

ROOT = Path(__file__).parents[2]
HEADERS = {"reference/c": "csrc/include/nccl_ep.h", "reference/c_added": "csrc/include/nccl_epx.h"}

# The table of contents: every page is in one place.
NAVIGATION = {
    "Guides": [
        "docs/installing", "docs/tutorial", "docs/training", "docs/placement", "docs/elastic", "docs/network",
        "docs/c_api", "docs/migrating_from_deepep", "docs/migrating_from_nccl_ep", "docs/frameworks", "docs/report",
    ],
    "Reference": [
        "reference/nccl_ep", "reference/deep_ep", "reference/placement", "reference/testing", "reference/c",
        "reference/c_added", "docs/semantics", "docs/deepep", "docs/glossary", "docs/security",
    ],
    "What has run": [
        "docs/status", "docs/performance", "docs/network_tests", "docs/example_model",
        "docs/comparison", "docs/benchmarks",
    ],
    "How it works": [
        "docs/architecture", "docs/wire_format", "docs/network_protocol", "docs/memory_model", "docs/adding_an_option",
        "CONTRIBUTING", "docs/mutants",
    ],
    "History": ["CHANGELOG", "docs/notebook/README"],
}  # fmt: skip
MODULES = {
    "nccl_ep": "The two operations and the buffer. [Semantics](../docs/semantics.md) says what they promise.",
    "nccl_ep.deep_ep": "The names of DeepEP's V1, V2 and Hybrid-EP. [DeepEP's methods](../docs/deepep.md) compares.",
    "nccl_ep.placement": "Experts that move. [The guide](../docs/placement.md) has the whole step.",
    "nccl_ep.testing": "Ranks as threads of one process: for tests, notebooks and debuggers.",
}
NOT_HERE = {  # names that another of the pages has
    "nccl_ep": ("Config", "topk_idx_t", "__version__"),
    "nccl_ep.deep_ep": ("EventHandle", "EventOverlap"),
}


def sources() -> list[Path]:
    """Of the site, below ROOT: pages, the pictures that they show, and traces for Perfetto."""
    folders = [ROOT / "docs", ROOT / "records/plots"]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".svg", ".png", ".gz")]
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(found)


def index(text: str) -> str:
    """README.md with the table of contents."""
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in NAVIGATION.items()
    ]
    return "\n".join([text, *trees])


def notebook(text: str) -> str:
    """The notebook's first page with its others below it."""
    return text + "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def names_of(module: str) -> list[str]:
    """The public names of a module, as `NOT_HERE` leaves them."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module
    ]  # fmt: skip
    return [name for name in names if name not in NOT_HERE.get(module, ())]


def kind_of(value: Any) -> str:
    if inspect.isclass(value):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions" if callable(value) else "Constants"


def described(module: str, name: str, value: Any) -> str:
    """What Sphinx is told of a name."""
    whole = f"{module}.{name}"
    if kind_of(value) == "Constants":
        return f".. py:data:: {whole}\n   :value: {value!r}\n\n   {comment_of(name)}\n"
    if kind_of(value) == "Functions":
        return f".. autofunction:: {whole}\n"
    if kind_of(value) == "Errors":
        return f".. autoexception:: {whole}\n"
    inherited = "" if issubclass(value, enum.Enum) else "   :inherited-members:\n"
    return f".. autoclass:: {whole}\n   :members:\n{inherited}"


def comment_of(name: str) -> str:
    """Of a constant: the comment beside it or above it, where the package defines it."""
    pattern = re.compile(rf"((?:^# [^\n]*\n)*)^{name} = [^#\n]*(?:# ([^\n]*))?$", re.MULTILINE)
    for path in sorted((ROOT / "nccl_ep").rglob("*.py")):
        if match := pattern.search(path.read_text(encoding="utf-8")):
            return match[2] or " ".join(line.lstrip("# ") for line in match[1].splitlines())
    raise LookupError(f"{name} is defined nowhere in nccl_ep")


def python_page(module: str) -> str:
    values = {name: getattr(importlib.import_module(module), name) for name in names_of(module)}
    parts = [f"# {module}\n\n{MODULES[module]}\n"]
    for kind in ("Functions", "Classes", "Errors", "Constants"):
        texts = [described(module, name, value) for name, value in values.items() if kind_of(value) == kind]
        if texts:
            parts.append(f"## {kind}\n\n```{{eval-rst}}\n" + "\n".join(texts) + "```\n")
    return "\n".join(parts)


def main(folder: Path) -> None:
    for path in sources():
        name = path.relative_to(ROOT)
        target = folder / ("index.md" if name == Path("README.md") else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, target)
            continue
        text = path.read_text(encoding="utf-8").replace("](../README.md", "](../index.md")
        text = index(text) if name == Path("README.md") else text
        target.write_text(notebook(text) if name == Path("docs/notebook/README.md") else text, encoding="utf-8")
    (folder / "reference").mkdir(exist_ok=True)
    for page, path in HEADERS.items():
        text = page_of((ROOT / path).read_text(encoding="utf-8"), Path(path).name)
        (folder / f"{page}.md").write_text(text, encoding="utf-8")
    for module in MODULES:
        (folder / f"reference/{module.rpartition('.')[2]}.md").write_text(python_page(module), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
