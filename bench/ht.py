"""``python -m bench ht``: high-throughput dispatch and combine, checked, then measured, against torch's sort
and all-to-all."""

from __future__ import annotations

import argparse

from . import jobs
from .options import parse_ht
from .rivals.torch_all_to_all import TorchAllToAll


def make_jobs(options: argparse.Namespace) -> list[jobs.Job]:
    rivals = () if options.no_rivals else (TorchAllToAll.name,)
    return jobs.with_rivals(jobs.library_jobs(options, ["ht"]), rivals)


BENCH = jobs.Bench("ht", parse_ht, make_jobs)


def main(argv: list[str]) -> int:
    return jobs.main(BENCH, argv)
