"""``python -m nccl_ep.report FILE...``: docs/report.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .figures import figures
from .inputs import KINDS, files_of, load
from .page import page
from .trace import trace


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nccl_ep.report",
        description="One HTML page of what was recorded, measured or found, without anything from the network.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=f"{KINDS}; any number of each")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    options = parser.parse_args(argv)
    try:
        beside = options.out.with_suffix(".trace.json")
        read = {each.resolve() for each in files_of(options.files)}
        for written in (options.out, beside):
            if written.resolve() in read:
                raise ValueError(f"--out is {options.out}: {written} is one of the files to read")
        inputs = load(options.files)
        recorded = figures(inputs.recorded) if inputs.recorded else None
        options.out.write_text(page(inputs, recorded), encoding="utf-8", errors="backslashreplace")
        print(f"wrote {options.out}")
        if recorded is not None and options.out.is_file():  # no trace beside /dev/null
            beside.write_text(json.dumps(trace(recorded)))
            print(f"wrote {beside}, for ui.perfetto.dev")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
