"""``python -m bench ll``: low-latency dispatch and combine, checked, then measured, against torch's ways."""

from __future__ import annotations

import argparse

from . import jobs
from .options import parse
from .rivals.torch_all_to_all import TorchAllToAll, TorchSymmMem


def make_jobs(options: argparse.Namespace) -> list[jobs.Job]:
    rivals = () if options.no_rivals else (TorchAllToAll.name, TorchSymmMem.name)
    return jobs.with_rivals(jobs.library_jobs(options, ["ll"]), rivals)


BENCH = jobs.Bench("ll", parse, make_jobs)


def main(argv: list[str]) -> int:
    return jobs.main(BENCH, argv)
