"""Paths that comments and documents name exist, and so does a name behind one: `csrc/base/check.h: raise`."""

import ast
import fnmatch
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("csrc", "nccl_ep", "bench", "tests", "tools", "examples", "docs", "cmake", "records")
FILE = r"(?:[\w*-]+/)*[\w*-]+\.(?:h|cc|cu|cuh|c|py|md|sh|cmake)(?![\w/*-])"
IN_FOLDER = rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]"
MENTION = re.compile(rf"(?<![\w./*<~{{-])({FILE}|{IN_FOLDER})(?:: (\w+))?")

# What others have, what is built, and names that stand for any file.
EXCEPTIONS = ("cuda.h", "nccl.h", "nccl_device.h", "nccl_ep/_C", "folder/file.cc", "tests/api/test_x.py")
ABOUT_OTHERS = ("tests/deep_ep/test_callers.py", "tests/frameworks/")


def comments(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and docstrings."""
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            if comment := re.search(r"(?<!:)//.*", line):
                yield number, comment[0]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_docstring and (docstring := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, docstring


class Tree:
    """The files of a tree, found by their whole path or by its end."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self.folders = {parent.as_posix() for name in names for parent in Path(name).parents}
        self.by_end: dict[str, list[str]] = {}
        for name in names:
            parts = name.split("/")
            for n in range(len(parts)):
                self.by_end.setdefault("/".join(parts[n:]), []).append(name)

    def find(self, mention: str) -> list[str]:
        mention = mention.rstrip("/.")
        if "*" in mention:
            return fnmatch.filter([*self.by_end, *self.folders], mention)
        return self.by_end.get(mention, []) or [mention] * (mention in self.folders)

    def has(self, file: str, name: str) -> bool:
        path = self.root / file
        return path.is_file() and re.search(rf"\b{name}\b", path.read_text()) is not None

    def faults(self, text: str) -> Iterator[str]:
        for mention, name in MENTION.findall(text):
            if mention in EXCEPTIONS:
                continue
            found = self.find(mention)
            if not found:
                yield f"names {mention}, which does not exist"
            elif name and not any(self.has(file, name) for file in found):
                yield f"names {mention}: {name}, but {name} is not in it"

    def faults_of_source(self, path: Path) -> Iterator[str]:
        """Of comments."""
        name = path.relative_to(self.root).as_posix()
        if not name.startswith(ABOUT_OTHERS):
            for line, comment in comments(path, path.read_text()):
                yield from (f"{name}:{line} {fault}" for fault in self.faults(comment))

    def faults_of_document(self, path: Path) -> Iterator[str]:
        """Documents name files of others too: only paths from a folder of ours count."""
        for line, text in enumerate(path.read_text().splitlines(), 1):
            ours = " ".join(match[0] for match in MENTION.finditer(text) if match[1].split("/")[0] in FOLDERS)
            yield from (f"{path.relative_to(self.root)}:{line} {fault}" for fault in self.faults(ours))
