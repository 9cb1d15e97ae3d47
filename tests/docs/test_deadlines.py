"""Ranks that live have time to make a buffer, however busy the machine: a short deadline is for a wait in vain."""

from __future__ import annotations

import ast
import re

from tests import ROOT

LEAST = 20.0  # seconds
ALONE = {"None", "ThreadGroup.make(1)[0]"}  # groups of one rank


def _is_hurried(call: ast.Call) -> bool:
    given = [each.value for each in call.keywords if each.arg == "timeout"]
    seconds = given[0].value if given and isinstance(given[0], ast.Constant) else LEAST
    if not isinstance(seconds, int | float) or seconds >= LEAST:
        return False
    makes = re.search("for_shapes$|buffer$", ast.unparse(call.func), re.IGNORECASE)
    return makes is not None and ALONE.isdisjoint(map(ast.unparse, call.args))


def hurried(source: str) -> list[int]:
    """Lines that make a buffer of several ranks in less time, unless a TimeoutError is expected."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_hurried(node)]
    blocks = [node for node in nodes if calls and isinstance(node, ast.With)]
    vain = [block for block in blocks if any("TimeoutError" in ast.unparse(each) for each in block.items)]
    excused = {id(node) for block in vain for node in ast.walk(block)}
    return [call.lineno for call in calls if id(call) not in excused]


def test_ranks_that_live_have_time_to_make_a_buffer() -> None:
    sources = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    found = [f"{path}:{line}" for path, text in sources.items() if "timeout=" in text for line in hurried(text)]
    assert not found, "the rank that is to wait in vain calls buffer.set_timeout() afterwards"


def test_hurried_lines_are_found() -> None:
    assert hurried("nccl_ep.Buffer.for_shapes(group, timeout=0.2)\nmake_buffer(case, group, timeout=1.0)") == [1, 2]
    alone = "deep_ep.Buffer(None, timeout=5.0)\nmake_buffer(case, ThreadGroup.make(1)[0], timeout=1)"
    vain = "with pytest.raises(nccl_ep.TimeoutError):\n    nccl_ep.Buffer.for_shapes(group, timeout=0.05)"
    for source in (alone, vain, "for_shapes(group, timeout=60.0)", 'Buffer(group, timeout="x")', "wait(timeout=0.1)"):
        assert hurried(source) == []
