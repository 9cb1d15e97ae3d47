"""Adds up a ninja log by what was built: seconds of commands, one after another, as a build with one job would take.

    python tools/build_times.py build/dev
    python tools/build_times.py build/kernels --limit kernels=300 --limit all=650

With a limit it exits with 1 where the sum is above. `all` leaves the C++ tests out. A command counts once, by its last
entry; what it made must still be there. The sums of a build that a compiler cache helped, or that shared its cores with
others, say little.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

GROUPS = ("kernels", "torch", "c_api", "core", "tests", "rest")  # of all outputs
SUMS = (*GROUPS, "all")


def group_of(output: str) -> str:
    """The group of a file that a build made, by its path in the build directory."""
    if "/ep_core_testing.dir/" in output or "tests" in output or "no_driver" in output:
        return "tests"
    if output.endswith(".cu.o"):
        return "kernels"
    if "_C.dir/" in output or "/_C." in output:
        return "torch"
    if "/ep_api.dir/" in output or "libnccl_ep." in output:
        return "c_api"
    return "core" if output.endswith((".o", ".a", ".so")) else "rest"


def commands(log: Iterable[str], build: Path) -> dict[tuple[str, str, str], list[str]]:
    """The last run of each command, as (start, end, hash) with its outputs that are still there."""
    last: dict[str, tuple[str, str, str]] = {}
    for number, line in enumerate(log):
        if number == 0:
            version = line.removeprefix("# ninja log v").strip()
            if not version.isdecimal() or int(version) < 5:
                raise ValueError(f"the log begins with {line!r}: ninja's logs of version 5 and newer can be read")
            continue
        start, end, _, output, command = line.rstrip("\n").split("\t")
        last[output] = (start, end, command)
    runs: dict[tuple[str, str, str], list[str]] = {}
    for output, run in last.items():
        if (build / output).exists():
            runs.setdefault(run, []).append(output)
    return runs


def sums_of(runs: dict[tuple[str, str, str], list[str]]) -> dict[str, float]:
    """Seconds of each group, and of all but the tests."""
    sums = dict.fromkeys(SUMS, 0.0)
    for (start, end, _), outputs in runs.items():
        sums[group_of(min(outputs))] += (int(end) - int(start)) / 1000
    sums["all"] = sum(sums[group] for group in GROUPS if group != "tests")
    return sums


def limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in SUMS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SUMS)}")
    return name, float(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, nargs="+", help="build directories; their sums are added up")
    parser.add_argument("--limit", type=limit, action="append", default=[], metavar="GROUP=SECONDS")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="also show the N slowest commands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the sums there")
    options = parser.parse_args(argv)

    sums = dict.fromkeys(SUMS, 0.0)
    slowest: list[tuple[float, str]] = []
    for build in options.build:
        with open(build / ".ninja_log") as log:
            runs = commands(log, build)
        for group, seconds in sums_of(runs).items():
            sums[group] += seconds
        slowest += [((int(end) - int(start)) / 1000, min(outputs)) for (start, end, _), outputs in runs.items()]

    for group in SUMS:
        print(f"{group:8} {sums[group]:8.1f} s")
    for seconds, output in sorted(slowest, reverse=True)[: options.slowest]:
        print(f"{seconds:8.1f} s  {output}")
    if options.json:
        record = {"builds": [str(build) for build in options.build], "seconds": sums}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    above = [f"{name} took {sums[name]:.1f} s, more than {most:g}" for name, most in options.limit if sums[name] > most]
    print("\n".join(above), file=sys.stderr, end="\n" if above else "")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
