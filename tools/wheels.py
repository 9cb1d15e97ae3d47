"""Builds wheels, one for each torch and Python: dist/nccl_ep-VERSION+torch211-cp311-cp311-manylinux_2_28_x86_64.whl

    python tools/wheels.py [--torch 2.11 2.15] [--python python3.11 python3.12]

A wheel has the kernels, those for several NVLink domains too, and wants the minor release of torch it was built for.
It takes nvcc and g++ 11 or newer, and from PyPI torch, NCCL's headers and the tools of requirements/wheels.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import newer_python

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build/wheels"
OLDEST = (2, 11)
OLDEST_PYTHON = 10  # of Python 3
GIN_NCCL = ("2.30.7", "2.31.2")  # csrc/transport/nccl/gin/releases.h
NOT_INSIDE = ("libc10*", "libtorch*", "libcuda.so*")  # torch's, and the driver


def run(*command: str | Path, **environment: str) -> str:
    print("+", *command, flush=True)
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def make_venv(folder: Path, python: str, *packages: str) -> Path:
    """Its bin."""
    if not (folder / "bin/pip").exists():
        run(python, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return folder / "bin"


def pythons() -> list[str]:
    """Of each minor release the first interpreter that is here."""
    found = [each for each in newer_python.candidates(OLDEST_PYTHON) if newer_python.serves(each, OLDEST_PYTHON)]
    ask = "import sys; print(*sys.version_info[:2], sep='.')"
    return list({run(python, "-c", ask): python for python in reversed(found)}.values())[::-1]


def nccl_headers(pip: Path, version: str) -> Path:
    folder = WORK / f"nccl-{version}"
    if not folder.exists():
        run(pip, "download", "--quiet", "--no-deps", "--dest", WORK, f"nvidia-nccl-cu13=={version}")
        (wheel,) = WORK.glob(f"nvidia_nccl_cu13-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
        wheel.unlink()
    return next(folder.glob("**/nccl.h")).parent


def torches(pip: Path) -> list[str]:
    """Minor releases that are supported."""
    found = re.findall(r"(\d+)\.(\d+)\.\d+", run(pip, "index", "versions", "torch").split("Available versions:")[1])
    minors = sorted({(int(major), int(minor)) for major, minor in found})
    return [f"{major}.{minor}" for major, minor in minors if (major, minor) >= OLDEST]


def name_torch(wheel: Path, torch: str, tools: Path) -> Path:
    """The wheel in dist/ whose version and metadata name the torch that it is for."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {top for name in archive.namelist() if (top := name.split("/")[0]).endswith(".dist-info")}
    run(tools / "wheel", "unpack", "--dest", WORK / "unpacked", wheel)
    folder = WORK / "unpacked" / info.removesuffix(".dist-info")
    version = info.removesuffix(".dist-info").split("-")[1]
    local = f"{version}+torch{torch.replace('.', '')}"
    metadata = folder / info / "METADATA"
    text, count = re.subn(r"(?m)^Requires-Dist: torch\b.*$", f"Requires-Dist: torch=={torch}.*", metadata.read_text())
    assert count == 1, text
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1))
    (folder / info).rename(folder / info.replace(version, local))
    run(tools / "wheel", "pack", "--dest-dir", ROOT / "dist", folder)
    shutil.rmtree(WORK / "unpacked")
    (found,) = (ROOT / "dist").glob(wheel.name.replace(version, local, 1))
    return found


def build(bare: Path, torch: str, headers: str, tools: Path) -> None:
    for folder in (WORK / "built", WORK / "repaired"):
        shutil.rmtree(folder, ignore_errors=True)
    run(bare / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", WORK / "built", ".",
        NCCL_EP_CUDA="ON", NCCL_EP_GIN_NCCL_INCLUDE_DIRS=headers,
        NCCL_EP_GLIBC_STUBS=str(WORK / "stubs"))  # fmt: skip
    (built,) = (WORK / "built").glob("*.whl")
    excluded = [each for name in NOT_INSIDE for each in ("--exclude", name)]
    run(tools / "auditwheel", "repair", "--plat", "manylinux_2_28_x86_64", *excluded, "--wheel-dir", WORK / "repaired",
        built, PATH=f"{tools}:{os.environ['PATH']}")  # fmt: skip
    (repaired,) = (WORK / "repaired").glob("*.whl")
    print(run(bare / "python", "tools/check_wheel.py", name_torch(repaired, torch, tools), *GIN_NCCL), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", help="minor releases; default: all from 2.11 that PyPI has")
    parser.add_argument("--python", nargs="+", help="interpreters; default: one of each of 3.10 to 3.14 that is here")
    options = parser.parse_args()
    tools = make_venv(WORK / "tools", sys.executable, "-r", "requirements/wheels.txt")
    run(sys.executable, "tools/glibc_stubs.py", WORK / "stubs")
    headers = ";".join(str(nccl_headers(tools / "pip", version)) for version in GIN_NCCL)
    for torch in options.torch or torches(tools / "pip"):
        for python in options.python or pythons():
            try:
                bare = make_venv(WORK / f"{Path(python).name}-torch{torch}", python, f"torch=={torch}.*")
            except subprocess.CalledProcessError:
                print(f"torch {torch} cannot be had for {python}: no wheel for them")
                continue
            build(bare, torch, headers, tools)


if __name__ == "__main__":
    main()
