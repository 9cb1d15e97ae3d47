"""Compares the machine code of all GPU kernels in two builds: for moves and renames, which may not change one.

    python tools/compare_kernels.py OLD NEW    each an extension or library (.so), or what --save wrote
    python tools/compare_kernels.py --save OUT BUILD

Kernels are matched by their instructions, as a rename changes their mangled names. Exit status 1: some differ. It needs
cuobjdump, of the CUDA toolkit or of the triton beside torch.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path


def find_cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    if found:
        return found
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        beside = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if beside.exists():
            return str(beside)
    sys.exit("no cuobjdump: put that of a CUDA toolkit on PATH, or install triton")


def kernels_of(build: Path) -> dict[str, str]:
    """Mangled name of every kernel and a digest of its instructions, encodings included."""
    if build.suffix == ".json":
        saved: dict[str, str] = json.loads(build.read_text())
        return saved
    command = [find_cuobjdump(), "--dump-sass", str(build)]
    kernels: dict[str, str] = {}
    name, digest = "", hashlib.sha256()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            begins = re.match(r"\s*Function : (\S+)", line)
            if begins:
                name, digest = begins[1], hashlib.sha256()
            elif name and line.strip().startswith("/*"):
                digest.update(" ".join(line.split()).encode())
                kernels[name] = digest.hexdigest()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {process.returncode}")
    return kernels


def readable(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return names
    return subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()


def compare(old: dict[str, str], new: dict[str, str]) -> tuple[list[str], list[str]]:
    """Kernels whose instructions only the old build has, and only the new one."""

    def without(mine: dict[str, str], others: dict[str, str]) -> list[str]:
        left = collections.Counter(others.values())
        alone = []
        for name, digest in sorted(mine.items()):
            if left[digest] > 0:
                left[digest] -= 1
            else:
                alone.append(name)
        return alone

    return without(old, new), without(new, old)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="write the digests of one build to this .json and end")
    parser.add_argument("builds", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.save:
        arguments.save.write_text(json.dumps(kernels_of(arguments.builds[0]), indent=1, sort_keys=True) + "\n")
        return 0
    if len(arguments.builds) != 2:
        parser.error(f"{len(arguments.builds)} builds, must be two")
    old, new = (kernels_of(build) for build in arguments.builds)
    if not old or not new:
        print(f"no kernels in {arguments.builds[0 if not old else 1]}")
        return 1
    gone, added = compare(old, new)
    for title, names in (("only in the old build", gone), ("only in the new build", added)):
        for name in readable(names):
            print(f"{title}: {name}")
    same = len(new) - len(added)
    print(f"{same} kernels are the same to the instruction, {len(gone)} are only in the old build, {len(added)} in the new")
    return 1 if gone or added else 0


if __name__ == "__main__":
    sys.exit(main())
