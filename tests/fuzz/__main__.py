"""python -m tests.fuzz [--seed N] [--seconds S] [--rounds N] [--kinds extra,...]: random cases until the time is up.

A round that fails prints the command that runs it again.
"""

from __future__ import annotations

import argparse
import logging
import random
import time

import torch

from tests.fuzz.kinds import KINDS

RARE = {"processes": 10}  # rounds of all others to one of these, which take seconds to start


def run(seed: int, seconds: float, rounds: int, kinds: list[str]) -> int:
    """Runs rounds of all kinds in turn, and returns how many. Raises what one of them raises."""
    end, done = time.monotonic() + seconds, 0
    while done < rounds and (done == 0 or time.monotonic() < end):
        kind = kinds[done % len(kinds)]
        if len(kinds) == 1 or done // len(kinds) % RARE.get(kind, 1) == 0:
            try:
                KINDS[kind](seed + done)
            except BaseException:
                print(f"again: python -m tests.fuzz --kinds {kind} --seed {seed + done} --rounds 1", flush=True)
                raise
        done += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=1 << 40)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"kinds are {', '.join(KINDS)}, not {', '.join(unknown)}")
    torch.set_num_threads(1)
    logging.getLogger("nccl_ep").setLevel(logging.CRITICAL)  # changed handles make buffers fail
    print(f"seed {options.seed}", flush=True)
    done = run(options.seed, options.seconds, options.rounds, kinds)
    print(f"{done} rounds of {', '.join(kinds)}: all as the oracle says")


if __name__ == "__main__":
    main()
