"""tools/check_kernels.py reads what cuobjdump prints, and finds what is not as it is meant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = next(parent for parent in Path(__file__).resolve().parents if (parent / "pyproject.toml").is_file())
NAME = "_ZN2ep2ht12dispatch_sendILb1ELi896EEEvv"

# 50 instructions in the loop at 0x20, one of them of local memory; another loop around it, which moves nothing.
BODY = ["@P0 LDG.E.128 R4, desc[UR4][R2.64]", "STL [R1+0x8], R0", "UBLKCP.S.G [UR10], [UR8], UR6",
        "@UP0 UBLKCP.G.S [UR12], [UR8], UR6", *["FADD R0, R0, R0"] * 45, "@P1 BRA 0x20"]  # fmt: skip
CODE = ["LDC R1, c[0x0][0x28]", "STL [R1], R0", *BODY, "LDL R0, [R1]", "@!P2 BRA 0x10", "EXIT", "BRA 0x370"]

USAGE = f"""
Fatbin elf code:
================
arch = sm_120a
 Function {NAME}:
  REG:72 STACK:632 SHARED:1152 LOCAL:0 CONSTANT[2]:16 CONSTANT[0]:1744 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ELF = f"""
arch = sm_120a
.nv.info.{NAME}
	Attribute:	EIATTR_REGCOUNT
	Value:	0x999 0x1 0x1
	Attribute:	EIATTR_MAX_THREADS
	Format:	EIFMT_SVAL
	Value:	0x380 0x1 0x1 
"""  # noqa: W291


def sass(code: list[str]) -> str:
    lines = ["Fatbin elf code:", "arch = sm_120a", f"\t\tFunction : {NAME}", '	.headerflags	@"EF_CUDA_SM120"']
    for index, text in enumerate(code):
        lines += [
            f"        /*{16 * index:04x}*/  {text} ;  /* 0x00000a00ff017b82 */",
            " " * 62 + "/* 0x000fe20000000800 */",
        ]
    return "\n".join(lines)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "check_kernels", raising=False)
    return __import__("check_kernels")


def kernel_of(tool: Any, code: list[str] = CODE, usage: str = USAGE, elf: str = ELF) -> Any:
    kernels = tool.parse_code(sass(code).splitlines())
    tool.parse_facts(usage.splitlines(), elf.splitlines(), kernels)
    (kernel,) = kernels.values()
    return kernel


def test_facts_of_a_kernel_are_read(tool: Any) -> None:
    kernel = kernel_of(tool)
    assert (kernel.architecture, kernel.name, kernel.family) == ("sm_120a", NAME, "dispatch_send")
    assert (kernel.registers, kernel.threads) == (72, 896)
    assert [opcode for _, opcode, _ in kernel.instructions[:4]] == ["LDC", "STL", "LDG.E.128", "STL"]
    assert len(kernel.instructions) == len(CODE) and kernel.instructions[-1] == (16 * (len(CODE) - 1), "BRA", "0x370")
    assert tool.innermost_loops(kernel) == [(0x20, 0x20 + 16 * (len(BODY) - 1))]
    assert list(tool.faults(kernel)) == []


@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("FADD R0, R0, R0", "LDL R0, [R1+0x8]", "46 accesses of local memory in the loop of 50 instructions at 0x20"),
        ("@UP0 UBLKCP.G.S [UR12], [UR8], UR6", "NOP", "has not got a bulk copy out of shared memory"),
        ("UBLKCP.S.G [UR10], [UR8], UR6", "NOP", "has not got a bulk copy into shared memory"),
    ],
)
def test_machine_code_that_is_not_meant_is_found(tool: Any, was: str, becomes: str, fault: str) -> None:
    assert was in CODE
    assert list(tool.faults(kernel_of(tool, [becomes if each == was else each for each in CODE]))) == [fault]


def test_a_loop_that_moves_no_rows_may_use_local_memory(tool: Any) -> None:
    code = [*CODE, "LDL R0, [R1]", "STL [R1], R0", f"@P0 BRA 0x{16 * len(CODE):x}"]
    kernel = kernel_of(tool, code)
    assert len(tool.innermost_loops(kernel)) == 2 and list(tool.faults(kernel)) == []


def test_the_loop_of_a_ring_keeps_its_numbers_in_registers(tool: Any) -> None:
    """Where no bias and no scale is added, for a wire without blocks: the whole loop, not the innermost one alone."""
    for types, is_meant in (("0ELS3_0ELS3_0ELb1E", True), ("0ELS3_0ELS3_0ELb0E", False), ("0ELS3_9ELS3_0ELb1E", False)):
        name = f"_ZN2ep2ht12combine_rowsILNS_5DTypeE{types}Evv"
        kernels = tool.parse_code(sass(CODE).replace(NAME, name).splitlines())
        facts = [text.replace(NAME, name).splitlines() for text in (USAGE, ELF)]
        tool.parse_facts(*facts, kernels)
        (kernel,) = kernels.values()
        assert list(tool.faults(kernel)) == ["3 accesses of local memory in the loop of its ring"] * is_meant


def test_registers_fit_the_launch_bounds(tool: Any) -> None:
    (fault,) = tool.faults(kernel_of(tool, usage=USAGE.replace("REG:72", "REG:73")))
    assert fault.startswith("896 threads of 73 registers")
    assert list(tool.faults(kernel_of(tool, elf=""))) == ["has no launch bounds"]


def test_a_table_has_a_line_for_each_family(tool: Any) -> None:
    lines = list(tool.table([kernel_of(tool)]))
    assert len(lines) == 2 and lines[1].split() == ["sm_120a", "dispatch_send", "1", "72", "896", "3", "2"]
