"""Rules of the Python packages: what is imported when a module is loaded, and who needs whom at all."""

import ast
from collections.abc import Iterator
from pathlib import Path

FACES = ("deep_ep", "nvidia")  # folders of nccl_ep with the names of others
ASKED_FOR = (*FACES, "integrations")  # folders that nothing else needs


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What stands in no function, and is not for type checkers alone."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield node
        if is_for_types(node):
            yield from run_at_import(node.orelse)
            continue
        for part in ("body", "orelse", "handlers", "finalbody"):
            yield from run_at_import(getattr(node, part, []))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def faults(core: Path, path: Path, text: str) -> Iterator[str]:
    """nccl_ep.deep_ep and nccl_ep.nvidia are faces over the core: the core imports without them."""
    if core not in path.parents or path.relative_to(core).parts[0] in ASKED_FOR:
        return
    for node in run_at_import(ast.parse(text).body):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        for face in FACES:
            if any(face in f"{module}.{name}".split(".") for name in names):
                yield f"imports {face} in line {node.lineno}: only inside a function, when it is asked for"


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name in it) of all imports, those inside functions and those for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")
            if node.level:
                base = base[: len(base) - node.level + is_package]
            module = ".".join([*(base if node.level else []), *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name


def graph(root: Path, texts: dict[Path, str]) -> dict[str, set[str]]:
    """Which modules a module imports, wherever it does so. A name of a package is its submodule or, else, the package's
    own: of the packages on the way only the one that is asked for counts."""
    known = {module_name(root, path): path for path in texts}
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        needed = found[name] = set()
        for module, member in imports(name, path.stem == "__init__", ast.parse(texts[path])):
            target = f"{module}.{member}" if f"{module}.{member}" in known else module
            if target in known:
                needed.add(target)
    return found
