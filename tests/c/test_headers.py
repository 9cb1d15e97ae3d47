"""nccl_ep.h beside NVIDIA's: the same program compiled with both says the same of every size, offset and value."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.c import c_api
from tests.c.case import run

THEIRS = Path(os.environ.get("NVIDIA_NCCL_EP_H", "/nowhere"))  # a folder with their nccl_ep.h

VALUES = [
    "AUTO", "ALGO_LOW_LATENCY", "ALGO_HIGH_THROUGHPUT", "OVERFLOW_AUTO", "OVERFLOW_TRAP", "OVERFLOW_DROP",
    "LAYOUT_UNSET", "LAYOUT_EXPERT_MAJOR", "LAYOUT_RANK_MAJOR", "LAYOUT_FLAT", "FWD_PASS", "BWD_PASS",
    "ZERO_COPY_AUTO", "ZERO_COPY_OFF", "ZERO_COPY_ON", "EXPERT_ID_AUTO", "EXPERT_ID_LOCAL", "EXPERT_ID_GLOBAL",
    "DISP_QUANT_NONE", "DISP_QUANT_FWD", "DISP_QUANT_DS_FP8E3M4", "COMB_QUANT_NONE", "COMB_QUANT_NVFP4", "MAJOR",
    "MINOR", "PATCH", "VERSION_CODE", "API_VERSION", "MAGIC", "TENSOR_MAGIC", "TENSOR_V1_SIZE",
    "TENSOR_ALLOC_CONFIG_V1_SIZE", "GROUP_CONFIG_V1_SIZE", "GROUP_CONFIG_V2_SIZE", "LAYOUT_INFO_V1_SIZE",
    "LAYOUT_INFO_V2_SIZE", "DISPATCH_INPUTS_V1_SIZE", "DISPATCH_OUTPUTS_V1_SIZE", "COMBINE_INPUTS_V1_SIZE",
    "COMBINE_INPUTS_V2_SIZE", "COMBINE_OUTPUTS_V1_SIZE", "HANDLE_CONFIG_V1_SIZE", "DISPATCH_CONFIG_V1_SIZE",
    "DISPATCH_CONFIG_V2_SIZE", "COMBINE_CONFIG_V1_SIZE", "COMBINE_CONFIG_V2_SIZE", "COMPLETE_CONFIG_V1_SIZE",
    "TENSOR_SIZE", "TENSOR_ALLOC_CONFIG_SIZE", "GROUP_CONFIG_SIZE", "LAYOUT_INFO_SIZE", "DISPATCH_INPUTS_SIZE",
    "DISPATCH_OUTPUTS_SIZE", "COMBINE_INPUTS_SIZE", "COMBINE_OUTPUTS_SIZE", "HANDLE_CONFIG_SIZE",
    "DISPATCH_CONFIG_SIZE", "COMBINE_CONFIG_SIZE", "COMPLETE_CONFIG_SIZE", "GROUP_CONFIG_CURRENT_VERSION",
    "TENSOR_CURRENT_VERSION", "LAYOUT_INFO_CURRENT_VERSION",
]  # fmt: skip
SIGNATURES = {
    "GetVersion": "int*",
    "TensorAlloc": "ncclEpTensor_t**, unsigned int, ncclDataType_t, const size_t*, const ncclEpTensorAllocConfig_t*",
    "TensorDestroy": "ncclEpTensor_t*",
    "CreateGroup": "ncclEpGroup_t*, ncclComm_t, const ncclEpGroupConfig_t*",
    "GroupDestroy": "ncclEpGroup_t",
    "HandleMemSize": "ncclEpGroup_t, ncclEpLayout_t, const ncclEpHandleConfig_t*, size_t*, int",
    "InitHandle": "ncclEpHandle_t*, ncclEpGroup_t, ncclEpLayout_t, const ncclEpHandleConfig_t*, int, "
    "const ncclEpTensor_t*",
    "UpdateHandle": "ncclEpHandle_t, const ncclEpTensor_t*, const ncclEpLayoutInfo_t*, cudaStream_t",
    "CreateHandle": "ncclEpHandle_t*, ncclEpGroup_t, ncclEpLayout_t, const ncclEpTensor_t*, "
    "const ncclEpLayoutInfo_t*, const ncclEpHandleConfig_t*, cudaStream_t",
    "HandleDestroy": "ncclEpHandle_t",
    "Dispatch": "ncclEpHandle_t, const ncclEpDispatchInputs_t*, const ncclEpDispatchOutputs_t*, "
    "const ncclEpLayoutInfo_t*, const ncclEpDispatchConfig_t*, cudaStream_t",
    "Combine": "ncclEpHandle_t, const ncclEpCombineInputs_t*, const ncclEpCombineOutputs_t*, "
    "const ncclEpCombineConfig_t*, cudaStream_t",
    "Complete": "ncclEpHandle_t, const ncclEpCompleteConfig_t*, cudaStream_t",
    "MaskQuery": "ncclEpGroup_t, int*, cudaStream_t",
    "MaskUpdate": "ncclEpGroup_t, const int*, cudaStream_t",
    "MaskClean": "ncclEpGroup_t, cudaStream_t",
    "GetAsyncError": "ncclEpGroup_t, int*",
    "ErrorClear": "ncclEpGroup_t",
}


def toolkit() -> list[str]:
    """Include folders with CUDA's and NCCL's headers: those that torch's packages bring, or the system's."""
    found = importlib.util.find_spec("nvidia")
    packages = [Path(each) for each in (found.submodule_search_locations or [])] if found else []
    cuda = [path.parent for each in packages for path in each.glob("cu*/include/cuda_runtime.h")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        cuda.append(Path(nvcc).parent.parent / "include")
    nccl = [path.parent for each in packages for path in each.glob("nccl/include/nccl.h")]
    return [str(paths[0]) for paths in (cuda, nccl) if paths]


def program(structs: list[str]) -> str:
    """Prints a line for each fact."""
    lines = [f'printf("{name} %lld\\n", (long long)NCCL_EP_{name});' for name in VALUES]
    for name in structs:
        struct, _ = c_api.STRUCTS[name]
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            in_c = {"alloc_fn": "alloc", "free_fn": "alloc.free_fn", "alloc_context": "alloc.context"}.get(field, field)
            size = f"sizeof((({name}*)0)->{in_c})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {in_c}), {size});')
    for name, arguments in SIGNATURES.items():
        lines.append(f"{{ ncclResult_t (*f)({arguments}) = ncclEp{name}; (void)sizeof f; }}")
    return (
        "#include <stddef.h>\n#include <stdio.h>\n#include <nccl_ep.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n"
    )


def facts(include: Path, source: Path, library_file: Path, *options: str) -> list[str]:
    out = source.with_suffix("")
    how = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable"]
    run("cc", *how, f"-I{include}", *options, source, library_file, f"-Wl,-rpath,{library_file.parent}", "-o", out)
    return run(out).splitlines()


# Of NCCL EP 0.2.0; sizes and offsets of structs are those of tests/c/c_api.py.
WANTED = dict(zip(VALUES, [
    0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0, 2, 0, 200, 2, 0xC00FFFEE, 0xCAFECAFE, 48, 8,
    96, 112, 40, 48, 32, 40, 24, 32, 24, 16, 20, 24, 16, 20, 8, 48, 8, 112, 48, 32, 40, 32, 24, 16, 24, 20, 8, 2, 1, 2,
], strict=True))  # fmt: skip
THEIR_STRUCTS = [name for name in c_api.STRUCTS if not name.startswith("ncclEpx")]


def test_the_numbers_are_those_of_nccl_ep(prefix: Path, library_file: Path, tmp_path: Path) -> None:
    """Without headers of CUDA and NCCL, and with them."""
    source = tmp_path / "facts.c"
    source.write_text(program(THEIR_STRUCTS))
    told = facts(prefix / "include", source, library_file)
    assert [line.split() for line in told[: len(VALUES)]] == [[name, str(value)] for name, value in WANTED.items()]
    if len(system := toolkit()) == 2:
        flags = [f"-I{path}" for path in system]
        assert facts(prefix / "include", source, library_file, *flags) == told


@pytest.mark.skipif(not (THEIRS / "nccl_ep.h").exists(), reason="NVIDIA_NCCL_EP_H names no folder with their nccl_ep.h")
def test_the_header_of_nvidia_says_the_same(prefix: Path, library_file: Path, tmp_path: Path) -> None:
    source = tmp_path / "facts.c"
    source.write_text(program(THEIR_STRUCTS))
    flags = [f"-I{path}" for path in toolkit()]
    assert facts(THEIRS, source, library_file, *flags) == facts(prefix / "include", source, library_file, *flags)
