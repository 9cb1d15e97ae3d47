"""pytest on the kernels of CUDA without a GPU: ranks on "cpu" run them by tests/gpu_emulator.

    make emulated    or, after its build,    python tests/support/emulated.py [arguments of pytest]

The extension of build/emulated (or NCCL_EP_EMULATED_BUILD) takes the place of nccl_ep/_C. NCCL_EP_EMULATOR_SEED, _SMS,
_GPUS and _LATE_WEAK are explained in tests/gpu_emulator.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    if not any(Path(argument.split("::")[0]).exists() for argument in arguments):
        arguments = [str(ROOT / "tests/gpu/test_emulated.py"), *arguments]
    sys.path.insert(0, str(ROOT))
    from tests.support import other_build

    other_build.use(os.environ.get("NCCL_EP_EMULATED_BUILD", ROOT / "build" / "emulated"), target="emulated")
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
