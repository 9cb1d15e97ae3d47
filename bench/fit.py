"""``python -m bench fit``: both modes over the tokens, and where one overtakes the other."""

from __future__ import annotations

import argparse

from . import crossover, jobs, records, table
from .options import parse_fit
from .records import Record


def make_jobs(options: argparse.Namespace) -> list[jobs.Job]:
    return jobs.library_jobs(options, ["ll", "ht"])


def report(found: list[Record]) -> list[Record]:
    table.show(found)
    fitted = crossover.fit(found)
    print(crossover.render(fitted), flush=True)
    return found + fitted


BENCH = jobs.Bench("fit", parse_fit, make_jobs, report)


def main(argv: list[str]) -> int:
    options = parse_fit(argv)
    if not options.files:
        return jobs.main(BENCH, argv)
    parser = argparse.ArgumentParser(prog="python -m bench fit")
    fitted = crossover.fit(records.given(parser, options.files))
    print(crossover.render(fitted), flush=True)
    if options.json is not None:
        records.save(options.json, fitted)
    return 0 if fitted else 1
