"""Installs a wheel into a new environment, and runs README's program and the doctor there. Takes no network.

    python tools/try_wheel.py WHEEL

The environment has the packages of this one, torch among them, and of nccl_ep the wheel alone.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def make_environment(folder: Path, wheel: Path) -> Path:
    """Its interpreter."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel,
        folder=folder)  # fmt: skip
    return python


def main(wheel: Path) -> None:
    (program,) = (
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "LOCAL_RANK" in block
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_environment(folder / "environment", wheel)
        where = run(python, "-c", "import nccl_ep; print(nccl_ep.__file__)", folder=folder)
        assert where.startswith(name), where
        (folder / "moe.py").write_text(program)
        said = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "moe.py", folder=folder)
        assert said.count("rows came for its experts") == 2, said
        assert "well" in (doctor := run(python, "-m", "nccl_ep.doctor", folder=folder)), doctor
    print(f"{wheel}: installed, README's program and the doctor ran, in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
