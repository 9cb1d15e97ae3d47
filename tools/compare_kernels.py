"""Compares the machine code of all GPU kernels in two builds: for moves and renames, which may not change one.

    python tools/compare_kernels.py OLD NEW    each an extension or library (.so), or what --save wrote
    python tools/compare_kernels.py --save OUT BUILD

Kernels are matched by their instructions with all operands, as a rename changes their mangled names. The order of
functions that are not inlined follows from those names, and the numbers of scoreboards from the order: neither counts.
Exit status 1: some differ. It needs cuobjdump, of the CUDA toolkit or of the triton beside torch.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CALL = re.compile(r"\bCALL\S* (?:`\()?(0x[0-9a-f]+)")
JUMP = re.compile(r"\b(BRA|BSSY|BSYNC|JMP|WARPSYNC|BRX|BREAK|RET)\b")


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


@dataclass
class Instruction:
    address: int
    text: str


def kernels_of(build: Path) -> dict[str, str]:
    """Mangled name of every kernel and a digest of its instructions."""
    if build.suffix == ".json":
        saved: dict[str, str] = json.loads(build.read_text())
        return saved
    command = [find_cuobjdump(), "--dump-sass", str(build)]
    kernels: dict[str, str] = {}
    name, code = "", list[Instruction]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            begins = re.match(r"\s*Function : (\S+)", line)
            if begins:
                if code:
                    kernels[name] = digest_of(code)
                name, code = begins[1], []
                continue
            first = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)
            if first:
                code.append(Instruction(int(first[1], 16), first[2]))
    if code:
        kernels[name] = digest_of(code)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with status {process.returncode}")
    return kernels


def without_pipe(text: str) -> str:
    """A move, shift or sum that either of two pipes can do: ptxas balances them."""
    text = text.replace("HFMA2.MMA", "MOV").replace(", -RZ, RZ, 0, 0", ", RZ")
    text = re.sub(r"\bIMAD\.MOV(?:\.U32)? (\S+), RZ, RZ, ", r"MOV \1, ", text)
    text = re.sub(
        r"\bIMAD\.SHL(?:\.U32)? (\S+), (\S+), (0x[0-9a-f]+), RZ",
        lambda m: f"SHF.L.U32 {m[1]}, {m[2]}, {int(m[3], 16).bit_length() - 1:#x}, RZ",
        text,
    )
    return re.sub(r"\bIMAD\.IADD (\S+), (\S+), 0x1, (\S+)", r"IADD3 \1, \2, \3, RZ", text)


def digest_of(code: list[Instruction]) -> str:
    """Of a kernel whose functions that are not inlined may lie in any order, as that follows from their names.

    Each is told apart by what it does: its own instructions with addresses counted from its start, and, where it calls
    another, that one's digest without calls.
    """
    while code and (code[-1].text == "NOP" or code[-1].text == f"BRA {code[-1].address:#x}"):
        code.pop()  # padding
    targets = {int(call[1], 16) for each in code if (call := CALL.search(each.text))}
    returns = {after.address for each, after in zip(code, code[1:]) if CALL.search(each.text)}
    parts: dict[int, list[Instruction]] = {}
    start = 0
    for each in code:
        if each.address in targets:
            start = each.address
        parts.setdefault(start, []).append(each)

    def lines(start: int, name_of: Callable[[int], str]) -> str:
        part = parts[start]
        end = part[-1].address

        def relative(match: re.Match[str]) -> str:
            address = int(match[0], 16)
            is_own = start <= address <= end and (is_branch or (is_move and address in returns))
            return f"+{address - start:#x}" if is_own else match[0]

        found = []
        for each in part:
            call, is_branch = CALL.search(each.text), JUMP.search(each.text) is not None
            is_move = "MOV" in each.text
            if call:
                found.append(each.text.replace(call[1], name_of(int(call[1], 16))))
                continue
            found.append(without_pipe(re.sub(r"0x[0-9a-f]+", relative, each.text)))
        return "\n".join(sorted(found))

    def hashed(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    own = {start: hashed(lines(start, lambda _: "?")) for start in parts}
    called = sorted(hashed(lines(start, own.__getitem__)) for start in parts if start != 0)
    return hashed("\n".join([hashed(lines(0, own.__getitem__)), *called]))


def readable(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return names
    return subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()


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
    print(
        f"{same} kernels are the same to the instruction, {len(gone)} are only in the old build, {len(added)} in the new"
    )
    return 1 if gone or added else 0


if __name__ == "__main__":
    sys.exit(main())
