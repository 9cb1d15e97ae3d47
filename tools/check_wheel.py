"""Checks a built wheel: size, contents, dependencies, and that it imports, fast.

    python tools/check_wheel.py WHEEL [2.30.7 ...]

The releases of NCCL are those whose kernels for several NVLink domains must be in it.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_BYTES = 15 * 2**20
MAX_IMPORT_SECONDS = 0.15
SHIMS = ("deep_ep/__init__.py", "deep_ep/utils/__init__.py", "deep_ep_cpp.py")  # what PYTHONPATH has of nccl_ep.deep_ep
GIN = "nccl_ep/libnccl_ep_gin_"
IMPORT = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
import nccl_ep
print(time.perf_counter() - start)
assert nccl_ep.__file__.startswith(sys.argv[1]), nccl_ep.__file__
"""

wheel = Path(sys.argv[1])
size = wheel.stat().st_size
with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as target:
    names = archive.namelist()
    metadata = next(archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    extensions = [name for name in names if name.endswith(".so")]
    strangers = [name for name in names if not name.startswith(("nccl_ep/", "nccl_ep-"))]  # bench/ and records/ too
    measuring = [name for name in names if "bench" in Path(name).parts or name.endswith((".json", ".sh"))]

    assert size <= MAX_BYTES, f"{wheel} has {size} bytes, more than {MAX_BYTES}"
    own = [name for name in extensions if not name.startswith(GIN)]  # those are loaded on demand
    assert {f"{GIN}{release}.so" for release in sys.argv[2:]} <= set(extensions), extensions
    assert len(own) == 1 and own[0].startswith("nccl_ep/_C."), extensions
    assert "nccl_ep/py.typed" in names, names
    assert {f"nccl_ep/deep_ep/shims/{name}" for name in SHIMS} <= set(names), names
    assert any(name.endswith("/LICENSE") for name in names), names
    assert not strangers and not measuring, strangers + measuring
    assert "Requires-Dist: nvidia" not in metadata, metadata

    archive.extractall(target)
    # Not the source tree's: it runs elsewhere, and the unpacked files come first.
    command = [sys.executable, "-c", IMPORT, target]
    seconds = min(float(subprocess.check_output(command, cwd=target, text=True)) for _ in range(3))
    assert seconds <= MAX_IMPORT_SECONDS, f"import nccl_ep takes {seconds:.3f} s, more than {MAX_IMPORT_SECONDS}"

print(f"{wheel}: {size / 2**20:.1f} MiB, {len(names)} files, imports in {seconds * 1e3:.0f} ms after torch")
