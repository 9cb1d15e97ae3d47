"""The names of low latency's kernels, as DeepEP's benchmark reads them: of the program itself, where no GPU runs it.

That benchmark prints the profiler's table, whose names have 100 columns, and wants one line with "dispatch" and one
with "combine" in it. Of the trace it takes the kernels whose names have "::dispatch" and "::combine": all of them, so
that with hooks there are two launches a period. tests/gpu/test_gpu.py asks the profiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from nccl_ep import _C
from tests import ROOT

TABLE_COLUMNS = 100 - len("...")
ONE_GPU_WORLD = "_world"  # kernels of tests and tools, which no benchmark launches
SCOPE_OR_KERNEL = re.compile(
    r"^(?:inline )?namespace ([\w:]* ?)\{|^\}  // namespace"
    r"|^__global__[^{]*?(\w+)\(const [^({]*?(?:Kernel|Ll)Args<(\w+)>",
    re.MULTILINE,
)
STREAMED = "ep::ll::(anonymous namespace)::combine_streamed"
# By their parameter, the word that a kernel's name must have.
WORDS = {"LlDispatchParams": "dispatch", "LlCombineParams": "combine"}


def kernels_of_sources() -> Iterator[tuple[str, str]]:
    """Qualified name and parameter of each kernel that takes a KernelArgs, or LlArgs (between nodes)."""
    for path in sorted((ROOT / "csrc/cuda").rglob("*.cu*")):
        spaces: list[str] = []
        for found in SCOPE_OR_KERNEL.finditer(path.read_text()):
            if found[0].startswith("}"):
                spaces.pop()
            elif found[2] is None:
                spaces.append(found[1].strip() or "(anonymous namespace)")
            else:
                yield "::".join([*spaces, found[2]]), found[3]


def kernels_of_build() -> list[tuple[str, str]]:
    """The same, of the loaded extension: with template arguments, as the profiler has them. Host code has a function
    for each kernel, by the kernel's name and parameters."""
    symbols = subprocess.run(["nm", "-C", _C.__file__], capture_output=True, text=True, check=True).stdout
    found = re.findall(r" [tTwW] (?:void )?(ep::.*)\(ep::KernelArgs<ep::(\w+)>\)$", symbols, re.MULTILINE)
    return [(name, parameter) for name, parameter in found if "launch_kernel" not in name]


def check_names(kernels: list[tuple[str, str]]) -> None:
    for name, parameter in kernels:
        shown, word = f"void {name}"[:TABLE_COLUMNS], WORDS.get(parameter)
        assert [each for each in WORDS.values() if each in shown and parameter.startswith("Ll")] == [word] * bool(word)
        if word is not None:
            assert f"::{word}" in shown, shown


def test_kernels_in_the_sources_have_the_names_that_profilers_look_for() -> None:
    kernels = list(kernels_of_sources())
    assert {name for name, parameter in kernels if parameter in WORDS and ONE_GPU_WORLD not in name} == {
        "ep::ll::(anonymous namespace)::dispatch", "ep::ll::(anonymous namespace)::combine",
        "ep::ll::(anonymous namespace)::dispatch_by_rail", "ep::ll::(anonymous namespace)::combine_by_rail",
        STREAMED,
    }  # fmt: skip
    high = [name for name, parameter in kernels if parameter.startswith("Ht") and ONE_GPU_WORLD not in name]
    assert sorted(name.rsplit("::", 1)[1] for name in high) == [
        "combine_rows", "combine_signalled_rows", "dispatch_route", "dispatch_send",
    ]  # fmt: skip
    check_names(kernels)


@pytest.mark.skipif(
    not (_C.has_cuda() or _C.EMULATES_GPU) or shutil.which("nm") is None, reason="no kernels in this build, or no nm"
)
def test_kernels_in_the_build_have_the_names_that_profilers_look_for() -> None:
    """All kernel sets: with and without masks, of each layout, encoding and type."""
    kernels = kernels_of_build()
    mine = [(name, parameter) for name, parameter in kernels if ONE_GPU_WORLD not in name]
    for parameter, word in WORDS.items():
        names = [name for name, each in mine if each == parameter]
        # With masks and without; but kernels that stream rows, or wait for their signals (the last template argument),
        # have no masks. Dispatch to experts' rows has a third set, for arrivals.
        without_masks = {name for name in names if (word == "combine" and name.endswith(", true>")) or STREAMED in name}
        announcing = {name for name in names if word == "dispatch" and re.search(r"OutputLayout\)[01]>", name)}
        counts = {name: 2 - (name in without_masks) + (name in announcing) for name in names}
        assert len(names) >= 4 and Counter(names) == counts, names
        bare = {f"ep::ll::(anonymous namespace)::{word}", *([STREAMED] if word == "combine" else [])}
        assert {name.partition("<")[0] for name in names} == bare, names
    check_names(kernels)
