"""Builds wheels, one for each torch and Python: dist/nccl_ep-VERSION+torch211-cp311-cp311-manylinux_2_28_x86_64.whl

    python tools/wheels.py [--torch 2.11 2.15] [--python python3.11 python3.12] [--architectures 90a] [--list]

A wheel has the kernels, those for several NVLink domains too, and wants the minor release of torch it was built for.
The kernels and what else knows neither torch nor Python are compiled once, for all wheels; the extension for each.
It takes nvcc and g++ 11 or newer, and from PyPI torch, NCCL's headers and the tools of requirements/wheels.txt.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import newer_python

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build/wheels"
SHARED = WORK / "shared"  # the build directory of what all wheels have in common
OLDEST = (2, 11)
OLDEST_PYTHON = 10  # of Python 3
NCCL = "2.28.9"  # the oldest that is supported: kernels compiled with its headers run with every newer one
GIN_NCCL = ("2.30.7", "2.31.2")  # csrc/transport/nccl/gin/releases.h
ARCHITECTURES = ("90a", "100a", "103a", "120a")  # of a release
PLATFORM = "manylinux_2_28_x86_64"
SIDE_BY_SIDE = 2  # wheels of one torch: one links, packs and checks while another compiles
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


def make_bare(uv: Path, folder: Path, minor: str, python: str, torch: str) -> Path:
    """An environment with that torch. Its bin. What uv has unpacked once is linked into those of other Pythons."""
    environment, cache = folder / minor, str(folder / "cache")
    run(python, "-m", "venv", environment)
    run(uv, "pip", "install", "--quiet", "--python", environment, f"torch=={torch}.*", UV_CACHE_DIR=cache)
    return environment / "bin"


# --- What is built ----------------------------------------------------------------------------------------------------


def pythons() -> list[str]:
    """Of each minor release the first interpreter that is here."""
    return [each for each in newer_python.candidates(OLDEST_PYTHON) if newer_python.serves(each, OLDEST_PYTHON)]


def minor_of(python: str) -> str:
    """ "3.12" """
    return run(python, "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()


def torches(pip: Path, minor: str) -> list[str]:
    """Minor releases that are supported, of those that PyPI has for that Python."""
    said = run(pip, "index", "versions", "torch", "--python-version", minor, "--only-binary=:all:")
    found = re.findall(r"(\d+)\.(\d+)\.\d+", said.split("Available versions:")[1])
    minors = sorted({(int(major), int(minor)) for major, minor in found})
    return [f"{major}.{minor}" for major, minor in minors if (major, minor) >= OLDEST]


def matrix(torch: list[str] | None, python: dict[str, str], found: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """(torch, minor release of Python, interpreter) of each wheel. torch: those that are wanted; None: all. python:
    from minor release to interpreter. found: the torches of each."""
    every = {each for mine in found.values() for each in mine}
    if torch is not None and not every.issuperset(torch):
        raise ValueError(f"--torch {' '.join(torch)}: PyPI has {' '.join(sorted(every, key=_number))}")
    return [
        (each, minor, python[minor])
        for each in sorted(torch or every, key=_number)
        for minor in sorted(python, key=_number)
        if each in found[minor]
    ]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# --- Building ---------------------------------------------------------------------------------------------------------


def nccl_headers(pip: Path, version: str) -> Path:
    folder = WORK / f"nccl-{version}"
    if not folder.exists():
        run(pip, "download", "--quiet", "--no-deps", "--dest", WORK, f"nvidia-nccl-cu13=={version}")
        (wheel,) = WORK.glob(f"nvidia_nccl_cu13-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
        wheel.unlink()
    return next(folder.glob("**/nccl.h")).parent


def options_of_all(pip: Path, architectures: list[str]) -> dict[str, str]:
    """CMake's, for what is shared and for the extensions."""
    return {
        "NCCL_EP_CUDA": "ON",
        "NCCL_EP_CUDA_ARCHS": ";".join(architectures),
        "NCCL_EP_NCCL_INCLUDE_DIR": str(nccl_headers(pip, NCCL)),
        "NCCL_EP_GLIBC_STUBS": str(WORK / "stubs"),
    }


def as_arguments(options: dict[str, str]) -> list[str]:
    return [f"-D{name}={value}" for name, value in options.items()]


