"""pytest on the kernels of CUDA without a GPU: ranks on "cpu" run them by tests/gpu_emulator.

    make emulated    or, after its build,    python tests/support/emulated.py [arguments of pytest]

The extension of build/emulated (or NCCL_EP_EMULATED_BUILD) takes the place of nccl_ep/_C. NCCL_EP_EMULATOR_SEED, _SMS
and _GPUS are explained in tests/gpu_emulator.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (its libraries must be loaded before the extension)

ROOT = Path(__file__).resolve().parents[2]


def load_extension() -> None:
    """Before nccl_ep is imported."""
    build = Path(os.environ.get("NCCL_EP_EMULATED_BUILD", ROOT / "build" / "emulated"))
    built = sorted(build.glob("_C.*.so"))
    if not built:
        sys.exit(f"{build} has no extension: run make emulated")
    spec = importlib.util.spec_from_file_location("nccl_ep._C", built[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    import nccl_ep

    nccl_ep._C = module


def main(arguments: list[str]) -> int:
    if not any(Path(argument.split("::")[0]).exists() for argument in arguments):
        arguments = [str(ROOT / "tests/gpu/test_emulated.py"), *arguments]
    sys.path.insert(0, str(ROOT))
    load_extension()
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
