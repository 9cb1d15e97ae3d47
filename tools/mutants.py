"""Plants mutants (tests/mutants) one by one, in a copy of the tree, and runs the tests that are said to see them.

    python tools/mutants.py                    all, whose tests stand in the list
    python tools/mutants.py arena_end --jobs 2
    python tools/mutants.py --columns test     those of `make test` alone
    python tools/mutants.py --list             those of docs/mutants.md

Each such test must pass without the mutant and fail with it. Where the page says that no test sees a mutant, or that
none was tried, nothing runs. A column needs its build: that of CPU ranks takes minutes, that of emulated GPUs more.
The folder of copy and builds is kept if --folder names one. It exits with 1 if a test does not do what the list says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutants import COLUMNS, MUTANTS, Mutant, is_test, listed  # noqa: E402

FOR_CPU_RANKS = ("-DNCCL_EP_CUDA=OFF", "-DNCCL_EP_BUILD_C_LIBRARY=OFF")
# As `make emulated` has it.
FOR_EMULATED_GPUS = (
    "-DNCCL_EP_CUDA=OFF", "-DNCCL_EP_EMULATED_GPU=ON", "-DNCCL_EP_LAB=ON", "-DNCCL_EP_BUILD_TESTS=OFF",
    "-DNCCL_EP_BUILD_C_LIBRARY=OFF", "-DNCCL_EP_IN_PLACE=OFF",
)  # fmt: skip
BUILDS = {"test": ("dev", FOR_CPU_RANKS), "emulated": ("emulated", FOR_EMULATED_GPUS), "fuzz": ("dev", FOR_CPU_RANKS)}
LIMIT = 1800  # seconds of a test


class Tree:
    """A copy of the sources, with builds of its own."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self.jobs = folder, jobs
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True,
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if not (ROOT / name).is_file():
                continue
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_bytes() != (ROOT / name).read_bytes():
                shutil.copyfile(ROOT / name, copy)

    def build(self, column: str) -> None:
        name, options = BUILDS[column]
        build = self.folder / "build" / name
        if not (build / "build.ninja").exists():
            python = f"-DPython_EXECUTABLE={sys.executable}"
            self._run(["cmake", "-S", ".", "-B", str(build), "-G", "Ninja", *options, python], check=True)
        self._run(["cmake", "--build", str(build), "--parallel", str(self.jobs)], check=True)

    def passes(self, column: str, test: str) -> bool:
        """Whether the test does; a ValueError if there is none of that name."""
        if test.startswith("ep_tests "):
            name = test.split()[1]
            command = [str(self.folder / "build/dev/ep_tests"), f"--gtest_filter={name}", "--gtest_brief=1"]
        elif column == "fuzz":
            command = [sys.executable, "-m", "tests.fuzz", *test.split()]
        else:
            start = ["tests/support/emulated.py"] if column == "emulated" else ["-m", "pytest"]
            command = [sys.executable, *start, "-q", "-x", "-p", "no:cacheprovider", test]
        done = self._run(command)
        if (column != "fuzz" and done.returncode in (2, 3, 4, 5)) or " ran 0 tests" in done.stdout:
            raise ValueError(f"{test} did not run:\n{done.stdout[-2000:]}")
        return done.returncode == 0

    def _run(self, command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
        # Bytecode is known by the second in which a source was written, and its size: that of a mutant may be the same.
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=None if check else LIMIT,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-4000:]}")
        return done


def faults_of(tree: Tree, mutant: Mutant, columns: list[str]) -> Iterator[str]:
    """What is not as the list says."""
    tests = {column: test for column in columns if is_test(test := mutant.seen_by(column))}
    file = tree.folder / mutant.file
    sound = file.read_text()
    for is_planted in (False, True):
        try:
            file.write_text(mutant.planted_in(sound) if is_planted else sound)
            for column, test in tests.items():
                tree.build(column)
                if tree.passes(column, test) == is_planted:
                    yield f"{test} {'passes with' if is_planted else 'fails without'} {mutant.name}"
        finally:
            file.write_text(sound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all, if none is given")
    parser.add_argument("--columns", default="test,emulated,fuzz", help="which of test, emulated and fuzz")
    parser.add_argument("--folder", type=Path, help="for the copy and its builds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of a build")
    parser.add_argument("--list", action="store_true", help="print what docs/mutants.md has, and end")
    options = parser.parse_args()
    if options.list:
        print(listed(), end="")
        return 0
    columns, known = options.columns.split(","), {mutant.name: mutant for mutant in MUTANTS}
    for wrong in [*(set(options.names) - set(known)), *(set(columns) - set(COLUMNS))]:
        parser.error(f"{wrong} is no mutant and no column")
    with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
        tree = Tree((options.folder or Path(temporary)).resolve(), options.jobs)
        failed = False
        for name in options.names or known:
            faults = list(faults_of(tree, known[name], columns))
            print(f"{name}: {'; '.join(faults) or 'as the list says'}", flush=True)
            failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
