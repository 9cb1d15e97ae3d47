"""Makes libraries to link against in place of this system's: symbols that manylinux_2_28 has, with nothing behind them.

    python tools/glibc_stubs.py FOLDER

glibc and libstdc++ keep every version of a symbol. What is linked against the newest one does not start on an older
system. These stubs have of each symbol the newest version that manylinux_2_28 has, so that what is linked against them
starts from glibc 2.28 on. What they lack is taken from this system's archives of the same libraries: what glibc has
there alone (atexit), and what libstdc++ has had since. cmake/glibc_2_28.cc has what glibc 2.28 does not have under its
present name.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # PEP 600, and gcc 8
LIBRARIES = {"libc.so.6": "libc_nonshared.a", "libm.so.6": "", "libstdc++.so.6": "libstdc++.a"}  # and their archives
LOADER = "ld-linux-x86-64.so.2"  # has __tls_get_addr
WERE_THEIR_OWN = ("libpthread.so.0", "libdl.so.2", "librt.so.1")  # libraries whose symbols are in libc.so.6 by now
SYMBOL = re.compile(
    r"^[0-9a-f]+ (?P<kind>.{7}) (?P<section>\S+)\s+(?P<size>[0-9a-f]+)\s+\(?(?P<version>\S+?)\)?\s+(?P<name>\S+)$"
)


def _number(version: str) -> tuple[int, ...] | None:
    """Of "GLIBC_2.28". None: of no system that we link for, as GLIBC_PRIVATE."""
    family, _, digits = version.partition("_")
    if family not in NEWEST or not re.fullmatch(r"\d+(\.\d+)*", digits):
        return None
    number = tuple(map(int, digits.split(".")))
    return number if number <= NEWEST[family] else None


def symbols(library: Path) -> dict[str, tuple[str, str, int]]:
    """Name: version, "function" or "object" or "tls_object", bytes."""
    found: dict[str, tuple[tuple[int, ...], str, str, int]] = {}
    text = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    for match in filter(None, map(SYMBOL.match, text.splitlines())):
        number = _number(match["version"])
        if number is None or match["section"] in ("*UND*", "*ABS*"):  # wanted, and the versions themselves
            continue
        if match["name"] in found and found[match["name"]][0] > number:
            continue
        kind = (
            "tls_object"
            if match["section"] in (".tdata", ".tbss")
            else "object"
            if "O" in match["kind"]
            else "function"
        )
        found[match["name"]] = (number, match["version"], kind, int(match["size"], 16))
    return {name: (version, kind, size) for name, (_, version, kind, size) in found.items()}


def write_stub(folder: Path, soname: str, wanted: dict[str, tuple[str, str, int]]) -> None:
    lines = []
    sections = {"function": ".text", "object": ".data", "tls_object": '.section .tbss,"awT",@nobits'}
    for number, (name, (version, kind, size)) in enumerate(wanted.items()):
        lines += [sections[kind], f".globl s{number}", f".type s{number},@{kind}", f".size s{number},{max(size, 1)}",
                  f"s{number}: .zero {max(size, 1) if kind != 'function' else 1}",
                  f'.symver s{number},"{name}@@{version}",remove']  # fmt: skip
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("\n".join(lines) + "\n")
    versions = sorted({version for version, _, _ in wanted.values()})
    script.write_text("".join(f"{version} {{}};\n" for version in versions))
    arguments = [f"-Wl,--version-script={script}"] if versions else []
    subprocess.run(["gcc", "-shared", "-nostdlib", "-x", "assembler", source, f"-Wl,-soname={soname}", *arguments,
                    "-o", folder / soname], check=True)  # fmt: skip


def find(name: str) -> Path:
    """Where g++ has a library."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return Path(found.strip())


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    write_stub(folder, LOADER, symbols(find(LOADER)))
    for soname, archive in {**LIBRARIES, **dict.fromkeys(WERE_THEIR_OWN, "")}.items():
        write_stub(folder, soname, symbols(find(soname)) if soname in LIBRARIES else {})
        inputs = [folder / soname, *([find(archive)] if archive else [])]
        if soname == "libc.so.6":
            inputs.append(f"AS_NEEDED ( {folder / LOADER} )")
        script = folder / (soname.split(".so")[0] + ".so")  # what -l finds
        script.write_text(f"GROUP ( {' '.join(map(str, inputs))} )\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
