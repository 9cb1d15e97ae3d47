"""Checks a built wheel: size, contents, dependencies, and that it imports, fast.

    python tools/check_wheel.py WHEEL [--torch 2.11 --architectures 90a --gin 2.30.7 2.31.2]

--torch, of a wheel for others: its name and metadata are for that minor release alone, and its libraries want no glibc
newer than 2.28. --architectures: what its kernels are for, machine code of each and no PTX. --gin: the releases of NCCL
whose kernels for several NVLink domains are in it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from compare_kernels import find_cuobjdump

MAX_BYTES = 6 * 2**20  # of a wheel without kernels, or with those for one architecture
MAX_GIN_BYTES = 5 * 2**20  # more for each of --gin, and architecture
MAX_IMPORT_SECONDS = 0.15
MAX_GLIBC = (2, 28)
SHIMS = ("deep_ep/__init__.py", "deep_ep/utils/__init__.py", "deep_ep_cpp.py")  # what PYTHONPATH has of nccl_ep.deep_ep
GIN = "nccl_ep/libnccl_ep_gin_"
IMPORT = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
start = time.process_time()
import nccl_ep
print(time.process_time() - start)
assert nccl_ep.__file__.startswith(sys.argv[1]), nccl_ep.__file__
"""


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_names(names: list[str], gin: list[str]) -> None:
    libraries = {name for name in names if name.endswith(".so")}
    loaded_on_demand = {f"{GIN}{release}.so" for release in gin}
    own = libraries - loaded_on_demand
    assert loaded_on_demand <= libraries, libraries
    assert len(own) == 1 and next(iter(own)).startswith("nccl_ep/_C."), libraries
    assert "nccl_ep/py.typed" in names, names
    assert {f"nccl_ep/deep_ep/shims/{name}" for name in SHIMS} <= set(names), names
    assert any(name.endswith("/LICENSE") for name in names), names
    strangers = [name for name in names if not name.startswith(("nccl_ep/", "nccl_ep-"))]  # bench/ and records/ too
    measuring = [name for name in names if "bench" in Path(name).parts or name.endswith((".json", ".sh"))]
    assert not strangers and not measuring, strangers + measuring


def check_metadata(wheel: Path, metadata: str, torch: str | None) -> None:
    assert "Requires-Dist: nvidia" not in metadata, metadata
    wanted = re.findall(r"(?m)^Requires-Dist: (torch\b.*)$", metadata)
    version = re.findall(r"(?m)^Version: (.*)$", metadata)
    assert wheel.name.startswith(f"nccl_ep-{version[0]}-"), (wheel.name, version)
    if torch is None:
        assert wanted == ["torch>=2.11"], wanted
        return
    assert wanted == [f"torch=={torch}.*"], wanted
    assert version[0].endswith(f"+torch{torch.replace('.', '')}"), version
    assert wheel.name.endswith("-manylinux_{}_{}_x86_64.whl".format(*MAX_GLIBC)), wheel.name


def check_glibc(library: Path) -> None:
    found = re.findall(r"\(GLIBC_(\d+)\.(\d+)", output_of("objdump", "-T", library))
    newest = max((int(major), int(minor)) for major, minor in found)
    assert newest <= MAX_GLIBC, f"{library.name} wants glibc {newest}, newer than {MAX_GLIBC}"


def check_architectures(library: Path, wanted: list[str]) -> None:
    listed = output_of(find_cuobjdump(), library)
    found = set(re.findall(r"Fatbin (\w+) code:\n=+\narch = sm_(\w+)", listed))
    assert found == {("elf", each) for each in wanted}, f"{library.name} has {sorted(found)}, must have {wanted}"


def check_import(folder: str) -> float:
    """Seconds of a CPU, which other work on the machine does not change much: one of some tries is quick enough. Not
    the source tree's: it runs elsewhere, and the unpacked files come first. As byte code, which pip installs."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
    command = [sys.executable, "-c", IMPORT, folder]
    seconds = float("inf")
    for _ in range(10):
        seconds = min(seconds, float(subprocess.check_output(command, cwd=folder, text=True)))
        if seconds <= MAX_IMPORT_SECONDS:
            return seconds
    raise AssertionError(f"import nccl_ep takes {seconds:.3f} s, more than {MAX_IMPORT_SECONDS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch")
    parser.add_argument("--architectures", nargs="+", default=[])
    parser.add_argument("--gin", nargs="+", default=[])
    given = parser.parse_args()
    size = given.wheel.stat().st_size
    most = (MAX_BYTES + MAX_GIN_BYTES * len(given.gin)) * max(1, len(given.architectures))
    assert size <= most, f"{given.wheel} has {size} bytes, more than {most}"
    with zipfile.ZipFile(given.wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        check_names(names, given.gin)
        check_metadata(given.wheel, next(archive.read(each).decode() for each in names if each.endswith("/METADATA")),
                       given.torch)  # fmt: skip
        archive.extractall(folder)
        for library in Path(folder).glob("nccl_ep/*.so"):
            if given.torch:
                check_glibc(library)
            if given.architectures:
                check_architectures(library, given.architectures)
        seconds = check_import(folder)
    print(f"{given.wheel}: {size / 2**20:.1f} MiB, {len(names)} files, imports in {seconds * 1e3:.0f} ms after torch")


if __name__ == "__main__":
    main()
