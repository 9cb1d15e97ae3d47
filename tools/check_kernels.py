"""Holds the machine code of GPU kernels against what is meant, for each architecture that it is built for.

    python tools/check_kernels.py FILE...         objects, archives or libraries, as build/kernels/libep_cuda.a

- Kernels that move rows have the instructions for it: 16-byte loads and stores, and high-throughput dispatch bulk
  copies in both directions (UBLKCP).
- An innermost loop of 16-byte accesses or bulk copies keeps its numbers in registers: it may access local memory once,
  and once more for each LOCAL_SHARE instructions, for what a wait or a call in it saves.
- High-throughput combine of rows that travel as they are, without biases and scale, has no access of local memory in
  the whole loop that fills and empties its ring.
- A kernel's registers, in units of 8 a thread, fit an SM with as many threads as its launch bounds allow.

Prints a line for each architecture and family of kernels, and what is wrong. Exit status 1: something is, or no kernel
was found. Needs cuobjdump (tools/compare_kernels.py: find_cuobjdump).
"""

from __future__ import annotations

import bisect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from compare_kernels import find_cuobjdump, readable

LOCAL_SHARE = 30
SM_REGISTERS, REGISTER_UNIT = 1 << 16, 8  # of every architecture from sm_90 on

_LOADS, _STORES = "a 16-byte load", "a 16-byte store"
_BULK_LOADS, _BULK_STORES = "a bulk copy into shared memory", "a bulk copy out of shared memory"
MEANT = {  # family, as a part of the mangled name: what its kernels must have
    "dispatch_send": (_BULK_LOADS, _BULK_STORES),
    "dispatch_by_rail": (),
    "combine_rows": (_LOADS,),
    "combine_by_rail": (),
    "dispatch_route": (),
    "8dispatchI": (_LOADS, _STORES),
    "7combineI": (),
}


# combine_rows<in, wire, out, kTermsAlone> whose wire has no blocks.
RINGS_IN_REGISTERS = re.compile(r"12combine_rowsILNS_5DTypeE\dELS\d_[0-7]ELS\d_\dELb1E")


@dataclass
class Kernel:
    architecture: str
    name: str  # mangled
    instructions: list[tuple[int, str, str]] = field(default_factory=list)  # address, opcode, operands
    registers: int = 0
    threads: int = 0  # of its launch bounds; 0: it has none

    @property
    def family(self) -> str:
        return next((each for each in MEANT if each in self.name), "others")


def main() -> int:
    files = sys.argv[1:]
    if not files or files[0].startswith("-"):
        sys.exit(__doc__)
    kernels = [kernel for file in files for kernel in kernels_of(file)]
    if not kernels:
        sys.exit(f"no kernels in {', '.join(files)}")
    wrong = [(kernel, what) for kernel in kernels for what in faults(kernel)]
    for line in table(kernels):
        print(line)
    names = readable([kernel.name for kernel, _ in wrong])
    for (kernel, what), name in zip(wrong, names, strict=True):
        print(f"{kernel.architecture} {name}: {what}")
    print(f"{len(kernels)} kernels, {len(wrong)} faults")
    return 1 if wrong else 0


def kernels_of(file: str) -> list[Kernel]:
    tool = find_cuobjdump()
    kernels = parse_code(_dump(tool, "--dump-sass", file))
    parse_facts(_dump(tool, "--dump-resource-usage", file), _dump(tool, "--dump-elf", file), kernels)
    return list(kernels.values())


