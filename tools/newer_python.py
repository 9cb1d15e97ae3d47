"""Prints the path of a Python 3.12 or newer that can build extensions: what the newest frameworks ask for.

    python tools/newer_python.py

It is this one, if it is new enough; one of the PATH, or of pyenv; or what `uv` (of PyPI) has or fetches, where uv is
installed. Of several the oldest. Fails where there is none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST, NEWEST = 12, 14  # of Python 3
ASK = "import sys, sysconfig, venv; print(sys.version_info[1], sysconfig.get_path('include'))"


def candidates(oldest: int = OLDEST) -> Iterator[str]:
    yield sys.executable
    for minor in range(oldest, NEWEST + 1):
        found = shutil.which(f"python3.{minor}")
        if found is not None:
            yield found
        yield from map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}")))


def serves(python: str, oldest: int = OLDEST) -> bool:
    """Whether it runs, is new enough, and has its headers. A name in the PATH may be a shim without a Python."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode != 0:
        return False
    minor, include = done.stdout.split(maxsplit=1)
    return oldest <= int(minor) <= NEWEST and (Path(include.strip()) / "Python.h").exists()


def of_uv() -> str | None:
    uv = shutil.which("uv")
    if uv is None:
        return None
    wanted = f"3.{OLDEST}"
    subprocess.run([uv, "python", "install", wanted], capture_output=True, timeout=300)
    found = subprocess.run([uv, "python", "find", wanted], capture_output=True, text=True).stdout.strip()
    return found if found and serves(found) else None


def main() -> int:
    python = next(filter(serves, candidates()), None) or of_uv()
    if python is None:
        print("no Python 3.12 or newer with headers is here", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