def build_shared(tools: Path, options: dict[str, str]) -> None:
    """The core, the kernels, and the GIN libraries."""
    run(sys.executable, "tools/glibc_stubs.py", WORK / "stubs")
    headers = ";".join(str(nccl_headers(tools / "pip", version)) for version in GIN_NCCL)
    only = {
        f"NCCL_EP_{name}": "OFF" for name in ("BUILD_PYTHON", "BUILD_TESTS", "BUILD_C_LIBRARY", "IN_PLACE", "WERROR")
    }
    only["NCCL_EP_GIN_NCCL_INCLUDE_DIRS"] = headers
    run(tools / "cmake", "-S", ROOT, "-B", SHARED, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        *as_arguments(options | only))  # fmt: skip
    run(tools / "cmake", "--build", SHARED, "--target", "all", "ep_api", "ep_cuda")


def name_torch(wheel: Path, torch: str, tools: Path, work: Path) -> Path:
    """The wheel in dist/ whose version and metadata name the torch that it is for. work: a folder for it."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {top for name in archive.namelist() if (top := name.split("/")[0]).endswith(".dist-info")}
    run(tools / "wheel", "unpack", "--dest", work / "unpacked", wheel)
    folder = work / "unpacked" / info.removesuffix(".dist-info")
    version = info.removesuffix(".dist-info").split("-")[1]
    local = f"{version}+torch{torch.replace('.', '')}"
    metadata = folder / info / "METADATA"
    text, count = re.subn(r"(?m)^Requires-Dist: torch\b.*$", f"Requires-Dist: torch=={torch}.*", metadata.read_text())
    assert count == 1, text
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1))
    (folder / info).rename(folder / info.replace(version, local))
    (ROOT / "dist").mkdir(exist_ok=True)
    run(tools / "wheel", "pack", "--dest-dir", ROOT / "dist", folder)
    (found,) = (ROOT / "dist").glob(wheel.name.replace(version, local, 1))
    return found


def build(bare: Path, torch: str, tools: Path, options: dict[str, str], work: Path) -> Path:
    """The wheel for the torch of the environment `bare`. work: an empty folder."""
    arguments = " ".join(as_arguments(options | {"NCCL_EP_PREBUILT": str(SHARED)}))
    run(bare / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "built", ".",
        CMAKE_ARGS=arguments)  # fmt: skip
    (built,) = (work / "built").glob("*.whl")
    excluded = [each for name in NOT_INSIDE for each in ("--exclude", name)]
    run(tools / "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *excluded, "--wheel-dir", work / "repaired",
        built, PATH=f"{tools}:{os.environ['PATH']}")  # fmt: skip
    (repaired,) = (work / "repaired").glob("*.whl")
    return name_torch(repaired, torch, tools, work)


def build_and_check(bare: Path, torch: str, tools: Path, options: dict[str, str], architectures: list[str]) -> str:
    """What the check says."""
    with tempfile.TemporaryDirectory(dir=WORK) as work:
        wheel = build(bare, torch, tools, options, Path(work))
    return run(bare / "python", "tools/check_wheel.py", wheel, "--torch", torch, "--architectures", *architectures,
               "--gin", *GIN_NCCL)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", help="minor releases; default: all from 2.11 that PyPI has")
    parser.add_argument("--python", nargs="+", help="interpreters; default: one of each of 3.10 to 3.14 that is here")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES, help="default: those of a release")
    parser.add_argument("--list", action="store_true", help="only print which wheels these are")
    chosen = parser.parse_args()
    tools = make_venv(WORK / "tools", sys.executable, "-r", "requirements/wheels.txt")
    pip = tools / "pip"
    python = {minor_of(each): each for each in reversed(chosen.python or pythons())}
    wheels = matrix(chosen.torch, python, {minor: torches(pip, minor) for minor in python})
    for torch, minor, _ in wheels:
        print(f"torch {torch}, Python {minor}")
    if chosen.list:
        return
    options = options_of_all(pip, chosen.architectures)
    build_shared(tools, options)
    for torch, of_it in itertools.groupby(wheels, key=lambda wheel: wheel[0]):
        # torch and CUDA's packages are 5 GB: they go before the next ones come.
        with tempfile.TemporaryDirectory(dir=WORK) as folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            bare = [make_bare(tools / "uv", Path(folder), minor, path, torch) for _, minor, path in of_it]
            one = functools.partial(
                build_and_check, torch=torch, tools=tools, options=options, architectures=chosen.architectures
            )
            for said in pool.map(one, bare):
                print(said, end="", flush=True)


if __name__ == "__main__":
    main()
