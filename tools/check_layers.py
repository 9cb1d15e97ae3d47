"""Checks the layering of csrc/ (docs/architecture.md) where CMake's include paths cannot."""

import re
import sys
from pathlib import Path

CSRC = Path(__file__).parent.parent / "csrc"
LEVEL = {"base": 0, "layout": 1, "transport": 2, "runtime": 3, "cpu": 4, "cuda": 4, "include": 4, "api": 5, "torch": 6}


def faults(path: Path, text: str) -> list[str]:
    name = path.relative_to(CSRC).as_posix()
    folder = name.split("/")[0]
    device = path.suffix in (".cu", ".cuh")
    sees_cuda = device or folder in ("cuda", "torch") or name.startswith(("transport/nccl/", "transport/device/check_cuda."))
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
        if header.endswith(".cuh") and not device:
            found.append(f"includes {header}: only .cu and .cuh are compiled by nvcc")
        if re.match(r"(cuda|nccl)(_\w+)?\.h$", header) and header != "nccl_ep.h" and not sees_cuda:
            found.append(f"includes {header}: this file is built without CUDA")

    if re.search(r"\basm\b\s*(volatile)?\s*\(", text) and name != "cuda/device/ptx.cuh":
        found.append("has an asm statement: those are in cuda/device/ptx.cuh")
    if "ncclGin" in text and "/gin/" not in name:
        found.append("uses GIN: that is for folders named gin")
    return found


paths = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cc", ".cuh", ".cu"))
messages = [f"csrc/{path.relative_to(CSRC)} {fault}" for path in paths for fault in faults(path, path.read_text())]
print("\n".join(messages) or f"layers: {len(paths)} files in order")
sys.exit(bool(messages))
