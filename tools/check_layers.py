"""Checks the layering of csrc/ (docs/architecture.md) where CMake's include paths cannot, and of nccl_ep/."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "nccl_ep"
LEVEL = {"base": 0, "layout": 1, "transport": 2, "runtime": 3, "cpu": 4, "cuda": 4, "include": 4, "api": 5, "torch": 6}

CUDA_LEVEL = {
    "device": 0,
    "testing": 1,
    "protocol": 2,
    "network": 3,
    "ll": 4,
    "ht": 4,
    "launch": 5,
    "bench": 6,
    "host": 7,
}


def cuda_level(name: str) -> int:
    """Launchers of kernels stand above what launches have in common, their kernels below it."""
    folder = name.split("/")[1]
    is_launcher = folder in ("ll", "ht", "network") and (name.endswith((".cu", "_launch.cuh")))
    return CUDA_LEVEL["launch"] + 1 if is_launcher else CUDA_LEVEL[folder]


def crosses_cuda_order(name: str, header: str) -> bool:
    if not (name.startswith("cuda/") and header.startswith("cuda/")):
        return False
    own, other = cuda_level(name), cuda_level(header)
    apart = {name.split("/")[1], header.split("/")[1]} == {"ll", "ht"}
    return other > own or apart


def faults(path: Path, text: str) -> list[str]:
    name = path.relative_to(CSRC).as_posix()
    folder = name.split("/")[0]
    device = path.suffix in (".cu", ".cuh")
    sees_cuda = (
        device or folder in ("cuda", "torch") or name.startswith(("transport/nccl/", "transport/device/check_cuda."))
    )
    found = []

    for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
        target = header.split("/")[0]
        if target in ("ATen", "c10", "pybind11") or header.startswith("torch/") or header == "Python.h":
            if folder != "torch":
                found.append(f"includes {header}: torch is for csrc/torch")
        elif target in LEVEL and (CSRC / header).exists():
            same_level = target != folder and LEVEL[target] == LEVEL[folder]
            if LEVEL[target] > LEVEL[folder] or same_level:
                found.append(f"includes {header}: {folder} may not see {target}")
        if crosses_cuda_order(name, header):
            found.append(f"includes {header}: against the order of the folders of csrc/cuda")
        if header.endswith(".cuh") and not device:
            found.append(f"includes {header}: only .cu and .cuh are compiled by nvcc")
        if re.match(r"(cuda|nccl)(_\w+)?\.h$", header) and header != "nccl_ep.h" and not sees_cuda:
            found.append(f"includes {header}: this file is built without CUDA")

    if re.search(r"\basm\b\s*(volatile)?\s*\(", text) and name != "cuda/device/ptx.cuh":
        found.append("has an asm statement: those are in cuda/device/ptx.cuh")
    if "ncclGin" in text and "/gin/" not in name:
        found.append("uses GIN: that is for folders named gin")
    return found


def run_at_import(body: list[ast.stmt]) -> list[ast.stmt]:
    """What stands in no function, and is not for type checkers alone."""
    found = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        found.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found += run_at_import(node.orelse)
            continue
        for part in ("body", "orelse", "handlers", "finalbody"):
            found += run_at_import(getattr(node, part, []))
    return found


def python_faults(path: Path, text: str) -> list[str]:
    """nccl_ep.deep_ep is a face over the core: the core imports without it."""
    if PACKAGE / "deep_ep" in path.parents:
        return []
    found = []
    for node in run_at_import(ast.parse(text).body):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if any("deep_ep" in f"{module}.{name}".split(".") for name in names):
            found.append(f"imports deep_ep in line {node.lineno}: only inside a function, when it is asked for")
    return found


paths = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cc", ".cuh", ".cu"))
messages = [f"{path.relative_to(ROOT)} {fault}" for path in paths for fault in faults(path, path.read_text())]
modules = sorted(PACKAGE.rglob("*.py"))
messages += [f"{path.relative_to(ROOT)} {fault}" for path in modules for fault in python_faults(path, path.read_text())]
print("\n".join(messages) or f"layers: {len(paths)} + {len(modules)} files in order")
sys.exit(bool(messages))
