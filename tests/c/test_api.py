"""The C library: it computes what the oracle does, and a C program can build against it, also beside another one."""

from __future__ import annotations

import ctypes as c
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import nccl_ep
from tests import ROOT
from tests.api.test_observing import listener  # noqa: F401
from tests.c import c_api
from tests.c.c_api import Library
from tests.c.case import TOOLS, has_c_form, refused, run, run_case
from tests.support.expected import expected_cases
from tests.support.gpus import NUM_GPUS, on_one_gpu

HEADERS = [ROOT / "csrc/include" / name for name in ("nccl_ep.h", "nccl_epx.h")]
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]


@pytest.mark.parametrize("staged", [False, True], ids=["fused", "staged"])
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (3, 1)])
def test_generated_cases_give_the_oracles_results(
    library: Library, num_ranks: int, domain_size: int, staged: bool
) -> None:
    cases = expected_cases(30, num_ranks=num_ranks, domain_size=domain_size, first=500, fits=has_c_form)
    assert len({expected.case.layout for expected in cases}) == 4
    for expected in cases:
        run_case(library, expected, staged=staged)


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True], ids=["fused", "staged"])
@pytest.mark.parametrize("num_ranks", on_one_gpu(1, 2, 4))
def test_low_latency_on_one_gpu_gives_the_oracles_bits(library: Library, num_ranks: int, staged: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    for expected in expected_cases(12, num_ranks=num_ranks, first=900, fits=has_c_form):
        run_case(library, expected, staged=staged, device="cuda")


TWO_GROUPS = """
import ctypes, sys
import torch
from tests.c import c_api
from tests.c.test_refusals import Solo
library = c_api.Library(sys.argv[1])
solos = [Solo(library, library.solo_group()) for _ in range(2)]
for solo in reversed(solos):
    solo.check_round()
"""


def test_ranges_for_profilers_name_their_group(
    library_file: Path,
    listener: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    names = tmp_path / "names"
    attached = {"NVTX_INJECTION64_PATH": str(listener), "NVTX_LISTENER_FILE": str(names)}
    paths = {"PYTHONPATH": str(ROOT)}
    run(sys.executable, "-c", TWO_GROUPS, library_file, env={**TOOLS, **attached, **paths})
    assert [line for line in names.read_text().splitlines() if line.startswith("group")] == [
        f"group{number}.rank0 {operation} 1" for number in (1, 0) for operation in ("dispatch", "combine")
    ]


# ---- Structs of other headers, versions


def declared() -> list[str]:
    """Functions of the headers, without nccl."""
    return re.findall(r"^NCCL_EPX_API [^;(]*\bnccl(Epx?\w+)\(", "".join(h.read_text() for h in HEADERS), re.MULTILINE)


def test_the_headers_are_what_the_tests_and_the_package_say(library: Library, prefix: Path, tmp_path: Path) -> None:
    version = c.c_int()
    library.EpxGetVersion(version)
    major, minor, patch = version.value // 10000, version.value // 100 % 100, version.value % 100
    assert f"{major}.{minor}.{patch}" == nccl_ep.__version__ and version.value == c_api.VERSION
    assert sorted(declared()) == sorted({*c_api.FUNCTIONS, *c_api.TEXTS})
    lines, checks = [], []
    for name, (struct, _) in c_api.STRUCTS.items():
        kind = re.sub(r"(?<!^)([A-Z])", r"_\1", name.removesuffix("_t").removeprefix("ncclEpx").removeprefix("ncclEp"))
        macro = ("NCCL_EPX_" if "Epx" in name else "NCCL_EP_") + kind.upper()
        lines.append(f'_Static_assert(sizeof({name}) == {c.sizeof(struct)}, "{name}");')
        for field, _ in struct._fields_:
            in_c = {"alloc_fn": "alloc", "free_fn": "alloc.free_fn", "alloc_context": "alloc.context"}.get(field, field)
            offset = getattr(struct, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {in_c}) == {offset}, "{name}.{field}");')
        filled = struct()
        if struct is c_api.Tensor:
            filled.sizes = None
        values = ", ".join(map(str, bytes(filled)))
        checks.append(f"{{ {name} made = {macro}_INIT; static const unsigned char want[] = {{{values}}};")
        checks.append(f'made = {macro}_INIT; if (memcmp(&made, want, sizeof made)) return puts("{name}"); }}')
    source = tmp_path / "structs.c"
    source.write_text(
        "#include <nccl_epx.h>\n#include <stdio.h>\n#include <string.h>\n" + "\n".join(lines)
        + "\nint main(void) {\n" + "\n".join(checks) + "\nreturn 0; }\n"
    )  # fmt: skip
    run("cc", *STRICT, f"-I{prefix}/include", source, "-o", tmp_path / "structs")
    run(tmp_path / "structs")
    source.with_suffix(".cc").write_text(
        "#include <nccl_epx.h>\nint main() { ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT; c = "
        "NCCL_EP_GROUP_CONFIG_INIT; return c.version == 2 && c.size == NCCL_EP_GROUP_CONFIG_SIZE ? ncclSuccess : 1; }\n"
    )
    run("c++", "-std=c++11", *STRICT[1:], f"-I{prefix}/include", source.with_suffix(".cc"), "-o", tmp_path / "plus")
    run(tmp_path / "plus")


def test_structs_are_read_up_to_the_ends_that_versions_have_had(library: Library) -> None:
    made = library.solo_group()
    for name, (struct, first) in c_api.STRUCTS.items():
        sizes = {first, c.sizeof(struct)}
        if struct is c_api.Tensor:
            call, argument = library.TensorBytes, "tensor"
        elif struct is c_api.GroupInfo:
            call, argument = library.GroupGetInfo, "info"
        else:
            continue
        for size in range(c.sizeof(struct) + 9):
            given = struct()
            given.size = size
            rest = (c.c_size_t(),) if struct is c_api.Tensor else ()
            arguments = (given, *rest) if struct is c_api.Tensor else (made, given)
            if size in sizes or size > max(sizes):
                call(*arguments)
                continue
            text = f"{argument} is a {name} of {size} bytes" + (
                ": no version" if size >= first else ", must have at least"
            )
            refused(c_api.INVALID_ARGUMENT, text, call, *arguments)
    library.GroupDestroy(made)


class NewerGroupConfig(c_api.RawGroupConfig):
    """Of a header of the future."""

    _fields_: ClassVar[Any] = [("new_option", c.c_int64)]


def test_structs_of_older_and_newer_headers_are_read_by_their_size(library: Library) -> None:
    fields: dict[str, Any] = {"num_experts": 2, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64}
    comm = library.comm(0, 1, c_api.Allgather())

    def create(config: Any) -> None:
        made = c.c_void_p()
        library.EpCreateGroup(made, comm, c.cast(c.pointer(config), c.POINTER(c_api.RawGroupConfig)))
        library.EpGroupDestroy(made)

    behind = {"overflow_policy": 99, "num_topk": 1000}
    older = c_api.RawGroupConfig(**fields, **behind)
    older.size = 96  # of version 1: what is behind is not looked at
    create(older)
    refused(c_api.INVALID_ARGUMENT, "overflow_policy 99 is unknown", create, c_api.RawGroupConfig(**fields, **behind))
    for size in (100, 104, 111):
        older.size = size
        refused(c_api.INVALID_ARGUMENT, f"of {size} bytes: no version of it ends there", create, older)
    create(NewerGroupConfig(**fields, new_option=-1))  # nobody knows what it means
    for change, pattern in (
        ({"magic": 0}, "its INIT macro: its magic is 0"),
        ({"size": 8}, "of 8 bytes, must have at least 96"),
    ):
        config = c_api.RawGroupConfig(**fields)
        for name, value in change.items():
            setattr(config, name, value)
        refused(c_api.INVALID_ARGUMENT, pattern, create, config)
    library.EpxCommDestroy(comm)


# ---- A C program against the installed library


# What each rank says, and what the program says in the end.
EXAMPLES = {
    "ll_moe": (": 0 of 192 values that came home are wrong", "every token came home as its experts made it"),
    "ht_moe": (": 0 values are wrong; 0 dispatches copied rows", "sums and gradients are those of one rank"),
}


def check_example(program: Path, *arguments: str, num_ranks: int, environment: dict[str, str] = TOOLS) -> None:
    of_each_rank, end = EXAMPLES[program.name]
    lines = run(program, *arguments, env=environment).splitlines()
    assert sorted(line for line in lines if line.endswith(of_each_rank)) == [
        f"rank {r}{of_each_rank}" for r in range(num_ranks)
    ], lines
    assert lines[-1] == end and len(set(lines)) == len(lines), lines


def build_examples(prefix: Path, directory: Path, *options: str) -> None:
    flags = f"-DCMAKE_C_FLAGS={' '.join(STRICT[1:])}"
    run("cmake", "-S", ROOT / "examples/c", "-B", directory, f"-DCMAKE_PREFIX_PATH={prefix}", flags, *options)
    run("cmake", "--build", directory, "--verbose")


def test_the_examples_build_and_run_through_find_package(prefix: Path, tmp_path: Path) -> None:
    build_examples(prefix, tmp_path)
    for name in EXAMPLES:
        check_example(tmp_path / name, num_ranks=4)
    check_example(tmp_path / "ll_moe", "cpu", "2", num_ranks=2)


def test_the_examples_build_and_run_through_pkg_config(prefix: Path, library_file: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    found = {**TOOLS, "PKG_CONFIG_PATH": str(library_file.parent / "pkgconfig")}
    assert run("pkg-config", "--modversion", "ncclep", env=found).strip() == nccl_ep.__version__
    flags = run("pkg-config", "--cflags", "--libs", "ncclep", env=found).split()
    environment = {**TOOLS, "LD_LIBRARY_PATH": str(library_file.parent)}
    for name in EXAMPLES:
        run("cc", *STRICT, "-pthread", ROOT / f"examples/c/{name}.c", *flags, "-o", tmp_path / name)
        check_example(tmp_path / name, num_ranks=4, environment=environment)

    for arguments, pattern in (
        (["tpu"], r"usage: \S+ \[cpu\|cuda\] \[RANKS\], .* not tpu 4\n"),
        (["cpu", "3"], "RANKS divides 8; not cpu 3\n"),
        (["cpu", "2x"], "not cpu 2x\n"),
        (["cpu", "16"], "not cpu 16\n"),
        (["cpu", "2", "1"], "not cpu 2 and more\n"),
        (["cuda"], "compiled without EXAMPLES_WITH_CUDA\n"),
    ):
        done = subprocess.run([tmp_path / "ll_moe", *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and re.search(pattern, done.stderr) and not done.stdout, (arguments, done)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU here, or nccl_ep was built without CUDA")
def test_the_examples_run_on_gpus(prefix: Path, tmp_path: Path) -> None:
    """Every rank a process with a GPU of its own, as many as there are, with the NCCL that torch has loaded."""
    from torch.utils.cpp_extension import CUDA_HOME  # nvcc is searched for when it is imported

    if CUDA_HOME is None:
        pytest.skip("there is no CUDA toolkit to build with")
    build_examples(prefix, tmp_path, f"-DCUDAToolkit_ROOT={CUDA_HOME}")
    nccl = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libnccl.so" in line)
    search = [str(Path(nccl).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**TOOLS, "LD_LIBRARY_PATH": ":".join(filter(None, search))}
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can put GPUs that others share out of service
    for num_ranks in {1, next(n for n in (8, 4, 2, 1) if n <= NUM_GPUS)}:
        for name in EXAMPLES:
            check_example(tmp_path / name, "cuda", str(num_ranks), num_ranks=num_ranks, environment=environment)


# ---- Beside NVIDIA's library of the same symbols


def exported(library_file: Path) -> list[str]:
    lines = run("nm", "--dynamic", "--defined-only", "--format=posix", library_file).splitlines()
    return [line.split()[0] for line in lines]


def test_the_library_exports_what_its_header_declares(library_file: Path) -> None:
    assert sorted(exported(library_file)) == sorted(f"nccl{name}" for name in declared())
    dynamic = run("readelf", "--dynamic", "--wide", library_file)
    assert re.search(r"SONAME.*\[libnccl_ep\.so\.0\]", dynamic), dynamic
    assert not re.search(r"NEEDED.*(torch|python|nccl|cuda)", dynamic), dynamic


OTHER_FIRST = """
import ctypes, sys
from tests.c import c_api
other = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
ours = c_api.Library(sys.argv[2])
group, handle = ours.solo_group(), ctypes.c_void_p()
ids = (ctypes.c_int64 * 8)(*[-1] * 8)
described = c_api.Tensor(2, 4, ctypes.addressof(ids), (4, 2))
ours.CreateHandle(handle, group, c_api.HandleConfig(layout=1), described, None)
ours.HandleDestroy(handle)
ours.GroupDestroy(group)
assert ctypes.CDLL(None).ncclEpxCheck(None) == 77, "the other library was not there"
print("calls of the other library:", other.num_calls() - 1)
"""


def test_another_library_of_the_same_symbols_is_not_called(library_file: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    functions = "\n".join(f"int {name}(void) {{ calls++; return 77; }}" for name in exported(library_file))
    source.write_text(f"static int calls;\n{functions}\nint num_calls(void) {{ return calls; }}\n")
    other = tmp_path / "libother.so"
    run("cc", "-shared", "-fPIC", source, "-o", other)
    environment = {**TOOLS, "PYTHONPATH": str(ROOT)}
    for preload in ("", str(other)):
        text = run(sys.executable, "-c", OTHER_FIRST, other, library_file, env={**environment, "LD_PRELOAD": preload})
        assert text.strip() == "calls of the other library: 0"
