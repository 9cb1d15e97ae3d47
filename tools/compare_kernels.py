"""Compares the GPU kernels of two versions: for moves and renames, which may not change one.

    python tools/compare_kernels.py OLD.so NEW.so         machine code of two builds, to the bit: for moves
    python tools/compare_kernels.py --ptx OLD NEW         PTX, whatever the names in it are: for renames

With --ptx each is a source tree, compiled with the flags that --flags has, or a folder of .ptx files.

Names also steer ptxas: from them, and from the place in the file, follows the order in which it takes functions that
are not inlined, and from the order some choices of instructions and registers. So after a rename machine code may
differ though the program is the same. The program is its input, PTX. There a kernel is compared with all that it
reaches, functions and variables, and each of those has, in place of its name, the number of its first mention.
Instructions and their order, registers, labels, constants and attributes count; names, comments and the order of
functions in the file do not. That two builds of the same PTX run equally fast it does not show.

Kernels are matched by their contents. Exit status 1: some differ. Machine code needs cuobjdump, of the CUDA toolkit or
of requirements/dev.txt; source trees need nvcc.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

Kernels = dict[str, str]  # file and mangled name, and a digest of the contents


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", action="store_true", help="compare PTX modulo names")
    parser.add_argument(
        "--flags", type=Path, default=Path("build/kernels/compile_commands.json"), help="default: %(default)s"
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    both = [
        kernels_of_source(path, arguments.flags) if arguments.ptx else kernels_of_build(path)
        for path in (arguments.old, arguments.new)
    ]
    for path, kernels in zip((arguments.old, arguments.new), both, strict=True):
        if not kernels:
            sys.exit(f"no kernels in {path}")
    gone, added = compare(*both)
    for title, names in (("only in the old one", gone), ("only in the new one", added)):
        for name in readable(names):
            print(f"{title}: {name}")
    same = len(both[1]) - len(added)
    print(f"{same} kernels are the same, {len(gone)} are only in the old one, {len(added)} only in the new one")
    return 1 if gone or added else 0


def compare(old: Kernels, new: Kernels) -> tuple[list[str], list[str]]:
    """Kernels whose contents only the old version has, and only the new one."""

    def without(mine: Kernels, others: Kernels) -> list[str]:
        left = collections.Counter(others.values())
        alone = []
        for name, digest in sorted(mine.items()):
            if left[digest] > 0:
                left[digest] -= 1
            else:
                alone.append(name)
        return alone

    return without(old, new), without(new, old)


def readable(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return names
    return subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()


# Machine code


def kernels_of_build(build: Path) -> Kernels:
    command = [find_cuobjdump(), "--dump-sass", str(build)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        kernels = kernels_of_sass(process.stdout)
    if process.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed with status {process.returncode}")
    return kernels


def kernels_of_sass(dump: Iterable[str]) -> Kernels:
    """Every line of a function counts as it is: instruction, address, encoding."""
    digests: dict[str, hashlib._Hash] = {}
    name = ""
    for line in dump:
        begins = re.match(r"\s*Function : (\S+)", line)
        if begins:
            name = begins[1]
        elif name and line.strip().startswith("/*"):
            digests.setdefault(name, hashlib.sha256()).update(" ".join(line.split()).encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def find_cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    if found:
        return found
    for package, place in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):  # triton's knows no 103a
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            tool = Path(folder, place, "cuobjdump")
            if tool.exists():
                return str(tool)
    sys.exit("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


# PTX


def kernels_of_source(source: Path, flags: Path) -> Kernels:
    with tempfile.TemporaryDirectory() as out:
        if (source / "csrc").is_dir():
            compile_tree(source.resolve(), flags, Path(out))
            source = Path(out)
        return {
            f"{file.stem}: {name}": hashlib.sha256(text.encode()).hexdigest()
            for file in sorted(source.glob("*.ptx"))
            for name, text in kernels_of_ptx(file.read_text()).items()
        }


def compile_tree(tree: Path, flags: Path, out: Path) -> None:
    """Every .cu of the tree to PTX, with the flags that all of them have in the build."""
    commands = set()
    for entry in json.loads(flags.read_text()):
        if entry["file"].endswith(".cu"):
            built = entry["file"].partition("/csrc/")[0]
            options = entry["command"].partition(" -x cu -c ")[0]
            commands.add(options.replace(f"{built}/csrc", f"{tree}/csrc"))
    if len(commands) != 1:
        sys.exit(f"{flags} has {len(commands)} sets of options for .cu files, must be one")
    command = [*shlex.split(commands.pop()), "-x", "cu", "-ptx"]
    for file in sorted((tree / "csrc").rglob("*.cu")):
        name = "_".join(file.relative_to(tree / "csrc").with_suffix(".ptx").parts)
        subprocess.run([*command, str(file), "-o", str(out / name)], check=True)


NAME = re.compile(r"(?<![%.\w$])([A-Za-z_$][\w$]*)")  # no register, directive or part of an opcode
FUNCTION = re.compile(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$]+)")
VARIABLE = re.compile(
    r"^(?:\.(?:visible|weak|common|extern) )?\.(?:global|shared|const|local) "
    r"[^=;]*?([A-Za-z_$][\w$]*)(?:\[[\d\[\]]*\])*(?: =|;)",
    re.MULTILINE,
)


def kernels_of_ptx(module: str) -> dict[str, str]:
    """Mangled name of every kernel, and the text of all that it reaches, modulo names."""
    words: dict[str, list[str]] = {}
    kernels = []
    for statement in statements_of(module):
        found = FUNCTION.search(statement) or VARIABLE.search(statement)
        if not found:
            raise ValueError(f"a PTX statement of no known kind: {statement[:200]}")
        name = found[1]
        if found.re is FUNCTION and statement.endswith(";"):
            continue  # a declaration: the definition counts, and what is defined elsewhere keeps its name
        if re.search(r"\.entry\b", found[0]):
            kernels.append(name)
        # Names of the function alone: its name or its place in the file is in those of parameters and labels.
        statement = re.sub(rf"(?<![\w$]){re.escape(name)}_param_", "<parameter>", statement)
        statement = re.sub(r"\$L__BB\d+", "$L__BB", statement)
        words |= {variable: [] for variable in VARIABLE.findall(statement)}  # declared in its body
        words[name] = NAME.split(statement)
    return {name: reached_from(name, words) for name in kernels}


def statements_of(module: str) -> list[str]:
    """Functions and variables without comments and lines for debuggers."""
    module = re.sub(r"//[^\n]*|/\*.*?\*/", "", module, flags=re.DOTALL)
    module = re.sub(r"^\s*\.(?:version|target|address_size|file|loc)\b.*", "", module, flags=re.MULTILINE)
    found, start, depth = [], 0, 0
    for mark in re.finditer(r"[{};]", module):
        depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
        is_body = mark[0] == "}" and FUNCTION.search(module, start, mark.start())
        if depth == 0 and (mark[0] == ";" or is_body):
            lines = (" ".join(line.split()) for line in module[start : mark.end()].splitlines())
            found.append("\n".join(line for line in lines if line))
            start = mark.end()
    return found


def reached_from(kernel: str, words: dict[str, list[str]]) -> str:
    """The kernel and, in the order in which each is first mentioned, the functions and variables that it reaches."""
    numbers = {kernel: 0}
    texts: list[str] = []
    while len(texts) < len(numbers):
        mine = words[list(numbers)[len(texts)]]
        texts.append("".join(f"<{numbers.setdefault(word, len(numbers))}>" if word in words else word for word in mine))
    return "\n\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
