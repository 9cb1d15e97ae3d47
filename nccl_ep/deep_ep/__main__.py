"""``python -m nccl_ep.deep_ep path``: the folder that makes ``import deep_ep`` find nccl_ep, for PYTHONPATH."""

from __future__ import annotations

import argparse
import sys

from .install import installed_elsewhere, shims


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.deep_ep", description=__doc__)
    parser.add_argument("what", choices=["path"], help="path: prints the folder")
    parser.parse_args(arguments)
    for name, place in installed_elsewhere().items():
        print(f"note: {name} is installed at {place}, and this folder in PYTHONPATH comes before it", file=sys.stderr)
    print(shims())
    return 0


if __name__ == "__main__":
    sys.exit(main())
