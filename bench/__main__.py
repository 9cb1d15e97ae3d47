"""``python -m bench [ll | ht | rivals | fit | overlap | time-line]`` measures, ``plot``, ``table``, ``compare`` show,
``model`` and ``placement`` compute."""

from __future__ import annotations

import sys

USAGE = """usage: python -m bench [ll] [options]              measure low-latency dispatch and combine
       python -m bench ht [options]                high-throughput dispatch and combine
       python -m bench rivals [options]            what is installed of other systems, beside ours
       python -m bench fit [FILE...] [options]     where high throughput overtakes low latency
       python -m bench overlap [options]           an operation and a GEMM at the same time
       python -m bench time-line [options]         when warps pass the phases of a kernel, in builds with stamps
       python -m bench model [options]             several nodes, by arithmetic: nothing is measured
       python -m bench placement [options]         how evenly ranks are loaded before and after experts move
       python -m bench plot FILE... [--out DIR]   draw what was measured, as PNG and SVG
       python -m bench table FILE...              print it
       python -m bench compare NOW BEFORE...      print what has become slower
--help after a command lists its options."""


def main(argv: list[str]) -> int:
    command = argv[0] if argv and not argv[0].startswith("-") else "ll"
    rest = argv[1:] if argv and argv[0] == command else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if command == "ll":
        from .ll import main as run
    elif command == "ht":
        from .ht import main as run
    elif command == "rivals":
        from .rivals.run import main as run
    elif command == "fit":
        from .fit import main as run
    elif command == "overlap":
        from .overlap import main as run
    elif command == "time-line":
        from .time_line import main as run
    elif command == "model":
        from .model import main as run
    elif command == "placement":
        from .placement import main as run
    elif command == "plot":
        from .plot import main as run
    elif command == "table":
        from .table import main as run
    elif command == "compare":
        from .compare import main as run
    else:
        print(f"{command!r} is no command\n{USAGE}", file=sys.stderr)
        return 2
    return run(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
