"""``python -m nccl_ep.nvidia path``: the folders that make ``import nccl.ep`` find nccl_ep, for PYTHONPATH."""

from __future__ import annotations

import argparse
import os
import sys

from .install import folders, installed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.nvidia", description=__doc__)
    parser.add_argument("what", choices=["path"], help="path: prints the folders")
    parser.parse_args(arguments)
    place = installed("ep")
    if place is not None:
        print(f"note: nccl.ep is installed at {place}, and these folders in PYTHONPATH come before it", file=sys.stderr)
    print(os.pathsep.join(folders()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
