"""Checks which file may know which (docs/architecture.md), where CMake's include paths cannot: the order of the folders
of csrc/, circles of includes and of imports. And that comments and documents name files that exist."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from layers import cpp, mentions, python
from layers.circles import circle

ROOT = Path(__file__).parent.parent
SUFFIXES = (*cpp.SUFFIXES, ".c", ".py", ".pyi")


def messages(root: Path, names: list[str]) -> Iterator[str]:
    """`names`: of the tree's files."""
    csrc, core = root / "csrc", root / "nccl_ep"
    texts = {path: path.read_text() for name in names if (path := root / name).suffix in SUFFIXES}
    sources = {path: text for path, text in texts.items() if csrc in path.parents}
    in_packages = {core, root / "bench"}
    packages = {p: text for p, text in texts.items() if p.suffix in (".py", ".pyi") and in_packages & set(p.parents)}
    for path, text in sources.items():
        yield from (f"{path.relative_to(root)} {fault}" for fault in cpp.faults(csrc, path, text))
    for path, text in packages.items():
        yield from (f"{path.relative_to(root)} {fault}" for fault in python.faults(core, path, text))
    for graph in (cpp.graph(csrc, sources), python.graph(root, packages)):
        if found := circle(graph):
            yield f"a circle: {found}"

    tree = mentions.Tree(root, names)
    for path in texts:
        yield from tree.faults_of_source(path)
    for name in names:
        is_page = name.startswith("docs/") and name.endswith(".md") and name.count("/") == 1
        if is_page or name.split("/")[-1] in ("README.md", "CONTRIBUTING.md"):
            yield from tree.faults_of_document(root / name)


if __name__ == "__main__":
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True, capture_output=True
    )
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    found = list(messages(ROOT, files))
    print("\n".join(found) or f"layers: {len(files)} files in order")
    sys.exit(bool(found))