def _dump(tool: str, what: str, file: str) -> Iterator[str]:
    command = [tool, what, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed with status {process.returncode}")


# What cuobjdump prints


_INSTRUCTION = re.compile(r" {8}/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def parse_code(dump: Iterable[str]) -> dict[tuple[str, str], Kernel]:
    kernels: dict[tuple[str, str], Kernel] = {}
    architecture, kernel = "", None
    for line in dump:
        if kernel and (found := _INSTRUCTION.match(line)):
            kernel.instructions.append((int(found[1], 16), found[2], found[3]))
        elif found := re.match(r"arch = (\S+)", line):
            architecture, kernel = found[1], None
        elif found := re.match(r"\s+Function : (\S+)", line):
            kernel = kernels.setdefault((architecture, found[1]), Kernel(architecture, found[1]))
    return kernels


def parse_facts(usage: Iterable[str], elf: Iterable[str], kernels: dict[tuple[str, str], Kernel]) -> None:
    """Registers and launch bounds."""
    architecture, name = "", ""
    for line in usage:
        if found := re.match(r"arch = (\S+)", line):
            architecture = found[1]
        elif found := re.match(r"\s*Function (\S+):$", line.rstrip()):
            name = found[1]
        elif (found := re.match(r"\s*REG:(\d+)", line)) and (architecture, name) in kernels:
            kernels[architecture, name].registers = int(found[1])
    architecture, name, is_bound = "", "", False
    for line in elf:
        if found := re.match(r"arch = (\S+)", line):
            architecture = found[1]
        elif found := re.match(r"\.nv\.info\.(\S+)", line):
            name = found[1]
        elif "Attribute:" in line:
            is_bound = "EIATTR_MAX_THREADS" in line
        elif is_bound and (found := re.match(r"\s*Value:\s*0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)", line)):
            if (architecture, name) in kernels:
                kernels[architecture, name].threads = int(found[1], 16) * int(found[2], 16) * int(found[3], 16)
            is_bound = False


# What is held against it


def is_wide(opcode: str) -> bool:
    return opcode.startswith("UBLKCP") or (".128" in opcode and opcode.startswith(("LD", "ST")))


def has(kernel: Kernel, what: str) -> bool:
    opcodes = [opcode for _, opcode, _ in kernel.instructions]
    if what == _BULK_LOADS:
        return any(opcode.startswith("UBLKCP.S.G") for opcode in opcodes)
    if what == _BULK_STORES:
        return any(opcode.startswith("UBLKCP.G.S") for opcode in opcodes)
    starts = ("LDG", "LD.", "LDGSTS") if what == _LOADS else ("STG", "ST.")
    return any(".128" in opcode and opcode.startswith(starts) for opcode in opcodes)


def loops(kernel: Kernel) -> set[tuple[int, int]]:
    """First and last address of what a branch backwards repeats."""
    found = set()
    for address, opcode, operands in kernel.instructions:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < address:  # a branch to itself is the end of a kernel
            found.add((int(target[1], 16), address))
    return found


def opcodes_between(kernel: Kernel, begin: int, end: int) -> list[str]:
    first, last = (bisect.bisect(kernel.instructions, (address,)) for address in (begin, end + 1))
    return [opcode for _, opcode, _ in kernel.instructions[first:last]]


def innermost_loops(kernel: Kernel) -> list[tuple[int, int]]:
    """Those of loops() within which no other lies."""
    inner: list[tuple[int, int]] = []
    for begin, end in sorted(loops(kernel), key=lambda loop: loop[1] - loop[0]):
        if not any(begin <= first and last <= end for first, last in inner):
            inner.append((begin, end))
    return sorted(inner)


def faults(kernel: Kernel) -> Iterator[str]:
    for what in MEANT.get(kernel.family, ()):
        if not has(kernel, what):
            yield f"has not got {what}"
    for begin, end in innermost_loops(kernel):
        body = opcodes_between(kernel, begin, end)
        local = sum(opcode.startswith(("LDL", "STL")) for opcode in body)
        if local > 1 + len(body) // LOCAL_SHARE and any(map(is_wide, body)):
            yield f"{local} accesses of local memory in the loop of {len(body)} instructions at 0x{begin:x}"
    if RINGS_IN_REGISTERS.search(kernel.name):
        whole = max(loops(kernel), key=lambda loop: loop[1] - loop[0], default=(0, 0))
        local = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes_between(kernel, *whole))
        if local:
            yield f"{local} accesses of local memory in the loop of its ring"
    if kernel.threads == 0 and kernel.family != "others":
        yield "has no launch bounds"
    registers = -(-kernel.registers // REGISTER_UNIT) * REGISTER_UNIT
    if registers * max(kernel.threads, 1) > SM_REGISTERS:
        yield f"{kernel.threads} threads of {kernel.registers} registers: more than the {SM_REGISTERS} of an SM"


def table(kernels: list[Kernel]) -> Iterator[str]:
    yield f"{'architecture':<14}{'family':<18}{'kernels':>8}{'registers':>11}{'threads':>9}{'local':>7}{'bulk':>6}"
    for architecture in sorted({kernel.architecture for kernel in kernels}):
        for family in (*MEANT, "others"):
            mine = [each for each in kernels if (each.architecture, each.family) == (architecture, family)]
            if not mine:
                continue
            opcodes = [opcode for each in mine for _, opcode, _ in each.instructions]
            local = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
            bulk = sum(opcode.startswith("UBLKCP") for opcode in opcodes)
            yield (
                f"{architecture:<14}{family:<18}{len(mine):>8}{max(each.registers for each in mine):>11}"
                f"{max(each.threads for each in mine):>9}{local:>7}{bulk:>6}"
            )


if __name__ == "__main__":
    sys.exit(main())
