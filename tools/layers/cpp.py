"""Rules of csrc/: the order of its folders, and what only some of them may see."""

import re
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".h", ".cc", ".cuh", ".cu")

# The folders of a folder, from below: each may include those of earlier lines, and no other of its own line. "." are
# the folder's own files. A star: the launchers of kernels, which stand above what launches have in common.
ORDER = {
    "": ["base", "layout", "transport", "runtime", "cpu cuda include", "api", "torch"],
    "layout": ["common", "ll ht", "."],
    "transport": [".", "device", "host nccl"],
    "transport/nccl": [".", "gin"],
    "runtime": ["common", "ll ht", "."],
    "cpu": ["common", "ll ht", "."],
    "cuda": ["device", "testing", "protocol", "network", "ll ht", "launch", "ll* ht*", "network*", "host"],
    "cuda/network": [".", "gin"],
    "cuda/ll": ["common", "dispatch combine", "links", "."],
    "cuda/ht": ["common", "dispatch combine", "links", "."],
    "cuda/host": [".", "one_gpu", "gin"],
    "torch": ["common", "ops", "call", "deep_ep", "."],
}
NOT_YET_ORDERED = ("runtime",)


def is_launcher(name: str) -> bool:
    return name.startswith("cuda/") and name.endswith((".cu", "_launch.cuh"))


def place(name: str, parent: str) -> str:
    """Where a file below ``parent`` stands in its order."""
    rest = name.removeprefix(f"{parent}/") if parent else name
    folder = rest.split("/")[0] if "/" in rest else "."
    if parent == "cuda" and is_launcher(name) and f"{folder}*" in " ".join(ORDER["cuda"]).split():
        return f"{folder}*"
    return "." if parent in ("cuda/ll", "cuda/ht") and is_launcher(name) else folder


def common_folder(name: str, other: str) -> str:
    shared = []
    for mine, theirs in zip(name.split("/")[:-1], other.split("/")[:-1], strict=False):
        if mine != theirs:
            break
        shared.append(mine)
    return "/".join(shared)


def against_order(name: str, header: str) -> str | None:
    """What is wrong with an include of ``header`` by ``name``, both below csrc/."""
    parent = common_folder(name, header)
    own, other = place(name, parent), place(header, parent)
    if own == other or parent in NOT_YET_ORDERED:
        return None
    level = {folder: n for n, line in enumerate(ORDER.get(parent, ())) for folder in line.split()}
    unknown = [folder for folder in (own, other) if folder not in level]
    if unknown:
        return f"csrc/{parent}: the order of its folders does not have {unknown[0]} (tools/layers/cpp.py)"
    are_apart = any({own.rstrip("*"), other.rstrip("*")} <= set(line.split()) for line in ORDER[parent])
    if level[other] < level[own] and (not are_apart or own == f"{other}*"):
        return None
    return f"in csrc/{parent}, {own} may not see {other}"


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def late_include(text: str) -> str | None:
    """An include behind the first line of code. Declarations of the C header are wrapped for C++."""
    is_behind = False
    for line in text.splitlines():
        stripped = line.strip()
        if re.match(r"#\s*include\b", stripped) and is_behind:
            return stripped
        is_behind |= bool(stripped) and not stripped.startswith(("//", "#", "/*", "*"))
    return None


def faults(csrc: Path, path: Path, text: str) -> Iterator[str]:
    name = path.relative_to(csrc).as_posix()
    folder = name.split("/")[0]
    device = path.suffix in (".cu", ".cuh")
    sees_cuda = (
        device
        or folder in ("cuda", "torch", "include")
        or name.startswith(("transport/nccl/", "transport/device/check_cuda."))
    )
    for header in includes(text):
        target = header.split("/")[0]
        if target in ("ATen", "c10", "pybind11") or header.startswith("torch/") or header == "Python.h":
            if folder != "torch":
                yield f"includes {header}: torch is for csrc/torch"
        elif (csrc / header).exists() and (fault := against_order(name, header)):
            yield f"includes {header}: {fault}"
        if header.endswith(".cuh") and not device:
            yield f"includes {header}: only .cu and .cuh are compiled by nvcc"
        if re.match(r"(cuda|nccl)(_(?!ep)\w+)?\.h$", header) and not sees_cuda:
            yield f"includes {header}: this file is built without CUDA"

    if header := late_include(text):
        yield f"has {header} in mid-file"
    if re.search(r"\basm\b\s*(volatile)?\s*\(", text) and name != "cuda/device/ptx.cuh":
        yield "has an asm statement: those are in cuda/device/ptx.cuh"
    if "ncclGin" in text and "/gin/" not in name:
        yield "uses GIN: that is for folders named gin"


def graph(csrc: Path, texts: dict[Path, str]) -> dict[str, set[str]]:
    """Which files of csrc/ a file includes."""
    return {
        path.relative_to(csrc).as_posix(): {header for header in includes(text) if (csrc / header).exists()}
        for path, text in texts.items()
    }
